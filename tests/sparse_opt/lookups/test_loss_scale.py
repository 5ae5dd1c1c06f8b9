"""Losses scaled by torch's GradScaler: the same weights as without a scale, also after gradients that overflow."""

import gc
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch import nn
from torch.amp import GradScaler
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, FieldClip, attach_cowclip
from process_groups import in_processes, process_group
from random_problems.drawing import Problem, small_problem
from random_problems.training import assert_equal, batch_of, dense_optimizer, sharded_model, state_of

pytest_plugins = ["one_group"]
RULE = CowClip(r=1.0, zeta=1e-3)
SINGLE: dict[str, Any] = {"max_ids": 1, "single_id_bags": True, "l2": 3e-3}
CASES = {
    "bags": small_problem(weighted=True),
    "rowwise_adagrad": small_problem(optimizer="rowwise_adagrad", pooling="mean"),
    "single ids with L2": small_problem(**SINGLE),
    "column-wise": small_problem(sharding="column_wise"),
    "sequences": small_problem(sequence=True, weighted=True),
    "data-parallel": small_problem(sharding="data_parallel", l2=3e-3),
    "adam": small_problem(optimizer="replay"),
    "dense adam": small_problem(optimizer="dense"),
    "half outputs": small_problem(optimizer="half"),
    "half outputs under adam": small_problem(optimizer="half lazy"),
}


@pytest.fixture(autouse=True, scope="module")
def no_scaler_is_left() -> Iterator[None]:
    """Attached tables warn of every scaler in the process, those in cycles of finished tests included."""
    yield
    gc.collect()


def model_of(case: Problem) -> nn.Module:
    half = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1, "output_dtype": SparseType.FP16}
    return sharded_model(case, fused_params=half if case.optimizer.startswith("half") else None)


def attach(model: nn.Module, case: Problem, **more: Any) -> Any:
    kind = case.optimizer.split()[-1]
    more["exclude"] = [case.name(*place) for place in case.exclude]
    if kind in ("replay", "dense", "lazy"):
        return EmbeddingAdam(model, AdamConfig(lr=1e-2, l2=1e-3, absent_rows=kind), RULE, **more)
    rule = RULE if case.rule[0] == "none" else FieldClip(**case.rule[1])
    return attach_cowclip(model, rule, single_id_bags=case.single_id_bags, l2=case.l2, **more)


def scaled_step(model: nn.Module, case: Problem, step: int, scaler: GradScaler, kind: str = "") -> None:
    """The backward of a step of a case on this rank's samples.

    Under "overflow" a gradient of feature a is infinite on the first rank, under "zeros" the loss is 0.
    """
    drawn, rank, size = case.batches()[step], dist.get_rank(), case.batch // case.world
    if kind == "overflow" and rank == 0:
        bags = drawn[0]["a"]
        drawn[0]["target a"][next(sample for sample, (ids, _) in enumerate(bags) if len(ids)), 0] = np.inf
    batch = batch_of(case, drawn, rank * size, (rank + 1) * size)
    scaler.scale(model.module(batch)[0] * (kind != "zeros")).backward()


def dense_step(scaler: GradScaler, dense: torch.optim.Optimizer) -> None:
    scaler.step(dense)
    scaler.update()
    dense.zero_grad()


def trained(case: Problem, scale: float, kinds: Sequence[str] = ("", "", "")) -> dict[str, np.ndarray]:
    """Tables on the first rank, and moments, after training a case under a scale, 0 for none."""
    model = model_of(case)
    scaler = GradScaler("cpu", init_scale=scale or 1.0, enabled=scale > 0)
    attached = attach(model, case, grad_scaler=scaler)
    dense = dense_optimizer(case, model)
    for step, kind in enumerate(kinds):
        if kind != "left out":
            scaled_step(model, case, step, scaler, kind)
            if not isinstance(attached, EmbeddingAdam):
                dense_step(scaler, dense)
    return state_of(model, attached)


@pytest.mark.parametrize("name", CASES)
def test_weights_do_not_depend_on_the_scale(group: None, name: str) -> None:
    """Scales are powers of two, so that nothing is rounded in float32. In half precision the small gradients of the
    unscaled loss are, which is what scales are for; with the scale they follow float32 outputs."""
    case, tolerance = CASES[name], 0.0
    if name.startswith("half"):
        case, tolerance = small_problem(optimizer="sgd" if case.optimizer == "half" else "lazy"), 5e-3
    for unscaled, scaled in zip(trained(case, 0).values(), trained(CASES[name], 2.0**10).values(), strict=True):
        np.testing.assert_allclose(scaled, unscaled, rtol=tolerance, atol=tolerance * np.abs(unscaled).max())


@pytest.mark.parametrize("name", CASES)
def test_an_overflow_is_a_gradient_of_zeros(group: None, name: str) -> None:
    """Which leaves tables under SGD and Adagrad as they were, L2 included; Adam's momentum and L2 go on."""
    is_adam = CASES[name].optimizer.split()[-1] in ("replay", "dense", "lazy")
    zeros = trained(CASES[name], 2.0**10, ("", "zeros" if is_adam else "left out", ""))
    got = trained(CASES[name], 2.0**10, ("", "overflow", ""))
    assert_equal(got, zeros)
    assert all(np.isfinite(tensor).all() for tensor in got.values())


def test_trained_weights_of_ids_show_an_overflow_to_the_scaler(group: None) -> None:
    """Their own gradient is not finite, so that the scale is lowered and their optimizer skips the step."""
    case = CASES["bags"]
    for attached in (attach, lambda model, *_, **more: EmbeddingAdam(model, AdamConfig(lr=0.1), RULE, **more)):
        model, scaler = model_of(case), GradScaler("cpu", init_scale=2.0**10)
        attached(model, case, grad_scaler=scaler)
        collection = next(module for module in model.modules() if isinstance(module, ShardedEmbeddingBagCollection))
        keys = batch_of(case, case.batches()[0], 0, 1).ids[0].keys()
        for factor, finite in ((1.0, True), (torch.inf, False)):
            weights, ones = torch.rand(2 * len(keys), requires_grad=True), torch.ones(2 * len(keys), dtype=torch.int64)
            ids = KeyedJaggedTensor(keys, torch.zeros_like(ones), weights, ones)
            scaler.scale((collection(ids).wait().values() * factor).sum()).backward()
            assert weights.grad is not None
            assert bool(weights.grad.isfinite().all()) == finite


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
def test_an_overflow_in_one_of_several_passes_leaves_the_step_out(group: None, sharding: str) -> None:
    case = small_problem(sharding=sharding)
    model, scaler = sharded_model(case), GradScaler("cpu", init_scale=2.0**10)
    attach(model, case, grad_scaler=scaler).accumulate(2)
    dense = dense_optimizer(case, model)
    for kinds in (("overflow", ""), ("", "overflow"), ("", "")):
        before = state_of(model)
        for kind in kinds:
            scaled_step(model, case, 0, scaler, kind)
        dense_step(scaler, dense)
        for key, got in state_of(model).items():
            assert np.array_equal(got, before[key]) == ("overflow" in kinds)


ALL = ((0, 0), (0, 1), (0, 2))
OF_TWO = [
    small_problem(world=2, sharding="row_wise", rule=("field", {"max_norm": 0.1})),
    small_problem(world=2, sharding="row_wise"),
    small_problem(world=2, sharding="column_wise"),
    small_problem(world=2, sharding="column_wise", optimizer="lazy"),
    small_problem(world=2, sharding="column_wise", exclude=ALL),
    small_problem(world=2, sharding="column_wise", exclude=ALL, optimizer="lazy"),
    small_problem(
        world=2, sharding="column_wise,row_wise", exclude=(ALL[0], ALL[2]), rule=("field", {"max_norm": 0.1})
    ),
    small_problem(world=2, sharding="data_parallel"),
    small_problem(world=2, sharding="data_parallel", optimizer="lazy"),
    small_problem(world=2, sharding="data_parallel", optimizer="replay"),
]


def two_ranks(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        for case in OF_TWO:
            kinds = ("", "zeros", ""), ("", "overflow", "")
            zeros, overflow = (trained(case, 2.0**10, kind) for kind in kinds)
            own = tuple(f"c0.t{t}" for _, t in case.exclude or ALL)  # looked up together
            assert_equal(*({key: state[key] for key in state if key.startswith(own)} for state in (overflow, zeros)))


def test_an_overflow_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    """The output gradients of row-wise shards have all ranks' samples; copies of data-parallel tables stay equal, and
    the columns of a row move together, with a limit and without."""
    in_processes(two_ranks, (str(tmp_path),), 2)


def first_backward(scaler: GradScaler, **told: Any) -> list[str]:
    """Warnings of the first two steps of a case under a scaler, by attach_cowclip and by EmbeddingAdam."""
    case = CASES["bags"]
    model, found = sharded_model(case), []
    for make in (attach, lambda *_, **more: EmbeddingAdam(model, AdamConfig(lr=0.1), **more)):
        attached = make(model, case, **told)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                scaled_step(model, case, step, scaler)
        attached.remove()
        found += [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    return found


def test_an_unnamed_scaler_is_reported_once(group: None) -> None:
    scaler = GradScaler("cpu", init_scale=512.0)
    messages = first_backward(scaler)
    assert len(messages) == 2
    assert all(
        "a GradScaler with scale 512 is in use" in message and "grad_scaler=scaler" in message for message in messages
    )
    assert not first_backward(scaler, grad_scaler=scaler)
    assert not first_backward(scaler, grad_scaler=GradScaler("cpu", enabled=False))
    del scaler
    assert not first_backward(GradScaler("cpu", enabled=False))


@pytest.mark.parametrize(
    "case", [small_problem(optimizer="half", **settings) for settings in (SINGLE, {"sequence": True})]
)
def test_half_precision_outputs_that_would_hold_unscaled_gradients_are_refused(group: None, case: Problem) -> None:
    model = model_of(case)
    single = {"single_id_bags": case.single_id_bags}
    with pytest.raises(ValueError, match=r"'t0' has outputs in half precision.*cannot hold that of the unscaled loss"):
        attach_cowclip(model, RULE, **single, grad_scaler=GradScaler("cpu"))
    attach_cowclip(model, RULE, **single, grad_scaler=GradScaler("cpu", enabled=False)).remove()
