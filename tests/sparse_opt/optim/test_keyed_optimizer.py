"""EmbeddingAdam as a KeyedOptimizer: schedulers and TorchRec's wrappers set its rate, and save and load its state."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.optim import lr_scheduler
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from adam_case import ADAM, CASE, MODES, RULE, SMALL, started, train
from cowrec.sparse_opt import EmbeddingAdam
from process_groups import in_processes, process_group
from random_problems.drawing import small_problem
from random_problems.training import assert_equal, sharded_model, state_of, train_step
from refusal import refused

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")


def trained_at(rates: list[float]) -> dict[str, np.ndarray]:
    """Trains at given rates, which ``lr`` sets."""
    model, optimizer = started()
    for step, rate in enumerate(rates):
        optimizer.lr = rate
        train_step(CASE, model, step)
    return state_of(model, optimizer)


# Rates.
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "sequential": lambda each: lr_scheduler.SequentialLR(
        each, [lr_scheduler.LinearLR(each, 0.1, total_iters=4), lr_scheduler.ExponentialLR(each, 0.7)], [4]
    ),
    "one cycle": lambda each: lr_scheduler.OneCycleLR(each, 1e-2, total_steps=12, cycle_momentum=False),
    "plateau": lambda each: lr_scheduler.ReduceLROnPlateau(each, patience=2),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_the_next_backward(name: str) -> None:
    """The rates are those that the scheduler gives torch's SGD."""
    model, optimizer = started()
    oracle = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=ADAM.lr)
    scheduler, its_scheduler = SCHEDULERS[name](optimizer), SCHEDULERS[name](oracle)
    losses = [(1.0,)] * 12 if name == "plateau" else [()] * 12
    rates = []
    for step, loss in enumerate(losses):
        rates.append(oracle.param_groups[0]["lr"])
        optimizer.zero_grad()
        train_step(CASE, model, step)
        for driver in (optimizer, scheduler, oracle, its_scheduler):
            driver.step(*(loss if driver in (scheduler, its_scheduler) else ()))
    assert len(set(rates)) > 2
    assert_equal(state_of(model, optimizer), trained_at(rates))


@pytest.mark.parametrize("mode", MODES)
def test_rates_out_of_range_are_refused_before_a_row_has_moved(mode: str) -> None:
    model, optimizer = started(mode)
    before = state_of(model, optimizer)
    wrong = {-1e-3: "must be >= 0 and finite", float("nan"): "must be >= 0", float("inf"): "must be >= 0"}
    if mode == "replay":
        wrong |= {2e-2: r"lr = 0.02 is above 0.0171, .* AdamConfig.lr = 0.01 tells when a row is at rest"}
    for rate, message in wrong.items():
        refused(message, setattr, optimizer, "lr", rate)
        optimizer.param_groups[0]["lr"] = rate
        refused(message, train_step, CASE, model, 0)
        assert optimizer.steps == 0
        optimizer.lr = 1e-3
        assert_equal(state_of(model, optimizer), before)
    if mode != "replay":
        optimizer.lr = 2e-2


# TorchRec's wrappers.
STAGES = [WarmupStage(WarmupPolicy.LINEAR, 4, 0.1), WarmupStage(WarmupPolicy.POLY, 12, 0.5, decay_iters=14)]


def warmup(optimizer: KeyedOptimizer) -> WarmupOptimizer:
    return WarmupOptimizer(optimizer, [replace(stage) for stage in STAGES], lr=ADAM.lr)


def combined(optimizer: KeyedOptimizer) -> CombinedOptimizer:
    """With that of a network."""
    parameters = {"dense": nn.Parameter(torch.ones(3))}
    dense = KeyedOptimizerWrapper(parameters, lambda given: torch.optim.Adam(given, lr=1e-3))
    return CombinedOptimizer([optimizer, ("network", dense)])


WRAPPERS: dict[str, Callable[[Any], KeyedOptimizer]] = {
    "warmup": warmup,
    "combined": lambda each: combined(warmup(each)),
    "clipping": lambda each: GradientClippingOptimizer(combined(warmup(each)), GradientClipping.NORM, 1e-3),
    "keyed": lambda each: KeyedOptimizerWrapper(warmup(each).params, lambda _: each),
}


@pytest.mark.parametrize(("name", "library"), zip(WRAPPERS, cycle(["dcp", "torch.save"]), strict=False))
def test_wrappers_drive_save_and_load(name: str, library: str, tmp_path: Path) -> None:
    """The warm-up's rates are those of TorchRec's formula; a resumed run continues at them, bit-identically."""
    rates = [1e-2 * (0.1 + 0.9 * step / 4) for step in range(5)]
    rates += [1e-2 * (1 - step / 14) ** 0.5 for step in range(5, 12)]
    expected = trained_at([rates[0]] * 12 if name == "keyed" else rates)

    def train_with(model: nn.Module, optimizer: KeyedOptimizer, first: int, end: int) -> None:
        for step in range(first, end):
            optimizer.zero_grad()
            train_step(CASE, model, step)
            for key, parameter in optimizer.params.items():
                if key.endswith("dense"):
                    parameter.grad = torch.ones(3)
            optimizer.step()

    model, adam = started()
    optimizer = WRAPPERS[name](adam)
    train_with(model, optimizer, 0, 7)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path) if library == "dcp" else torch.save(state, tmp_path / "state")
    train_with(model, optimizer, 7, 12)
    assert_equal(state_of(model, adam), expected)
    adam.remove()

    model, adam = started()
    optimizer = WRAPPERS[name](adam)
    optimizer.step()  # makes the warm-up's and the dense state, as for TorchRec's own optimizers
    for key, parameter in optimizer.params.items():
        if key.endswith("dense"):
            parameter.grad = torch.zeros(3)
    optimizer.step()
    if library == "dcp":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
    else:
        state = torch.load(tmp_path / "state", weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train_with(model, optimizer, 7, 12)
    assert_equal(state_of(model, adam), expected)


@pytest.mark.parametrize("names", permutations(["model", "optimizer"]))
def test_a_rollback_into_states_taken_earlier(names: tuple[str, str], tmp_path: Path) -> None:
    """They are the memory of weights and moments, which the checkpoint is read into."""
    model, adam = started()
    parts = {"model": model, "optimizer": adam}
    train(model, adam, range(3))
    expected = state_of(model, adam)
    state = {name: part.state_dict() for name, part in parts.items()}
    dcp.save(state, checkpoint_id=tmp_path)
    train(model, adam, range(3, 9))
    dcp.load(state, checkpoint_id=tmp_path)
    for name in names:
        parts[name].load_state_dict(state[name])
    assert_equal(state_of(model, adam), expected)


def test_weights_written_in_place_are_kept_where_no_optimizer_is_loaded() -> None:
    """The missed steps of their moments do not move them."""
    model, adam = started()
    state = model.state_dict()
    train(model, adam, range(3))
    parts = [tensor.local_shards()[0].tensor for tensor in state.values() if isinstance(tensor, ShardedTensor)]
    assert len(parts) == 2
    for part in parts:
        part.fill_(0.5)
    model.load_state_dict(state)
    assert int(next(iter(adam.state_dict()["state"].values()))["step"]) == 3
    for key, tensor in model.state_dict().items():
        if isinstance(tensor, ShardedTensor):
            assert (tensor.local_shards()[0].tensor == 0.5).all(), key


# Each way of saving meets each order of saving and of loading.
WAYS = [
    (library, stored, first, first if n % 2 else other)
    for n, (library, stored) in enumerate([("torch.save", False), ("dcp", False), ("dcp", True)])
    for first, other in permutations(["model", "optimizer"])
]


@pytest.mark.parametrize(("library", "stored", "saved_first", "loaded_first"), WAYS)
def test_model_and_optimizer_are_saved_and_loaded_in_any_order(
    tmp_path: Path, library: str, stored: bool, saved_first: str, loaded_first: str
) -> None:
    model, optimizer = started()
    train(model, optimizer, range(0, 16))
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with optimizer.as_stored() if stored else nullcontext():
        for name in sorted(parts, key=lambda each: each != saved_first):  # each is written before the next is taken
            if library == "dcp":
                dcp.save(parts[name].state_dict(), checkpoint_id=tmp_path / name)
            else:
                torch.save(parts[name].state_dict(), tmp_path / name)
    train(model, optimizer, range(16, 24))
    expected = state_of(model, optimizer)
    optimizer.remove()

    model, optimizer = started()
    parts = {"model": model, "optimizer": optimizer}
    with optimizer.as_stored() if stored else nullcontext():
        for name in sorted(parts, key=lambda name: name != loaded_first):
            if library == "dcp":
                state = parts[name].state_dict()
                dcp.load(state, checkpoint_id=tmp_path / name)
            else:
                state = torch.load(tmp_path / name, weights_only=False)
            parts[name].load_state_dict(state)
    train(model, optimizer, range(16, 24))
    assert_equal(state_of(model, optimizer), expected)


def test_a_replayed_state_continues_densely() -> None:
    model, optimizer = started()
    train(model, optimizer, range(0, 9))
    other, dense = started("dense")
    other.load_state_dict(model.state_dict())
    dense.load_state_dict(optimizer.state_dict())
    train(other, dense, range(9, 16))
    expected, always_dense = started("dense")
    train(expected, always_dense, range(0, 16))
    assert_equal(state_of(other, dense), state_of(expected, always_dense))


def test_states_that_do_not_fit_are_refused() -> None:
    _, optimizer = started()
    plain = optimizer.state_dict()
    with optimizer.as_stored():
        stored = optimizer.state_dict()
        message = "no 'last_step' of 'c0.*t0.weight'; it was taken outside of as_stored"
        refused(message, optimizer.load_state_dict, plain)
    for mode in MODES:
        _, other = started(mode)
        message = "no 'step' of .*; its rows may be behind: load it .* within as_stored"
        refused(message, other.load_state_dict, stored)
    del plain["state"]["c0.embedding_bags.t1.weight"]
    message = "no 'exp_avg' of 'c0.embedding_bags.t1.weight'; it is of another model"
    refused(message, optimizer.load_state_dict, plain)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(("rows", "sharding"), [(50, "table_wise"), (70, "row_wise"), (70, "data_parallel")])
@pytest.mark.parametrize("combined", [True, False])
def test_a_state_of_a_table_with_other_rows_is_refused(combined: bool, rows: int, sharding: str, stored: bool) -> None:
    """A CombinedOptimizer loads one entry after the other: those of other tables come first."""
    _, saved = started(problem=small_problem(**SMALL | {"rows": (60, rows), "sharding": sharding}))
    model, optimizer = started(problem=small_problem(**SMALL | {"rows": (60, 60), "sharding": sharding}))
    train_step(CASE, model, 0)
    before = state_of(model, optimizer)
    with saved.as_stored() if stored else nullcontext(), optimizer.as_stored() if stored else nullcontext():
        message = rf"'exp_avg' of 'c0.*t1.weight' in the sizes \[\[{rows}, 4\].*, but the table has \[\[60, 4\].*; load"
        loading = CombinedOptimizer([optimizer]) if combined else optimizer
        refused(message, loading.load_state_dict, saved.state_dict())
    kept = [key for key in before if "t1" in key or not combined]
    assert kept
    after = state_of(model, optimizer)
    assert_equal({key: after[key] for key in kept}, {key: before[key] for key in kept})


def test_two_processes_resume_without_preparation(tmp_path: Path) -> None:
    """In the last case one rank holds no table and counts no step."""
    in_processes(_resume, (str(tmp_path),), 2)


def _resume(rank: int, folder: str) -> None:
    kinds = (
        {"sharding": "column_wise,data_parallel", "dim": 8},
        {"sharding": "row_wise,table_wise"},
        {"rows": (60,), "features": (("a",),)},
    )
    with process_group(rank, 2, folder):
        alone = [dist.new_group([rank]) for rank in (0, 1)][rank]
        if rank == 0:  # whoever has no part in a model is not waited for
            model = sharded_model(CASE, env=ShardingEnv.from_process_group(alone))
            optimizer = EmbeddingAdam(model, ADAM, RULE)
            train(model, optimizer, range(2))
            with optimizer.as_stored():
                assert optimizer.state_dict()
            assert optimizer.state_dict()
        for number, (kind, stored) in enumerate(zip(kinds, (True, False, True), strict=True)):
            case = small_problem(**SMALL | kind, world=2, steps=16)
            file = f"{folder}/{number}"
            model, optimizer = started(problem=case)
            train(model, optimizer, range(0, 9), case)
            with optimizer.as_stored() if stored else nullcontext():
                for name in ("model", "optimizer"):  # each is written before the next is taken
                    dcp.save({name: state_dict_of(name, model, optimizer)}, checkpoint_id=f"{file}{name}")
            train(model, optimizer, range(9, 16), case)
            expected = state_of(model, optimizer)
            optimizer.remove()
            model, optimizer = started(problem=case)
            with optimizer.as_stored() if stored else nullcontext():
                state = {name: state_dict_of(name, model, optimizer) for name in ("model", "optimizer")}
                for name, part in state.items():
                    dcp.load({name: part}, checkpoint_id=f"{file}{name}")
                model.load_state_dict(state["model"])
                CombinedOptimizer([optimizer]).load_state_dict(state["optimizer"])
            train(model, optimizer, range(9, 16), case)
            assert_equal(state_of(model, optimizer), expected)
            optimizer.remove()


def state_dict_of(name: str, model: nn.Module, optimizer: EmbeddingAdam) -> dict[str, Any]:
    return model.state_dict() if name == "model" else CombinedOptimizer([optimizer]).state_dict()
