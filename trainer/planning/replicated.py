"""Stand-ins for what needs memory: DistributedDataParallel and its buckets, and tables of data-parallel lookups."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel, batched_embedding_kernel, comm, embeddingbag
from torchrec.distributed.model_parallel import DataParallelWrapper
from torchrec.distributed.types import ShardingEnv

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
"""Bytes of DistributedDataParallel's buckets; the sizes are those that it passes by default."""


class Unreplicated(DataParallelWrapper):
    """Leaves the network as it is; :func:`reduce_gradients` then communicates as DistributedDataParallel does."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        pass


def reduce_gradients(parameters: list[Tensor]) -> None:
    """Sends the gradients of replicated parameters in the buckets of DistributedDataParallel, last ones first."""
    reverse = [each for each in reversed(parameters) if each.requires_grad]
    if not reverse or dist.get_world_size() == 1:
        return
    buckets, _ = dist._compute_bucket_assignment_by_size(reverse, [_FIRST_BUCKET, _BUCKET])
    for bucket in buckets:
        dist.all_reduce(torch.cat([reverse[index].flatten() for index in bucket]))


class Undistributed:
    """Stands for DistributedDataParallel around data-parallel tables, which EmbeddingAdam takes out of it again."""

    def __new__(cls, module: nn.Module, **_: Any) -> Any:
        return module


def table_slice(
    data: Tensor, start_offset: int, end_offset: int, num_embeddings: int, embedding_dim: int
) -> nn.Parameter:
    """Stands for TableBatchedEmbeddingSlice, a table of a data-parallel lookup, which no fake tensor can become."""
    return nn.Parameter(data.detach()[start_offset:end_offset].view(num_embeddings, embedding_dim))


def keep_objects(objects: list[Any], *_: Any, **__: Any) -> None:
    """Stands for the broadcast of objects: what another rank would send stays None, as TorchRec's settings are then."""


@contextmanager
def stand_ins(machine: int) -> Iterator[None]:
    """Replaces what a model without memory cannot have; groups of TorchRec's hosts last as long as the default group.

    Args:
        machine: ranks of a host.
    """
    with (
        patch.object(dist, "broadcast_object_list", keep_objects),
        patch.object(embeddingbag, "DistributedDataParallel", Undistributed),
        patch.object(batched_embedding_kernel, "TableBatchedEmbeddingSlice", table_slice),
        patch.multiple(comm, _INTRA_PG=None, _CROSS_PG=None),
        patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(machine)}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        torchrec_log = logging.getLogger("torchrec")
        level = torchrec_log.level
        torchrec_log.setLevel(logging.ERROR)  # it names every group of hosts
        try:
            yield
        finally:
            torchrec_log.setLevel(level)


@torch.library.register_fake("fbgemm::dense_embedding_codegen_lookup_function")
def _(
    dev_weights: Tensor, weights_offsets: Tensor, D_offsets: Tensor, total_D: int, *others: Any, **settings: Any
) -> Tensor:
    """Output of FBGEMM's lookup in data-parallel tables, for which FBGEMM registers none."""
    offsets = others[4]
    return dev_weights.new_empty((len(offsets) - 1) // (len(D_offsets) - 1), total_D)
