"""Fused settings and data types under which the clip or L2 would silently be wrong."""

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv2D
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip
from process_groups import in_processes, process_group
from sharded_case import Case, gather_tables, sharded_model, train_step

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
CASE = Case(rows=(40,), features=(("a",),), max_ids=1)
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}


attached_either_way = pytest.mark.parametrize(
    "attach", [attach_cowclip, lambda model, rule: EmbeddingAdam(model, AdamConfig(), rule)]
)


def model_with(dtype: torch.dtype = torch.float32, **fused_params: Any) -> Any:
    return sharded_model(CASE, CASE.draw()["tables"], dtype, fused_params={**SGD, **fused_params})


@attached_either_way
def test_gradient_clipping_by_fbgemm_is_refused(attach: Any) -> None:
    model = model_with(gradient_clipping=True, max_gradient=0.5)
    with pytest.raises(ValueError, match=r"'t0' is under FBGEMM's gradient_clipping.* to 0.5 after"):
        attach(model, CowClip())


@attached_either_way
def test_2d_parallelism_is_refused(attach: Any) -> None:
    """DMPCollection itself needs CUDA; what it gives its collections is a ShardingEnv2D."""
    groups = [
        name for name in signature(ShardingEnv2D).parameters if name.endswith("_pg")
    ]  # not the same in all versions
    env = ShardingEnv2D(**dict.fromkeys(groups, dist.group.WORLD), device_mesh=DeviceMesh("cpu", [[0]]))
    collection = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t0", feature_names=["a"])], device="meta")
    sharder = EmbeddingBagCollectionSharder(fused_params=SGD)
    plan = construct_module_sharding_plan(
        collection, {"t0": table_wise(rank=0, compute_kernel="fused")}, sharder, 1, 1, device_type="cpu"
    )
    sharded = sharder.shard(collection, plan, env, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"'t0' is under 2D parallelism \(DMPCollection\).* own share of the batch"):
        attach(sharded, CowClip())


@pytest.mark.parametrize(
    ("lr_factors", "message"),
    [
        ({"t9": 2.0}, "lr_factors names table 't9', which the model does not have; did you mean 't0'"),
        ({"t0": -1.0}, "lr_factors of table 't0' must be at least 0 and finite, got -1.0"),
        ({"t0": 3.0}, "gives table 't0' the learning rate 0.3, whose product with weight_decay = 5 must be at most 1"),
    ],
)
def test_rates_of_tables_that_make_no_sense_are_refused(lr_factors: dict[str, float], message: str) -> None:
    config = AdamConfig(lr=0.1, weight_decay=5.0)
    with pytest.raises(ValueError, match=message):
        EmbeddingAdam(model_with(), config, lr_factors=lr_factors)


@pytest.mark.parametrize("output", [SparseType.FP16, SparseType.BF16])
def test_l2_in_output_gradients_of_half_precision_is_refused(output: SparseType) -> None:
    model = model_with(output_dtype=output)
    with pytest.raises(ValueError, match=r"'t0' has outputs in half precision.*set output_dtype to float32"):
        attach_cowclip(model, CowClip(), single_id_bags=True, l2=1e-5)
    attach_cowclip(model, CowClip(), single_id_bags=True)


def test_a_small_l2_moves_rows_of_float16_tables() -> None:
    """Against a loop that rounds the weights in each step; 2 * l2 * w itself underflows in float16."""
    config = AdamConfig(lr=1e-4, l2=1e-6, eps=1e-9, absent_rows="dense")
    model = model_with(torch.float16)
    EmbeddingAdam(model, config)
    (before,) = gather_tables(CASE, model)
    expected = torch.from_numpy(before).half()
    first, second = torch.zeros(expected.shape), torch.zeros(expected.shape)
    nothing = {"a": [(np.empty(0, np.int64), np.empty(0, np.float32))] * CASE.batch}
    targets = CASE.draw()["steps"][0][1]
    for step in range(1, 6):
        train_step(CASE, model, nothing, targets, 0, CASE.batch)
        grad = 2 * config.l2 * expected.float()
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        moved = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + config.eps)
        expected = (expected.float() - config.lr * moved).half()
    (got,) = gather_tables(CASE, model)
    small = abs(before) > 1e-3
    assert (got != before)[small & (abs(before) < 2e-2)].mean() > 0.9
    np.testing.assert_allclose(got, expected.float().numpy(), rtol=2e-3, atol=1e-7)


@attached_either_way
def test_a_variable_batch_of_tables_that_are_looked_up_separately_is_refused(attach: Any) -> None:
    case = Case(variable_batch=True, pooling="sum,mean")
    model = sharded_model(case, case.draw()["tables"])
    attach(model, CowClip())
    with pytest.raises(ValueError, match="variable batch size per feature, tables that are looked up separately"):
        train_step(case, model, *case.draw()["steps"][0], 0, case.batch)


@attached_either_way
def test_ids_that_are_deduplicated_before_the_lookup_are_refused(attach: Any) -> None:
    case = Case(sequence=True)
    model = sharded_model(case, case.draw()["tables"])
    model.module["ebc"]._use_index_dedup = True  # of EmbeddingCollectionSharder, whose operator exists on CUDA alone
    with pytest.raises(ValueError, match=r"table 't0' cannot be clipped: TorchRec deduplicates .* use_index_dedup"):
        attach(model, CowClip())


REFUSED_BY_ONE_RANK: dict[str, tuple[Case, torch.dtype, Any]] = {
    "replay computes missed steps in float32": (
        Case(rows=(40,), features=(("a",),)),  # the second rank has no table
        torch.float16,
        lambda model: EmbeddingAdam(model, AdamConfig(absent_rows="replay")),
    ),
    "clip_columns of table 't0' must be in": (
        Case(rows=(40,), features=(("a",),), max_ids=1),
        torch.float32,
        lambda model: attach_cowclip(model, CowClip(), clip_columns=9, single_id_bags=True),
    ),
    "a rank holds no row of it": (
        Case(rows=(1,), features=(("a",),), sharding="row_wise"),
        torch.float32,
        lambda model: attach_cowclip(model, CowClip()),
    ),
}


def refused(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        for message, (case, dtype, attach) in REFUSED_BY_ONE_RANK.items():
            model = sharded_model(case, case.draw()["tables"], dtype)
            with pytest.raises(ValueError, match=message):
                attach(model)


def test_what_one_rank_refuses_all_ranks_refuse(tmp_path: Path) -> None:
    in_processes(refused, (str(tmp_path),), 2)
