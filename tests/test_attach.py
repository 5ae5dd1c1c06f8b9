"""CowClip under stock fused optimizers and under EmbeddingAdam equals plain loops, in one and in two processes."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from sharded_case import Case, row_gradients, run_here, run_sharded

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, ReferenceCowClip, attach_cowclip

RULE = CowClip(r=1.0, zeta=1e-3)
ADAM = AdamConfig(lr=1e-2, l2=1e-3, eps=1e-6)


def clip_in_loops(grads, weights, counts, columns):
    for row in range(len(grads)):
        if counts[row]:
            limit = counts[row] * max(RULE.r * np.linalg.norm(weights[row, :columns]), RULE.zeta)
            norm = np.linalg.norm(grads[row, :columns])
            if norm > limit:
                grads[row, :columns] *= limit / norm
    return grads


def train_in_loops(case: Case, columns: int | None = None) -> list[np.ndarray]:
    drawn = case.draw()
    tables = [table.astype(np.float64) for table in drawn["tables"]]
    state = [(np.zeros_like(table), np.zeros_like(table)) for table in tables]
    for step, (bags, targets) in enumerate(drawn["steps"], start=1):
        for t, weights in enumerate(tables):
            grads, counts = row_gradients(case, bags, targets, t)
            present = counts > 0
            if case.optimizer == "adam":
                grads[present] += 2 * ADAM.l2 * weights[present]
            grads = clip_in_loops(grads, weights, counts, columns or case.dim)
            first, second = state[t]
            if case.optimizer == "sgd":
                weights -= case.lr * grads
            elif case.optimizer == "adagrad":
                first += grads**2
                weights -= case.lr * grads / (np.sqrt(first) + 1e-8)
            elif case.optimizer == "rowwise_adagrad":
                first += (grads**2).mean(1, keepdims=True)
                weights -= case.lr * grads / (np.sqrt(first) + 1e-8)
            else:
                b1, b2 = ADAM.betas
                first[present] = b1 * first[present] + (1 - b1) * grads[present]
                second[present] = b2 * second[present] + (1 - b2) * grads[present] ** 2
                m, v = first / (1 - b1**step), second / (1 - b2**step)
                weights[present] -= (ADAM.lr * m / (np.sqrt(v) + ADAM.eps))[present]
    return tables


def attach(model, case: Case):
    if case.optimizer == "adam":
        return EmbeddingAdam(model, ADAM, RULE, clip_columns=case.extra.get("clip_columns"))
    return attach_cowclip(model, RULE, **case.extra)


def attach_adam(model, case: Case):
    return EmbeddingAdam(model, ADAM, RULE, clip_columns=case.extra.get("clip_columns"))


def assert_follows(case: Case, world_size: int, columns: int | None = None) -> None:
    sharded_case = replace(case, optimizer="sgd") if case.optimizer == "adam" else case
    run = run_here if world_size == 1 else partial(run_sharded, world_size=world_size)
    tables = run(sharded_case, attach=attach_adam if case.optimizer == "adam" else attach)
    for got, expected, start in zip(tables, train_in_loops(case, columns), case.draw()["tables"], strict=True):
        # Relative to the larger of the row before and after, since a step may bring a weight near zero.
        scale = np.maximum(np.abs(expected), np.abs(start)).max(1, keepdims=True) + 1e-6
        np.testing.assert_array_less(np.abs(got - expected) / scale, 1e-6)


KINDS = {
    "one id": {"max_ids": 1},
    "several and repeated ids, empty bags, a shared table": {},
    "weights": {"weighted": True},
    "mean": {"pooling": "mean"},
}


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_one_process_equals_plain_loops(kind, optimizer, seed):
    assert_follows(Case(seed=seed, optimizer=optimizer, **KINDS[kind]), 1)


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [("sgd", "weights"), ("rowwise_adagrad", "several and repeated ids, empty bags, a shared table"), ("sgd", "mean"),
     ("adam", "mean"), ("adam", "weights")],
)  # fmt: skip
def test_two_processes_equal_plain_loops(sharding, optimizer, kind):
    assert_follows(Case(optimizer=optimizer, sharding=sharding, **KINDS[kind]), 2)
