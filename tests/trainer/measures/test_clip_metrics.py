"""Statistics of the clip: counts against the data, limits against the rule, and the files they are written to."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cowrec.sparse_opt import TableStats
from cowrec.trainer.measures.clip_metrics import ClipWatch, clip_remark
from cowrec.trainer.runtime.processes import Process
from trained_runs import metrics, report_of, run
from trainer_cases import COLUMNS, TRAIN_ROWS, config_file, make_data

FIELDS = [name for name in COLUMNS if name != "price"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    make_data(folder)
    make_data(folder / "single", ("price", "city"))
    config_file(folder)
    return folder


def trained(folder: Path, run_dir: Path, *overrides: str, data: str = "data") -> tuple[list[dict[str, Any]], Any]:
    """Trains; returns the clip's lines of metrics.jsonl, and the report."""
    report = run(folder, run_dir, *overrides, data=folder / data)
    return metrics(run_dir, "clip"), report


def test_rows_are_the_distinct_ids_of_each_step(folder: Path, tmp_path: Path) -> None:
    """Each step has every id of the data, since an epoch is one batch."""
    lines, report = trained(folder, tmp_path / "run", f"train.batch_size={TRAIN_ROWS}", "train.epochs=3")
    table = pq.read_table(folder / "data" / "train")
    distinct = {name: len(np.unique(np.hstack(table[name].to_numpy()))) for name in FIELDS}
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert {name: line["fields"][name]["rows"] for name in FIELDS} == distinct
        assert line["rows"] == sum(distinct.values())
    total = report["clip_statistics"]
    assert total["rows"] == 3 * sum(distinct.values())
    assert total["fields"]["city"]["rows"] == 3 * distinct["city"]


OF_LIMITS = {"data": [], "single/data": ["optimizer.embedding=adagrad", "optimizer.l2=0"]}


@pytest.mark.parametrize("data", OF_LIMITS)
def test_limit_to_norm_doubles_with_the_limit(folder: Path, tmp_path: Path, data: str) -> None:
    """Gradients and weights before the first update do not depend on r; without zeta the limit is proportional to r."""
    found = {}
    for r in (1e-4, 1.0, 2.0, 1e9):
        own = (*OF_LIMITS[data], f"clip.r={r}", "clip.zeta=0.0", "train.batch_size=1000", "train.epochs=1")
        found[r], report = trained(folder, tmp_path / str(r), *own, data=data)
    of_1, of_2 = ([field["limit_to_norm"] for field in found[r][0]["fields"].values()] for r in (1.0, 2.0))
    assert of_2 == pytest.approx([2 * number for number in of_1], rel=1e-5)  # float32
    assert found[1e-4][0]["clipped_share"] == 1
    assert found[1e9][0]["clipped_share"] == 0
    assert report["clip_statistics"]["clipped_share"] == 0
    assert report["clip_remark"].startswith("the clip had no effect: 0 % of ")
    for line in (*found[1.0], *found[2.0]):
        for field in line["fields"].values():
            # More than half of the rows exceed their limit exactly if the median row does.
            assert (field["clipped_share"] > 0.5) == (field["limit_to_norm"] < 1)


def test_lines_add_up_to_the_report_and_are_in_tensorboard(folder: Path, tmp_path: Path) -> None:
    lines, report = trained(folder, tmp_path / "run")
    total = report["clip_statistics"]
    assert [line["step"] for line in lines] == [1, 2, 4, 5, 6, 8, 10]
    for name in FIELDS:
        field_lines = [line["fields"][name] for line in lines]
        rows = [line["rows"] for line in field_lines]
        assert sum(rows) == total["fields"][name]["rows"]
        clipped = np.dot(rows, [line["clipped_share"] for line in field_lines])
        assert total["fields"][name]["clipped_share"] == pytest.approx(clipped / sum(rows), rel=1e-12)
        assert total["fields"][name]["limit_to_norm"] == field_lines[-1]["limit_to_norm"]
    assert 0 < total["clipped_share"] < 1
    assert total == report_of(tmp_path / "run")["clip_statistics"]
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in board.Scalars("clip/fields/city/clipped_share")]
    assert shown == [(line["step"], pytest.approx(line["fields"]["city"]["clipped_share"], abs=1e-7)) for line in lines]
    assert len(board.Scalars("clip/limit_to_norm")) == len(lines)
    lines, report = trained(folder, tmp_path / "unclipped", "clip.rule=none", "train.epochs=1")
    assert (lines, report["clip_statistics"], report["clip_remark"]) == ([], None, None)


def test_remark_on_a_clip_without_effect() -> None:
    def remark(clipped: float, distance: float, rows: int = 20_000) -> str | None:
        return clip_remark({"rows": rows, "clipped_share": clipped, "limit_to_norm": distance})

    assert str(remark(0.0, 41.2)).startswith("the clip had no effect: 0 % of 20,000 row updates were clipped; lower")
    assert str(remark(5e-5, 2.0)).startswith(
        "the clip had almost no effect: 0.005 % of 20,000 row updates were clipped"
    )
    assert [remark(1e-4, 2.0), remark(1.0, 0.1), remark(np.nan, np.nan, rows=0)] == [None] * 3


def test_readings_cover_the_time_since_the_last_and_tables_without_rows() -> None:
    """Table c is never looked up, b not in the latest step, a has gradients of zero at first."""
    stats = {"a": TableStats(10, 0.2, 0.0), "b": TableStats(40, 0.5, np.nan), "c": TableStats(0, 0.0, np.nan)}
    process = Process(0, 1, 1, False, torch.device("cpu"))
    watch = ClipWatch(lambda: stats, {name: name for name in ("c", "b", "a", "elsewhere")}, process)
    first = watch.read()
    assert first["fields"]["a"] == {"rows": 10, "clipped_share": 0.2, "limit_to_norm": np.inf}
    nothing = {"rows": 0, "clipped_share": np.nan, "limit_to_norm": np.nan}
    for name in ("c", "elsewhere"):
        assert first["fields"][name] == pytest.approx(nothing, nan_ok=True)
    assert (first["rows"], first["clipped_share"]) == (50, pytest.approx(22 / 50))
    stats |= {"a": TableStats(40, 0.8, 4.0), "b": TableStats(50, 0.6, 0.5)}
    assert watch.counts() == {"c": [0, 0], "b": [50, 30], "a": [40, 32], "elsewhere": [0, 0]}, "up to now"
    second = watch.read()
    # With 30 rows of a and 10 of b the typical row is in a.
    assert second["fields"]["a"] == {"rows": 30, "clipped_share": 1.0, "limit_to_norm": 0.25}
    assert second["fields"]["b"] == {"rows": 10, "clipped_share": 1.0, "limit_to_norm": 2.0}
    assert (second["rows"], second["clipped_share"], second["limit_to_norm"]) == (40, 1.0, 0.25)
    # From the beginning b has 50 rows and a 40, so the typical row is in b.
    assert watch.total()["limit_to_norm"] == 2.0
    assert watch.total()["clipped_share"] == pytest.approx(62 / 90)
