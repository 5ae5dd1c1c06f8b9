"""Clip rules for a table or for all tables equal plain loops, under fused optimizers and EmbeddingAdam, on any plan."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cowrec.sparse_opt import (
    AdamConfig,
    AdaptiveFieldClip,
    ClipRule,
    EmbeddingAdam,
    FieldClip,
    GlobalClip,
    attach_cowclip,
    clip_tables,
)
from sharded_case import (
    Case,
    gather_tables,
    process_group,
    row_gradients,
    run_in_processes,
    sharded_model,
    train_step,
)

RULES: dict[str, ClipRule] = {
    "field": FieldClip(0.3),
    "adaptive_field": AdaptiveFieldClip(r=0.5, zeta=1e-3),
    "global": GlobalClip(0.4),
}
KINDS: dict[str, dict[str, Any]] = {
    "several ids": {},
    "weights": {"weighted": True},
    "no ids in half of the batch": {"empty_half": True},
    "an excluded table": {"extra": {"exclude": ["t2"]}},
    "leading columns and L2": {"max_ids": 1, "extra": {"clip_columns": 5, "single_id_bags": True, "l2": 3e-3}},
}


def case_of(kind: str, rule: str, **more: Any) -> Case:
    case = Case(**KINDS[kind], **more)
    return replace(case, extra=case.extra | {"rule": rule})


def attach(model: nn.Module, case: Case) -> Any:
    settings = dict(case.extra)
    return attach_cowclip(model, RULES[settings.pop("rule")], **settings)


def factors_in_loops(case: Case, grads: list[np.ndarray], tables: list[np.ndarray]) -> list[float]:
    """Computes each table's factor by definition; tables [V, D] hold the measured columns and present rows only."""
    rule, excluded = RULES[case.extra["rule"]], {int(name[1:]) for name in case.extra.get("exclude", ())}
    norms = [float(np.sqrt((grad**2).sum())) for grad in grads]
    if isinstance(rule, GlobalClip):
        norms = [float(np.sqrt(sum(norm**2 for t, norm in enumerate(norms) if t not in excluded)))] * len(grads)
    factors = []
    for t, (norm, weights) in enumerate(zip(norms, tables, strict=True)):
        if isinstance(rule, AdaptiveFieldClip):
            limit = max(rule.r * float(np.sqrt((weights**2).sum())), rule.zeta)
        else:
            limit = rule.max_norm
        factors.append(min(1.0, limit / norm) if norm > 0 and t not in excluded else 1.0)
    return factors


def train_in_loops(case: Case) -> tuple[list[np.ndarray], set[bool]]:
    """The case in float64, with SGD or row-wise Adagrad; and whether tables were clipped, True, False or both."""
    drawn = case.draw()
    tables = [table.astype(np.float64) for table in drawn["tables"]]
    sums = [np.zeros((len(table), 1)) for table in tables]
    columns, happened = case.extra.get("clip_columns", case.dim), set()
    for bags, targets in drawn["steps"]:
        grads, present = [], []
        for t, table in enumerate(tables):
            grad, counts = row_gradients(case, bags, targets, t)
            moved = (counts > 0) | (case.extra.get("absent_rows") == "dense")
            grad[moved] += 2 * case.extra.get("l2", 0) * table[moved]
            grads.append(grad)
            present.append(moved)
        measured = [grad[:, :columns] for grad in grads]
        weights = [table[here, :columns] for table, here in zip(tables, present, strict=True)]
        for t, factor in enumerate(factors_in_loops(case, measured, weights)):
            measured[t] *= factor
            happened.add(factor < 1)
            if case.optimizer == "sgd":
                tables[t] -= case.lr * grads[t]
            else:
                sums[t] += (grads[t] ** 2).mean(1, keepdims=True)
                tables[t] -= case.lr * grads[t] / (np.sqrt(sums[t]) + 1e-8)
    return tables, happened


def assert_follows_loops(case: Case, tables: list[np.ndarray]) -> None:
    expected, happened = train_in_loops(case)
    assert True in happened
    for got, table, start in zip(tables, expected, case.draw()["tables"], strict=True):
        # Relative to the larger of the row before and after; float32 weights and optimizer.
        scale = np.maximum(np.abs(table), np.abs(start)).max(1, keepdims=True) + 1e-6
        assert float((np.abs(got - table) / scale).max()) <= 1e-6, case


# Optimizers and plans in turn; the random problems draw all combinations.
CASES = [
    case_of(kind, rule, optimizer=("sgd", "rowwise_adagrad")[number % 2], seed=number)
    for number, (rule, kind) in enumerate(product(RULES, KINDS))
]


def test_one_process_equals_plain_loops() -> None:
    for case, tables in zip(CASES, run_in_processes([(case, attach) for case in CASES], 1), strict=True):
        assert_follows_loops(case, tables)


def attach_adam(model: nn.Module, case: Case) -> Any:
    """Adam that is SGD to a ten-millionth of the gradient: lr * g / (1 + 1e-7 * |g|)."""
    more = {key: value for key, value in case.extra.items() if key != "rule"}
    config = AdamConfig(lr=case.lr * 1e7, betas=(0.0, 0.0), eps=1e7, **more)
    return EmbeddingAdam(model, config, RULES[case.extra["rule"]])


def refuse(model: nn.Module, case: Case) -> None:
    with pytest.raises(ValueError, match=case.extra["message"]):
        attach_cowclip(model, GlobalClip(0.4))


def test_two_processes_equal_plain_loops() -> None:
    """Covers ranks without a row of a table, and without an id of their rows in a step.

    Global rules are refused on all ranks if one has no table: the others would wait for its norm forever.
    """
    cases = [
        replace(case, sharding=("table_wise", "row_wise")[(number + number // 5) % 2])
        for number, case in enumerate(CASES)
    ]
    extra = {"rule": "field"}
    # Rank 1 holds the rows from 500 on, and no id of a step reaches them.
    idle = Case(rows=(1000,), features=(("a",),), batch=4, steps=2, max_ids=1, sharding="row_wise", extra=extra, seed=1)
    assert all(ids.max() < 500 for bags, _ in idle.draw()["steps"] for ids, _ in bags["a"])
    cases += [idle, replace(idle, extra={"rule": "global"}), replace(idle, rows=(1, 40), features=(("a",), ("b",)))]
    tableless = replace(idle, rows=(40,), sharding="table_wise")
    cases += [tableless]
    refused = replace(tableless, extra={"message": "rank 1 holds no table"})
    plain = [case for case in cases if case.sharding == "row_wise" and case.extra.keys() == {"rule"}]
    adam = [replace(case, optimizer="sgd") for case in plain]
    adam += [replace(case, extra=case.extra | {"absent_rows": "dense", "l2": 3e-3}) for case in adam]
    jobs = [*((case, attach) for case in cases), *((case, attach_adam) for case in adam), (refused, refuse)]
    for (case, _), tables in zip(jobs[:-1], run_in_processes(jobs, 2)[:-1], strict=True):
        assert_follows_loops(case, tables)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(0, 1, str(tmp_path_factory.mktemp("group"))):
        yield


@pytest.mark.usefixtures("group")
def test_separate_lookups_are_refused() -> None:
    models = nn.ModuleList([sharded_model(Case(), Case().draw()["tables"]) for _ in range(2)])
    with pytest.raises(ValueError, match=r"needs the norm over all tables before the first .* looks up 't0' and 't0'"):
        attach_cowclip(models, GlobalClip(1.0))
    attach_cowclip(models, FieldClip(1.0)).remove()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("rule", RULES)
def test_statistics_are_those_of_the_group(rule: str) -> None:
    case = case_of("several ids", rule, steps=1)
    drawn = case.draw()
    model = sharded_model(case, drawn["tables"])
    handle = attach(model, case)
    bags, targets = drawn["steps"][0]
    train_step(case, model, bags, targets, 0, case.batch)
    grads, counts = zip(*(row_gradients(case, bags, targets, t) for t in range(len(case.rows))), strict=True)
    weights = [table[count > 0].astype(np.float64) for table, count in zip(drawn["tables"], counts, strict=True)]
    factors = factors_in_loops(case, list(grads), weights)
    for stats, factor, count in zip(handle.stats().values(), factors, counts, strict=True):
        assert stats.rows == (count > 0).sum()
        assert stats.clipped == float(factor < 1)
        if factor < 1:
            assert stats.median_ratio == pytest.approx(1 / factor, rel=1e-6)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("absent_rows", ["lazy", "dense"])
@pytest.mark.parametrize("rule", RULES)
def test_adam_sees_the_clipped_gradient(rule: str, absent_rows: str) -> None:
    """Compares a first step with torch's Adam on gradients clipped by clip_tables, of the batch's rows or of all."""
    case = case_of("several ids", rule, steps=1)
    drawn = case.draw()
    model = sharded_model(case, drawn["tables"])
    adam = EmbeddingAdam(model, AdamConfig(lr=0.1, eps=1e-3, l2=3e-3, absent_rows=absent_rows), RULES[rule])
    bags, targets = drawn["steps"][0]
    train_step(case, model, bags, targets, 0, case.batch)
    tables = [nn.Parameter(torch.from_numpy(table).double()) for table in drawn["tables"]]
    moved, rows, grads, counts = [], [], [], []
    for t, table in enumerate(tables):
        grad, count = row_gradients(case, bags, targets, t)
        moved.append(torch.from_numpy((count > 0) | (absent_rows == "dense")))
        rows.append(table.detach()[moved[t]])
        grads.append(torch.from_numpy(grad)[moved[t]] + 2 * 3e-3 * rows[t])
        counts.append(torch.from_numpy(count)[moved[t]])
    for table, grad, here in zip(tables, clip_tables(grads, rows, counts, RULES[rule]), moved, strict=True):
        table.grad = torch.zeros_like(table)
        table.grad[here] = grad
    torch.optim.Adam(tables, lr=0.1, eps=1e-3).step()
    for got, expected in zip(gather_tables(case, model), tables, strict=True):
        np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert any(stats.clipped == 1 for stats in adam.stats().values())
