"""TorchRec's own models, with its planner, optimizers and training loop: a clip equals clip_rows under autograd."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.test_utils import test_model as upstream
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import CowClip, attach_cowclip, clip_rows
from process_groups import in_processes, process_group
from random_problems.training import gathered, set_to

pytest_plugins = ["one_group"]
DIM, DENSE, BATCH, STEPS = 8, 3, 16, 3
DENSE_LR, TABLE_LR = 0.1, 2000.0
BINDS = CowClip(r=1e-5, zeta=1e-7)
CPU = torch.device("cpu")
FEATURES = {"t0": ["f0"], "t1": ["f1"], "t2": ["f2", "f3"], "t3": ["f4"]}
ROWS = {"t0": 40, "t1": 12, "t2": 30, "t3": 24, "w0": 20}
TOWERS = ("TestTowerSparseNN", "TestTowerCollectionSparseNN")


def tables_of(features: dict[str, list[str]], **more: Any) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS[name], feature_names=names, **more)
        for name, names in features.items()
    ]


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


def model_on(device: torch.device, name: str) -> nn.Module:
    """The model of TorchRec's tests, with its tables on a device."""
    torch.manual_seed(1)
    model: Any = getattr(upstream, name)
    tables = tables_of(FEATURES, pooling=PoolingType.MEAN if name == "TestSparseNN" else PoolingType.SUM)
    weighted, on = tables_of({"w0": ["w"]}), {"dense_device": CPU, "sparse_device": device}
    made: nn.Module = model(tables=tables, weighted_tables=weighted, num_float_features=DENSE, **on)
    return made


def sharded_model(name: str) -> DistributedModelParallel:
    """The model as TorchRec's planner shards it, with fused SGD."""
    model = model_on(torch.device("meta"), name)
    tables = [parameter for key, parameter in model.named_parameters() if ".embedding" in key]
    apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": TABLE_LR})
    constraints = {table: ParameterConstraints(compute_kernels=["fused"]) for table in ROWS}
    world = dist.get_world_size()
    planner = EmbeddingShardingPlanner(topology=Topology(world, "cpu", local_world_size=world), constraints=constraints)
    plan = planner.collective_plan(model, get_default_sharders(), dist.group.WORLD)
    return DistributedModelParallel(model, device=CPU, plan=plan)


def copy_weights(source: nn.Module, target: DistributedModelParallel) -> None:
    state = target.state_dict()
    assert state.keys() == source.state_dict().keys()
    for key, value in source.state_dict().items():
        set_to(state[key], value)


def train(model: DistributedModelParallel, batches: Sequence[Any]) -> dict[str, Tensor]:
    """Weights on the first rank after TorchRec's pipeline has trained the batches of this rank."""
    network = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
    dense = torch.optim.SGD(network, lr=DENSE_LR)
    pipeline, stream = TrainPipelineSparseDist(model, dense, CPU), iter(batches)
    for _ in batches:
        pipeline.progress(stream)
    return {key: torch.from_numpy(gathered(value)) for key, value in model.state_dict().items()}


def occurrences(table: str, batches: Sequence[Any]) -> Tensor:
    features = (FEATURES | {"w0": ["w"]})[table]
    given = [kjt for batch in batches for kjt in (batch.idlist_features, batch.idscore_features)]
    ids = [kjt[name].values() for kjt in given for name in features if name in dict.fromkeys(kjt.keys())]
    return torch.cat(ids).bincount(minlength=ROWS[table])


def train_by_autograd(name: str, batches: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
    """Weights after steps of SGD on the unsharded model, whose row gradients clip_rows clips; batches[step][rank]."""
    model = model_on(CPU, name)
    for of_ranks in batches:
        model.zero_grad()
        torch.stack([model(batch)[0] for batch in of_ranks]).mean().backward()
        for key, weight in model.named_parameters():
            if ".embedding" in key:
                counts = occurrences(key.split(".")[-2], of_ranks)
                weight.data -= TABLE_LR * clip_rows(weight.grad, weight.data, counts.clamp_min(1), BINDS)
            elif weight.grad is not None:  # some of TestSparseNN's parameters have no use
                weight.data -= DENSE_LR * weight.grad
    return model.state_dict()


def assert_clips_like_autograd(name: str) -> None:
    """Tolerance: sums in another order, of steps that move rows by up to a hundredth."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = [[batch_of(world * step + rank) for rank in range(world)] for step in range(STEPS)]
    model = sharded_model(name)
    copy_weights(model_on(CPU, name), model)
    handle = attach_cowclip(model, BINDS)
    trained = train(model, [of_ranks[rank] for of_ranks in batches])
    assert all(of_table.clipped_share > 0.2 for of_table in handle.stats().values())
    if rank == 0:
        torch.testing.assert_close(trained, train_by_autograd(name, batches), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("name", TOWERS)
def test_a_clip_of_towers_equals_autograd(group: None, name: str) -> None:
    assert_clips_like_autograd(name)


def two_ranks(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        assert_clips_like_autograd("TestSparseNN")


def test_two_processes_equal_autograd_on_both_batches(tmp_path: Path) -> None:
    in_processes(two_ranks, (str(tmp_path),), 2)
