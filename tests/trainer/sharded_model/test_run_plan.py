"""What a run's plan gives its optimizers, against torch's schedulers, and how it shards tables on any machines."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from cowrec.data_pipeline import Reader, Schema
from cowrec.sparse_opt import ConstantClip, CowClip, GlobalClip, Hyperparameters
from cowrec.sparse_opt.tbe.inventory import ModelInventory
from cowrec.trainer import RunConfig, load_config, train
from cowrec.trainer.config.sections import ClipConfig, LrDecay, OptimizerConfig, ShardingConfig, TrainConfig
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.sharded_model.build import fused_params, gathered_table, sharding_plan, tables_of
from cowrec.trainer.sharded_model.check_run import check_scaled_decay, check_sharding
from cowrec.trainer.sharded_model.run_plan import LrSchedule, RunPlan, Scaled, chosen_kinds
from cowrec.trainer.training.state import TrainState
from refusal import refused
from trained_runs import data_folder, run
from trainer_cases import TRAIN_ROWS, checkpoint

FUSED = ["optimizer.embedding=sgd", "optimizer.l2=0", "clip.rule=none", "optimizer.lr_decay=linear"]


DECAYS: dict[LrDecay, Callable] = {
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=12),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=12),
    1.25: lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.1),
    "none": lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=1.0),
}


@pytest.mark.parametrize("decay", DECAYS)
def test_rates_fall_as_under_torchs_schedulers(decay: LrDecay) -> None:
    """Both rates, over three epochs of four steps; 1.25 epochs are five steps. A warm-up multiplies the dense rate."""
    config = OptimizerConfig(lr_decay=decay)
    values = Hyperparameters(embedding_lr=0.02, dense_lr=0.5, l2=0.0)
    schedule = LrSchedule.of_epochs(config, 4, 12)
    warm = LrSchedule.of_epochs(dataclasses.replace(config, warmup_epochs=0.6), 4, 12)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = DECAYS[decay](optimizer)
    for step in range(12):
        (rate,) = scheduler.get_last_lr()
        assert schedule.dense_lr(values, step) == pytest.approx(rate, abs=1e-15)
        assert schedule.embedding_lr(values, step) == pytest.approx(rate / 25, abs=1e-15)
        risen = 1e-8 + (0.5 - 1e-8) * min(step, 3) / 3  # 0.6 epochs are 2.4 steps, rounded up
        assert warm.dense_lr(values, step) == pytest.approx(risen * rate / 0.5, abs=1e-15)
        assert warm.dense_lr(Hyperparameters(0.02, 0.0, 0.0), step) == 0
        optimizer.step()
        scheduler.step()


def test_a_fall_comes_at_the_step_that_is_meant() -> None:
    """0.7 epochs of ten steps are seven steps, not the 7.000000000000001 of their product."""
    schedule = LrSchedule.of_epochs(OptimizerConfig(lr_decay=0.7), 10, 100)
    rates = [schedule.dense_lr(Hyperparameters(0.0, 1.0, 0.0), step) for step in (6, 7, 13, 14)]
    assert rates == pytest.approx([1, 0.1, 0.1, 0.01])
    assert LrSchedule.of_epochs(OptimizerConfig(warmup_epochs=0.07), 100, 100).warmup_steps == 7


@pytest.mark.parametrize(
    ("decay", "message"),
    [
        ({"weight_decay": 40.0}, r"optimizer.weight_decay = 40 takes 1\.6 .* from batch 100 to 400, .* 24\.8 or less"),
        ({"dense_weight_decay": 5.0}, r"optimizer.dense_weight_decay = 5 takes 2 of each weight .* 2\.48 or less"),
    ],
)
def test_weight_decay_that_turns_signs_is_refused(decay: dict[str, float], message: str) -> None:
    rates = {"embedding_lr": 0.01, "dense_lr": 0.1, "l2": 0.0, "base_batch_size": 100, "scaling": "linear"}
    config = RunConfig(optimizer=OptimizerConfig(**rates, **decay), train=TrainConfig(batch_size=400))
    refused(message, check_scaled_decay, config)
    check_scaled_decay(dataclasses.replace(config, train=TrainConfig(batch_size=100)))


folder = data_folder("price", "city", "tags")


def test_a_fused_optimizer_follows_the_decay_and_the_rates_of_tables(folder: Path) -> None:
    """FBGEMM's own learning rates in each step, which fall over ten steps; SGD's first step shows their ratio."""
    moved: list[dict[str, torch.Tensor]] = []
    for factors, rates in (([], {}), (["optimizer.embedding_lr_factors.city=0.5"], {"city": 0.005})):
        config = load_config(folder / "run.toml", [*FUSED, *factors])
        schedule = LrSchedule(lr_decay="linear", decay_steps=10)
        with process_group("cpu") as process:
            reader = Reader(folder / "data", "train", batch_size=51)
            state = TrainState(RunPlan.of(config, reader.schema, process, schedule=schedule))
            batches = map(state.ids.training, reader.epoch(0))
            lookups = ModelInventory(state.model).lookups
            assert sorted(shard.name for lookup in lookups for shard in lookup.shards) == ["city", "tags"]
            start = {name: gathered_table(tensor, process).clone() for name, tensor in tables_of(state.model).items()}
            for step in range(4):
                state.step(batches)
                if not step:
                    now = tables_of(state.model).items()
                    moved.append({name: gathered_table(tensor, process) - start[name] for name, tensor in now})
                for lookup in lookups:
                    rate = rates.get(lookup.shards[0].name, 0.01) * (1 - step / 10)
                    assert lookup.module.get_learning_rate() == pytest.approx(rate)
    for name, share in (("city", 0.5), ("tags", 1.0)):
        assert moved[0][name].abs().max() > 1e-6
        torch.testing.assert_close(moved[1][name], share * moved[0][name], rtol=1e-3, atol=1e-8)


single = data_folder("price", "city")


def city_table(run_dir: Path) -> torch.Tensor:
    """Rows of the run's newest checkpoint, [rows, D]."""
    (name,) = [name for name in checkpoint(run_dir)["model"] if name.endswith("city.weight")]
    table: torch.Tensor = checkpoint(run_dir)["model"][name]
    return table.double()


def test_thresholds_grow_with_the_root_of_the_batch() -> None:
    for clip, scaling, batch_size, expected in (
        (ClipConfig("constant", max_norm=1e-3), "cowclip", 4096, ConstantClip(2e-3)),
        (ClipConfig("global", max_norm=1.0), "linear", 256, GlobalClip(0.5)),
        (ClipConfig("constant", max_norm=1e-3), "none", 4096, ConstantClip(1e-3)),
        (ClipConfig("cowclip", r=2.0), "cowclip", 4096, CowClip(r=2.0)),
    ):
        given = {"scaling": scaling, "absent_rows": "lazy", "embedding_lr": 2e-3, "l2": 0.0}
        optimizer = OptimizerConfig(base_batch_size=1024, **given)
        config = RunConfig(train=TrainConfig(batch_size=batch_size), optimizer=optimizer, clip=clip)
        plan = RunPlan.of(config, Schema("none", (), (), {}), Process(0, 1, 1, False, torch.device("cpu")))
        assert plan.scaled.clip == expected
        assert plan.describe()["clip_values"] == dataclasses.asdict(expected)


RULES = ["sgd constant max_norm=1e-3", "rowwise_adagrad field max_norm=1e-2"]
RULES += ["adam adaptive_field r=0.01", "sgd global max_norm=1e-2"]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_trains_by_configuration(single: Path, tmp_path: Path, rule: str) -> None:
    embedding, name, value = rule.split()
    config = (single / "run.toml").read_text().partition("[clip]")[0] + f'[clip]\nrule = "{name}"\n{value}\n'
    (tmp_path / "run.toml").write_text(config)
    settings = [f"optimizer.embedding={embedding}", "optimizer.absent_rows=lazy", "train.epochs=1"]
    report = train(load_config(tmp_path / "run.toml", settings), single / "data", tmp_path / "run")
    assert report["clip"] == name
    assert report["clip_statistics"]["clipped_share"] > 0


def test_fused_sgd_applies_l2_to_the_rows_of_the_batch(single: Path, tmp_path: Path) -> None:
    """One step over all samples: L2 lowers a row by lr * 2 * l2 * w; rows of absent ids do not change."""
    settings = ["optimizer.embedding=sgd", "clip.rule=none", "train.epochs=1", "optimizer.scaling=none"]
    settings += [f"train.batch_size={TRAIN_ROWS}", "optimizer.embedding_lr=0.5"]
    run(single, tmp_path / "start", *settings, "optimizer.embedding_lr=0", "optimizer.l2=0")
    run(single, tmp_path / "without", *settings, "optimizer.l2=0")
    report = run(single, tmp_path / "with", *settings, "optimizer.l2=0.1")
    assert report["steps"] == 1
    start, without, with_l2 = (city_table(tmp_path / name) for name in ("start", "without", "with"))
    updated = (without != start).any(1)
    assert 0 < updated.sum() < len(updated)
    expected = without - 0.5 * 2 * 0.1 * start * updated[:, None]
    torch.testing.assert_close(with_l2, expected, rtol=1e-5, atol=1e-8)


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


def planned(config: RunConfig, process: Process, rows: Sequence[int]) -> dict[str, Any]:
    """Sharding of each table; a machine without a GPU can plan for GPUs."""
    collection = EmbeddingBagCollection(tables(rows), device=torch.device("meta"))
    fused = fused_params(config.optimizer, Scaled.of(config).hyperparameters)
    kinds = chosen_kinds(config, collection.embedding_bag_configs(), process)
    model, sharder = nn.ModuleDict({"ebc": collection}), EmbeddingBagCollectionSharder(fused_params=fused)
    with process_group("cpu"):
        return dict(sharding_plan(model, kinds, config, process, sharder).plan["ebc"])


def test_torchrecs_planner_chooses_kinds_that_can_be_clipped() -> None:
    """For sixteen GPUs of two machines."""
    process = Process(0, 16, 8, True, torch.device("cuda", 0))
    config = run_of("auto", t1="row_wise", t2="data_parallel")
    plan = planned(config, process, [20_000_000, 500_000, 1000, 30])
    kernels = {name: table.compute_kernel for name, table in plan.items()}
    assert kernels == {"t0": "fused", "t1": "fused", "t2": "dense", "t3": "fused"}
    assert (plan["t1"].sharding_type, plan["t2"].sharding_type) == ("row_wise", "data_parallel")
    assert {plan["t0"].sharding_type, plan["t3"].sharding_type} <= {"table_wise", "row_wise", "table_row_wise"}


@pytest.mark.parametrize(("world_size", "plan"), [(1, "row_wise"), (2, "auto")])
def test_tables_in_unified_memory(world_size: int, plan: Any) -> None:
    """Holds for either planner."""
    process = Process(0, world_size, world_size, True, torch.device("cuda", 0))
    config = run_of(plan, memory="uvm", t1="data_parallel")
    found = planned(config, process, [20_000_000, 30, 1000])
    kernels = {name: table.compute_kernel for name, table in found.items()}
    assert kernels == {"t0": "fused_uvm", "t1": "dense", "t2": "fused_uvm"}


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (run_of("data_parallel", "adagrad"), {}, "'t0' is to be data-parallel, but .* set optimizer.embedding = .adam"),
        (run_of("column_wise"), {"columns": 4}, "its 4 columns cannot be split .* raise model.embedding_dim"),
        (run_of("table_wise", t0="row_wise"), {"mean": [0]}, "'t0' is pooled by the mean .* such as 't1', wrongly"),
        (run_of("table_wise", t2="table_row_wise"), {}, "'t2' has too few rows .1. for the 2 processes of a machine"),
    ],
)
def test_refuses(config: RunConfig, given: dict, message: str) -> None:
    refused(message, check_sharding, config, tables([40, 5, 1], **given), processes(4, machine=2))
