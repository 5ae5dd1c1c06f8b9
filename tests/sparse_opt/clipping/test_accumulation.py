"""Passes that wait for others of their step: interrupted, without samples, and when a state is loaded.

That accumulated passes equal one pass over the complete batch is tested by test_plans.py and the random problems.
"""

from typing import Any

import numpy as np
import pytest
from torch import nn

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip
from cowrec.sparse_opt.clipping.clipped_lookup import Accumulation
from random_problems.drawing import Problem, small_problem
from random_problems.training import assert_equal, batch_of, batches_of, sharded_model, state_of

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
CASE = small_problem(pooling="sum,mean")  # two lookups
RULE = CowClip(1.0, 1e-3)
ATTACH = {
    "sgd": lambda model: attach_cowclip(model, RULE),
    "lazy": lambda model: EmbeddingAdam(model, AdamConfig(), RULE),
    "replay": lambda model: EmbeddingAdam(model, AdamConfig(absent_rows="replay"), RULE),
}
by_optimizer = pytest.mark.parametrize("optimizer", ATTACH)


def attached(optimizer: str, passes: int, case: Problem = CASE) -> tuple[nn.Module, Any]:
    model = sharded_model(case)
    handle = ATTACH[optimizer](model)
    handle.accumulate(passes)
    return model, handle


def backward(model: nn.Module) -> None:
    """A pass of half of the first step's loss."""
    (model(batches_of(CASE)[0][0])[0] / 2).backward()


@by_optimizer
def test_tables_change_in_the_last_pass_alone(optimizer: str) -> None:
    model, handle = attached(optimizer, 2)
    before = state_of(model)
    backward(model)
    assert_equal(state_of(model), before)
    backward(model)
    assert not np.array_equal(state_of(model)["c0.t0"], before["c0.t0"])
    handle.accumulate(1)  # none waits


@by_optimizer
def test_passes_without_samples(optimizer: str) -> None:
    case = small_problem()
    model, handle = attached(optimizer, 2, case)
    before = state_of(model)
    for _ in range(2):
        model(batch_of(case, case.batches()[0], 0, 0))[0].backward()
    assert_equal(state_of(model), before)
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
    before = state_of(model)
    backward(model)
    assert_equal(state_of(model), before)


@by_optimizer
@pytest.mark.parametrize("case", [{"weighted": True}, {"sequence": True}], ids=["weights", "sequence"])
def test_a_batch_may_be_overwritten_after_its_backward(optimizer: str, case: dict[str, Any]) -> None:
    """As by a loop that copies every batch to the same memory."""
    problem, trained = small_problem(**case), []
    for overwritten in (False, True):
        model, _ = attached(optimizer, 2, problem)
        for (batch,) in batches_of(problem)[:2]:
            model(batch)[0].backward()
            if overwritten:
                (ids,) = batch.ids
                for each in (ids.values(), ids.offsets(), ids.weights_or_none()):
                    if each is not None:
                        each.zero_()
        trained.append(state_of(model))
    assert_equal(*trained)
