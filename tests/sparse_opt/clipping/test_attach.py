"""CowClip under stock fused optimizers: statistics, removal, and what is refused.

That tables train as plain loops do is tested by the random problems, with all rules, optimizers and back ends.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from cowrec.sparse_opt import (
    AdamConfig,
    AdaptiveFieldClip,
    ClipRule,
    CowClip,
    EmbeddingAdam,
    FieldClip,
    GlobalClip,
    NoClip,
    attach_cowclip,
)
from cowrec.sparse_opt.clipping.clipped_lookup import ClippedLookup
from cowrec.sparse_opt.clipping.table_rules import TableRules
from cowrec.sparse_opt.kernels.layout import LookupBackward
from cowrec.sparse_opt.tbe.discovery import find_lookups
from sharded_case import (
    Case,
    batch_of,
    gather_tables,
    lookups_of,
    row_gradients,
    run_on,
    sharded_model,
    train_step,
)

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
RULE = CowClip(r=1.0, zeta=1e-3)


def model_of(case: Case) -> nn.Module:
    return sharded_model(case, case.draw()["tables"])


def one_step(case: Case, model: nn.Module) -> None:
    bags, targets = case.draw()["steps"][0]
    train_step(case, model, bags, targets, 0, case.batch)


RULES: list[ClipRule] = [RULE, FieldClip(0.3), AdaptiveFieldClip(0.5, 1e-3), GlobalClip(0.4)]


@pytest.mark.parametrize(("rule", "backend"), [*((rule, "compiled") for rule in RULES), (RULE, "torch")])
def test_statistics_of_a_step(rule: ClipRule, backend: str) -> None:
    """Ratios are those of rows, of tables or of all tables. Under SGD, before whose steps no row has any."""
    case = Case(steps=1)
    drawn = case.draw()
    model = sharded_model(case, drawn["tables"])
    handle = attach_cowclip(model, rule)
    for each in lookups_of(handle):
        run_on(backend, each)
    before = handle.stats()["t0"]
    assert (before.rows, before.clipped) == (0, 0.0)
    assert np.isnan(before.median_ratio)
    one_step(case, model)
    grads, counts = zip(*(row_gradients(case, *drawn["steps"][0], t) for t in range(len(case.rows))), strict=True)
    everything = float(np.sqrt(sum((each**2).sum() for each in grads)))
    for stats, table, grad, count in zip(handle.stats().values(), drawn["tables"], grads, counts, strict=True):
        weights = table[count > 0].astype(np.float64)
        if rule == RULE:
            norms = np.linalg.norm(grad[count > 0], axis=1)
            ratios = norms / (count[count > 0] * np.maximum(np.linalg.norm(weights, axis=1), RULE.zeta))
        else:
            norm = everything if isinstance(rule, GlobalClip) else np.linalg.norm(grad)
            adaptive = isinstance(rule, AdaptiveFieldClip)
            limit = max(rule.r * np.linalg.norm(weights), rule.zeta) if adaptive else rule.max_norm  # type: ignore[attr-defined]
            ratios = np.full(len(weights), norm / limit)
        assert stats.rows == len(weights)
        assert stats.clipped == pytest.approx((ratios > 1).mean())
        assert stats.median_ratio == pytest.approx(np.sort(ratios)[(len(ratios) - 1) // 2], rel=1e-5)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_remove_restores_the_model(pooling: str) -> None:
    case = Case(steps=1, pooling=pooling)
    plain, removed = (model_of(case) for _ in range(2))
    handle = attach_cowclip(removed, RULE)
    handle.remove()
    handle.remove()
    for model in (plain, removed):
        one_step(case, model)
    for expected, got in zip(gather_tables(case, plain), gather_tables(case, removed), strict=True):
        np.testing.assert_array_equal(got, expected)
    attach_cowclip(removed, RULE).remove()


def test_evaluation_and_the_users_weights_are_unchanged() -> None:
    case = Case(steps=1, weighted=True)
    plain, attached = (model_of(case) for _ in range(2))
    handle = attach_cowclip(attached, RULE)
    bags, targets = case.draw()["steps"][0]
    with torch.no_grad():
        pooled = [m.module["ebc"](batch_of(case, bags, 0, 8)).wait().values() for m in (plain, attached)]
    assert torch.equal(*pooled)
    assert handle.stats()["t0"].rows == 0
    batch = batch_of(case, bags, 0, case.batch)
    kept = batch.weights().clone()
    outputs = attached.module["ebc"](batch).wait().to_dict()
    sum((outputs[key] * torch.from_numpy(targets[key])).sum() for key in case.keys).backward()
    assert torch.equal(batch.weights(), kept)


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_the_l2_of_a_frequent_id_is_not_lost(backend: str) -> None:
    """Divided over 2^15 occurrences, L2 would be below half a unit in the last place of each."""
    case = Case(rows=(1,), features=(("a",),), batch=1 << 15, max_ids=1)
    clipped = ClippedLookup(find_lookups(model_of(case))[0][0], TableRules(NoClip()), {"t0": case.dim})
    weight = clipped.lookup.flat_weights().fill_(0.5)
    grad = torch.ones(case.batch, case.dim)
    grad[1::2] = -1
    ids, offsets = torch.zeros(case.batch, dtype=torch.int64), torch.arange(case.batch + 1)
    bags = clipped.bags.of({"indices": ids, "offsets": offsets})
    run_on(backend, clipped)
    output_grad = clipped.rows.clipped_output_grad(LookupBackward(bags, None, grad), 1e-4)
    torch.testing.assert_close(output_grad.sum(0), 2e-4 * weight, rtol=1e-6, atol=0)


def test_an_id_outside_its_table_is_named() -> None:
    clipped = ClippedLookup(find_lookups(model_of(Case(max_ids=1)))[0][0], TableRules(RULE), {})
    bags = clipped.bags.of({"indices": torch.tensor([0, 99, 0, 0]), "offsets": torch.arange(5)})
    with pytest.raises(ValueError, match=r"id 99 is outside table 't1', which holds 7 rows here"):
        clipped.rows.id_factors(LookupBackward(bags, None, torch.ones(1, 32)))


SINGLE = {"single_id_bags": True}
REFUSALS: list[tuple[str, Case, Callable[[nn.Module], Any]]] = [
    (
        "needs the norm over all tables, but 't0' is data-parallel",
        Case(sharding="data_parallel"),
        lambda model: EmbeddingAdam(model, AdamConfig(), GlobalClip(1.0)),
    ),
    (
        "needs the norm of the complete table 't0', which is sharded column-wise",
        Case(sharding="column_wise"),
        lambda model: attach_cowclip(model, FieldClip(1.0)),
    ),
    (
        "an absent row's L2 may exceed its limit alone .*; lower l2, shard",
        Case(sharding="column_wise"),
        lambda model: EmbeddingAdam(model, AdamConfig(l2=0.3, absent_rows="replay"), CowClip(r=0.5)),
    ),
    (
        "exclude names table 't9', which the model does not have; did you mean",
        Case(),
        lambda model: attach_cowclip(model, RULE, exclude=["t9"]),
    ),
    (
        "clip_columns names table 'x'",
        Case(),
        lambda model: attach_cowclip(model, RULE, clip_columns={"x": 2}, **SINGLE),
    ),
    (
        re.escape("clip_columns of table 't0' must be in [1, 8]"),
        Case(),
        lambda model: attach_cowclip(model, RULE, clip_columns=9, **SINGLE),
    ),
    ("needs single_id_bags=True", Case(), lambda model: attach_cowclip(model, RULE, clip_columns=4)),
    (
        "l2 = 0.1 .* needs single_id_bags=True .* use cowrec's EmbeddingAdam, or l2 = 0",
        Case(),
        lambda model: attach_cowclip(model, RULE, l2=0.1),
    ),
    (
        "l2 must be >= 0 and finite, got nan",
        Case(),
        lambda model: attach_cowclip(model, RULE, l2=float("nan"), **SINGLE),
    ),
    ("l2 must be >= 0 and finite, got -1.0", Case(), lambda model: attach_cowclip(model, RULE, l2=-1.0, **SINGLE)),
    (
        "attached already",
        Case(),
        lambda model: [attach_cowclip(model, RULE) for _ in range(2)],
    ),
    (
        "more than one id",
        Case(),
        lambda model: (attach_cowclip(model, RULE, **SINGLE), one_step(Case(), model)),
    ),
    (
        "ids' weights",
        Case(max_ids=1, weighted=True),
        lambda model: (attach_cowclip(model, RULE, **SINGLE), one_step(Case(max_ids=1, weighted=True), model)),
    ),
    (
        "under fused .*ROWWISE_ADAGRAD.*EXACT_SGD",
        Case(optimizer="rowwise_adagrad"),
        lambda model: EmbeddingAdam(model, AdamConfig()),
    ),
    (
        "needs the norm over all tables before the first .* looks up 't0' and 't0'",
        Case(),
        lambda model: attach_cowclip(nn.ModuleList([model, model_of(Case())]), GlobalClip(1.0)),
    ),
]


@pytest.mark.parametrize(("message", "case", "attach"), REFUSALS, ids=[message for message, *_ in REFUSALS])
def test_refuses(message: str, case: Case, attach: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(ValueError, match=message):
        attach(model_of(case))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "Linear holds no TorchRec embedding tables"),
        (
            EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "x", feature_names=["f"])]),
            "table 'x' cannot be clipped: .*is not sharded",
        ),
    ],
)
def test_refuses_models_without_sharded_tables(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attach_cowclip(model, RULE)


@pytest.mark.parametrize("change", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": 0.0}, {"l2": float("nan")}])
def test_adam_settings(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"adam {next(iter(change))} is out of range"):
        AdamConfig(**change)
