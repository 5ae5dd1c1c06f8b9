"""Autograd around the lookups: several backward passes, activation checkpointing, and tensors changed in place."""

import copy
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip
from sharded_case import Case, batch_of, gather_tables, process_group, row_gradients, sharded_model

RULE = CowClip(r=1.0, zeta=1e-3)
CASE = Case(rows=(40, 7), features=(("a",), ("b", "c")))
KINDS = {
    "several ids": CASE,
    "weights": Case(rows=(40, 7), features=(("a",), ("b", "c")), weighted=True),
    "mean": Case(rows=(40, 7), features=(("a",), ("b", "c")), pooling="mean"),
    "one id": Case(rows=(40, 7), features=(("a",), ("b", "c")), max_ids=1, extra={"single_id_bags": True}),
}


@contextmanager
def started(case: Case, adam: AdamConfig | None = None) -> Iterator[nn.Module]:
    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, folder):
        model = sharded_model(case, case.draw()["tables"])
        if adam:
            EmbeddingAdam(model, adam, RULE)
        else:
            attach_cowclip(model, RULE, **case.extra)
        yield model


def pooled(case: Case, model: nn.Module, bags: dict) -> Tensor:
    return model.module["ebc"](batch_of(case, bags, 0, case.batch)).wait().values()


def losses(case: Case, values: Tensor, targets: dict, share: float) -> Tensor:
    return (
        share * (values * torch.from_numpy(np.concatenate([targets[key] for key in case.keys], 1))).sum() / case.batch
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_backward_of_a_forward_clips_its_own_gradient(kind: str) -> None:
    case, shares = KINDS[kind], (100.0, 0.01, 3.0)
    drawn = case.draw()
    expected = [table.astype(np.float64) for table in drawn["tables"]]
    with started(case) as model:
        for bags, targets in drawn["steps"]:
            values = pooled(case, model, bags)
            for share in shares:
                losses(case, values, targets, share).backward(retain_graph=share != shares[-1])
                for table, weights in enumerate(expected):
                    grads, counts = row_gradients(case, bags, targets, table)
                    limits = counts * np.maximum(RULE.r * np.linalg.norm(weights, axis=1), RULE.zeta)
                    norms = np.linalg.norm(share * grads, axis=1)
                    factors = np.divide(limits, norms, out=np.ones_like(norms), where=norms > limits)
                    weights -= case.lr * share * grads * factors[:, None]
        for got, weights, first in zip(gather_tables(case, model), expected, drawn["tables"], strict=True):
            scale = np.maximum(np.abs(weights), np.abs(first)).max(1, keepdims=True) + 1e-6
            assert np.abs((got - weights) / scale).max() <= 2e-6


OPTIMIZERS = {"sgd": None, "lazy": AdamConfig(lr=1e-2, l2=1e-3, absent_rows="lazy"), "replay": AdamConfig(lr=1e-2)}


def trained(case: Case, adam: AdamConfig | None, change: Callable[[Callable[..., Tensor], Tensor], Tensor]) -> list:
    """Trains with ``change(lookup, x)``, where ``lookup(x)`` gives the pooled rows times x, if there is one."""
    drawn = case.draw()
    with started(case, adam) as model:
        for bags, targets in drawn["steps"]:

            def lookup(x: Tensor | None, bags: dict = bags) -> Tensor:
                values = pooled(case, model, bags)
                return values if x is None else values * x

            losses(case, change(lookup, torch.ones(1, requires_grad=True)), targets, 100.0).backward()
        return gather_tables(case, model)


@pytest.mark.parametrize(("kind", "optimizer"), zip(KINDS, cycle(OPTIMIZERS), strict=False))
def test_activation_checkpointing_changes_no_bit(kind: str, optimizer: str) -> None:
    case, adam = KINDS[kind], OPTIMIZERS[optimizer]
    plain = trained(case, adam, lambda lookup, x: lookup(x))
    kept = trained(case, adam, lambda lookup, x: checkpoint(lookup, x, use_reentrant=False))
    assert all(np.array_equal(*each) for each in zip(kept, plain, strict=True))


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


AROUND: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "activations are offloaded": offloaded,
    "float64 by default": partial(default_dtype, torch.float64),
    "bfloat16 by default": partial(default_dtype, torch.bfloat16),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(("kind", "optimizer"), zip(KINDS, cycle(OPTIMIZERS), strict=False))
def test_what_is_around_a_forward_changes_no_bit(kind: str, optimizer: str, around: str) -> None:
    case, adam = KINDS[kind], OPTIMIZERS[optimizer]

    def looked_up(lookup: Any, x: Tensor) -> Tensor:
        with AROUND[around]():
            return lookup(None) * x

    plain = trained(case, adam, lambda lookup, x: lookup(None) * x)
    assert all(np.array_equal(*each) for each in zip(trained(case, adam, looked_up), plain, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tables_keep_their_types_whatever_the_default(optimizer: str) -> None:
    plain = trained(CASE, OPTIMIZERS[optimizer], lambda lookup, x: lookup(None) * x.float())
    with default_dtype(torch.float64):
        other = trained(CASE, OPTIMIZERS[optimizer], lambda lookup, x: lookup(None) * x.float())
    assert all(np.array_equal(*each) for each in zip(other, plain, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_outputs_changed_in_place_train_as_copies_do(optimizer: str) -> None:
    def in_place(lookup: Any, x: Tensor) -> Tensor:
        return lookup(None).relu_() * x

    def copied(lookup: Any, x: Tensor) -> Tensor:
        return lookup(None).relu() * x

    adam = OPTIMIZERS[optimizer]
    assert all(
        np.array_equal(*each) for each in zip(trained(CASE, adam, in_place), trained(CASE, adam, copied), strict=True)
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ids_that_change_before_the_backward_are_refused(optimizer: str) -> None:
    (bags, targets), *_ = CASE.draw()["steps"]
    with started(CASE, OPTIMIZERS[optimizer]) as model:
        before = gather_tables(CASE, model)
        batch = batch_of(CASE, bags, 0, CASE.batch)
        values = model.module["ebc"](batch).wait().values()
        batch.values()[:] = 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses(CASE, values, targets, 1.0).backward()
        assert all(np.array_equal(*each) for each in zip(before, gather_tables(CASE, model), strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_calls_in_one_loss_are_warned_of(optimizer: str) -> None:
    (bags, targets), *_ = CASE.draw()["steps"]
    with started(CASE, OPTIMIZERS[optimizer]) as model:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                losses(CASE, pooled(CASE, model, bags), targets, 1.0).backward()
        both = losses(CASE, pooled(CASE, model, bags) + pooled(CASE, model, bags), targets, 1.0)
        with pytest.warns(RuntimeWarning, match=r"called several times in one loss.* call accumulate\(n\)"):
            both.backward()


@pytest.mark.parametrize("optimizer", ["lazy", "replay"])
def test_evaluation_in_another_thread_changes_no_bit(optimizer: str) -> None:
    case = replace(CASE, rows=(4000, 3000), batch=64, steps=30)
    drawn = case.draw()

    def train(evaluates: bool) -> list:
        ended = threading.Event()
        with started(case, OPTIMIZERS[optimizer]) as model:

            def evaluate() -> None:
                while not ended.is_set():
                    with torch.no_grad():
                        pooled(case, model, drawn["steps"][-1][0])

            with torch.no_grad():
                pooled(case, model, drawn["steps"][0][0])  # TorchRec sets itself up in the first forward
            other = threading.Thread(target=evaluate)
            if evaluates:
                other.start()
            try:
                for bags, targets in drawn["steps"]:
                    losses(case, pooled(case, model, bags), targets, 100.0).backward()
            finally:
                ended.set()
                if evaluates:
                    other.join()
            return gather_tables(case, model)

    assert all(np.array_equal(*each) for each in zip(train(True), train(False), strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_copies_and_compiled_autograd_are_refused(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is made as by DistributedModelParallel.copy, which takes torch's CUDA build."""
    monkeypatch.setattr(ProcessGroup, "__deepcopy__", lambda group, _: group, raising=False)
    (bags, targets), *_ = CASE.draw()["steps"]
    with started(CASE, OPTIMIZERS[optimizer]) as model:
        pooled(CASE, model, bags)
        with pytest.raises(RuntimeError, match=r"is a copy of one that is attached.* call remove\(\)"):
            pooled(CASE, copy.deepcopy(model), bags)
        loss, before = losses(CASE, pooled(CASE, model, bags), targets, 1.0), gather_tables(CASE, model)
        with (
            compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(RuntimeError, match="compiled autograd would trace"),
        ):
            loss.backward()
        assert all(np.array_equal(*each) for each in zip(before, gather_tables(CASE, model), strict=True))
