"""Batches that would make the model non-finite are set aside whole, and training goes on as if they had not come."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from cowrec.data_pipeline.synthetic.drifting import drifting_tables
from cowrec.trainer.config.run import load_config
from cowrec.trainer.online.loop import online
from cowrec.trainer.runtime.errors import NonFiniteLoss
from cowrec.trainer.training.loop import MOST_SET_ASIDE
from online_cases import DRIFT, assert_readers_equal_an_export, make_case, write_stream
from run_comparison import assert_same
from trained_runs import metrics
from trainer_cases import checkpoint, interrupted, tensors

BATCH, POISONED = 64, (5, 6, 11)
"""Batches of the stream, from 0, with a sample whose prediction overflows."""

NETWORK = """
from torch import nn
class Net(nn.Module):
    def __init__(self, config, front):
        super().__init__()
        self.front, self.norm, self.out = front, nn.BatchNorm1d(front.width), nn.Linear(front.width, 1)
    def forward(self, dense, sparse):
        return self.out(self.norm(self.front(dense, sparse).flat)).squeeze(1) + (dense / 10).exp().mean(1)
"""
HASHED = ["id_table.kind=hash", "id_table.expire_after=''", "optimizer.absent_rows=lazy"]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Streams ``poisoned``, ``clean`` without the poisoned batches, and ``hopeless``, in which all are poisoned."""
    folder = make_case(tmp_path_factory.mktemp("quarantine"))
    (folder / "my_exponential.py").write_text(NETWORK)
    rows = pa.concat_tables(drifting_tables(DRIFT, 0, 16 * BATCH, chunk_rows=500)).sort_by("time")
    number = np.arange(len(rows))
    kept = pa.array(~np.isin(number // BATCH, POISONED))
    write_stream(folder / "clean", [rows.filter(kept)])
    write_stream(folder / "poisoned", [spoiled(rows, (number % BATCH == 7) & ~kept.to_numpy(zero_copy_only=False))])
    write_stream(folder / "hopeless", [spoiled(rows, (number % BATCH == 7) & (number >= 2 * BATCH))])
    return folder


def spoiled(rows: pa.Table, where: np.ndarray) -> pa.Table:
    """The samples with a first number of 1e39, which float32 cannot hold, in some of them."""
    numbers = pc.if_else(pa.array(where), pa.scalar(1e39), rows["I1"].cast(pa.float64()))
    return rows.set_column(rows.column_names.index("I1"), "I1", numbers)


@pytest.fixture
def run(case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(case)

    def follow(source: str, name: str, *overrides: str, **given: Any) -> dict[str, Any]:
        config = load_config(case / "run.toml", ["model.name=my_exponential:Net", "train.log_every=4", *overrides])
        return online(config, case / "data", str(case / source), tmp_path / name, **given)

    return follow


def test_the_model_is_as_if_the_batches_had_not_come(
    run: Any, case: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, moments and the means of BatchNorm, bit for bit, also for readers; samples and reason are kept."""
    report = run("poisoned", "poisoned", *HASHED, publish=str(tmp_path / "published"))
    run("clean", "clean", *HASHED)
    assert_readers_equal_an_export(case, tmp_path / "poisoned", tmp_path / "published", source="clean")
    found, expected = (tensors(checkpoint(tmp_path / name)) for name in ("poisoned", "clean"))
    compared = [name for name in expected if name != "/iterations"]  # which FBGEMM counts in forward passes
    assert any("running_mean" in name for name in compared)
    for name in compared:
        assert torch.equal(found[name], expected[name]), name
    assert (report["steps"], report["batches_set_aside"]) == (16 - len(POISONED), len(POISONED))
    files = sorted((tmp_path / "poisoned" / "quarantine").iterdir())
    assert [file.name for file in files] == [f"batch_{number + 1:09d}.parquet" for number in POISONED]
    samples = pq.read_table(files[0])
    assert np.flatnonzero(~np.isfinite(samples["logit"].to_numpy())).tolist() == [7]
    assert "the loss is " in samples["reason"][0].as_py()
    assert {"time", "sample_id", "label"} <= set(samples.column_names)
    assert caplog.text.count(f"({BATCH} samples) is set aside") == len(POISONED)
    logged = {kind: metrics(tmp_path / "poisoned", kind) for kind in ("set_aside", "stream", "train")}
    assert [line["batch"] for line in logged["set_aside"]] == [number + 1 for number in POISONED]
    assert logged["stream"][-1]["batches_set_aside"] == len(POISONED)
    assert all(np.isfinite(line["loss"]) for line in logged["train"])


def test_a_resumed_run_sets_the_same_batches_aside(run: Any, tmp_path: Path) -> None:
    given = ["online.snapshot_seconds=0", "checkpoint.keep_last=1000"]
    run("poisoned", "whole", *given)
    copy = interrupted(tmp_path / "whole", 8, tmp_path / "copy")  # two were set aside before, one comes again
    report = run("poisoned", copy.name, *given, resume=True)
    assert report["batches_set_aside"] == len(POISONED)
    assert_same(copy, tmp_path / "whole")


def test_many_batches_in_a_row_end_the_run(run: Any, tmp_path: Path) -> None:
    """The model is at fault then, or all of the data; with `stop` the first one ends it."""
    with pytest.raises(NonFiniteLoss, match=f"in {MOST_SET_ASIDE} batches in a row after step 2"):
        run("hopeless", "hopeless", *HASHED)
    assert len(list((tmp_path / "hopeless" / "quarantine").iterdir())) == MOST_SET_ASIDE - 1
    with pytest.raises(NonFiniteLoss, match="the loss was not finite at step 6"):
        run("poisoned", "stops", *HASHED, "online.on_nonfinite=stop")
