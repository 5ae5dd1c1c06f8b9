"""TorchRec's own models: a clip equals clip_rows under autograd.

The models, their planner, their optimizers and their training loop are TorchRec's. The histories are wired as in its
example "bert4rec", the table that is data-parallel as in "golden_training".
"""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.test_utils import test_model as upstream
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import CowClip, attach_cowclip, clip_rows
from process_groups import in_processes, process_group
from random_problems.training import gathered

pytest_plugins = ["one_group"]
DIM, DENSE, BATCH, STEPS = 8, 3, 16, 3
DENSE_LR, TABLE_LR = 0.1, 2000.0
BINDS = CowClip(r=1e-5, zeta=1e-7)
CPU, META = torch.device("cpu"), torch.device("meta")
FEATURES = {"t0": ["f0"], "t1": ["f1"], "t2": ["f2", "f3"], "t3": ["f4"]}
ROWS = {"t0": 40, "t1": 12, "t2": 30, "t3": 24, "w0": 20}
KEYS = [name for names in FEATURES.values() for name in names]


def configs(kind: Any = EmbeddingBagConfig, **more: Any) -> list[Any]:
    return [
        kind(name=name, embedding_dim=DIM, num_embeddings=ROWS[name], feature_names=features, **more)
        for name, features in FEATURES.items()
    ]


def bags(device: torch.device, **more: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=configs(**more), device=device)


def weighted() -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(name="w0", embedding_dim=DIM, num_embeddings=ROWS["w0"], feature_names=["w"])]


def batch_of(seed: int) -> upstream.ModelInput:
    """Up to three ids per bag, repeated ones and empty bags included."""
    draw = torch.Generator().manual_seed(seed)

    def ids(features: dict[str, list[str]], weights: bool) -> KeyedJaggedTensor:
        keys = [name for names in features.values() for name in names]
        rows = torch.tensor([ROWS[table] for table, names in features.items() for _ in names])
        lengths = torch.randint(0, 4, (len(keys), BATCH), generator=draw)
        of_id = rows.repeat_interleave(lengths.sum(1))
        values = (of_id * torch.rand(len(of_id), generator=draw) ** 3).long()
        factors = torch.rand(len(of_id), generator=draw) + 0.5 if weights else None
        return KeyedJaggedTensor(keys, values, factors, lengths=lengths.flatten())

    dense, label = torch.rand(BATCH, DENSE, generator=draw), torch.rand(BATCH, generator=draw).round()
    return upstream.ModelInput(dense, ids(FEATURES, False), ids({"w0": ["w"]}, True), label)


def click_batch_of(seed: int) -> Batch:
    batch = batch_of(seed)
    return Batch(batch.float_features, batch.idlist_features, batch.label)


class Histories(nn.Module):
    """Sequences of item embeddings with their positions, encoded by attention."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.items = EmbeddingCollection(tables=configs(EmbeddingConfig)[:1], device=device)
        self.positions = nn.Parameter(torch.randn(3, DIM))
        self.encoder = nn.TransformerEncoderLayer(DIM, 2, 16, 0.0, batch_first=True)
        self.out = nn.Linear(DIM, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        items = self.items(batch.sparse_features)["f0"]
        padded = torch.ops.fbgemm.jagged_2d_to_dense(items.values(), items.offsets(), 3).view(-1, 3, DIM)
        logits = self.out(self.encoder(padded + self.positions).mean(1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits


def sparse_nn(device: torch.device, model: Callable[..., nn.Module] = upstream.TestSparseNN, **more: Any) -> nn.Module:
    tables = configs(pooling=PoolingType.MEAN) if model is upstream.TestSparseNN else configs()
    return model(
        tables=tables,
        weighted_tables=weighted(),
        num_float_features=DENSE,
        dense_device=CPU,
        sparse_device=device,
        **more,
    )


MODELS: dict[str, tuple[Callable[[torch.device], nn.Module], Callable[[int], Any]]] = {
    "Histories": (Histories, click_batch_of),
    "DLRM": (lambda on: DLRMTrain(DLRM(bags(on), DENSE, [8, DIM], [8, 1])), click_batch_of),
    "TestSparseNN": (sparse_nn, batch_of),
    "TestTowerSparseNN": (lambda on: sparse_nn(on, upstream.TestTowerSparseNN), batch_of),
    "TestTowerCollectionSparseNN": (lambda on: sparse_nn(on, upstream.TestTowerCollectionSparseNN), batch_of),
}


def plain_model(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name][0](CPU)


def sharded_model(
    build: Callable[[torch.device], nn.Module], kernels: dict[str, str] | None = None
) -> DistributedModelParallel:
    """The model as TorchRec's planner shards it, with fused SGD."""
    torch.manual_seed(1)
    model = build(META)
    tables = [each for key, each in model.named_parameters() if ".embedding" in key]
    apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": TABLE_LR})
    constraints = {table: ParameterConstraints(compute_kernels=[(kernels or {}).get(table, "fused")]) for table in ROWS}
    world = dist.get_world_size()
    planner = EmbeddingShardingPlanner(topology=Topology(world, "cpu", local_world_size=world), constraints=constraints)
    plan = planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
    return DistributedModelParallel(model, device=CPU, plan=plan)


def copy_weights(source: nn.Module, target: DistributedModelParallel) -> None:
    state = target.state_dict()
    assert state.keys() == source.state_dict().keys()
    for key, value in source.state_dict().items():
        for shard in state[key].local_shards() if hasattr(state[key], "local_shards") else ():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.detach().copy_(value[row : row + rows, column : column + columns])
        if not hasattr(state[key], "local_shards"):
            state[key].detach().copy_(value)


def train(model: DistributedModelParallel, batches: Sequence[Any]) -> dict[str, Tensor]:
    """Weights on the first rank after TorchRec's pipeline has trained the batches of this rank."""
    named = dict(in_backward_optimizer_filter(model.named_parameters()))
    tables = [each for key, each in named.items() if ".embedding" in key]  # those that are data-parallel
    network = [each for key, each in named.items() if ".embedding" not in key]
    dense = torch.optim.SGD([{"params": tables, "lr": TABLE_LR}, {"params": network, "lr": DENSE_LR}])
    pipeline, stream = TrainPipelineSparseDist(model, dense, CPU), iter(batches)
    for _ in batches:
        pipeline.progress(stream)
    return {key: torch.from_numpy(gathered(value)) for key, value in model.state_dict().items()}


def occurrences(table: str, batches: Sequence[Any]) -> Tensor:
    features = (FEATURES | {"w0": ["w"]})[table]
    given = [
        [each.sparse_features] if isinstance(each, Batch) else [each.idlist_features, each.idscore_features]
        for each in batches
    ]
    ids = [kjt[name].values() for kjt in chain(*given) for name in features if name in dict.fromkeys(kjt.keys())]
    return torch.cat(ids).bincount(minlength=ROWS[table])


def train_by_autograd(name: str, batches: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
    """Weights after steps of SGD on the unsharded model, whose row gradients clip_rows clips; batches[step][rank]."""
    model = plain_model(name)
    for of_ranks in batches:
        model.zero_grad()
        torch.stack([model(each)[0] for each in of_ranks]).mean().backward()
        for key, weight in model.named_parameters():
            if ".embedding" in key:
                assert weight.grad is not None
                counts = occurrences(key.split(".")[-2], of_ranks)
                weight.data -= TABLE_LR * clip_rows(weight.grad, weight.data, counts.clamp_min(1), BINDS)
            elif weight.grad is not None:  # some of TestSparseNN's parameters have no use
                weight.data -= DENSE_LR * weight.grad
    return model.state_dict()


def assert_clips_like_autograd(name: str, kernels: dict[str, str] | None = None) -> None:
    """Tolerance: sums in another order, of steps that move rows by up to a hundredth."""
    build, make_batch = MODELS[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = [[make_batch(world * step + each) for each in range(world)] for step in range(STEPS)]
    model = sharded_model(build, kernels)
    copy_weights(plain_model(name), model)
    handle = attach_cowclip(model, BINDS)
    trained = train(model, [of_ranks[rank] for of_ranks in batches])
    assert all(each.clipped_share > 0.2 for each in handle.stats().values())
    if rank == 0:
        torch.testing.assert_close(trained, train_by_autograd(name, batches), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("name", MODELS)
def test_a_clip_that_binds_equals_autograd(group: None, name: str) -> None:
    assert_clips_like_autograd(name)


def two_ranks(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        assert_clips_like_autograd("DLRM", {"t1": "dense"})
        assert_clips_like_autograd("TestSparseNN")
        assert_clips_like_autograd("Histories")


def test_two_processes_equal_autograd_on_both_batches(tmp_path: Path) -> None:
    in_processes(two_ranks, (str(tmp_path),), 2)
