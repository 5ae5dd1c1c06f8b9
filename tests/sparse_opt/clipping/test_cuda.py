"""CowClip under FBGEMM's fused optimizers and EmbeddingAdam on CUDA equal plain loops, as they do on CPU."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, NoClip, attach_cowclip
from cowrec.trainer.sharded_model.build import set_product_precision
from process_groups import process_group
from random_problems.drawing import ADAM, Collection, Problem, Table, small_problem
from random_problems.training import assert_equal, assert_solved, batches_of, sharded_model, state_of, train, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.usefixtures("group"),
]
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.cuda.set_device(CUDA)
    with process_group(0, 1, str(tmp_path_factory.mktemp("group")), backend="nccl"):
        yield


TABLES = (Table(40, 8, ("a",)), Table(7, 8, ("b",)), Table(300, 8, ("c", "d")))
IDS = Collection(TABLES, weighted=True)
SINGLE = Collection(TABLES, max_ids=1)
MEANS = tuple(replace(table, pooling="mean") for table in TABLES)
SPLIT = replace(TABLES[2], plan="column_wise", shards=((0, 4), (0, 4)))
OTHER_PLANS = (replace(TABLES[0], plan="row_wise"), replace(TABLES[1], plan="data_parallel"), SPLIT)
KINDS: dict[str, dict[str, Any]] = {
    "weights": {"collections": (IDS,)},
    "mean": {"collections": (Collection(MEANS),)},
    "no ids in every other step": {"collections": (IDS,), "idle": (0,)},
    "sequences": {"collections": (replace(IDS, sequence=True),)},
    "a variable batch size": {"collections": (Collection(TABLES, variable_batch=True),)},
    "several passes": {"collections": (IDS,), "passes": 4},
    "leading columns and L2": {"collections": (SINGLE,), "single_id_bags": True, "l2": 3e-3, "clip_columns": 5},
    "an excluded table": {"collections": (IDS,), "exclude": ((0, 2),)},
    "a rule for tables": {"collections": (IDS,), "rule": ("field", {"max_norm": 0.3})},
    "column shards": {"collections": (Collection((*TABLES[:2], SPLIT)),)},
    "rows of many ids": {"collections": (Collection((Table(1, 4, ("a",)), Table(3, 12, ("b",)))),), "pass_size": 256},
    "several plans": {"collections": (Collection(OTHER_PLANS),)},
}


OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "lazy", "replay")
ABSENT = ("a variable batch size", "adagrad")  # FBGEMM has no such lookup
PAIRS = [pair for pair in product(KINDS, OPTIMIZERS) if pair != ABSENT]


@pytest.mark.parametrize(("kind", "optimizer"), PAIRS)
def test_equals_plain_loops(kind: str, optimizer: str) -> None:
    settings = {"rule": ("cowclip", {"r": 1.0, "zeta": 1e-3}), "steps": 3, "pass_size": 16} | KINDS[kind]
    if optimizer in ADAM:
        settings |= {"lr": 1e-2, "eps": 1e-6, "l2": 1e-3, "single_id_bags": False}
    problem = Problem(optimizer=optimizer, **settings)
    assert_solved(problem, [train(problem, CUDA)])


def test_embedding_adam_equals_fbgemms_adam() -> None:
    """Both update the batch's rows only, correct the bias by step, and add epsilon to the same root."""
    case = small_problem(weighted=True, optimizer="fbgemm_adam", steps=5, lr=1e-2)
    fused = sharded_model(case, CUDA)
    attach_cowclip(fused, NoClip())
    ours = sharded_model(replace(case, optimizer="sgd"), CUDA)
    EmbeddingAdam(ours, AdamConfig(lr=1e-2, eps=1e-8))
    for step in range(case.steps):
        for model in (fused, ours):
            train_step(case, model, step)
    for expected, got in zip(state_of(fused).values(), state_of(ours).values(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("absent_rows", ["replay", "lazy"])
def test_a_step_never_waits_for_the_device(absent_rows: str) -> None:
    """Runs lookup, replay, clip and update after two steps that compile kernels and determine the ids' lengths.

    TorchRec's distribution of the ids, which copies their new order to the device, comes before.
    """
    case = small_problem()
    model = sharded_model(case, CUDA)
    optimizer = EmbeddingAdam(model, AdamConfig(lr=1e-3, l2=1e-4, absent_rows=absent_rows), CowClip())
    collection, ids = model.module.c0, batches_of(case)[0][0].ids0.to(CUDA)
    context = collection.create_context()
    distributed = collection.input_dist(context, ids).wait().wait()

    def step() -> None:
        collection.compute_and_output_dist(context, distributed).wait().values().mean().backward()

    step()
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.steps == 3


def test_tf32_rounds_products_and_float32_does_not() -> None:
    """1 + 2^-12 has 12 bits after the point; TF32 keeps 10 of a factor, so its product with 1 rounds to 1."""
    x = torch.full((256, 256), 1 + 2.0**-12, device=CUDA)
    eye = torch.eye(256, device=CUDA)
    try:
        set_product_precision("tf32", CUDA)
        assert (x @ eye == 1).all()
    finally:
        set_product_precision("float32", CUDA)
    assert torch.equal(x @ eye, x)


@pytest.mark.parametrize("absent_rows", ["replay", "lazy"])
def test_tables_in_unified_memory_train_like_those_on_the_device(absent_rows: str) -> None:
    """The moments are in unified memory too."""
    trained = []
    for sharding in ("uvm", "table_wise"):
        case = small_problem(sharding=sharding)
        model = sharded_model(case, CUDA)
        optimizer = EmbeddingAdam(model, AdamConfig(lr=1e-3, l2=1e-4, absent_rows=absent_rows), CowClip())
        for step in range(case.steps):
            train_step(case, model, step)
        optimizer.flush()
        flats = [moment for adam in optimizer.lookups for moment in (adam.exp_avg, adam.exp_avg_sq)]
        assert all(torch.ops.fbgemm.is_uvm_tensor(flat) == (sharding != "table_wise") for flat in flats)
        trained.append(state_of(model))
    assert_equal(*trained)


def test_rows_behind_fbgemms_cache_are_refused() -> None:
    model = sharded_model(small_problem(weighted=True, sharding="cached"), CUDA)
    for attach in (attach_cowclip, EmbeddingAdam):
        with pytest.raises(ValueError, match="behind a cache of FBGEMM"):
            attach(model, CowClip() if attach is attach_cowclip else AdamConfig())
