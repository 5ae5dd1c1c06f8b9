"""Sharded networks equal the unsharded ones, and TorchRec's pipeline can trace them."""

from types import SimpleNamespace

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch
from cowrec.models import MODELS, ModelConfig, build_model, l2_kernels, physical_dim
from history_cases import OF_HISTORIES
from random_problems.training import set_to
from tiers import tiered

pytest_plugins = ["one_group"]

ROWS = {"C1": 40, "C2": 7, "C3": 25, "C4": 12}
DIM, NUM_DENSE, BATCH = 4, 2, 10
CPU = torch.device("cpu")
HISTORY = SimpleNamespace(keys=("C2", "C3"), shares="C1", along="")


class Training(nn.Module):
    """The module that a training loop passes to the pipeline; returns (loss, output)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.network(batch.dense, batch.sparse)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.label), logits


def samples(seed: int, size: int = BATCH) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(0, rows, (size,), generator=generator) for rows in ROWS.values()])
    sparse = KeyedJaggedTensor(keys=list(ROWS), values=ids, lengths=torch.ones(len(ids), dtype=torch.int64))
    label = torch.randint(0, 2, (size,), generator=generator).float()
    return Batch(torch.rand(size, NUM_DENSE, generator=generator), sparse, label)


def network(name: str, device: torch.device) -> nn.Module:
    torch.manual_seed(5)
    tables = [
        EmbeddingBagConfig(name=f"t_{key}", feature_names=[key], num_embeddings=rows, embedding_dim=physical_dim(DIM))
        for key, rows in ROWS.items()
    ]
    given = {"fields": ["C1", "history", "C4"], "sequences": {"history": HISTORY}} if name in OF_HISTORIES else {}
    config = ModelConfig(name=name, embedding_dim=DIM, hidden=(8, 8))
    return build_model(config, tables, NUM_DENSE, device=device, **given)


def shard(model: nn.Module) -> DistributedModelParallel:
    """Shards half of the tables row-wise and half table-wise, which changes the order of the looked-up columns."""
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.0})
    kinds = {
        f"t_{key}": row_wise(compute_kernel="fused") if i % 2 else table_wise(rank=0, compute_kernel="fused")
        for i, key in enumerate(reversed(ROWS))
    }
    plan = construct_module_sharding_plan(model.network.front.embeddings, kinds, sharder=sharder, device_type="cpu")
    plan = ShardingPlan(plan={"network.front.embeddings": plan})
    return DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])


def pair(name: str) -> tuple[Training, DistributedModelParallel]:
    plain = Training(network(name, CPU))
    sharded = shard(Training(network(name, torch.device("meta"))))
    state = sharded.state_dict()
    for key, value in plain.state_dict().items():
        set_to(state[key], value)
    return plain, sharded


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", tiered(MODELS, ("deepfm", "dcnmix", "dlrm", "din")))
def test_sharded_equals_unsharded_also_in_a_pipeline(name: str) -> None:
    """Additions after the lookup are the same, except for the matrix library's order; L2 finds the same kernels.

    A rank without samples takes part in the step; unsharded, TorchRec itself refuses an empty batch.
    """
    plain, sharded = pair(name)
    batch, empty = samples(0), samples(0, size=0)
    front = sharded.module.network.front
    assert list(front.embeddings(batch.sparse).keys()) != list(ROWS), "the plan does not permute the columns"
    dense = {key: parameter for key, parameter in sharded.module.named_parameters() if "front.embeddings" not in key}
    logits = sharded.module.network(empty.dense, empty.sparse)
    assert logits.shape == (0,)
    logits.sum().backward()
    assert not any(parameter.grad.any() for parameter in dense.values())

    (loss, logits), (sharded_loss, sharded_logits) = plain(batch), sharded(batch)
    torch.testing.assert_close(sharded_logits, logits, rtol=1e-6, atol=1e-6)
    loss.backward()
    sharded_loss.backward()
    for key, parameter in dense.items():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(key).grad, rtol=1e-5, atol=1e-7)

    batches = [batch, samples(1), samples(2, size=3)]
    optimizer = torch.optim.SGD([p for p in sharded.parameters() if p.requires_grad], lr=0.0)
    pipeline, stream = TrainPipelineSparseDist(sharded, optimizer, device=CPU), iter(batches)
    for taken in batches:
        torch.testing.assert_close(pipeline.progress(stream), plain(taken)[1], rtol=1e-6, atol=1e-6)
    # A network that cannot be traced is silently not pipelined.
    assert pipeline._pipelined_modules == [front.embeddings]
    for group, kernels in l2_kernels(plain).items():
        found = l2_kernels(sharded)[group]
        assert all(torch.equal(a, b) for a, b in zip(found, kernels, strict=True))
        assert kernels or (group, name) != ("cross", "dcn")
