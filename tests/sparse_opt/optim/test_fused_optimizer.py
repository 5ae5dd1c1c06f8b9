"""A TorchRec job that drives, saves and loads ``model.fused_optimizer``, under EmbeddingAdam without a change."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim import lr_scheduler
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from adam_case import ADAM, CASE, RULE, SMALL, started
from cowrec.sparse_opt import AdamConfig, EmbeddingAdam
from process_groups import in_processes, process_group
from random_problems.drawing import Problem, small_problem
from random_problems.training import assert_equal, sharded_model, state_of, train_step
from refusal import refused

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
STEPS, FACTOR = 8, 0.7
PLANS: dict[str, dict[str, Any]] = {
    "table-wise": {},
    "data-parallel": {"sharding": "data_parallel"},
    "both": {"sharding": "row_wise,data_parallel"},
    "two lookups": {"pooling": "sum,mean"},
}


def with_network(fused: KeyedOptimizer) -> CombinedOptimizer:
    dense = KeyedOptimizerWrapper({"dense": nn.Parameter(torch.ones(3))}, lambda given: torch.optim.SGD(given, lr=1.0))
    return CombinedOptimizer([fused, ("network", dense)])


JOBS: dict[str, Callable[[KeyedOptimizer], KeyedOptimizer]] = {
    "alone": lambda fused: fused,
    "combined": with_network,
    "in a wrapper": lambda fused: GradientClippingOptimizer(with_network(fused), GradientClipping.NORM, 1e-3),
}


def train_falling(problem: Problem, model: nn.Module, optimizer: KeyedOptimizer, first: int, end: int) -> None:
    """Trains as a job does, its rates falling by ``FACTOR`` in each step from the first on."""
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: FACTOR ** (first + step))
    for step in range(first, end):
        optimizer.zero_grad()
        train_step(problem, model, step)
        optimizer.step()
        scheduler.step()


def trained_by_lr(problem: Problem, steps: int = STEPS) -> dict[str, np.ndarray]:
    """The same steps at the same rates, which ``lr`` sets."""
    model, adam = started(problem=problem)
    for step in range(steps):
        adam.lr = ADAM.lr * FACTOR**step
        train_step(problem, model, step)
    state = state_of(model, adam)
    adam.remove()
    return state


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("job", JOBS)
def test_a_schedule_of_the_fused_optimizer_moves_the_tables(job: str, plan: str) -> None:
    """Also where its wrappers were made before EmbeddingAdam, which know no group of data-parallel tables alone."""
    problem = small_problem(**SMALL | PLANS[plan], steps=STEPS)
    for wrapped_first in (True, False):
        if wrapped_first and job == "in a wrapper" and plan == "data-parallel":
            continue
        model = sharded_model(problem)
        optimizer = JOBS[job](model.fused_optimizer) if wrapped_first else None
        adam = EmbeddingAdam(model, ADAM, RULE)
        train_falling(problem, model, optimizer or JOBS[job](model.fused_optimizer), 0, STEPS)
        assert_equal(state_of(model, adam), trained_by_lr(problem))


@pytest.mark.parametrize("plan", PLANS)
def test_a_checkpoint_of_the_fused_optimizer_resumes(plan: str) -> None:
    problem = small_problem(**SMALL | PLANS[plan], steps=STEPS)
    model, adam = started(problem=problem)
    job = with_network(model.fused_optimizer)
    train_falling(problem, model, job, 0, 5)
    assert model.fused_optimizer.state_dict()["state"].keys() == adam.state_dict()["state"].keys()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": job.state_dict()}, file)
    for names in (("model", "optimizer"), ("optimizer", "model")):
        resumed, other = started(problem=problem)
        parts = {"model": resumed, "optimizer": with_network(resumed.fused_optimizer)}
        file.seek(0)
        state = torch.load(file, weights_only=False)
        for name in names:
            parts[name].load_state_dict(state[name])
        train_falling(problem, resumed, parts["optimizer"], 5, STEPS)
        assert_equal(state_of(resumed, other), trained_by_lr(problem))


def test_two_processes_follow_the_fused_optimizer(tmp_path: Any) -> None:
    """In the last case one rank holds no table."""
    in_processes(_drive, (str(tmp_path),), 2)


def _drive(rank: int, folder: str) -> None:
    kinds: tuple[dict[str, Any], ...] = (
        {"sharding": "column_wise,data_parallel", "dim": 8},
        {"sharding": "row_wise,table_wise"},
        {"rows": (60,), "features": (("a",),)},
    )
    with process_group(rank, 2, folder):
        for number, kind in enumerate(kinds):
            problem = small_problem(**SMALL | kind, world=2, steps=STEPS)
            expected = trained_by_lr(problem)
            model, adam = started(problem=problem)
            train_falling(problem, model, with_network(model.fused_optimizer), 0, 5)
            state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
            dcp.save(state, checkpoint_id=f"{folder}/{number}")
            adam.remove()
            model, adam = started(problem=problem)
            state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
            dcp.load(state, checkpoint_id=f"{folder}/{number}")
            model.load_state_dict(state["model"])
            model.fused_optimizer.load_state_dict(state["optimizer"])
            train_falling(problem, model, with_network(model.fused_optimizer), 5, STEPS)
            assert_equal(state_of(model, adam), expected)
            adam.remove()


def test_torchrecs_recipe_leaves_data_parallel_tables_to_it() -> None:
    """TorchRec's planner makes small tables data-parallel; its filter then finds the network's parameters alone."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=6, feature_names=["f"])
            self.tables = EmbeddingBagCollection([config], device=torch.device("meta"))
            self.network = nn.Linear(4, 1)

        def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
            logits: torch.Tensor = self.network(self.tables(ids).values())
            return logits

    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.1})
    sharded = DistributedModelParallel(model, device=torch.device("cpu"))
    plan = next(iter(sharded.plan.plan.values()))
    assert plan["t"].sharding_type == "data_parallel"
    adam = EmbeddingAdam(sharded, AdamConfig(lr=0.1))

    def not_fused() -> dict[str, nn.Parameter]:
        return dict(in_backward_optimizer_filter(sharded.named_parameters()))

    assert not_fused().keys() == {"network.weight", "network.bias"}
    job = CombinedOptimizer(
        [sharded.fused_optimizer, KeyedOptimizerWrapper(not_fused(), lambda given: torch.optim.SGD(given, lr=0.1))]
    )
    assert len(job.params) == 3
    before = sharded.state_dict()["tables.embedding_bags.t.weight"].clone()
    ids = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.ones(2, dtype=torch.int32))
    sharded(ids).sum().backward()
    job.step()
    moved = (sharded.state_dict()["tables.embedding_bags.t.weight"] - before).abs()
    torch.testing.assert_close(moved[1:3], torch.full((2, 4), 0.1))  # Adam's first step is the rate
    assert not moved[3:].any()
    adam.remove()
    assert "tables.embedding_bags.t.weight" in not_fused()


def test_removal_gives_the_fused_optimizers_back() -> None:
    model = sharded_model(CASE)
    fused = model.fused_optimizer
    groups, state = fused.param_groups, fused.state_dict()
    before = [dict(group) for group in groups]
    adam = EmbeddingAdam(model, ADAM, RULE)
    train_falling(CASE, model, fused, 0, 3)
    adam.remove()
    assert [dict(group) for group in fused.param_groups] == before
    assert all(one is other for one, other in zip(groups, fused.param_groups, strict=True))
    assert fused.state_dict().keys() == state.keys()
    EmbeddingAdam(model, ADAM, RULE).remove()


def test_a_schedule_that_is_there_already_is_refused() -> None:
    """It would go on from the fused optimizer's rate."""
    model = sharded_model(CASE)
    lr_scheduler.LambdaLR(model.fused_optimizer, lambda _: 1.0)
    refused("a scheduler or a warm-up of model.fused_optimizer", EmbeddingAdam, model, ADAM, RULE)
    model = sharded_model(CASE)
    WarmupOptimizer(with_network(model.fused_optimizer), [WarmupStage(WarmupPolicy.LINEAR, 4, 0.1)], lr=1e-3)
    message = "has set the learning rate 0.0001, not from AdamConfig.lr; make EmbeddingAdam before it"
    refused(message, EmbeddingAdam, model, ADAM, RULE)


def test_a_rate_may_rise_above_the_first_one() -> None:
    """Under replay as under dense, in a warm-up that begins at the configured rate."""
    refused("above 0.0171", setattr, EmbeddingAdam(sharded_model(CASE), replace(ADAM, lr=0)), "lr", 0.02)
    problem = small_problem(**SMALL, steps=24)
    config, states = AdamConfig(lr=1e-4, l2=1e-3, eps=1e-6), []
    for mode in ("replay", "dense"):
        model = sharded_model(problem)
        adam = EmbeddingAdam(model, AdamConfig(config.lr, l2=config.l2, eps=config.eps, absent_rows=mode), RULE)
        scheduler = lr_scheduler.LambdaLR(model.fused_optimizer, lambda step: min(1 + 20 * step, 160))
        for step in range(24):
            train_step(problem, model, step)
            model.fused_optimizer.step()
            scheduler.step()
        assert adam.lr == pytest.approx(1.6e-2)
        states.append(state_of(model, adam))
        adam.remove()
    for key, replayed in states[0].items():
        np.testing.assert_allclose(replayed, states[1][key], rtol=1e-5, atol=1e-9, err_msg=key)


def test_rows_keep_first_moments_while_the_rate_is_zero() -> None:
    """Rows miss more than the 32 steps after which a row that cannot move any more is at rest."""
    problem, states = small_problem(**SMALL, steps=80), []
    for mode in ("dense", "replay"):
        model = sharded_model(problem)
        adam = EmbeddingAdam(model, AdamConfig(lr=0.0, absent_rows=mode))
        for step in range(80):
            if step == 50:
                adam.lr = 1e-2
            # The rows of one batch come in the first step alone.
            train_step(problem, model, min(step, 1))
        states.append(state_of(model, adam))
        adam.remove()
    assert_equal(*states)


# Rows that others write.
def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key.split(".")[-2]: parameter for key, parameter in model.named_parameters() if key.endswith(".weight")}


@pytest.mark.parametrize("plan", ["table-wise", "data-parallel", "both"])
def test_rows_written_while_steps_are_owed_are_refused_once(plan: str) -> None:
    """After a flush, or after taking the model's state, writing is right: the result is that of "dense"."""
    problem = small_problem(**SMALL | PLANS[plan], steps=STEPS)
    states = []
    for mode, prepare in (("dense", "nothing"), ("replay", "flush"), ("replay", "state_dict"), ("replay", "refused")):
        model, adam = started(mode, problem)
        for step in range(STEPS):
            if step % 3 == 2:
                if prepare == "state_dict":
                    model.state_dict()
                elif prepare == "refused":
                    write(model, -7.0)
                    with pytest.raises(
                        RuntimeError, match=r"rows of table .*t1.* were written .*; call flush\(\) before"
                    ):
                        train_step(problem, model, step)
                if prepare in ("flush", "refused"):
                    adam.flush()
                write(model, 0.01 * step)
            train_step(problem, model, step)
        states.append(state_of(model, adam))
        adam.remove()
    for state in states[1:]:
        for key, value in state.items():
            np.testing.assert_allclose(value, states[0][key], rtol=1e-5, atol=1e-9, err_msg=key)


@torch.no_grad()
def write(model: nn.Module, value: float) -> None:
    parameters_of(model)["t1"][:3] = value


@pytest.mark.parametrize("plan", ["table-wise", "both"])
def test_a_state_that_shares_the_memory_of_the_tables_loads_as_it_is(plan: str) -> None:
    """It changes nothing, and the rows take the steps that they missed."""
    problem = small_problem(**SMALL | PLANS[plan], steps=STEPS)
    states = []
    for mode in ("dense", "replay"):
        model, adam = started(mode, problem)
        state = model.state_dict()
        for step in range(STEPS):
            train_step(problem, model, step)
            if step == 4:
                model.load_state_dict(state)
        states.append(state_of(model, adam))
        adam.remove()
    for key, value in states[1].items():
        np.testing.assert_allclose(value, states[0][key], rtol=1e-5, atol=1e-9, err_msg=key)


def test_rows_written_with_an_earlier_copy_of_the_state_do_not_pass_silently() -> None:
    """Through the tensors of a ``state_dict()`` too, which share the tables' memory."""
    model, adam = started()
    part = (
        next(tensor for tensor in model.state_dict().values() if isinstance(tensor, ShardedTensor))
        .local_shards()[0]
        .tensor
    )
    for step in range(4):
        train_step(CASE, model, step)
    part[0] = 1.0
    for read in (adam.flush, model.state_dict, lambda: adam.catch_up("t0", torch.arange(3))):
        with pytest.raises(RuntimeError, match="were written while steps were owed"):
            read()
        part[0] = 2.0
