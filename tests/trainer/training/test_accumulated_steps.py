"""Steps of several passes have the results of steps of one, in the trainer and in the reader."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cowrec.data_pipeline import Reader
from cowrec.trainer.config.run import load_config
from cowrec.trainer.online.loop import online
from run_comparison import same
from trained_runs import make_folder, run
from trainer_cases import checkpoint, interrupted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("accumulation"), ("price", "city", "tags"))


@pytest.mark.parametrize(("world_size", "start_step"), [(1, 0), (3, 2)])
def test_parts_join_to_the_batches(folder: Path, world_size: int, start_step: int) -> None:
    """Of 205 samples in a ramp and batches of 20; the last batch has one, and parts are as even as can be."""
    settings: dict[str, Any] = {"batch_size": 20, "first_batches": (2, 7, 55), "shuffle": True, "window_rows": 50}
    whole = Reader(folder / "data", "train", **settings)
    parts = [
        Reader(folder / "data", "train", passes=4, rank=rank, world_size=world_size, **settings)
        for rank in range(world_size)
    ]
    assert len(parts[0]) == len(whole)
    iterators = [each.epoch(0, start_step) for each in parts]
    for step, batch in enumerate(whole.epoch(0, start_step), start_step):
        taken = [[next(each) for each in iterators] for _ in range(parts[0].passes(0, step))]
        assert torch.equal(torch.cat([each.dense for of_ranks in taken for each in of_ranks]), batch.dense)
        sizes = [of_ranks[0].global_batch_size for of_ranks in taken]
        assert len(taken) == min(4, batch.global_batch_size)
        assert max(sizes) - min(sizes) <= 1
        assert [of_ranks[0].share for of_ranks in taken] == [size / batch.global_batch_size for size in sizes]
        assert batch.share == 1
    assert all(next(each, None) is None for each in iterators)


@pytest.mark.parametrize(
    "settings",
    [
        ["model.name=dcn", "optimizer.cross_l2=0.01"],
        ["train.batch_ramp=2", "optimizer.base_batch_size=6", "optimizer.dense_weight_decay=0.1"],
    ],
)
def test_a_run_in_passes_is_that_without(folder: Path, tmp_path: Path, settings: list[str]) -> None:
    """Five passes a step, and one in the last step of one sample. Counts and clip are over all passes of a step."""
    reports = [
        run(folder, tmp_path / str(passes), *settings, f"train.accumulation={passes}", "train.log_every=1")
        for passes in (1, 5)
    ]
    weights = [checkpoint(tmp_path / str(passes))["model"] for passes in (1, 5)]
    for key, value in weights[0].items():
        other = weights[1][key]
        torch.testing.assert_close(other, value, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
    assert reports[0]["steps"] == reports[1]["steps"]
    rows = [{name: each["rows"] for name, each in report["clip_statistics"]["fields"].items()} for report in reports]
    assert rows[0] == rows[1]
    assert reports[1]["logloss"] == pytest.approx(reports[0]["logloss"], abs=1e-5)


def test_a_run_in_passes_resumes_within_an_epoch(folder: Path, tmp_path: Path) -> None:
    always = ["checkpoint.every_steps=1", "checkpoint.keep_last=100", "train.accumulation=3"]
    run(folder, tmp_path / "run", *always)
    copy = interrupted(tmp_path / "run", 3, tmp_path / "copy")
    run(folder, copy, *always, resume=True)
    assert same(checkpoint(copy), checkpoint(tmp_path / "run"))


def test_what_cannot_accumulate_is_refused(folder: Path, tmp_path: Path) -> None:
    fused = ["train.accumulation=2", "optimizer.embedding=adagrad", "optimizer.l2=0", "clip.rule=none"]
    for overrides, message in (
        (["train.accumulation=52"], r"train.accumulation must be from 1 to train.batch_size = 51, got 52"),
        (fused, 'cannot add up gradients of optimizer.embedding = "adagrad" without a clip'),
    ):
        with pytest.raises(ValueError, match=message):
            run(folder, tmp_path / "run", *overrides)
    with pytest.raises(ValueError, match=r"is for data sets, not for streams; add --set train.accumulation=1"):
        online(load_config(folder / "run.toml", ["train.accumulation=2"]), folder / "data", "x", tmp_path / "run")
    assert not (tmp_path / "run").exists()
