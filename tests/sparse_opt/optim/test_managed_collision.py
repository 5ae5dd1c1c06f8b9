"""TorchRec's managed collision under EmbeddingAdam: rows of new ids start without the state of the old ones."""

import tempfile
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam
from process_groups import process_group

ROWS, DIM, CPU = 16, 4, torch.device("cpu")


def sharded() -> DistributedModelParallel:
    table = EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"])
    remapped = MCHManagedCollisionModule(
        zch_size=ROWS, device=CPU, input_hash_size=4000, eviction_interval=2, eviction_policy=LFU_EvictionPolicy()
    )
    model = torch.nn.Sequential()
    model.mc = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=[table], device=torch.device("meta")),
        ManagedCollisionCollection({"t": remapped}, [table]),
    )
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1})
    )
    plan = construct_module_sharding_plan(
        model.mc,
        {"t": row_wise(compute_kernel="fused")},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    return DistributedModelParallel(model, device=CPU, plan=ShardingPlan({"mc": plan}), sharders=[sharder])


@pytest.mark.parametrize("absent_rows", ["lazy", "replay"])
def test_evicted_rows_lose_their_moments(absent_rows: str) -> None:
    """Their moments are zero when TorchRec has evicted them, and the others' are as they were."""
    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, folder):
        model = sharded()
        optimizer = EmbeddingAdam(model, AdamConfig(lr=0.1, absent_rows=absent_rows), CowClip())
        (adam,), collection, evicted = optimizer.lookups, model.module.mc, []
        evict = collection._evict

        def watched(rows: dict[str, Tensor | None]) -> Any:
            before = adam.exp_avg.view(ROWS, DIM).clone()
            evict(rows)
            gone = torch.zeros(ROWS, dtype=torch.bool)
            gone[torch.cat([each for each in rows.values() if each is not None] or [torch.arange(0)])] = True
            assert torch.equal(adam.exp_avg.view(ROWS, DIM), before.where(~gone[:, None], 0))
            assert not adam.exp_avg_sq.view(ROWS, DIM)[gone].any()
            assert not adam.replays or (adam.last_step[gone] == adam.step).all()
            evicted.append(int((gone & before.any(1)).sum()))

        collection._evict = watched
        for step in range(40):
            ids = 40 * step + torch.randint(12, (12,), generator=torch.Generator().manual_seed(step))
            looked_up, _ = collection(KeyedJaggedTensor(["f"], ids, lengths=torch.ones(12, dtype=torch.int64)))
            looked_up.wait().values().sum().backward()
        assert sum(evicted) > 10
        optimizer.remove()
        assert "reset_embedding_weight_momentum" not in vars(adam.lookup.module)
