"""Learning rates over a run, against torch's schedulers; what fused optimizers are given, and what may change."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler

from cowrec.data_pipeline import Reader
from cowrec.sparse_opt import Hyperparameters
from cowrec.sparse_opt.tbe.discovery import find_lookups
from cowrec.trainer.config.run import load_config
from cowrec.trainer.config.sections import LrDecay, OptimizerConfig
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.sharded_model.run_plan import BatchRamp, RunPlan, Schedule
from cowrec.trainer.sharded_model.tables import gathered_table, tables_of
from cowrec.trainer.training.state import TrainState
from trained_runs import make_folder

FUSED = ["optimizer.embedding=sgd", "optimizer.l2=0", "clip.rule=none", "optimizer.lr_decay=linear"]


@pytest.mark.parametrize(
    ("decay", "reference"),
    [
        ("linear", lambda optimizer: lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=12)),
        ("cosine", lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)),
        (1.25, lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.1)),
        ("none", lambda optimizer: lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    ],
)
def test_rates_fall_as_under_torchs_schedulers(decay: LrDecay, reference: Callable) -> None:
    """Both rates, over three epochs of four steps; 1.25 epochs are five steps. A warm-up multiplies the dense rate."""
    config = OptimizerConfig(lr_decay=decay)
    values = Hyperparameters(embedding_lr=0.02, dense_lr=0.5, l2=0.0)
    schedule = Schedule.of_epochs(config, 4, 12, BatchRamp())
    warm = Schedule.of_epochs(dataclasses.replace(config, warmup_epochs=0.6), 4, 12, BatchRamp())
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = reference(optimizer)
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
    config = OptimizerConfig(lr_decay=0.7)
    schedule = Schedule.of_epochs(config, 10, 100, BatchRamp())
    assert [schedule.dense_lr(Hyperparameters(0.0, 1.0, 0.0), step) for step in (6, 7, 13, 14)] == pytest.approx(
        [1, 0.1, 0.1, 0.01]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("schedule"), ("price", "city", "tags"))


def test_a_fused_optimizer_follows_the_decay_and_the_rates_of_tables(folder: Path) -> None:
    """FBGEMM's own learning rates in each step, which fall over ten steps; SGD's first step shows their ratio."""
    moved: list[dict[str, torch.Tensor]] = []
    for factors, rates in (({}, {}), ({"city": 0.5}, {"city": 0.005})):
        config = load_config(folder / "run.toml", FUSED)
        optimizer = dataclasses.replace(config.optimizer, embedding_lr_factors=factors)
        config = dataclasses.replace(config, optimizer=optimizer)
        with process_group("cpu") as process:
            reader = Reader(folder / "data", "train", batch_size=51)
            state = TrainState(
                RunPlan.of(config, reader.schema, process, schedule=Schedule(decay="linear", decay_steps=10))
            )
            batches = state.ids.training_batches(reader.epoch(0))
            lookups = find_lookups(state.model)[0]
            assert sorted(shard.name for lookup in lookups for shard in lookup.shards) == ["city", "tags"]
            start = {name: gathered_table(each, process).clone() for name, each in tables_of(state.model).items()}
            for step in range(4):
                state.step(batches)
                if not step:
                    now = tables_of(state.model).items()
                    moved.append({name: gathered_table(each, process) - start[name] for name, each in now})
                for lookup in lookups:
                    rate = rates.get(lookup.shards[0].name, 0.01) * (1 - step / 10)
                    assert lookup.module.get_learning_rate() == pytest.approx(rate)
    for name, share in (("city", 0.5), ("tags", 1.0)):
        assert moved[0][name].abs().max() > 1e-6
        torch.testing.assert_close(moved[1][name], share * moved[0][name], rtol=1e-3, atol=1e-8)
