"""A run on one GPU saves its checkpoint, though its process group and its tables are on CUDA alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

from cowrec.trainer.config.sections import CheckpointConfig
from cowrec.trainer.runs.checkpoint import Checkpoints, Progress, list_checkpoints
from cowrec.trainer.runs.checkpoint_files import read_checkpoint
from cowrec.trainer.runs.local_copy import RunPlace
from cowrec.trainer.runtime.processes import Process

GPU = torch.device("cuda", 0)


@pytest.fixture
def group_on_cuda() -> Iterator[None]:
    """A group that is on CUDA alone, as that of nccl is."""

    def alone(_: Any, rank: int, world_size: int, __: Any) -> Any:
        return FakeProcessGroup._create_internal(rank, world_size)

    dist.Backend.register_backend("like_nccl", alone, devices=["cuda"])
    dist.init_process_group("like_nccl", rank=0, world_size=1, store=dist.HashStore())
    dist.group.WORLD.bound_device_id = GPU
    yield
    dist.destroy_process_group()


def placed_on_a_gpu(rows: torch.Tensor) -> ShardedTensor:
    """A sharded tensor that is described as those of a GPU are; its only shard is on the CPU."""
    described = ShardMetadata([0, 0], list(rows.shape), "rank:0/cpu")
    whole = ShardedTensorMetadata([described], rows.shape, TensorProperties(dtype=rows.dtype))
    sharded = ShardedTensor._init_from_local_shards_and_global_metadata([Shard(rows, described)], whole)
    described.placement = dist._remote_device(f"rank:0/{GPU}")
    return sharded


@pytest.mark.usefixtures("group_on_cuda")
def test_a_state_on_a_gpu_is_saved_and_read_back(tmp_path: Path) -> None:
    rows = torch.arange(12.0).view(3, 4)
    state = {"table": placed_on_a_gpu(rows), "weight": rows.sum()}
    place = RunPlace(tmp_path, resume=True)
    checkpoints = Checkpoints(place, CheckpointConfig(), Process(0, 1, 1, False, GPU))
    checkpoints.save(state, Progress(7), {})
    checkpoints.abandon()  # waits; a collective of the default group would need the GPU
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    (found,) = list_checkpoints(checkpoints.folder)
    read = {"table": torch.zeros(3, 4), "weight": torch.zeros(())}
    read_checkpoint(found, read)
    assert torch.equal(read["table"], rows)
    assert read["weight"] == 66
    assert state["table"].metadata().shards_metadata[0].placement.device() == GPU, "the state is left as it was"
