"""EmbeddingAdam over several collections, and interrupted backward passes."""

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from adam_case import ADAM, CASE, MODES, RULE, SMALL, schedule, started, train
from cowrec.sparse_opt import CowClip, EmbeddingAdam, attach_cowclip
from cowrec.sparse_opt.tbe.inventory import ModelInventory
from random_problems.drawing import small_problem
from random_problems.training import assert_equal, batch_of, batches_of, sharded_model, state_of, train_step

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")


# Two towers, each with a table of the same name. Each is held to a model with that tower alone.
TOWERS = {"user": replace(CASE, seed=1), "item": replace(CASE, seed=2)}


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, case in TOWERS.items():
            self.add_module(name, sharded_model(case))

    def tables(self) -> dict[str, np.ndarray]:
        return {f"{name}.{key}": own for name, module in self.named_children() for key, own in state_of(module).items()}


def step_of(model: nn.Module, optimizer: EmbeddingAdam, tower: str, step: int) -> None:
    optimizer.lr = schedule(step)
    train_step(TOWERS[tower], model, step)


@pytest.mark.parametrize("mode", MODES)
def test_towers_with_tables_of_one_name_and_steps_of_their_own(mode: str) -> None:
    """The item tower trains in every third step only, between which the rates change."""
    turns = {"user": range(18), "item": range(0, 18, 3)}
    alone: dict[str, dict[str, np.ndarray]] = {}
    for tower, steps in turns.items():
        model, optimizer = started(mode, TOWERS[tower])
        for step in steps:
            step_of(model, optimizer, tower, step)
        alone |= {tower: state_of(model, optimizer)}

    def fresh() -> tuple[Towers, EmbeddingAdam]:
        model = Towers()
        return model, EmbeddingAdam(model, replace(ADAM, absent_rows=mode), RULE)

    model, optimizer = fresh()
    for step in range(18):
        for tower, steps in turns.items():
            if step in steps:
                step_of(getattr(model, tower), optimizer, tower, step)
        if step == 9:
            assert optimizer.stats().keys() == {f"{tower}.c0.t{t}" for tower in TOWERS for t in range(2)}
            saved, of_model = io.BytesIO(), {name: module.state_dict() for name, module in model.named_children()}
            torch.save((of_model, optimizer.state_dict()), saved)
            saved.seek(0)
            of_model, of_optimizer = torch.load(saved, weights_only=False)
            optimizer.remove()
            model, optimizer = fresh()
            optimizer.load_state_dict(of_optimizer)
            for name, state in of_model.items():
                getattr(model, name).load_state_dict(state)
    expected = {f"{tower}.{key}": value for tower, state in alone.items() for key, value in state.items()}
    assert_equal(model.tables() | state_of(nn.Module(), optimizer), expected)


@pytest.mark.parametrize("names", [["t0"], ["user.c0.t0"]])
def test_a_name_of_several_collections_means_all_of_them(names: list[str]) -> None:
    model = Towers()
    attach_cowclip(model, CowClip(r=1e-6, zeta=1e-9), exclude=names)
    for tower, case in TOWERS.items():
        train_step(case, getattr(model, tower), 0)
    for tower, case in TOWERS.items():
        moved = abs(model.tables()[f"{tower}.c0.t0"] - case.initial()[0][0])
        assert (moved.max() > 1e-3) == (names == ["t0"] or tower == "user")


# Backward passes that an exception interrupts.
MIXED = small_problem(**SMALL, pooling="sum,mean", steps=24)  # two lookups


class Stop(Exception):
    pass


@contextmanager
def failing_before(model: nn.Module, table: str) -> Iterator[None]:
    """Lets the backward of a table's lookup fail before its update."""
    (lookup,) = (found for found in ModelInventory(model).lookups if found.shards[0].name == table)
    wrapped = lookup.module.forward

    def fails(_: Any) -> None:
        raise Stop

    def forward(**inputs: Any) -> torch.Tensor:
        output = wrapped(**inputs)
        output.register_hook(fails)
        return output

    lookup.module.forward = forward
    yield
    lookup.module.forward = wrapped


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("table", ["t0", "t1"])
def test_a_step_that_an_exception_interrupts(mode: str, table: str) -> None:
    """The table takes the step without ids; one whose lookup comes first in the backward then lets no step begin."""
    model, optimizer = started(mode, MIXED)
    train(model, optimizer, range(8), MIXED)
    with failing_before(model, table), pytest.raises(Stop):
        train(model, optimizer, [8], MIXED)
    steps = sorted(adam.step for adam in optimizer.lookups)
    message = f"interrupted the backward pass of step 9, or .* the outputs of the tables '{table}': they take"
    warned = pytest.warns(RuntimeWarning, match=message) if steps == [8, 9] else nullcontext()
    with torch.no_grad(), warned:  # an evaluation before the next step
        model(batches_of(MIXED)[9][0])
    train(model, optimizer, range(9, 14), MIXED)

    expected_model, expected = started(mode, MIXED)
    train(expected_model, expected, range(8), MIXED)
    if steps == [8, 9]:
        (drawn,) = MIXED.batches()[8]
        empty = (np.empty(0, np.int64), np.empty(0, np.float32))
        drawn |= {feature: [empty] * MIXED.batch for feature in SMALL["features"][int(table[1:])]}
        expected.lr = schedule(8)
        expected_model(batch_of(MIXED, [drawn], 0, MIXED.batch))[0].backward()
    train(expected_model, expected, range(9, 14), MIXED)
    assert_equal(state_of(model, optimizer), state_of(expected_model, expected))


@pytest.mark.parametrize("attach", [attach_cowclip, lambda model, rule: EmbeddingAdam(model, ADAM, rule)])
def test_lookups_that_are_rebuilt_are_refused(attach: Any) -> None:
    """As DistributedModelParallel.reshard does."""
    model = sharded_model(CASE)
    attached = attach(model, RULE)
    train_step(CASE, model, 0)
    before, lookups = state_of(model), model.module.c0._lookups
    lookups[0] = copy.copy(lookups[0])
    with pytest.raises(RuntimeError, match=r"were rebuilt after attaching.*call remove\(\) before"):
        train_step(CASE, model, 1)
    assert_equal(state_of(model), before)
    attached.remove()
