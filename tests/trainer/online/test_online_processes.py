"""Online training in several processes: what they train, publish and set aside equals what one process does."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cowrec.data_pipeline.synthetic.drifting import drifting_tables
from cowrec.data_pipeline.synthetic.histories import HistoryConfig
from history_cases import make_histories, with_categories
from online_cases import CONFIG, DRIFT, assert_readers_equal_an_export, make_case, online_case, write_stream
from run_comparison import assert_close, state_of, up_to_date
from shared_work import made_once
from tiers import tiered
from trained_runs import metrics, report_of, write_network
from trainer_cases import interrupted, outcomes_in_processes

SAMPLES, BATCH = 10 * 51 + 1, 51
"""Uneven slices for two and four processes; the last batch is one sample, none for most of them."""
SOME = ["train.batch_size=51", "optimizer.base_batch_size=51", "train.log_every=3", "online.window='6h'"]
TWICE = ["online.publish_seconds=1000", "online.dense_seconds=1000"]
"""Publishes a full version after the first step and a delta at the end."""
EXACT = ["optimizer.absent_rows=lazy", "id_table.expire_after=''"]
"""Readers of publications have every row exactly."""
MIXED = ['sharding.tables={C1 = "column_wise", C2 = "data_parallel", C3 = "row_wise"}']
ADAGRAD = ["optimizer.embedding=adagrad", "optimizer.l2=0", "clip.rule=none", "id_table.expire_after=''"]

CASES: dict[str, list[str]] = {
    "expiry": ["id_table.expire_after='8h'", "optimizer.l2=1e-3", "optimizer.wide=ftrl"],
    "eviction": [*EXACT, *MIXED, "id_table.capacity=60"],
    "count": [*ADAGRAD, "id_table.admission=count", "id_table.threshold=3", "id_table.window=1d"],
    "shared": [*EXACT, 'id_table.tables={both = {fields = ["C1", "C3"], capacity = 90}}'],
    "hash": [*EXACT, "id_table.kind=hash", "id_table.capacity=400", *MIXED],
}
FIRST = ("expiry", "hash")
"""Cases of the first tiers."""

POISONED = 4
"""Batch, from 0, with a sample whose prediction overflows; it is in the slice of the last process."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> Path:
    return made_once(tmp_path_factory, "online_processes", lambda folder: make_runs(folder, thorough))


def make_runs(folder: Path, thorough: bool) -> None:
    """Trains ``runs1/NAME``, ``runs2/NAME`` and ``runs4/NAME``."""
    make_streams(folder)
    names = CASES if thorough else FIRST
    one, four = ([*(case_of(folder, count, name) for name in names), poisoned(folder, count)] for count in (1, 4))
    if thorough:
        one.append(first_part(folder, 1))
        four += [idle(folder, 4), first_part(folder, 4)]
    assert [online_case(case) for case in one] == ["ok"] * len(one)
    for outcomes in outcomes_in_processes(online_case, [*four, damaged(folder)], 4):
        assert outcomes[:-1] == ["ok"] * len(four)
        assert "000002.parquet" in outcomes[-1], "the error of the first process, on all of them"
    if thorough:
        resume(folder)


def make_streams(folder: Path) -> None:
    """Makes the case's data, and streams of the same samples: complete, parts of it, damaged, poisoned."""
    make_case(folder)
    output = "self.out(x.flat).squeeze(1) + (dense / 10).exp().mean(1)"
    write_network(folder / "overflowing.py", output)
    rows = pa.concat_tables(drifting_tables(DRIFT, 0, SAMPLES, chunk_rows=200)).sort_by("time")
    parts = [rows.slice(0, 200), rows.slice(200, 200), rows.slice(400)]
    write_stream(folder / "in", parts)
    for name in ("first", "idle", "damaged"):
        write_stream(folder / name, parts[:2], end=name == "first")
    write_stream(folder / "damaged", [parts[2]], first=2, end=False)
    file = folder / "damaged" / "000002.parquet"
    file.write_bytes(file.read_bytes()[:-50])
    for name in ("later1", "later2", "later4"):
        write_stream(folder / name, [parts[2]], first=2)
    numbers = rows["I1"].to_numpy().copy().astype(np.float64)
    numbers[POISONED * BATCH + BATCH - 2] = 1e39
    write_stream(folder / "poisoned", [rows.set_column(rows.column_names.index("I1"), "I1", [numbers])])


def case_of(folder: Path, processes: int, name: str, *more: str, **given: Any) -> dict[str, Any]:
    runs = folder / f"runs{processes}"
    case = {"folder": str(folder), "source": str(folder / "in"), "run_dir": str(runs / name), "path": str(folder)}
    settings = [*SOME, *TWICE, *CASES.get(name, []), *more]
    return {**case, "publish": str(runs / f"{name}_published"), "set": settings, **given}


def poisoned(folder: Path, processes: int) -> dict[str, Any]:
    settings = [*EXACT, "model.name=overflowing:Net"]
    return case_of(folder, processes, "poisoned", *settings, source=str(folder / "poisoned"))


def idle(folder: Path, processes: int) -> dict[str, Any]:
    """The stream stops for longer than a process may keep the others waiting."""
    arrival = {"source": str(folder / "idle"), "later": str(folder / f"later{processes}"), "later_seconds": 19}
    given = ["train.timeout_seconds=16"]
    return case_of(folder, processes, "idle", *CASES["expiry"], *given, **arrival)


def first_part(folder: Path, processes: int) -> dict[str, Any]:
    """The first two files of the stream, which then ends, with a short batch; the run continues with the last one."""
    return case_of(folder, processes, "resumed", *CASES["expiry"], source=str(folder / "first"), publish=None)


def damaged(folder: Path) -> dict[str, Any]:
    return case_of(folder, 4, "damaged", source=str(folder / "damaged"))


def resume(folder: Path) -> None:
    """Runs of two processes: one with all its snapshots, and the rest of ``resumed``."""
    stream = folder / "first"
    (stream / "_END").unlink()
    for file in (folder / "later2").iterdir():
        shutil.copy(file, stream)
    every = [*CASES["expiry"], *MIXED, "online.snapshot_seconds=0", "checkpoint.keep_last=1000"]
    whole = case_of(folder, 2, "whole", *every)
    rest = [first_part(folder, processes) | {"resume": True} for processes in (1, 4)]
    assert online_case(rest[0]) == "ok"
    assert outcomes_in_processes(online_case, [whole, rest[1]], 2) == [["ok"] * 2] * 2
    steps = sorted(int(path.name[5:]) for path in (folder / "runs2" / "whole" / "checkpoints").iterdir())
    copy = interrupted(folder / "runs2" / "whole", steps[5], folder / "runs2" / "copy")
    again = whole | {"run_dir": str(copy), "publish": f"{copy}_published", "resume": True}
    assert outcomes_in_processes(online_case, [again], 2) == [["ok"]] * 2


@pytest.mark.parametrize("name", tiered(CASES, FIRST))
def test_four_processes_equal_one(folder: Path, name: str) -> None:
    assert_equal(folder / "runs1" / name, folder / "runs4" / name)
    if "C1" in str(CASES[name]):
        sharding = json.loads((folder / "runs4" / name / "sharding.json").read_text())
        assert sharding["ranks"] == 4


@pytest.mark.thorough
def test_a_resumed_run_is_bit_identical(folder: Path) -> None:
    """From a snapshot in the middle, with replayed rows under a mixed plan; its publication brings rows up to date."""
    copy, whole = (folder / "runs2" / name for name in ("copy", "whole"))
    assert_close(up_to_date(copy), up_to_date(whole), atol=0)
    for kind in ("window", "ids"):
        assert metrics(copy, kind) == metrics(whole, kind)


@pytest.mark.thorough
def test_fewer_processes_resume(folder: Path) -> None:
    """Four train the first part of the stream, two the rest."""
    assert_equal(folder / "runs1" / "resumed", folder / "runs4" / "resumed")
    assert report_of(folder / "runs4" / "resumed")["world_size"] == 2


@pytest.mark.thorough
def test_a_quiet_stream_is_waited_for(folder: Path) -> None:
    assert_equal(folder / "runs1" / "expiry", folder / "runs4" / "idle")


@pytest.mark.parametrize("name", tiered(CASES, FIRST))
def test_readers_of_publications_equal_an_export(folder: Path, name: str) -> None:
    run_dir = folder / "runs4" / name
    served = assert_readers_equal_an_export(folder, run_dir, f"{run_dir}_published", source="in")
    assert served.state.version == 2, "a full version and a delta"


def test_a_batch_is_set_aside_by_all_processes(folder: Path) -> None:
    """Only the last process has the sample that overflows, and all drop the batch; the first one saves it."""
    runs = [folder / f"runs{processes}" / "poisoned" for processes in (1, 4)]
    assert_equal(*runs)
    name = f"batch_{POISONED + 1:09d}.parquet"
    one, four = (pq.read_table(run / "quarantine" / name).drop(["reason", "logit"]) for run in runs)
    assert four.equals(one)
    assert len(four) == BATCH
    logits = [pq.read_table(run / "quarantine" / name)["logit"].to_numpy() for run in runs]
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5)
    for run in runs:
        assert report_of(run)["batches_set_aside"] == 1


def assert_equal(one: Path, other: Path) -> None:
    """Compares two runs to the rounding of sums: weights, moments, windows; id tables and counts exactly.

    Which rows are up to date in a checkpoint depends on when the first version was written.
    """
    states = [up_to_date(run) for run in (one, other)]
    squares = [{key: state.pop(key) for key in [*state] if key.endswith("exp_avg_sq")} for state in states]
    assert_close(*states)
    assert_close(*squares, rtol=1e-6)  # the wide weights' sums of squares are above 1
    reports = [report_of(run) for run in (one, other)]
    for key in ("samples", "steps", "id_tables", "batches_set_aside"):
        assert reports[0][key] == reports[1][key], key
    windows = [{line["start"]: line for line in metrics(run, "window")} for run in (one, other)]
    assert windows[0].keys() == windows[1].keys()
    for start, window in windows[0].items():
        for key in ("samples", "ctr", "auc", "logloss", "calibration"):
            assert windows[1][start][key] == pytest.approx(window[key], abs=1e-5), key


HISTORIES = HistoryConfig(rows=400, items=300, groups=4, max_length=4, half_life=1.0)
OF_HISTORIES = ["online.publish_seconds=0.05", "online.dense_seconds=0.1", "optimizer.absent_rows=lazy"]
OF_HISTORIES += ["model.name=din", "id_table.expire_after=''", "id_table.capacity=100"]
"""Fewer rows than items, so that ids are evicted."""


@pytest.mark.thorough
def test_histories_are_published_and_trained_by_processes_alike(tmp_path: Path) -> None:
    make_histories(tmp_path, HISTORIES, raw_ids=True)
    (tmp_path / "run.toml").write_text(CONFIG.replace("embedding_dims = { C1 = 9, C3 = 9 }", ""))
    chunks = [HISTORIES.draw(first, min(200, 1003 - first))[0] for first in range(0, 1003, 200)]
    write_stream(tmp_path / "in", [with_categories(chunk) for chunk in chunks])
    one, two = (
        {"folder": str(tmp_path), "source": str(tmp_path / "in"), "run_dir": str(tmp_path / name), "set": OF_HISTORIES}
        | {"publish": str(tmp_path / f"{name}_published")}
        for name in ("one", "two")
    )
    assert online_case(one) == "ok"
    served = assert_readers_equal_an_export(tmp_path, tmp_path / "one", one["publish"], source="in")
    assert served.state.version > 1
    assert served.counters()["removed_rows"] > 0
    assert outcomes_in_processes(online_case, [two], 2) == [["ok"]] * 2
    assert_close(state_of(tmp_path / "two"), state_of(tmp_path / "one"), atol=1e-5)
    assert_readers_equal_an_export(tmp_path, tmp_path / "two", two["publish"], source="in")
