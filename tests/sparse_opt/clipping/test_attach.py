"""CowClip under stock fused optimizers, and EmbeddingAdam, equal plain loops in one and in two processes."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from cowrec.sparse_opt import (
    AdamConfig,
    ConstantClip,
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
    process_group,
    row_gradients,
    run_in_processes,
    sharded_model,
    train_step,
)

RULE = CowClip(r=1.0, zeta=1e-3)
ADAM = {
    "adam": AdamConfig(lr=1e-2, l2=1e-3, eps=1e-6),
    "keras_adam": AdamConfig(lr=1e-2, l2=1e-3, eps=1e-6, adam_epsilon="keras"),
    "dense": AdamConfig(lr=1e-2, l2=1e-3, eps=1e-6, absent_rows="dense"),
    "replay": AdamConfig(lr=1e-2, l2=1e-3, eps=1e-6, absent_rows="replay"),
}
# Relative to the row. Adagrad and Adam divide each element by a root of its squares, which magnifies the float32
# rounding of sums whose terms nearly cancel (seen: 1.9e-6 for FBGEMM's Adagrad, 8.7e-6 for Adam's torch form).
TOLERANCE = {"adagrad": 5e-6} | dict.fromkeys(ADAM, 1e-5)


def attach(model: nn.Module, case: Case) -> Any:
    if case.optimizer in ADAM:
        return EmbeddingAdam(model, ADAM[case.optimizer], RULE, **case.extra)
    return attach_cowclip(model, RULE, **case.extra)


def lookups_of(attached: Any) -> list[ClippedLookup]:
    adams = attached.lookups if isinstance(attached, EmbeddingAdam) else None
    return attached._lookups if adams is None else [adam.clipped for adam in adams]


def clip_in_loops(grads: np.ndarray, weights: np.ndarray, counts: np.ndarray, columns: int) -> None:
    for row in np.flatnonzero(counts):
        limit = counts[row] * max(RULE.r * np.linalg.norm(weights[row, :columns]), RULE.zeta)
        norm = np.linalg.norm(grads[row, :columns])
        if norm > limit:
            grads[row, :columns] *= limit / norm


def train_in_loops(case: Case) -> list[np.ndarray]:
    """Trains the case in float64, row by row, from the published formulas."""
    drawn = case.draw()
    tables = [table.astype(np.float64) for table in drawn["tables"]]
    state = [(np.zeros_like(table), np.zeros_like(table)) for table in tables]
    for step, (bags, targets) in enumerate(drawn["steps"], start=1):
        for t, weights in enumerate(tables):
            grads, counts = row_gradients(case, bags, targets, t)
            adam = ADAM.get(case.optimizer)
            if adam and adam.absent_rows != "lazy":  # moves all rows, each at least under the limit of one occurrence
                counts = np.maximum(counts, 1)
            present = counts > 0
            grads[present] += 2 * (adam.l2 if adam else case.extra.get("l2", 0)) * weights[present]
            clip_in_loops(grads, weights, counts, case.extra.get("clip_columns", case.dim))
            first, second = state[t]
            if case.optimizer == "sgd":
                weights -= case.lr * grads
            elif adam:
                b1, b2 = adam.betas
                first[present] = b1 * first[present] + (1 - b1) * grads[present]
                second[present] = b2 * second[present] + (1 - b2) * grads[present] ** 2
                if adam.adam_epsilon == "keras":
                    size = adam.lr * np.sqrt(1 - b2**step) / (1 - b1**step)
                    moved = size * first / (np.sqrt(second) + adam.eps)
                else:
                    moved = adam.lr * (first / (1 - b1**step)) / (np.sqrt(second / (1 - b2**step)) + adam.eps)
                weights[present] -= moved[present]
            else:
                first += grads**2 if case.optimizer == "adagrad" else (grads**2).mean(1, keepdims=True)
                weights -= case.lr * grads / (np.sqrt(first) + 1e-8)
    return tables


def assert_follows_loops(case: Case, tables: list[np.ndarray]) -> None:
    for got, expected, start in zip(tables, train_in_loops(case), case.draw()["tables"], strict=True):
        # Relative to the larger of the row before and after, since a step may bring a weight near zero.
        scale = np.maximum(np.abs(expected), np.abs(start)).max(1, keepdims=True) + 1e-6
        error = float((np.abs(got - expected) / scale).max())
        assert error <= TOLERANCE.get(case.optimizer, 1e-6), case


KINDS: dict[str, dict[str, Any]] = {
    "one id": {"max_ids": 1},
    "several and repeated ids, empty bags, a shared table": {},
    "weights": {"weighted": True},
    "mean": {"pooling": "mean"},
    "no ids in half of the batch": {"empty_half": True},
    "only the leading columns": {"max_ids": 1, "extra": {"clip_columns": 5, "single_id_bags": True}},
    "sequences": {"sequence": True, "weighted": True},
    "a variable batch size": {"variable_batch": True},
    "four passes for a step": {"weighted": True, "passes": 4},
    "two passes for a step, sequences": {"sequence": True, "passes": 2},
    "L2": {"max_ids": 1, "extra": {"clip_columns": 5, "single_id_bags": True, "l2": 3e-3}},
}
OPTIMIZERS = ["sgd", "rowwise_adagrad", "adagrad", *ADAM]


def case_of(kind: str, optimizer: str, **more: Any) -> Case:
    case = Case(optimizer=optimizer, **KINDS[kind], **more)
    if optimizer in ADAM:  # needs no single_id_bags, and has its own L2
        case = replace(case, extra={key: case.extra[key] for key in case.extra.keys() - {"single_id_bags", "l2"}})
    return case


def pairs(*optimizers: str) -> list[tuple[str, str]]:
    """Each kind with two of the optimizers, and these in turn; the random problems draw all combinations."""
    in_turn = cycle(optimizers)
    found = [(kind, next(in_turn)) for kind in KINDS for _ in range(2)]
    return [pair for pair in found if pair != ("a variable batch size", "adagrad")]  # FBGEMM has no such lookup


def test_two_processes_equal_plain_loops_and_one_process() -> None:
    """Table-wise runs are bit-identical for one id or several, with and without weights."""
    cases = [
        case_of(kind, optimizer, sharding=("table_wise", "row_wise")[number % 2])
        for number, (kind, optimizer) in enumerate(pairs("sgd", "rowwise_adagrad", "adam"))
    ]
    cases += [Case(optimizer=name, rows=(40,), features=(("a",),)) for name in ("sgd", "adam")]  # rank 1: no table
    alone = run_in_processes([(case, attach) for case in cases], 1)
    for case, tables, expected in zip(
        cases, run_in_processes([(case, attach) for case in cases], 2), alone, strict=True
    ):
        assert_follows_loops(case, tables)
        for got, table in zip(tables, expected, strict=True):
            if case.sharding == "table_wise" and case.passes == 1:  # or the order of the ranks' ids differs
                np.testing.assert_array_equal(got, table)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(0, 1, str(tmp_path_factory.mktemp("group"))):
        yield


def one_step(case: Case, model: nn.Module) -> None:
    bags, targets = case.draw()["steps"][0]
    train_step(case, model, bags, targets, 0, case.batch)


@pytest.mark.usefixtures("group")
class TestHandle:
    def test_stats_count_rows_and_clips(self) -> None:
        case = Case(steps=1)
        drawn = case.draw()
        model = sharded_model(case, drawn["tables"])
        handle = attach_cowclip(model, RULE)
        before = handle.stats()["t0"]
        assert (before.rows, before.clipped) == (0, 0.0)
        assert np.isnan(before.median_ratio)
        one_step(case, model)
        bags, targets = drawn["steps"][0]
        for t, stats in enumerate(handle.stats().values()):
            grads, counts = row_gradients(case, bags, targets, t)
            present = counts > 0
            norms = np.linalg.norm(drawn["tables"][t][present].astype(np.float64), axis=1)
            ratios = np.linalg.norm(grads[present], axis=1) / (counts[present] * np.maximum(norms, RULE.zeta))
            assert stats.rows == present.sum()
            assert stats.clipped == pytest.approx((ratios > 1).mean())
            assert stats.median_ratio == pytest.approx(np.sort(ratios)[(len(ratios) - 1) // 2], rel=1e-5)

    @pytest.mark.parametrize("pooling", ["sum", "mean"])
    def test_remove_restores_the_model(self, pooling: str) -> None:
        case = Case(steps=1, pooling=pooling)
        plain, removed = (sharded_model(case, case.draw()["tables"]) for _ in range(2))
        handle = attach_cowclip(removed, RULE)
        handle.remove()
        handle.remove()
        for model in (plain, removed):
            one_step(case, model)
        for expected, got in zip(gather_tables(case, plain), gather_tables(case, removed), strict=True):
            np.testing.assert_array_equal(got, expected)
        attach_cowclip(removed, RULE).remove()

    def test_no_rule_has_no_effect_and_evaluation_is_unchanged(self) -> None:
        case = Case(steps=1, max_ids=1)
        plain, attached = (sharded_model(case, case.draw()["tables"]) for _ in range(2))
        handle = attach_cowclip(attached, NoClip())
        with torch.no_grad():
            bags, _ = case.draw()["steps"][0]
            pooled = [m.module["ebc"](batch_of(case, bags, 0, 8)).wait().values() for m in (plain, attached)]
        assert torch.equal(*pooled)
        assert handle.stats()["t0"].rows == 0
        for model in (plain, attached):
            one_step(case, model)
        for expected, got in zip(gather_tables(case, plain), gather_tables(case, attached), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-9)

    def test_excluded_tables_are_not_clipped(self) -> None:
        case = Case(steps=1)
        plain, attached = (sharded_model(case, case.draw()["tables"]) for _ in range(2))
        attach_cowclip(attached, RULE, exclude=["t2"])
        for model in (plain, attached):
            one_step(case, model)
        tables = list(zip(gather_tables(case, plain), gather_tables(case, attached), strict=True))
        np.testing.assert_allclose(*tables[2], rtol=1e-6, atol=1e-9)
        assert not np.allclose(*tables[0])

    def test_user_weights_are_not_changed(self) -> None:
        case = Case(steps=1, weighted=True)
        model = sharded_model(case, case.draw()["tables"])
        attach_cowclip(model, RULE)
        bags, targets = case.draw()["steps"][0]
        batch = batch_of(case, bags, 0, case.batch)
        kept = batch.weights().clone()
        pooled = model.module["ebc"](batch).wait().to_dict()
        sum((pooled[key] * torch.from_numpy(targets[key])).sum() for key in case.keys).backward()
        assert torch.equal(batch.weights(), kept)


@pytest.mark.usefixtures("group")
class TestBackEnds:
    """Kernels of numba, and torch, which also runs where rows are in half precision or not complete."""

    @pytest.mark.parametrize(("kind", "optimizer"), pairs(*OPTIMIZERS))
    def test_equal_plain_loops(self, kind: str, optimizer: str) -> None:
        case, stats = case_of(kind, optimizer), []
        for in_torch in (False, True):
            model = sharded_model(case, case.draw()["tables"])
            handle = attach(model, case)
            for each in lookups_of(handle) if in_torch else ():
                each.rows = each.in_torch
            handle.accumulate(case.passes)
            for bags, targets in case.draw()["steps"]:
                train_step(case, model, bags, targets, 0, case.batch)
            assert_follows_loops(case, gather_tables(case, model))
            stats.append(handle.stats())
        for compiled, in_torch in zip(*(each.values() for each in stats), strict=True):
            assert (in_torch.rows, in_torch.clipped) == (compiled.rows, compiled.clipped)
            assert in_torch.median_ratio == pytest.approx(compiled.median_ratio, rel=1e-4)

    @pytest.mark.parametrize("optimizer", ["sgd", "adam"])
    def test_half_precision_tables(self, optimizer: str) -> None:
        """Trains in float16; FBGEMM supports bfloat16 tables on CUDA only."""
        case, dtype = Case(steps=1, optimizer=optimizer, weight_scale=0.5), torch.float16
        model = sharded_model(case, case.draw()["tables"], dtype=dtype)
        attach(model, case)
        one_step(case, model)
        for got, expected in zip(gather_tables(case, model), train_in_loops(case), strict=True):
            assert np.isfinite(got).all()
            eps = torch.finfo(dtype).eps
            np.testing.assert_allclose(got, expected, rtol=0, atol=4 * eps * (1 + np.abs(expected).max()))

    def test_an_id_outside_its_table_is_named(self) -> None:
        case = Case(steps=1, max_ids=1)
        model = sharded_model(case, case.draw()["tables"])
        clipped = ClippedLookup(find_lookups(model)[0][0], TableRules(RULE), {})
        bags = clipped.bags.of({"indices": torch.tensor([0, 99, 0, 0]), "offsets": torch.arange(5)})
        with pytest.raises(ValueError, match=r"id 99 is outside table 't1', which holds 7 rows here"):
            clipped.rows.id_factors(LookupBackward(bags, None, torch.ones(1, 32)))


@pytest.mark.usefixtures("group")
class TestRefusals:
    def check(self, message: str, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=message):
            attach_cowclip(model, *(args or (RULE,)), **kwargs)

    def model(self, **kwargs: Any) -> nn.Module:
        case = Case(**kwargs)
        return sharded_model(case, case.draw()["tables"])

    def test_without_tables(self) -> None:
        self.check("Linear holds no TorchRec embedding tables", nn.Linear(2, 2))

    def test_unsharded(self) -> None:
        table = EmbeddingBagConfig(name="x", embedding_dim=4, num_embeddings=5, feature_names=["f"])
        self.check("table 'x' cannot be clipped: .*is not sharded", EmbeddingBagCollection(tables=[table]))

    def test_data_parallel_tables(self) -> None:
        model = self.model(sharding="data_parallel")
        with pytest.raises(ValueError, match="needs the norm over all tables, but 't0' is data-parallel"):
            EmbeddingAdam(model, ADAM["adam"], GlobalClip(1.0))

    def test_column_wise_tables(self) -> None:
        model = self.model(sharding="column_wise")
        self.check("needs the norm of the complete table 't0', which is sharded column-wise", model, FieldClip(1.0))
        replay = AdamConfig(l2=0.3, absent_rows="replay")
        with pytest.raises(ValueError, match=r"an absent row's L2 may exceed its limit alone .*; lower l2, shard"):
            EmbeddingAdam(model, replay, CowClip(r=0.5))
        EmbeddingAdam(model, replay, CowClip(r=1.0)).remove()
        EmbeddingAdam(model, replay).remove()

    def test_unknown_names(self) -> None:
        self.check(
            "exclude names table 't9', which the model does not have; did you mean", self.model(), exclude=["t9"]
        )
        self.check("clip_columns names table 'x'", self.model(), clip_columns={"x": 2}, single_id_bags=True)

    def test_columns(self) -> None:
        self.check(re.escape("clip_columns of table 't0' must be in [1, 8]"), self.model(), clip_columns=9,
                   single_id_bags=True)  # fmt: skip
        self.check("needs single_id_bags=True", self.model(), clip_columns=4)

    def test_twice(self) -> None:
        model = self.model()
        attach_cowclip(model, RULE)
        self.check("attached already", model)

    def test_single_id_bags_is_checked(self) -> None:
        for kind, message in ((Case(), "more than one id"), (Case(max_ids=1, weighted=True), "ids' weights")):
            model = sharded_model(kind, kind.draw()["tables"])
            attach_cowclip(model, RULE, single_id_bags=True)
            with pytest.raises(ValueError, match=message):
                one_step(kind, model)

    def test_adam_over_another_optimizer(self) -> None:
        with pytest.raises(ValueError, match=r"under fused .*ROWWISE_ADAGRAD.*EXACT_SGD"):
            EmbeddingAdam(self.model(optimizer="rowwise_adagrad"), ADAM["adam"])

    @pytest.mark.parametrize("change", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": 0.0}, {"l2": float("nan")}])
    def test_adam_settings(self, change: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=f"adam {next(iter(change))} is out of range"):
            AdamConfig(**change)


@pytest.mark.usefixtures("group")
def test_embedding_adam_equals_torch_sparse_adam() -> None:
    """Compares with torch's SparseAdam, which updates the batch's rows only and adds eps as Keras does."""
    case = Case(steps=5, optimizer="sgd")
    drawn = case.draw()
    model = sharded_model(case, drawn["tables"])
    EmbeddingAdam(model, AdamConfig(lr=1e-2, eps=1e-6, adam_epsilon="keras"))
    tables = [nn.Parameter(torch.from_numpy(table).double()) for table in drawn["tables"]]
    oracle = torch.optim.SparseAdam(tables, lr=1e-2, eps=1e-6)
    for bags, targets in drawn["steps"]:
        train_step(case, model, bags, targets, 0, case.batch)
        for t, table in enumerate(tables):
            grad = torch.from_numpy(row_gradients(case, bags, targets, t)[0])
            present = torch.from_numpy(np.flatnonzero(row_gradients(case, bags, targets, t)[1]))
            table.grad = torch.sparse_coo_tensor(present[None], grad[present], table.shape, check_invariants=True)
        oracle.step()
    for got, expected in zip(gather_tables(case, model), tables, strict=True):
        np.testing.assert_allclose(got, expected.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("group")
def test_constant_rule_bounds_every_row() -> None:
    case = Case(steps=1, lr=1.0)
    drawn = case.draw()
    model = sharded_model(case, drawn["tables"])
    attach_cowclip(model, ConstantClip(1e-3))
    one_step(case, model)
    for before, after in zip(drawn["tables"], gather_tables(case, model), strict=True):
        assert np.linalg.norm(after - before, axis=1).max() <= 1e-3 * (1 + 1e-5)
