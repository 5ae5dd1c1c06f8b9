"""Sharding plans of the trainer: chosen and refused kinds, for machines that are not here."""

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
from cowrec.trainer.sharded_model.sharding import chosen_kinds, sharding_plan
from process_groups import process_group
from refusal import refused


def tables(rows: Sequence[int], columns: int = 8, mean: Sequence[int] = ()) -> list[EmbeddingBagConfig]:
    poolings = [PoolingType.MEAN if t in mean else PoolingType.SUM for t in range(len(rows))]
    return [
        EmbeddingBagConfig(count, columns, name=f"t{t}", feature_names=[f"t{t}"], pooling=pooling)
        for t, (count, pooling) in enumerate(zip(rows, poolings, strict=True))
    ]


def processes(count: int, machine: int = 0) -> Process:
    return Process(0, count, machine or count, True, torch.device("cpu"))


def run_of(plan: str, embedding: str = "adam", memory: str = "device", **kinds: str) -> RunConfig:
    optimizer = OptimizerConfig(embedding=embedding, embedding_lr=2e-3, l2=0.0)
    sharding = ShardingConfig(plan, kinds, memory)
    return RunConfig(sharding=sharding, optimizer=optimizer, train=TrainConfig(batch_size=1024))


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
    config = run_of(plan, memory="uvm", t1="data_parallel")
    found = planned(tmp_path, config, process, [20_000_000, 30, 1000])
    kernels = {name: table.compute_kernel for name, table in found.items()}
    assert kernels == {"t0": "fused_uvm", "t1": "dense", "t2": "fused_uvm"}


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (run_of("auto", memory="uvm"), {}, 'sharding.memory = "uvm" exists on CUDA only'),
        (run_of("data_parallel", "adagrad"), {}, "'t0' is to be data-parallel, but .* set optimizer.embedding = .adam"),
        (run_of("column_wise", "rowwise_adagrad"), {}, "'t0' is to be column-wise, but .* keeps one number for a row"),
        (run_of("column_wise"), {"columns": 4}, "its 4 columns cannot be split .* raise model.embedding_dim"),
        (run_of("table_wise", t0="row_wise"), {"mean": [0]}, "'t0' is pooled by the mean .* such as 't1', wrongly"),
        (run_of("table_wise", t1="row_wise"), {}, "row-wise tables of 5 rows or fewer leave one of 4 processes"),
        (run_of("table_wise", t2="table_row_wise"), {}, "'t2' has too few rows .1. for the 2 processes of a machine"),
    ],
)
def test_refuses(config: RunConfig, given: dict, message: str) -> None:
    refused(message, chosen_kinds, config, tables([40, 5, 1], **given), processes(4, machine=2))
