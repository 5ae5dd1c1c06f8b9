"""Gradient accumulation: steps of several passes, which have the results of steps of one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cowrec.data_pipeline import Reader
from run_comparison import assert_close, state_of
from trained_runs import data_folder, run

folder = data_folder("price", "city", "tags")


@pytest.mark.parametrize(("world_size", "start_step"), [(1, 0), (3, 2)])
def test_parts_join_to_the_batches(folder: Path, world_size: int, start_step: int) -> None:
    """Of 205 samples in batches of 20; the last batch has one, and parts are as even as can be."""
    settings: dict[str, Any] = {"batch_size": 20, "shuffle": True, "window_rows": 50}
    whole = Reader(folder / "data", "train", **settings)
    parts = [
        Reader(folder / "data", "train", passes=4, rank=rank, world_size=world_size, **settings)
        for rank in range(world_size)
    ]
    assert len(parts[0]) == len(whole)
    iterators = [part.epoch(0, start_step) for part in parts]
    for step, batch in enumerate(whole.epoch(0, start_step), start_step):
        taken = [[next(iterator) for iterator in iterators] for _ in range(parts[0].passes(step))]
        assert torch.equal(torch.cat([batch.dense for of_ranks in taken for batch in of_ranks]), batch.dense)
        sizes = [of_ranks[0].global_batch_size for of_ranks in taken]
        assert len(taken) == min(4, batch.global_batch_size)
        assert max(sizes) - min(sizes) <= 1
        assert [of_ranks[0].share for of_ranks in taken] == [size / batch.global_batch_size for size in sizes]
        assert batch.share == 1
    assert all(next(iterator, None) is None for iterator in iterators)


CROSSES = "model.name=dcn optimizer.cross_l2=0.01"
DECAYING = "optimizer.weight_decay=0.1 optimizer.dense_weight_decay=0.1"


@pytest.mark.parametrize("settings", [CROSSES, DECAYING])
def test_a_run_in_passes_is_that_without(folder: Path, tmp_path: Path, settings: str) -> None:
    """Five passes a step, and one in the last step of one sample. Counts and clip are over all passes of a step."""
    given = [*settings.split(), "train.log_every=1"]
    reports = [run(folder, tmp_path / str(passes), *given, f"train.accumulation={passes}") for passes in (1, 5)]
    assert_close(*(state_of(tmp_path / str(passes), "model") for passes in (1, 5)), atol=1e-5)
    assert reports[0]["steps"] == reports[1]["steps"]
    rows = [{name: field["rows"] for name, field in report["clip_statistics"]["fields"].items()} for report in reports]
    assert rows[0] == rows[1]
    assert reports[1]["logloss"] == pytest.approx(reports[0]["logloss"], abs=1e-5)
