"""Autograd around the lookups: several backward passes, activation checkpointing, and tensors changed in place."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip
from random_problems.drawing import Problem, small_problem
from random_problems.in_loops import row_gradients
from random_problems.training import assert_equal, batches_of, sharded_model, state_of

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
RULE = CowClip(r=1.0, zeta=1e-3)
SMALL: dict[str, Any] = {"rows": (40, 7), "features": (("a",), ("b", "c"))}
CASE = small_problem(**SMALL)
KINDS = {
    "several ids": CASE,
    "weights": small_problem(**SMALL, weighted=True),
    "mean": small_problem(**SMALL, pooling="mean"),
    "one id": small_problem(**SMALL, max_ids=1, single_id_bags=True),
}


def started(case: Problem, adam: AdamConfig | None = None) -> nn.Module:
    model = sharded_model(case)
    if adam:
        EmbeddingAdam(model, adam, RULE)
    else:
        attach_cowclip(model, RULE, single_id_bags=case.single_id_bags)
    return model


def pooled(model: nn.Module, batch: Any) -> Tensor:
    return model.module.c0(batch.ids0).wait().values()


def losses(values: Tensor, batch: Any, share: float) -> Tensor:
    return share * (values * torch.cat([*batch.targets.values()], 1)).sum() / batch.divisor


@pytest.mark.filterwarnings("ignore:.*again through the same forward pass")
@pytest.mark.parametrize("kind", KINDS)
def test_each_backward_of_a_forward_clips_its_own_gradient(kind: str) -> None:
    case, shares = KINDS[kind], (100.0, 0.01, 3.0)
    (initial,), (collection,) = case.initial(), case.collections
    expected = [table.astype(np.float64) for table in initial]
    model = started(case)
    for (batch,), (drawn,) in zip(batches_of(case), case.batches(), strict=True):
        values = pooled(model, batch)
        for share in shares:
            losses(values, batch, share).backward(retain_graph=share != shares[-1])
            for table, weights in enumerate(expected):
                grads, counts = row_gradients(case, collection, table, drawn, None)
                limits = counts * np.maximum(RULE.r * np.linalg.norm(weights, axis=1), RULE.zeta)
                norms = np.linalg.norm(share * grads, axis=1)
                factors = np.divide(limits, norms, out=np.ones_like(norms), where=norms > limits)
                weights -= case.lr * share * grads * factors[:, None]
    for got, weights, first in zip(state_of(model).values(), expected, initial, strict=True):
        scale = np.maximum(np.abs(weights), np.abs(first)).max(1, keepdims=True) + 1e-6
        assert np.abs((got - weights) / scale).max() <= 2e-6


OPTIMIZERS = {"sgd": None, "lazy": AdamConfig(lr=1e-2, l2=1e-3, absent_rows="lazy"), "replay": AdamConfig(lr=1e-2)}


Change = Callable[[Callable[..., Tensor], Tensor], Tensor]


def trained(case: Problem, adam: AdamConfig | None, change: Change) -> dict[str, np.ndarray]:
    """Trains with ``change(lookup, x)``, where ``lookup(x)`` gives the pooled rows times x, if there is one."""
    model = started(case, adam)
    for (batch,) in batches_of(case):

        def lookup(x: Tensor | None, batch: Any = batch) -> Tensor:
            return pooled(model, batch) * (1 if x is None else x)

        losses(change(lookup, torch.ones(1, requires_grad=True)), batch, 100.0).backward()
    return state_of(model)


@contextmanager
def offloaded() -> Iterator[None]:
    """Copies activations away and back, as torchtune does: not parameters, nor numbers that are not floating point."""

    def pack(saved: Tensor) -> Tensor | tuple[Tensor]:
        is_kept = isinstance(saved, nn.Parameter) or not saved.is_floating_point()
        return saved if is_kept else (saved.detach().clone(),)

    def unpack(packed: Any) -> Tensor:
        return packed[0].clone() if isinstance(packed, tuple) else packed

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def looked_up_in(context: AbstractContextManager[None], lookup: Callable[..., Tensor], x: Tensor) -> Tensor:
    with context:
        return lookup(x)


AROUND: dict[str, Change] = {
    "activation checkpointing": lambda lookup, x: checkpoint(lookup, x, use_reentrant=False),
    "activations are offloaded": lambda lookup, x: looked_up_in(offloaded(), lookup, x),
    "float64 by default": lambda lookup, x: looked_up_in(default_dtype(torch.float64), lookup, x),
}


@cache
def plainly_trained(kind: str, optimizer: str) -> dict[str, np.ndarray]:
    return trained(KINDS[kind], OPTIMIZERS[optimizer], lambda lookup, x: lookup(x))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(("kind", "optimizer"), zip(KINDS, cycle(OPTIMIZERS), strict=False))
def test_what_is_around_a_forward_changes_no_bit(kind: str, optimizer: str, around: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = trained(KINDS[kind], OPTIMIZERS[optimizer], AROUND[around])
    assert_equal(found, plainly_trained(kind, optimizer))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tables_keep_their_types_whatever_the_default(optimizer: str) -> None:
    plain = trained(CASE, OPTIMIZERS[optimizer], lambda lookup, x: lookup(None) * x.float())
    with default_dtype(torch.float64):
        other = trained(CASE, OPTIMIZERS[optimizer], lambda lookup, x: lookup(None) * x.float())
    assert_equal(other, plain)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_outputs_changed_in_place_train_as_copies_do(optimizer: str) -> None:
    adam = OPTIMIZERS[optimizer]
    in_place = trained(CASE, adam, lambda lookup, x: lookup(None).relu_() * x)
    assert_equal(in_place, trained(CASE, adam, lambda lookup, x: lookup(None).relu() * x))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ids_that_change_before_the_backward_are_refused(optimizer: str) -> None:
    model = started(CASE, OPTIMIZERS[optimizer])
    batch = batches_of(CASE)[0][0]
    before = state_of(model)
    values = pooled(model, batch)
    batch.ids0.values()[:] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses(values, batch, 1.0).backward()
    assert_equal(before, state_of(model))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_calls_in_one_loss_are_warned_of(optimizer: str) -> None:
    model = started(CASE, OPTIMIZERS[optimizer])
    batch = batches_of(CASE)[0][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            losses(pooled(model, batch), batch, 1.0).backward()
    both = losses(pooled(model, batch) + pooled(model, batch), batch, 1.0)
    with pytest.warns(RuntimeWarning, match=r"called several times in one loss.* call accumulate\(n\)"):
        both.backward()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_backwards_of_one_forward_are_warned_of_and_not_accumulated(optimizer: str) -> None:
    model = sharded_model(CASE)
    adam = OPTIMIZERS[optimizer]
    handle = EmbeddingAdam(model, adam, RULE) if adam else attach_cowclip(model, RULE)
    batch = batches_of(CASE)[0][0]

    def backward_twice() -> None:
        loss = losses(pooled(model, batch), batch, 1.0)
        loss.backward(retain_graph=True)
        loss.backward()

    with pytest.warns(RuntimeWarning, match=r"again through the same forward pass: .* add the losses up"):
        backward_twice()
    handle.accumulate(3)
    with pytest.raises(RuntimeError, match=r"the same forward pass, whose ids .* would count again; add the losses up"):
        backward_twice()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("with_grad", "passes"), [(True, 2), pytest.param(False, 1, marks=pytest.mark.thorough)])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_evaluation_in_another_thread_changes_no_bit(optimizer: str, with_grad: bool, passes: int) -> None:
    """A new thread computes gradients unless it is told not to."""
    case = small_problem(**SMALL | {"rows": (4000, 3000)}, pooling="sum,mean", batch=64, steps=30)

    def train(evaluates: bool) -> dict[str, np.ndarray]:
        ended, errors = threading.Event(), list[Exception]()
        model, adam = sharded_model(case), OPTIMIZERS[optimizer]
        handle = EmbeddingAdam(model, adam, RULE) if adam else attach_cowclip(model, RULE)
        handle.accumulate(passes)
        batches = [batch for (batch,) in batches_of(case)]

        def evaluate() -> None:
            try:
                while not ended.is_set():
                    with torch.set_grad_enabled(with_grad):
                        pooled(model, batches[-1])
            except Exception as error:
                errors.append(error)

        with torch.no_grad():
            pooled(model, batches[0])  # TorchRec sets itself up in the first forward
        other = threading.Thread(target=evaluate)
        if evaluates:
            other.start()
        try:
            for batch in batches:
                losses(pooled(model, batch), batch, 100.0).backward()
        finally:
            ended.set()
            if evaluates:
                other.join()
        assert not errors
        return state_of(model)

    assert_equal(train(True), train(False))
