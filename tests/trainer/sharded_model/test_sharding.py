"""Sharding plans of the trainer: equality of four processes with one, saved plans, refused plans."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.config.sections import OptimizerConfig, ShardingConfig, TrainConfig
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.build import fused_params
from cowrec.trainer.sharded_model.run_plan import Scaled
from cowrec.trainer.sharded_model.sharding import chosen_kinds, sharding_line, sharding_plan
from process_groups import process_group
from run_comparison import assert_same_measures
from trained_runs import report_of
from trainer_cases import checkpoint, config_file, make_data, train_case, train_in_processes

MIXED = 'sharding.tables={city = "column_wise", tags = "data_parallel", history = "row_wise"}'
LAZY = ["optimizer.absent_rows=lazy"]
ADAGRAD = ["optimizer.embedding=adagrad"]

# name -> (data set, --set). The part of a name before "/" is the run of one process that it must equal.
CASES: dict[str, tuple[str, list[str]]] = {
    "adam/auto": ("weighted", []),
    "adam/mixed": ("weighted", [MIXED]),
    "lazy/mixed": ("weighted", [*LAZY, MIXED]),
    "adagrad/column_wise": ("single", [*ADAGRAD, "sharding.plan=column_wise"]),
    "adagrad/table_row_wise": ("single", [*ADAGRAD, "sharding.plan=table_row_wise"]),
}
HALVES = {
    "adam_half": ("weighted", ['sharding.tables={tags = "data_parallel", history = "row_wise"}', "train.epochs=1"]),
    "lazy_half": ("weighted", [*LAZY, "sharding.plan=column_wise", "train.epochs=1"]),
}
"""Runs of one epoch under a plan, which another plan then continues."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains ``runs1/NAME`` on one process and ``runs4/NAME_PLAN`` on four, in one launch."""
    folder = tmp_path_factory.mktemp("sharding")
    config_file(folder)
    make_data(folder / "weighted")
    make_data(folder / "single", ("price", "city"))

    def case(run: str, data: str, overrides: Sequence[str]) -> dict:
        data_dir, config = folder / data / "data", folder / "run.toml"
        paths = {"config": str(config), "data": str(data_dir), "run_dir": str(folder / run)}
        tables = ["optimizer.embedding_lr_factors={city = 0.5}"]
        tables += ["model.embedding_dims={tags = 10, history = 13}"] if data == "weighted" else []
        return {**paths, "set": [*tables, *overrides]}

    assert train_case(case("runs1/adam", "weighted", [])) == "ok"
    assert train_case(case("runs1/lazy", "weighted", LAZY)) == "ok"
    assert train_case(case("runs1/adagrad", "single", ADAGRAD)) == "ok"
    four = [case(f"runs4/{name.replace('/', '_')}", *settings) for name, settings in CASES.items()]
    refused = case("runs4/refused", "single", ['sharding.tables={citty = "row_wise"}'])
    halves = [case(f"runs4/{name}", *settings) for name, settings in HALVES.items()]
    train_in_processes([*four, *halves, refused], folder / "cases", 4)
    for name, (data, overrides) in HALVES.items():
        continued = [*overrides, "sharding.plan=table_wise", "sharding.tables={}", "train.epochs=2"]
        assert train_case(case(f"runs4/{name}", data, continued) | {"resume": True}) == "ok"
    return folder


@pytest.mark.parametrize("name", CASES)
def test_four_processes_equal_one(folder: Path, name: str) -> None:
    """Batches of 51 are uneven slices; the last one of each epoch is one sample, none for three of the processes."""
    one, four = folder / "runs1" / name.split("/")[0], folder / "runs4" / name.replace("/", "_")
    reports = [report_of(run) for run in (one, four)]
    assert [report["world_size"] for report in reports] == [1, 4]
    for first, second in zip(*(report["epochs"] for report in reports), strict=True):
        assert_same_measures(first, second)
    if name == "adam/mixed":
        return  # in checkpoints only rows of column-wise and data-parallel tables are up to date
    for part in ("model", "embedding_optimizer"):
        expected, got = (checkpoint(run)[part] for run in (one, four))
        assert expected.keys() == got.keys()
        for key, value in expected.items():
            if torch.is_tensor(value) and value.is_floating_point():
                torch.testing.assert_close(got[key], value, rtol=0, atol=1e-6, msg=f"{key} of {name}")


@pytest.mark.parametrize("name", HALVES)
def test_one_process_resumes_under_another_plan(folder: Path, name: str) -> None:
    runs = folder / "runs1" / name.split("_")[0], folder / "runs4" / name
    for first, second in zip(*(report_of(run)["epochs"] for run in runs), strict=True):
        assert_same_measures(first, second)


def test_statistics_count_each_row_once(folder: Path) -> None:
    """Several processes may hold columns or copies of a row."""
    totals = [report_of(folder / run)["clip_statistics"]["fields"] for run in ("runs1/adam", "runs4/adam_mixed")]
    assert {name: of["rows"] for name, of in totals[0].items()} == {name: of["rows"] for name, of in totals[1].items()}


def test_the_plan_is_saved(folder: Path) -> None:
    saved = json.loads((folder / "runs4" / "adam_mixed" / "sharding.json").read_text())
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


def test_an_unknown_table_stops_all_processes(folder: Path) -> None:
    for rank in range(4):
        *good, refused = json.loads((folder / f"cases.rank{rank}").read_text())
        assert good == ["ok"] * (len(CASES) + len(HALVES))
        assert "sharding.tables names 'citty', which is not a sparse field; did you mean 'city'?" in refused
    assert not (folder / "runs4" / "refused").exists()


def tables(rows: Sequence[int], columns: int = 8, mean: Sequence[int] = ()) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"t{t}",
            num_embeddings=count,
            embedding_dim=columns,
            feature_names=[f"t{t}"],
            pooling=PoolingType.MEAN if t in mean else PoolingType.SUM,
        )
        for t, count in enumerate(rows)
    ]


def processes(count: int, machine: int = 0) -> Process:
    return Process(0, count, machine or count, True, torch.device("cpu"))


def run_of(plan: str, embedding: str = "adam", **kinds: str) -> RunConfig:
    optimizer = OptimizerConfig(embedding=embedding, l2=0.0)
    return RunConfig(sharding=ShardingConfig(plan, kinds), optimizer=optimizer, train=TrainConfig(batch_size=1024))


def test_auto_splits_the_largest_tables() -> None:
    """Each process gets 325 of 1,300 rows: larger tables than half of that are split, if every process gets rows."""
    auto = run_of("auto")
    kinds = chosen_kinds(auto, tables([1000, 170, 100, 30]), processes(4))
    assert list(kinds.values()) == ["row_wise", "row_wise", "table_wise", "table_wise"]
    assert set(chosen_kinds(auto, tables([1000, 170]), processes(1)).values()) == {"table_wise"}
    assert chosen_kinds(auto, tables([5]), processes(4)) == {"t0": "table_wise"}
    assert set(chosen_kinds(auto, tables([1000, 10], mean=[0]), processes(4)).values()) == {"table_wise"}
    assert chosen_kinds(run_of("auto", t0="column_wise"), tables([1000, 10]), processes(4))["t0"] == "column_wise"


def planned(folder: Path, config: RunConfig, process: Process, rows: Sequence[int]) -> dict[str, Any]:
    """Sharding of each table; a machine without a GPU can plan for GPUs."""
    collection = EmbeddingBagCollection(tables(rows), device=torch.device("meta"))
    fused = fused_params(config.optimizer, Scaled.of(config).hyperparameters)
    kinds = chosen_kinds(config, collection.embedding_bag_configs(), process)
    model, sharder = nn.ModuleDict({"ebc": collection}), EmbeddingBagCollectionSharder(fused_params=fused)
    with process_group(0, 1, str(folder)):
        return dict(sharding_plan(model, kinds, config, process, sharder).plan["ebc"])


def test_torchrecs_planner_chooses_kinds_that_can_be_clipped(tmp_path: Path) -> None:
    """For sixteen GPUs of two machines."""
    process = Process(0, 16, 8, True, torch.device("cuda", 0))
    config = run_of("auto", t1="row_wise", t2="data_parallel")
    plan = planned(tmp_path, config, process, [20_000_000, 500_000, 1000, 30])
    kernels = {name: table.compute_kernel for name, table in plan.items()}
    assert kernels == {"t0": "fused", "t1": "fused", "t2": "dense", "t3": "fused"}
    assert (plan["t1"].sharding_type, plan["t2"].sharding_type) == ("row_wise", "data_parallel")
    assert {plan["t0"].sharding_type, plan["t3"].sharding_type} <= {"table_wise", "row_wise", "table_row_wise"}


@pytest.mark.parametrize(("world_size", "plan"), [(1, "auto"), (1, "row_wise"), (2, "auto"), (2, "table_row_wise")])
def test_tables_in_unified_memory(tmp_path: Path, world_size: int, plan: Any) -> None:
    """Holds for either planner."""
    process = Process(0, world_size, world_size, True, torch.device("cuda", 0))
    sharding = ShardingConfig(plan, {"t1": "data_parallel"}, memory="uvm")
    config = RunConfig(sharding=sharding, optimizer=OptimizerConfig(l2=0.0), train=TrainConfig(batch_size=1024))
    found = planned(tmp_path, config, process, [20_000_000, 30, 1000])
    kernels = {name: table.compute_kernel for name, table in found.items()}
    assert kernels == {"t0": "fused_uvm", "t1": "dense", "t2": "fused_uvm"}


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (
            RunConfig(sharding=ShardingConfig(memory="uvm"), optimizer=OptimizerConfig(l2=0.0)),
            {},
            r'sharding.memory = "uvm" exists on CUDA only',
        ),
        (run_of("data_parallel", "adagrad"), {}, "'t0' is to be data-parallel, but .* set optimizer.embedding = .adam"),
        (run_of("column_wise", "rowwise_adagrad"), {}, "'t0' is to be column-wise, but .* keeps one number for a row"),
        (run_of("column_wise"), {"columns": 4}, "its 4 columns cannot be split .* raise model.embedding_dim"),
        (run_of("table_wise", t0="row_wise"), {"mean": [0]}, "'t0' is pooled by the mean .* such as 't1', wrongly"),
        (run_of("table_wise", t1="row_wise"), {}, "row-wise tables of 5 rows or fewer leave one of 4 processes"),
        (run_of("table_wise", t2="table_row_wise"), {}, "'t2' has too few rows .1. for the 2 processes of a machine"),
    ],
)
def test_refuses(config: RunConfig, given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen_kinds(config, tables([40, 5, 1], **given), processes(4, machine=2))
