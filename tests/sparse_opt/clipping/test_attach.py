"""Attaching a clip: statistics, removal, rules of tables, passes that wait for others, and what is refused.

That tables train as plain loops do is tested by the random problems, with all rules, optimizers and back ends; there,
and in test_plans.py, that accumulated passes, also without samples, are one over the complete batch.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torchrec.modules import embedding_modules
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
    detach_cowclip,
)
from cowrec.sparse_opt.kernels.layout import LookupBackward
from cowrec.sparse_opt.lookups.rules import TableRules
from cowrec.sparse_opt.lookups.wrapped_lookup import Accumulation, WrappedLookup
from cowrec.sparse_opt.tbe.inventory import ModelInventory
from process_groups import in_processes, process_group
from random_problems.drawing import Problem, small_problem
from random_problems.in_loops import row_gradients
from random_problems.training import (
    assert_equal,
    batch_of,
    batches_of,
    dense_optimizer,
    lookups_of,
    run_on,
    sharded_model,
    state_of,
    train_step,
)
from refusal import refused

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
attached_either_way = pytest.mark.parametrize(
    "attach", [attach_cowclip, lambda model, rule, **more: EmbeddingAdam(model, AdamConfig(), rule, **more)]
)
leave_out_of_ddp: Any = getattr(embedding_modules, "mark_data_parallel_skip_grad_sync", None)
RULE = CowClip(r=1.0, zeta=1e-3)
RULES: list[ClipRule] = [RULE, FieldClip(0.3), AdaptiveFieldClip(0.5, 1e-3), GlobalClip(0.4)]


@pytest.mark.parametrize(("rule", "backend"), [*((rule, "compiled") for rule in RULES), (RULE, "torch")])
def test_statistics_of_a_step(rule: ClipRule, backend: str) -> None:
    """Ratios are those of rows, of tables or of all tables. Under SGD, before whose steps no row has any."""
    case = small_problem(steps=1)
    model = sharded_model(case)
    handle = attach_cowclip(model, rule)
    for lookup in lookups_of(handle):
        run_on(backend, lookup)
    before = handle.stats()["t0"]
    assert (before.rows, before.clipped_share) == (0, 0.0)
    assert np.isnan(before.median_ratio)
    train_step(case, model, 0)
    (collection,), (drawn,) = case.collections, case.batches()[0]
    rows = [row_gradients(case, collection, t, drawn, None) for t in range(len(collection.tables))]
    grads, counts = zip(*rows, strict=True)
    everything = float(np.sqrt(sum((rows**2).sum() for rows in grads)))
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
@attached_either_way
def test_shares_that_other_limits_would_clip(attach: Any, backend: str) -> None:
    """In a window of two steps, with 3 % for the bins; then in one of a single step."""
    case, seen = small_problem(steps=4), list[dict[str, Tensor]]()
    model = sharded_model(case)
    handle = attach(model, RULE)
    for lookup in lookups_of(handle):
        run_on(backend, lookup)
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
                least, most = (float((ratios > scale * factor).float().mean()) for factor in (1.04, 0.96))
                assert least - 1e-6 <= share <= most + 1e-6
            assert shares[1.0] == pytest.approx(handle.stats()[table].clipped_share)
    refused(r"scales of limits must be in \[1e-7, 1e7\], got 0", handle.clipped_shares, [0.0])


@pytest.mark.parametrize("absent_rows", ["lazy", "dense"])
@pytest.mark.parametrize("sharding", ["row_wise", "columns_of_one_rank"])
def test_a_step_without_ids_has_no_ratios(absent_rows: str, sharding: str) -> None:
    model = sharded_model(small_problem(sharding=sharding))
    adam = EmbeddingAdam(model, AdamConfig(absent_rows=absent_rows), RULE)
    for case in (small_problem(), small_problem(max_ids=0)):
        seen = len(adam.latest_ratios()["t0"])
        train_step(case, model, 0)
    assert seen > 0
    assert not len(adam.latest_ratios()["t0"])
    assert np.isnan(adam.stats()["t0"].median_ratio)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_remove_restores_the_model(pooling: str) -> None:
    """The handle tells its tables and limits, and that it was removed."""
    case = small_problem(pooling=pooling)
    plain, removed = (sharded_model(case) for _ in range(2))
    handle = attach_cowclip(removed, {"t0": CowClip(0.5), "*": RULE}, exclude=["t1"])
    limits = "t0: CowClip(r=0.5, zeta=1e-05), t1: unclipped, t2: CowClip(r=1.0, zeta=0.001)"
    assert repr(handle) == f"<LookupsHandle, attached; {limits}>"
    handle.remove()
    handle.remove()
    assert repr(handle).startswith("<LookupsHandle, removed; t0")
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
    wrapped = WrappedLookup(ModelInventory(sharded_model(case)).lookups[0], TableRules(NoClip()), {"t0": 8})
    weight = wrapped.lookup.flat_weights().fill_(0.5)
    grad = torch.ones(1 << 15, 8)
    grad[1::2] = -1
    ids, offsets = torch.zeros(1 << 15, dtype=torch.int64), torch.arange((1 << 15) + 1)
    bags = wrapped.bags.of({"indices": ids, "offsets": offsets})
    run_on(backend, wrapped)
    output_grad = wrapped.rows.clipped_output_grad(LookupBackward(bags, None, grad), 1e-4)
    torch.testing.assert_close(output_grad.sum(0), 2e-4 * weight, rtol=1e-6, atol=0)


def test_an_id_outside_its_table_is_named() -> None:
    wrapped = WrappedLookup(ModelInventory(sharded_model(small_problem())).lookups[0], TableRules(RULE), {})
    bags = wrapped.bags.of({"indices": torch.tensor([0, 99, 0, 0]), "offsets": torch.arange(5)})
    with pytest.raises(ValueError, match=r"id 99 is outside table 't1', which holds 7 rows here"):
        wrapped.rows.id_factors(LookupBackward(bags, None, torch.ones(1, 32)))


SINGLE = {"single_id_bags": True}
ADAM, DECAYS = {"config": AdamConfig()}, {"config": AdamConfig(lr=0.1, weight_decay=5.0)}
LAZY = {"config": AdamConfig(absent_rows="lazy")}
VARIABLE = {"variable_batch": True, "pooling": "sum,mean"}
SEPARATE = "variable batch size per feature, tables that are looked up separately"
WRONG_RULES: list[tuple[str, dict[str, Any]]] = [
    ("name none for table 't1'; name it, or give all others a rule as '\\*'", {"rule": {"t0": CowClip()}}),
    (
        "'field' and 'cowclip' cannot be mixed: .* a table, .* a row",
        {"rule": {"t0": CowClip(), "*": FieldClip(1.0)}},
    ),
]
REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((message, {}, rules | more) for message, rules in WRONG_RULES for more in ({}, ADAM)),
    *((SEPARATE, VARIABLE, more) for more in ({}, ADAM)),
    ("all tables, but 't0' is data-parallel", {"sharding": "data_parallel"}, {**LAZY, "rule": GlobalClip(1.0)}),
    ("complete table 't0', which is sharded column-wise", {"sharding": "column_wise"}, {"rule": FieldClip(1.0)}),
    ("all tables before the first .* looks up 't0' and 't1'", {"pooling": "sum,mean"}, {"rule": GlobalClip(1.0)}),
    ("needs single_id_bags=True", {}, {"clip_columns": 4}),
    ("l2 must be >= 0 and finite, got nan", {}, {"l2": float("nan"), **SINGLE}),
    ("more than one id", {}, SINGLE),
    ("under fused .*ROWWISE_ADAGRAD.*EXACT_SGD", {"optimizer": "rowwise_adagrad"}, ADAM),
    ("lr_factors names table 't00', .* have; did you mean 't0'", {}, {**ADAM, "lr_factors": {"t00": 2.0}}),
]


@pytest.mark.parametrize(("message", "case", "settings"), REFUSALS, ids=[message for message, *_ in REFUSALS])
def test_refuses(message: str, case: dict[str, Any], settings: dict[str, Any]) -> None:
    """When it attaches, or in the first step."""
    problem, given = small_problem(**case), {"rule": RULE} | settings
    model, attach = sharded_model(problem), EmbeddingAdam if "config" in given else attach_cowclip
    with pytest.raises(ValueError, match=message):
        _ = attach(model, **given), train_step(problem, model, 0)


def test_refuses_models_without_sharded_tables() -> None:
    refused("Linear holds no TorchRec embedding tables", attach_cowclip, nn.Linear(2, 2), RULE)
    unsharded = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "x", feature_names=["f"])])
    refused("table 'x' cannot be clipped: .*is not sharded", attach_cowclip, unsharded, RULE)


@pytest.mark.parametrize("change", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": 0.0}, {"l2": float("nan")}])
def test_adam_settings(change: dict[str, Any]) -> None:
    refused(f"adam {next(iter(change))} is out of range", AdamConfig, **change)


CASE = small_problem()


def fresh(like: nn.Module | None = None) -> Any:
    """The model, with the tables of another."""
    model = sharded_model(CASE)
    if like:
        model.load_state_dict(like.state_dict())
    return model


def like_sgd(absent_rows: str) -> AdamConfig:
    """Adam whose update is lr * g, because eps hides the second moment."""
    return AdamConfig(lr=CASE.lr * 1e7, betas=(0.0, 0.0), eps=1e7, absent_rows=absent_rows)


def train(model: Any, step: int) -> dict[str, np.ndarray]:
    train_step(CASE, model, step)
    return state_of(model)


def test_an_unclipped_table_may_be_column_wise_under_replay() -> None:
    """Replay refuses a column-wise table only where its own rule may bound an absent row."""
    case = small_problem(sharding="column_wise,table_wise")
    config = AdamConfig(l2=1e-2, absent_rows="replay")
    narrow, wide = CowClip(1e-2, 1e-5), CowClip(1.0, 1e-5)
    EmbeddingAdam(sharded_model(case), config, {"t0": wide, "t1": narrow, "t2": wide})
    message = "table 't0' is sharded column-wise, and an absent row's L2 may exceed its limit alone .*; lower l2, shard"
    refused(message, EmbeddingAdam, sharded_model(case), config, {"t0": narrow, "*": wide})


@pytest.mark.parametrize("attach", ["fused", "replay"])
def test_a_lost_handle(attach: str) -> None:
    """A first attachment ends with detaching; the fused optimizer then trains alone. Compared with new models."""
    model, rule = fresh(), CowClip(1e-2, 1e-5)

    def attach_to(each: Any) -> None:
        if attach == "fused":
            attach_cowclip(each, rule)
        else:
            EmbeddingAdam(each, like_sgd(attach), rule)

    detach_cowclip(model)
    attach_to(model)
    refused(r"attached already; .* or detach_cowclip\(model\)", attach_to, model)
    for step, is_attached in enumerate((True, False, True)):
        other = fresh(model)
        if is_attached:
            attach_to(other)
        assert_equal(train(model, step), train(other, step))
        attach_to(model) if step == 1 else detach_cowclip(model)


@pytest.mark.parametrize("rule", [0.5, CowClip, {"t0": CowClip(), "*": "cowclip"}])
@attached_either_way
def test_what_is_no_rule_is_named(attach: Any, rule: Any) -> None:
    with pytest.raises(TypeError, match=r"rule must be a clip rule.*got (0\.5|the class CowClip|'cowclip')"):
        attach(fresh(), rule)


ONE_TABLE: dict[str, Any] = {"rows": (40,), "features": (("a",),)}
ONE_ID = small_problem(**ONE_TABLE, max_ids=1)
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}


def model_with(**fused_params: Any) -> Any:
    return sharded_model(ONE_ID, fused_params={**SGD, **fused_params})


@attached_either_way
def test_gradient_clipping_by_fbgemm_is_refused(attach: Any) -> None:
    model = model_with(gradient_clipping=True, max_gradient=0.5)
    refused("'t0' is under FBGEMM's gradient_clipping.* to 0.5 after", attach, model, CowClip())


@pytest.mark.parametrize("output", [SparseType.FP16, SparseType.BF16])
def test_l2_in_output_gradients_of_half_precision_is_refused(output: SparseType) -> None:
    model = model_with(output_dtype=output)
    with pytest.raises(ValueError, match=r"'t0' has outputs in half precision.*set output_dtype to float32"):
        attach_cowclip(model, CowClip(), single_id_bags=True, l2=1e-5)
    attach_cowclip(model, CowClip(), single_id_bags=True)


def test_a_small_l2_moves_rows_of_float16_tables() -> None:
    """Against a loop that rounds the weights in each step; 2 * l2 * w itself underflows in float16."""
    config = AdamConfig(lr=1e-4, l2=1e-6, eps=1e-9, absent_rows="dense")
    problem = small_problem(**ONE_TABLE, dtype="float16")
    model = sharded_model(problem)
    EmbeddingAdam(model, config)
    before = state_of(model)["c0.t0"]
    expected = torch.from_numpy(before).half()
    first, second = torch.zeros(expected.shape), torch.zeros(expected.shape)
    (drawn,) = problem.batches()[0]
    no_ids = drawn | {"a": [(np.empty(0, np.int64), np.empty(0, np.float32))] * problem.batch}
    for step in range(1, 6):
        model(batch_of(problem, [no_ids], 0, problem.batch))[0].backward()
        grad = 2 * config.l2 * expected.float()
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        moved = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + config.eps)
        expected = (expected.float() - config.lr * moved).half()
    got = state_of(model)["c0.t0"]
    small = abs(before) > 1e-3
    assert (got != before)[small & (abs(before) < 2e-2)].mean() > 0.9
    np.testing.assert_allclose(got, expected.float().numpy(), rtol=2e-3, atol=1e-7)


@attached_either_way
def test_ids_that_are_deduplicated_before_the_lookup_are_refused(attach: Any) -> None:
    model = sharded_model(small_problem(sequence=True))
    model.module.c0._use_index_dedup = True  # of EmbeddingCollectionSharder, whose operator exists on CUDA alone
    refused("table 't0' cannot be clipped: TorchRec deduplicates .* use_index_dedup", attach, model, CowClip())
    message, excluded = "but it still needs L2, the loss' scale or the optimizer", ["t0", "t1", "t2"]
    refused(message, attach, model, CowClip(), exclude=excluded, grad_scaler=GradScaler("cpu"))


def attached_now_and_then(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        case = small_problem(sharding="data_parallel,table_wise,data_parallel", world=2, steps=8, lr=0.1)
        plain, model = (sharded_model(case) for _ in range(2))
        handle = None
        for step in range(case.steps):
            if step in (1, 5):
                assert handle
                handle.remove()
            if step in (0, 3, 7):
                handle = attach_cowclip(model, CowClip(r=1e6, zeta=1e6))  # which clips no row
            for trained in (plain, model):
                optimizer = dense_optimizer(case, trained)
                optimizer.zero_grad()
                train_step(case, trained, step)
                optimizer.step()
        for table in ("t0", "t2"):
            path = f"c0.embedding_bags.{table}.weight"
            weight, expected = (trained.module.state_dict()[path] for trained in (model, plain))
            torch.testing.assert_close(weight, expected)
            first = weight.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, weight), "ranks hold different copies"


@pytest.mark.thorough
def test_replicated_tables_are_reduced_after_remove(tmp_path: Path) -> None:
    in_processes(attached_now_and_then, (str(tmp_path),), 2)


REFUSED_BY_ONE_RANK: dict[str, tuple[dict[str, Any], Any]] = {
    # The second rank has no table.
    "replay computes missed steps in float32": (
        ONE_TABLE | {"dtype": "float16"},
        lambda model: EmbeddingAdam(model, AdamConfig(absent_rows="replay")),
    ),
    "clip_columns of table 't0' must be in": (
        ONE_TABLE | {"max_ids": 1},
        lambda model: attach_cowclip(model, CowClip(), clip_columns=9, single_id_bags=True),
    ),
    "a rank holds no row of it": (
        ONE_TABLE | {"rows": (1,), "sharding": "row_wise"},
        lambda model: attach_cowclip(model, CowClip()),
    ),
}


def two_ranks(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        for message, (case, attach) in REFUSED_BY_ONE_RANK.items():
            refused(message, attach, sharded_model(small_problem(**case, world=2)))


def test_what_one_rank_refuses_all_ranks_refuse(tmp_path: Path) -> None:
    in_processes(two_ranks, (str(tmp_path),), 2)


TWO_LOOKUPS = small_problem(pooling="sum,mean")  # two lookups
ATTACH = {
    "sgd": lambda model: attach_cowclip(model, RULE),
    "lazy": lambda model: EmbeddingAdam(model, AdamConfig(), RULE),
    "replay": lambda model: EmbeddingAdam(model, AdamConfig(absent_rows="replay"), RULE),
}
by_optimizer = pytest.mark.parametrize("optimizer", ATTACH)


def attached(optimizer: str, passes: int, case: Problem = TWO_LOOKUPS) -> tuple[nn.Module, Any]:
    model = sharded_model(case)
    handle = ATTACH[optimizer](model)
    handle.accumulate(passes)
    return model, handle


def backward(model: nn.Module) -> None:
    """A pass of half of the first step's loss."""
    (model(batches_of(TWO_LOOKUPS)[0][0])[0] / 2).backward()


@by_optimizer
def test_tables_change_in_the_last_pass_alone(optimizer: str) -> None:
    """Loading a state drops what waits."""
    model, handle = attached(optimizer, 2)
    state, before = model.state_dict(), state_of(model)
    backward(model)
    assert_equal(state_of(model), before)
    with pytest.warns(RuntimeWarning, match="1 backward passes that waited for others were dropped"):
        model.load_state_dict(state)
    backward(model)
    assert_equal(state_of(model), before)
    backward(model)
    assert not np.array_equal(state_of(model)["c0.t0"], before["c0.t0"])
    handle.accumulate(1)  # none waits


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
                for tensor in (ids.values(), ids.offsets(), ids.weights_or_none()):
                    if tensor is not None:
                        tensor.zero_()
        trained.append(state_of(model))
    assert_equal(*trained)


class _AsView(torch.autograd.Function):
    """Returns its input as a view, as FBGEMM's lookups of a variable batch size do on CUDA."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.view(output.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def attached_outside_of_ddp(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        for optimizer in ("sgd", "lazy", "replay"):
            case = small_problem(sharding="data_parallel,table_wise", world=2, optimizer=optimizer, lr=0.1)
            states, wrapped = [], []
            for prepare in (leave_out_of_ddp, lambda _: None):
                model = sharded_model(case, prepare=prepare)
                wrapped.append(any(isinstance(lookup, DistributedDataParallel) for lookup in model.module.c0._lookups))
                ATTACH[optimizer](model)
                dense = dense_optimizer(case, model)
                for step in range(case.steps):
                    train_step(case, model, step)
                    dense.step()
                    dense.zero_grad()
                states.append(state_of(model))
            assert wrapped == [False, True]
            assert_equal(*states)


@pytest.mark.skipif(leave_out_of_ddp is None, reason="TorchRec before 1.9 wraps all data-parallel tables in DDP")
def test_tables_that_torchrec_leaves_out_of_ddp_train_as_those_in_it(tmp_path: Path) -> None:
    """Bit for bit, on both ranks. TorchRec itself means this for tables that are not trained."""
    in_processes(attached_outside_of_ddp, (str(tmp_path),), 2)


@by_optimizer
def test_an_interrupted_step_begins_anew(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    message = r"have 0 or 1: an exception .* call accumulate\(n\) again.* of the tables '"
    with pytest.raises(RuntimeError, match=message):
        backward(model)
    with pytest.warns(RuntimeWarning, match="1 backward passes that waited for others were dropped"):
        handle.accumulate(2)
    backward(model)
    backward(model)


@pytest.mark.parametrize("passes", [1, 2])
def test_outputs_that_are_views_are_clipped_too(passes: int) -> None:
    trained = []
    for is_view in (False, True):
        model = sharded_model(CASE)
        module: Any = ModelInventory(model).lookups[0].module
        if is_view:
            module.forward = lambda forward=module.forward, **inputs: _AsView.apply(forward(**inputs))
        attach_cowclip(model, RULE, verify=0).accumulate(passes)  # a check would wait for the lookup's own backward
        for _ in range(passes):
            model(batches_of(CASE)[0][0])[0].backward()
        trained.append(state_of(model))
    assert_equal(*trained)
