"""CowClip under stock fused optimizers: statistics, removal, and what is refused.

That tables train as plain loops do is tested by the random problems, with all rules, optimizers and back ends.
"""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
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
from random_problems.drawing import small_problem
from random_problems.in_loops import row_gradients
from random_problems.training import assert_equal, batches_of, lookups_of, run_on, sharded_model, state_of, train_step

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
RULE = CowClip(r=1.0, zeta=1e-3)


RULES: list[ClipRule] = [RULE, FieldClip(0.3), AdaptiveFieldClip(0.5, 1e-3), GlobalClip(0.4)]


@pytest.mark.parametrize(("rule", "backend"), [*((rule, "compiled") for rule in RULES), (RULE, "torch")])
def test_statistics_of_a_step(rule: ClipRule, backend: str) -> None:
    """Ratios are those of rows, of tables or of all tables. Under SGD, before whose steps no row has any."""
    case = small_problem(steps=1)
    model = sharded_model(case)
    handle = attach_cowclip(model, rule)
    for each in lookups_of(handle):
        run_on(backend, each)
    before = handle.stats()["t0"]
    assert (before.rows, before.clipped_share) == (0, 0.0)
    assert np.isnan(before.median_ratio)
    train_step(case, model, 0)
    (collection,), (drawn,) = case.collections, case.batches()[0]
    rows = [row_gradients(case, collection, t, drawn, None) for t in range(len(collection.tables))]
    grads, counts = zip(*rows, strict=True)
    everything = float(np.sqrt(sum((each**2).sum() for each in grads)))
    for stats, table, grad, count in zip(handle.stats().values(), case.initial()[0], grads, counts, strict=True):
        weights = table[count > 0].astype(np.float64)
        if rule == RULE:
            norms = np.linalg.norm(grad[count > 0], axis=1)
            ratios = norms / (count[count > 0] * np.maximum(np.linalg.norm(weights, axis=1), RULE.zeta))
        else:
            norm = everything if isinstance(rule, GlobalClip) else np.linalg.norm(grad)
            adaptive = isinstance(rule, AdaptiveFieldClip)
            limit = max(rule.r * np.linalg.norm(weights), rule.zeta) if adaptive else rule.max_norm
            ratios = np.full(len(weights), norm / limit)
        assert stats.rows == len(weights)
        assert stats.clipped_share == pytest.approx((ratios > 1).mean())
        assert stats.median_ratio == pytest.approx(np.sort(ratios)[(len(ratios) - 1) // 2], rel=1e-5)


@pytest.mark.parametrize("backend", ["compiled", "torch"])
@pytest.mark.parametrize("attach", [attach_cowclip, lambda model, rule: EmbeddingAdam(model, AdamConfig(), rule)])
def test_shares_that_other_limits_would_clip(attach: Any, backend: str) -> None:
    """In a window of two steps, with 3 % for the bins; then in one of a single step."""
    case, seen = small_problem(steps=4), list[dict[str, Tensor]]()
    model = sharded_model(case)
    handle = attach(model, RULE)
    for each in lookups_of(handle):
        run_on(backend, each)
    for step in range(case.steps):
        train_step(case, model, step)
        seen.append(handle.latest_ratios())
        if step in (0, 2):
            handle.reset_stats()
            assert handle.stats()["t2"].rows == 0
            assert set(handle.clipped_shares()["t2"].values()) == {0.0}
            continue
        scales = (1.0, 0.1, 30.0, 1e-7)
        for table, shares in handle.clipped_shares(scales).items():
            ratios = torch.cat([own[table] for own in seen[1 if step == 1 else 3 :]])
            assert tuple(shares) == scales
            for scale, share in shares.items():
                least, most = (float((ratios > scale * each).float().mean()) for each in (1.04, 0.96))
                assert least - 1e-6 <= share <= most + 1e-6
            assert shares[1.0] == pytest.approx(handle.stats()[table].clipped_share)
    with pytest.raises(ValueError, match=r"scales of limits must be in \[1e-7, 1e7\], got 0"):
        handle.clipped_shares([0.0])


def test_handles_tell_their_tables_and_limits() -> None:
    model = sharded_model(small_problem())
    handle = attach_cowclip(model, {"t0": CowClip(0.5), "*": RULE}, exclude=["t1"])
    limits = "t0: CowClip(r=0.5, zeta=1e-05), t1: unclipped, t2: CowClip(r=1.0, zeta=0.001)"
    assert repr(handle) == f"<LookupsHandle, attached; {limits}>"
    handle.remove()
    assert repr(handle).startswith("<LookupsHandle, removed; t0")


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_remove_restores_the_model(pooling: str) -> None:
    case = small_problem(pooling=pooling)
    plain, removed = (sharded_model(case) for _ in range(2))
    handle = attach_cowclip(removed, RULE)
    handle.remove()
    handle.remove()
    for model in (plain, removed):
        train_step(case, model, 0)
    assert_equal(state_of(removed), state_of(plain))
    attach_cowclip(removed, RULE).remove()


def test_evaluation_and_the_users_weights_are_unchanged() -> None:
    case = small_problem(weighted=True)
    plain, attached = (sharded_model(case) for _ in range(2))
    handle, batch = attach_cowclip(attached, RULE), batches_of(case)[0][0]
    with torch.no_grad():
        pooled = [model.module.c0(batch.ids0).wait().values() for model in (plain, attached)]
    assert torch.equal(*pooled)
    assert handle.stats()["t0"].rows == 0
    kept = batch.ids0.weights().clone()
    attached(batch)[0].backward()
    assert torch.equal(batch.ids0.weights(), kept)


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_the_l2_of_a_frequent_id_is_not_lost(backend: str) -> None:
    """Divided over 2^15 occurrences, L2 would be below half a unit in the last place of each."""
    case = small_problem(rows=(1,), features=(("a",),))
    clipped = ClippedLookup(find_lookups(sharded_model(case))[0][0], TableRules(NoClip()), {"t0": 8})
    weight = clipped.lookup.flat_weights().fill_(0.5)
    grad = torch.ones(1 << 15, 8)
    grad[1::2] = -1
    ids, offsets = torch.zeros(1 << 15, dtype=torch.int64), torch.arange((1 << 15) + 1)
    bags = clipped.bags.of({"indices": ids, "offsets": offsets})
    run_on(backend, clipped)
    output_grad = clipped.rows.clipped_output_grad(LookupBackward(bags, None, grad), 1e-4)
    torch.testing.assert_close(output_grad.sum(0), 2e-4 * weight, rtol=1e-6, atol=0)


def test_an_id_outside_its_table_is_named() -> None:
    clipped = ClippedLookup(find_lookups(sharded_model(small_problem()))[0][0], TableRules(RULE), {})
    bags = clipped.bags.of({"indices": torch.tensor([0, 99, 0, 0]), "offsets": torch.arange(5)})
    with pytest.raises(ValueError, match=r"id 99 is outside table 't1', which holds 7 rows here"):
        clipped.rows.id_factors(LookupBackward(bags, None, torch.ones(1, 32)))


SINGLE = {"single_id_bags": True}
ADAM, DECAYS = {"config": AdamConfig()}, {"config": AdamConfig(lr=0.1, weight_decay=5.0)}
L2_IN_REPLAY = {"config": AdamConfig(l2=0.3, absent_rows="replay"), "rule": CowClip(r=0.5)}
REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("all tables, but 't0' is data-parallel", {"sharding": "data_parallel"}, {**ADAM, "rule": GlobalClip(1.0)}),
    ("complete table 't0', which is sharded column-wise", {"sharding": "column_wise"}, {"rule": FieldClip(1.0)}),
    ("an absent row's L2 may exceed its limit alone .*; lower l2, shard", {"sharding": "column_wise"}, L2_IN_REPLAY),
    ("all tables before the first .* looks up 't0' and 't1'", {"pooling": "sum,mean"}, {"rule": GlobalClip(1.0)}),
    ("exclude names table 't9', which the model does not have; did you mean", {}, {"exclude": ["t9"]}),
    ("clip_columns names table 'x'", {}, {"clip_columns": {"x": 2}, **SINGLE}),
    (re.escape("clip_columns of table 't0' must be in [1, 8]"), {}, {"clip_columns": 9, **SINGLE}),
    ("needs single_id_bags=True", {}, {"clip_columns": 4}),
    ("l2 = 0.1 .* needs single_id_bags=True .* use cowrec's EmbeddingAdam, or l2 = 0", {}, {"l2": 0.1}),
    ("l2 must be >= 0 and finite, got nan", {}, {"l2": float("nan"), **SINGLE}),
    ("l2 must be >= 0 and finite, got -1.0", {}, {"l2": -1.0, **SINGLE}),
    ("more than one id", {}, SINGLE),
    ("ids' weights", {"max_ids": 1, "weighted": True}, SINGLE),
    ("under fused .*ROWWISE_ADAGRAD.*EXACT_SGD", {"optimizer": "rowwise_adagrad"}, ADAM),
    ("lr_factors names table 't00', .* have; did you mean 't0'", {}, {**ADAM, "lr_factors": {"t00": 2.0}}),
    ("lr_factors of table 't0' must be at least 0 and finite, got -1", {}, {**ADAM, "lr_factors": {"t0": -1.0}}),
    ("'t0' the learning rate 0.3, .* weight_decay = 5 must be at most 1", {}, {**DECAYS, "lr_factors": {"t0": 3.0}}),
]


@pytest.mark.parametrize(("message", "case", "settings"), REFUSALS, ids=[message for message, *_ in REFUSALS])
def test_refuses(message: str, case: dict[str, Any], settings: dict[str, Any]) -> None:
    """When it attaches, or in the first step."""
    problem, given = small_problem(**case), {"rule": RULE} | settings
    model, attach = sharded_model(problem), EmbeddingAdam if "config" in given else attach_cowclip
    with pytest.raises(ValueError, match=message):
        _ = attach(model, **given), train_step(problem, model, 0)


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
