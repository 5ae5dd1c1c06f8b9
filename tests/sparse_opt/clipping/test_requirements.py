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
from random_problems.drawing import small_problem
from random_problems.training import batch_of, sharded_model, state_of, train_step

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
ONE_TABLE: dict[str, Any] = {"rows": (40,), "features": (("a",),)}
CASE = small_problem(**ONE_TABLE, max_ids=1)
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}


attached_either_way = pytest.mark.parametrize(
    "attach", [attach_cowclip, lambda model, rule: EmbeddingAdam(model, AdamConfig(), rule)]
)


def model_with(**fused_params: Any) -> Any:
    return sharded_model(CASE, fused_params={**SGD, **fused_params})


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
def test_a_variable_batch_of_tables_that_are_looked_up_separately_is_refused(attach: Any) -> None:
    case = small_problem(variable_batch=True, pooling="sum,mean")
    model = sharded_model(case)
    attach(model, CowClip())
    with pytest.raises(ValueError, match="variable batch size per feature, tables that are looked up separately"):
        train_step(case, model, 0)


@attached_either_way
def test_ids_that_are_deduplicated_before_the_lookup_are_refused(attach: Any) -> None:
    model = sharded_model(small_problem(sequence=True))
    model.module.c0._use_index_dedup = True  # of EmbeddingCollectionSharder, whose operator exists on CUDA alone
    with pytest.raises(ValueError, match=r"table 't0' cannot be clipped: TorchRec deduplicates .* use_index_dedup"):
        attach(model, CowClip())


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


def refused(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        for message, (case, attach) in REFUSED_BY_ONE_RANK.items():
            model = sharded_model(small_problem(**case, world=2))
            with pytest.raises(ValueError, match=message):
                attach(model)


def test_what_one_rank_refuses_all_ranks_refuse(tmp_path: Path) -> None:
    in_processes(refused, (str(tmp_path),), 2)
