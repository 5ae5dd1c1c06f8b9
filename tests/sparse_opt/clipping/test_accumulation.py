"""Passes that wait for others of their step: interrupted, without samples, and when a state is loaded.

That accumulated passes equal one pass over the complete batch is tested by test_plans.py and the random problems.
"""

from typing import Any

import numpy as np
import pytest
from torch import nn

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip
from cowrec.sparse_opt.clipping.clipped_lookup import Accumulation
from sharded_case import Case, batch_of, gather_tables, loss_of, sharded_model

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
CASE = Case(pooling="sum,mean")  # two lookups
RULE = CowClip(1.0, 1e-3)
ATTACH = {
    "sgd": lambda model: attach_cowclip(model, RULE),
    "lazy": lambda model: EmbeddingAdam(model, AdamConfig(), RULE),
    "replay": lambda model: EmbeddingAdam(model, AdamConfig(absent_rows="replay"), RULE),
}
by_optimizer = pytest.mark.parametrize("optimizer", ATTACH)


def attached(optimizer: str, passes: int, case: Case = CASE) -> tuple[nn.Module, Any]:
    model = sharded_model(case, case.draw()["tables"])
    handle = ATTACH[optimizer](model)
    handle.accumulate(passes)
    return model, handle


def backward(model: nn.Module) -> None:
    """A pass of half of the first step's loss."""
    (loss_of(CASE, model, *CASE.draw()["steps"][0], 0, CASE.batch) / 2).backward()


def tables_of(model: nn.Module) -> list[np.ndarray]:
    return [each.copy() for each in gather_tables(CASE, model)]


@by_optimizer
def test_tables_change_in_the_last_pass_alone(optimizer: str) -> None:
    model, handle = attached(optimizer, 2)
    before = tables_of(model)
    backward(model)
    for expected, got in zip(before, tables_of(model), strict=True):
        np.testing.assert_array_equal(got, expected)
    backward(model)
    assert not np.array_equal(tables_of(model)[0], before[0])
    handle.accumulate(1)  # none waits


@by_optimizer
def test_passes_without_samples(optimizer: str) -> None:
    case = Case()
    model, handle = attached(optimizer, 2, case)
    before = [each.copy() for each in gather_tables(case, model)]
    bags, _ = case.draw()["steps"][0]
    for _ in range(2):
        outputs = model.module["ebc"](batch_of(case, bags, 0, 0)).wait()
        outputs.values().sum().backward()
    for expected, got in zip(before, gather_tables(case, model), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert handle.stats()["t0"].rows == 0


@by_optimizer
def test_an_interrupted_pass_is_refused_until_the_step_begins_anew(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, handle = attached(optimizer, 2)
    calls, add = [], Accumulation.add

    def add_once(own: Accumulation, *arguments: Any) -> Any:
        calls.append(own)
        if len(calls) == 2:
            raise MemoryError
        return add(own, *arguments)

    monkeypatch.setattr(Accumulation, "add", add_once)
    with pytest.raises(MemoryError):
        backward(model)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"tables have 0 or 1; call accumulate\(n\) again"):
        backward(model)
    with pytest.warns(RuntimeWarning, match="1 backward passes that waited for others were dropped"):
        handle.accumulate(2)
    backward(model)
    backward(model)


@by_optimizer
def test_loading_a_state_drops_what_waits(optimizer: str) -> None:
    model, _ = attached(optimizer, 2)
    state = model.state_dict()
    backward(model)
    with pytest.warns(RuntimeWarning, match="1 backward passes that waited for others were dropped"):
        model.load_state_dict(state)
    before = tables_of(model)
    backward(model)
    for expected, got in zip(before, tables_of(model), strict=True):
        np.testing.assert_array_equal(got, expected)


@by_optimizer
@pytest.mark.parametrize("case", [Case(weighted=True), Case(sequence=True)], ids=["weights", "sequence"])
def test_a_batch_may_be_overwritten_after_its_backward(optimizer: str, case: Case) -> None:
    """As by a loop that copies every batch to the same memory."""
    trained = []
    for overwritten in (False, True):
        model, _ = attached(optimizer, 2, case)
        for bags, _ in case.draw()["steps"][:2]:
            batch = batch_of(case, bags, 0, case.batch)
            outputs = model.module["ebc"](batch).wait()
            parts = [each.values() for each in outputs.values()] if case.sequence else [outputs.values()]
            sum((part**2).sum() + part.sum() for part in parts).backward()
            if overwritten:
                batch.values().zero_()
                batch.offsets().zero_()
                if batch.weights_or_none() is not None:
                    batch.weights().zero_()
        trained.append([each.copy() for each in gather_tables(case, model)])
    for expected, got in zip(*trained, strict=True):
        np.testing.assert_array_equal(got, expected)
