"""Finds the fused lookups of a TorchRec model: which tables, features and weights each FBGEMM module holds.

This is the one file that reaches into attributes TorchRec and FBGEMM do not promise; tests/test_lookups.py names the
versions it was seen with. Terms: a lookup is one table-batched embedding module (TBE) of FBGEMM; it holds shards of
several tables and reads T features (a table may serve several) for B bags each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .versions import require_matched_set

require_matched_set()  # before the imports that fail in riddles without it

# ruff: noqa: E402
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection


@dataclass(frozen=True)
class TableShard:
    """The rows of one table that a lookup holds.

    Attributes:
        name: the table's name.
        rows: rows held here.
        embedding_dim: columns of a row.
    """

    name: str
    rows: int
    embedding_dim: int


class Lookup:
    """One FBGEMM module of a sharded collection and the geometry of what it looks up.

    Attributes:
        module: the TBE; its forward takes ``indices`` [nnz], ``offsets`` [T * B + 1] and returns float [B, sum D].
        collection: the sharded collection it belongs to.
        shards: the tables it holds, in the TBE's order.
        feature_table: table number of each feature, [T]; features of one table are neighbours.
    """

    def __init__(
        self,
        module: SplitTableBatchedEmbeddingBagsCodegen,
        collection: ShardedEmbeddingBagCollection,
        names: Sequence[str],
    ):
        self.module = module
        self.collection = collection
        views = module.split_embedding_weights()
        self.shards = tuple(TableShard(name, *view.shape) for name, view in zip(names, views, strict=True))
        self.feature_table: list[int] = list(module.feature_table_map)

    @property
    def is_mean_pooled(self) -> bool:
        return self.module.pooling_mode == PoolingMode.MEAN

    def pool_by_weighted_sum(self) -> None:
        """Lets the TBE sum; a mean is then the caller's 1/length as the ids' weights (exact on every back end)."""
        self.module.pooling_mode = PoolingMode.SUM

    def pool_by_mean(self) -> None:
        self.module.pooling_mode = PoolingMode.MEAN

    @property
    def is_plain_sgd(self) -> bool:
        return self.module.optimizer == EmbOptimType.EXACT_SGD

    @property
    def process_group(self) -> ProcessGroup:
        """The processes that its collection is sharded over."""
        group: ProcessGroup = self.collection._env.process_group
        return group

    @property
    def num_ranks(self) -> int:
        return self.process_group.size()

    @property
    def is_split(self) -> bool:
        """Whether other ranks hold further rows of its tables."""
        return any(_is_split(self.collection, shard.name) for shard in self.shards)

    @cached_property
    def column_offsets(self) -> list[int]:
        """First output column of each feature, [T]."""
        starts, column = [], 0
        for table in self.feature_table:
            starts.append(column)
            column += self.shards[table].embedding_dim
        return starts

    @cached_property
    def weight_offsets(self) -> list[int]:
        """Place of each table's first weight in :meth:`flat_weights`, in elements, [number of shards]."""
        first = self.flat_weights().storage_offset()
        return [view.storage_offset() - first for view in self.module.split_embedding_weights()]

    @property
    def iterations(self) -> int:
        """Forward passes that FBGEMM has counted, evaluation's too; some of its optimizers go by it."""
        return int(self.module.iter)

    def flat_weights(self) -> Tensor:
        """All weights held here as one flat tensor that shares their memory, float [sum rows * D]."""
        return _memory_of(self.module).detach().view(-1)

    def view_of(self, flat: Tensor, table: int) -> Tensor:
        """One table's part of a flat tensor: laid out like :meth:`flat_weights`, [rows, D], or with one value a row,
        numbered from the first table's first row on, [rows, 1].
        """
        shard = self.shards[table]
        if flat.numel() == sum(each.rows for each in self.shards):
            first = sum(each.rows for each in self.shards[:table])
            return flat[first : first + shard.rows].view(shard.rows, 1)
        start = self.weight_offsets[table]
        return flat[start : start + shard.rows * shard.embedding_dim].view(shard.rows, shard.embedding_dim)


@dataclass(frozen=True)
class Refusal:
    """A table that has no clippable lookup, and why."""

    table: str
    reason: str


def find_lookups(model: nn.Module) -> tuple[list[Lookup], list[Refusal]]:
    """The fused lookups of every sharded EmbeddingBagCollection in a model, and the tables that are out of reach."""
    lookups: list[Lookup] = []
    refusals: list[Refusal] = []
    for module in _outermost_collections(model):
        if not isinstance(module, ShardedEmbeddingBagCollection):
            refusals += [Refusal(table, _why_not(module)) for table in _table_names(module)]
            continue
        for kernel in _kernels(module):
            names = [table.name for table in kernel._config.embedding_tables]
            reason = _why_not_kernel(kernel)
            if reason:
                refusals += [Refusal(name, reason) for name in names]
            else:
                lookups.append(Lookup(kernel.emb_module, module, names))
    return lookups, refusals


def all_table_names(model: nn.Module) -> set[str]:
    """Names of all tables of a model on all ranks; also of those without a shard on this one."""
    return {name for module in _outermost_collections(model) for name in _table_names(module)}


def lookups_of_ranks(model: nn.Module) -> list[list[list[str]]]:
    """Table names of each fused lookup of each rank, [rank][lookup][table]; the same answer on all ranks."""
    ranks: list[list[list[str]]] = []
    for module in _outermost_collections(model):
        for sharding in getattr(module, "_embedding_shardings", ()):
            for rank, groups in enumerate(sharding._grouped_embedding_configs_per_rank):
                ranks += [[] for _ in range(rank + 1 - len(ranks))]
                ranks[rank] += [
                    [table.name for table in group.embedding_tables]
                    for group in groups
                    if group.compute_kernel == EmbeddingComputeKernel.FUSED
                ]
    return ranks


def partly_spread_tables(model: nn.Module) -> set[str]:
    """Tables whose rows lie on some of the ranks, but neither on one nor on all; the same answer on all ranks."""
    return {
        name
        for module in _outermost_collections(model)
        if isinstance(module, ShardedEmbeddingBagCollection)
        for name, table in module.module_sharding_plan.items()
        if _is_split(module, name) and len(set(table.ranks)) != module._env.world_size
    }


def sharded_like_weights(
    lookups: Sequence[Lookup], flats: Sequence[Tensor], dtype: torch.dtype, *, per_row: bool = False
) -> dict[str, ShardedTensor]:
    """State of the rows as sharded tensors, cut over the processes just as the weights are.

    Args:
        lookups: every lookup of the model on this rank.
        flats: for each of them a flat tensor as :meth:`Lookup.view_of` takes it; the result shares its memory.
        dtype: of the flat tensors.
        per_row: whether they hold one value a row.

    Returns:
        One ShardedTensor per table name, for ``torch.distributed.checkpoint``. All ranks must call together.
    """
    by_address: dict[int, Tensor] = {}
    for lookup, flat in zip(lookups, flats, strict=True):
        for table, view in enumerate(lookup.module.split_embedding_weights()):
            by_address[view.data_ptr()] = lookup.view_of(flat, table)
    result: dict[str, ShardedTensor] = {}
    for collection in dict.fromkeys(lookup.collection for lookup in lookups):
        for key, weight in collection.state_dict().items():
            if isinstance(weight, ShardedTensor):
                parts = [by_address[each.tensor.data_ptr()] for each in weight.local_shards()]
                result[key.split(".")[-2]] = _sharded_like(weight, parts, dtype, per_row)
    return result


def _sharded_like(weight: ShardedTensor, parts: Sequence[Tensor], dtype: torch.dtype, per_row: bool) -> ShardedTensor:
    """A sharded tensor cut over the rows like a weight, of its width or of one column."""

    def narrow(sizes: Sequence[int]) -> list[int]:
        return [sizes[0], 1] if per_row else list(sizes)

    whole = weight.metadata()
    metadata = ShardedTensorMetadata(
        shards_metadata=[replace(each, shard_sizes=narrow(each.shard_sizes)) for each in whole.shards_metadata],
        size=torch.Size(narrow(whole.size)),
        tensor_properties=replace(whole.tensor_properties, dtype=dtype),
    )
    shards = [
        Shard(part, replace(each.metadata, shard_sizes=narrow(each.metadata.shard_sizes)))
        for part, each in zip(parts, weight.local_shards(), strict=True)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=weight._process_group
    )


_UNSHARDED = (EmbeddingBagCollection, EmbeddingCollection, FusedEmbeddingBagCollection)


def _outermost_collections(model: nn.Module) -> Iterator[nn.Module]:
    if isinstance(model, _UNSHARDED) or hasattr(model, "_lookups"):
        yield model
        return
    for child in model.children():
        yield from _outermost_collections(child)


def _kernels(collection: Any) -> Iterator[Any]:
    for lookup in collection._lookups:
        inner = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
        yield from inner._emb_modules


def _table_names(collection: nn.Module) -> list[str]:
    for attribute in ("_embedding_bag_configs", "_embedding_configs"):
        if hasattr(collection, attribute):
            return [config.name for config in getattr(collection, attribute)]
    return [type(collection).__name__]


def _is_split(collection: Any, table: str) -> bool:
    spec = collection.module_sharding_plan[table].sharding_spec
    return spec is not None and len({shard.shard_offsets[0] for shard in spec.shards}) > 1


def _why_not(collection: nn.Module) -> str:
    kind = type(collection).__name__
    if isinstance(collection, _UNSHARDED):
        return f"{kind} is not sharded; wrap the model in torchrec.distributed.DistributedModelParallel first"
    return f"{kind} does not pool bags of ids; only a ShardedEmbeddingBagCollection can be clipped"


def _why_not_kernel(kernel: Any) -> str | None:
    if not isinstance(kernel, BatchedFusedEmbeddingBag) or not isinstance(
        kernel.emb_module, SplitTableBatchedEmbeddingBagsCodegen
    ):
        return f'its compute kernel is {type(kernel).__name__}; shard it row- or table-wise with compute_kernel="fused"'
    for table in kernel._config.embedding_tables:
        if table.local_cols != table.embedding_dim:
            return "it is sharded column-wise and the norm of a row needs all its columns; shard it row- or table-wise"
    tbe = kernel.emb_module
    if any(spec[2] == EmbeddingLocation.MANAGED_CACHING for spec in tbe.embedding_specs):
        return 'its rows are cached on the device, apart from their memory; shard it with compute_kernel="fused"'
    if len({view.untyped_storage().data_ptr() for view in tbe.split_embedding_weights()}) != 1:
        return "tables of its group lie in different memories; give them one placement"
    if len({view.dtype for view in tbe.split_embedding_weights()}) != 1 or not all(
        view.dtype.is_floating_point and view.element_size() > 1 for view in tbe.split_embedding_weights()
    ):
        return "its weights are quantised; use float32, float16 or bfloat16"
    return None


def _memory_of(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> Tensor:
    """The one memory that all tables of a lookup lie in; _why_not_kernel refuses several."""
    return next(memory for memory in (tbe.weights_dev, tbe.weights_host, tbe.weights_uvm) if memory.numel())
