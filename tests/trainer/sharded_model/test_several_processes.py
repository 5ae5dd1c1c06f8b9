"""Several processes train what one does, under every plan, and resume each other's runs under other plans."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cowrec.data_pipeline import SynthesizeConfig, synthesize
from cowrec.trainer.sharded_model.build import sharding_line
from run_comparison import assert_close, assert_same_measures, up_to_date
from shared_work import made_once
from tiers import tiered
from trained_runs import metrics, report_of
from trainer_cases import (
    TEST_ROWS,
    TRAIN_ROWS,
    UNWEIGHTED,
    case_of,
    config_file,
    interrupted,
    make_data,
    outcomes_in_processes,
    train_case,
    train_in_processes,
)

ROW_WISE, TABLE_WISE = "sharding.plan=row_wise", "sharding.plan=table_wise"
MIXED = 'sharding.tables={city="column_wise",tags="data_parallel",history="row_wise"}'
OFTEN = ["checkpoint.every_steps=3", "checkpoint.keep_last=100"]
WEIGHTED = [*OFTEN, "optimizer.embedding_lr_factors.city=0.5", "model.embedding_dims={tags=10,history=13}"]
STOCK = ["optimizer.embedding=rowwise_adagrad", "optimizer.l2=0", "clip.rule=none"]
AVERAGE = ["train.average=true", "checkpoint.keep_best=logloss"]
IDS = ["id_table.kind=collisionless", "id_table.capacity=100"]

ALONE: dict[str, tuple[str, list[str]]] = {
    "adam": ("weighted", WEIGHTED),
    "lazy": ("weighted", [*WEIGHTED, "optimizer.absent_rows=lazy"]),
    "stock": ("weighted", [*OFTEN, *STOCK]),
    "adagrad": ("single", ["optimizer.embedding=adagrad", "optimizer.embedding_lr_factors.city=0.5"]),
    "fused": ("single", ["optimizer.embedding=rowwise_adagrad", "clip.rule=adaptive_field"]),  # with L2
    "patient": ("single", ["train.validation_fraction=0.2", "train.patience=1", *AVERAGE]),
    "one_test_row": ("one_test_row", ["train.epochs=1"]),
    "synthetic": ("synthetic", ["train.epochs=1", "evaluate.by_id_counts=true"]),
    "ids": ("weighted", [*OFTEN, *IDS]),
    "ids_lazy": ("single", [*IDS, "optimizer.absent_rows=lazy", "model.embedding_dim=7"]),
    "ids_full": ("single", [*OFTEN, *IDS, "id_table.capacity=5", "id_table.when_full=refuse"]),
    "ids_counted": ("unweighted", [*IDS, "id_table.admission=count", "id_table.threshold=3"]),
    "ids_adagrad": ("unweighted", [*IDS, "optimizer.embedding=adagrad", "optimizer.l2=0", "clip.rule=none"]),
    "ids_hash": ("unweighted", ["id_table.kind=hash", "id_table.capacity=7"]),
}
"""Runs of one process: data set and settings."""
FIRST = [
    *[("adam", 2, TABLE_WISE), ("adam", 2, ROW_WISE), ("stock", 2, ROW_WISE), ("fused", 2, TABLE_WISE)],
    *[("patient", 2, ""), ("ids", 2, ROW_WISE), ("ids_counted", 2, ROW_WISE), ("adam", 4, MIXED)],
]
LATER = [
    *[("adam", 2, f"{ROW_WISE} train.accumulation=4"), ("fused", 2, ROW_WISE)],
    *[("one_test_row", 2, ROW_WISE), ("synthetic", 2, ROW_WISE)],
    *[("ids", 2, 'sharding.tables={city="table_wise",tags="data_parallel"}'), ("ids_full", 2, ROW_WISE)],
    *[("ids_lazy", 2, "sharding.plan=column_wise"), ("ids_adagrad", 2, ""), ("ids_hash", 2, ROW_WISE)],
    *[("lazy", 4, MIXED), ("adagrad", 4, "sharding.plan=column_wise"), ("adagrad", 4, "sharding.plan=table_row_wise")],
]
"""Those of the third tier."""
SEVERAL = [*FIRST, *LATER]
"""Runs of several processes: the run of one that they must equal, and how their tables are sharded.

Batches of 51 are uneven slices; the last one of each epoch is one sample, none for the other processes.
"""
RESUMED = {"adam": True, "ids_full": True, "lazy": False, "stock": False}
"""Runs that others resume, and whether the first tiers test this."""
OTHERWISE = {"stock": "sharding.plan=table_row_wise", "ids_full": TABLE_WISE}
"""In place of MIXED."""
# processes, plan, and the step to resume from; there are checkpoints at 3, 5, 6, 9 and 10.
STAGES = [(2, ROW_WISE, 3), (4, MIXED, 6), (1, ROW_WISE, 9)]


def case(folder: Path, run_dir: Path, name: str, plan: str = "", **more: Any) -> dict[str, Any]:
    data, settings = ALONE[name]
    return case_of(folder, run_dir, *settings, *plan.split(), data=folder / data / "data", **more)


def in_tiers(thorough: bool) -> tuple[list[tuple[str, int, str]], list[str]]:
    """The elements of SEVERAL and RESUMED that this run tests."""
    return SEVERAL if thorough else FIRST, [name for name, first in RESUMED.items() if first or thorough]


def make_runs(folder: Path, thorough: bool) -> None:
    """Trains ``runs1/NAME`` and ``several/N``, where N is the number in SEVERAL."""
    wanted, resumed = in_tiers(thorough)
    config_file(folder)
    make_data(folder / "weighted")
    make_data(folder / "unweighted", UNWEIGHTED)
    make_data(folder / "single", ("price", "city"))
    make_data(folder / "one_test_row", test_rows=1)
    sizes = {"rows": TRAIN_ROWS, "test_rows": TEST_ROWS, "vocabulary_scale": 1e-6}
    synthesize(folder / "synthetic" / "data", SynthesizeConfig(**sizes))
    for name in dict.fromkeys([*(name for name, _, _ in wanted), *resumed]):
        assert train_case(case(folder, folder / "runs1" / name, name)) == "ok"
    unknown = case(folder, folder / "refused", "lazy", 'sharding.tables={citty="row_wise"}')
    for processes, refused, message in (
        (2, case(folder, folder / "several" / "0", "adam"), "add --resume and raise train.epochs"),
        (4, unknown, "sharding.tables names 'citty', which is not a sparse field; did you mean 'city'?"),
    ):
        cases = [
            case(folder, folder / "several" / str(number), name, plan)
            for number, (name, count, plan) in enumerate(wanted)
            if count == processes
        ]
        for *good, last in outcomes_in_processes(train_case, [*cases, refused], processes):
            assert good == ["ok"] * len(cases)
            assert message in last, "the first process's error, on all of them"
    assert not (folder / "refused").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> Path:
    return made_once(tmp_path_factory, "several_processes", lambda folder: make_runs(folder, thorough))


def several(folder: Path, *of: str | int) -> Path:
    return folder / "several" / str(SEVERAL.index(of))


def assert_same_epochs(runs: Sequence[Path]) -> None:
    for first, second in zip(*(report_of(run)["epochs"] for run in runs), strict=True):
        assert_same_measures(first, second)


@pytest.mark.parametrize("of", tiered(SEVERAL, FIRST), ids=" ".join(map(str, range(len(SEVERAL)))).split())
def test_several_processes_train_what_one_does(folder: Path, of: tuple[str, int, str]) -> None:
    """Up to sums in another order, of other rows with id tables."""
    name, processes, _ = of
    runs = folder / "runs1" / name, several(folder, *of)
    reports = [report_of(run) for run in runs]
    assert [report["world_size"] for report in reports] == [1, processes]
    assert reports[0]["steps"] == reports[1]["steps"]
    assert_same_epochs(runs)
    assert len(metrics(runs[0], "eval")) == len(metrics(runs[1], "eval"))
    assert not list(runs[1].rglob("*.partial"))
    states = [up_to_date(run) for run in runs]
    parts = [{key: state[key] for key in state if key.startswith(("/model", "/embedding"))} for state in states]
    assert_close(*parts, atol=2e-5 if "ids" in name else 1e-6)


@pytest.mark.parametrize(("processes", "plan"), [(2, TABLE_WISE), (2, ROW_WISE), (4, MIXED)])
def test_clip_statistics_cover_the_tables_of_all_processes(folder: Path, processes: int, plan: str) -> None:
    """Counts are exact except for a row at its limit. The median over the shards of a row-wise table is an estimate.

    Several processes may hold columns or copies of a row, which counts once.
    """
    runs = folder / "runs1" / "adam", several(folder, "adam", processes, plan)
    readings = [metrics(run, "clip") for run in runs]
    assert len(readings[0]) == len(readings[1]) > 0
    for one, two in zip(*readings, strict=True):
        for first, second in ((one, two), *((one["fields"][name], two["fields"][name]) for name in one["fields"])):
            assert first["rows"] == second["rows"]
            assert first["clipped_share"] == pytest.approx(second["clipped_share"], abs=1.5 / first["rows"])
            if plan == TABLE_WISE:
                assert first["limit_to_norm"] == pytest.approx(second["limit_to_norm"], rel=1e-3)


def test_the_plan_is_saved(folder: Path) -> None:
    saved = json.loads((several(folder, "adam", 4, MIXED) / "sharding.json").read_text())
    kinds = {name: table["kind"] for name, table in saved["tables"].items()}
    assert kinds == {"city": "column_wise", "tags": "data_parallel", "history": "row_wise"}
    of_rank = [0] * 4
    for table in saved["tables"].values():
        copies = 4 if table["kind"] == "data_parallel" else 1
        assert sum(table["bytes_of_rank"].values()) == 4 * table["rows"] * table["columns"] * copies
        for rank, size in table["bytes_of_rank"].items():
            of_rank[int(rank)] += size
    assert saved["bytes_of_rank"] == of_rank
    assert sharding_line(saved).startswith("tables: 1 ")
    assert "1 data_parallel" in sharding_line(saved)


@pytest.fixture(scope="module")
def resumed(folder: Path, tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> Path:
    """Trains ``stageN/NAME``, each resumed from the stage before, the first one from the run of one process."""

    def make(stages: Path) -> None:
        before = folder / "runs1"
        for stage, (processes, plan, step) in enumerate(STAGES):
            cases = []
            for name in in_tiers(thorough)[1]:
                run_dir = interrupted(before / name, step, stages / f"stage{stage}" / name)
                own = OTHERWISE.get(name, plan) if plan == MIXED else plan
                cases.append(case(folder, run_dir, name, own, resume=True))
            train_in_processes(*cases, processes=processes)
            before = stages / f"stage{stage}"

    return made_once(tmp_path_factory, "several_processes_resumed", make)


@pytest.mark.parametrize("stage", range(len(STAGES)))
@pytest.mark.parametrize("name", tiered(RESUMED, in_tiers(thorough=False)[1]))
def test_another_number_of_processes_resumes_under_another_plan(
    folder: Path, resumed: Path, name: str, stage: int
) -> None:
    """All state and measures; several processes add dense gradients in another order."""
    runs = folder / "runs1" / name, resumed / f"stage{stage}" / name
    reports = [report_of(run) for run in runs]
    assert_same_epochs(runs)
    assert reports[1]["world_size"] == STAGES[stage][0]
    if reports[0]["clip_statistics"]:
        assert reports[0]["clip_statistics"]["rows"] == reports[1]["clip_statistics"]["rows"]
    assert_close(*map(up_to_date, runs), atol=2e-5 if "ids" in name else 1e-6)
