"""Finds the fused lookups of a TorchRec model: which tables, features and weights each FBGEMM module holds.

Only this file uses attributes that TorchRec and FBGEMM do not promise; tests/sparse_opt/tbe/test_tbe_lookup.py names
the versions it was seen with. Terms: a lookup is one table-batched embedding module (TBE) of FBGEMM; it holds shards of
several tables and reads T features (a table may serve several) for B bags each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations
from typing import Any

from cowrec.sparse_opt.versions import require_matched_set

require_matched_set()  # before the imports that fail in riddles without it

# ruff: noqa: E402
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_global_rank
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag, BatchedFusedEmbeddingBag
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection


@dataclass(frozen=True)
class TableShard:
    """The part of one table that a lookup holds.

    Attributes:
        name: the table's name; a lookup may hold several shards of a table.
        rows: rows held here.
        first_row: place of the first of them in the table.
        embedding_dim: columns of a row held here.
        first_column: place of the first of them in the table's row.
        table_dim: columns of the table's row, wherever they are.
        column_ranks: under column-wise sharding the ranks that hold the row's column shards, in ascending order, one
            for each shard; empty where rows are whole.
    """

    name: str
    rows: int
    first_row: int
    embedding_dim: int
    first_column: int
    table_dim: int
    column_ranks: tuple[int, ...]


class TbeLookup:
    """One FBGEMM module of a sharded collection and the geometry of what it looks up.

    Attributes:
        module: the TBE; its forward takes ``indices`` [nnz], ``offsets`` [T * B + 1] and returns float [B, sum D].
        is_replicated: every rank holds all of its tables and looks its own samples up in them (data-parallel).
        collection: the sharded collection it belongs to.
        shards: the tables it holds, in the TBE's order.
        feature_table: table number of each feature, [T]; features of one table are neighbours.
    """

    def __init__(self, kernel: Any, collection: ShardedEmbeddingBagCollection):
        self.module: SplitTableBatchedEmbeddingBagsCodegen | DenseTableBatchedEmbeddingBagsCodegen = kernel.emb_module
        self.collection = collection
        self.is_replicated = isinstance(self.module, DenseTableBatchedEmbeddingBagsCodegen)
        tables, views = kernel._config.embedding_tables, self.module.split_embedding_weights()
        self.shards = tuple(_shard_of(collection, table, view) for table, view in zip(tables, views, strict=True))
        self.feature_table: list[int] = list(kernel._feature_table_map)

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
        """Whether what updates its tables has no state; replicated ones have no fused optimizer at all."""
        return self.is_replicated or self.module.optimizer == EmbOptimType.EXACT_SGD

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

    @property
    def splits_columns(self) -> bool:
        """Whether it holds some columns of a row and not the others, or in several shards."""
        return any(shard.column_ranks for shard in self.shards)

    @property
    def has_like_partners(self) -> bool:
        """Whether all ranks with columns of its tables look up the same tables, one column shard of each."""
        names = [shard.name for shard in self.shards]
        of_ranks = [_table_names_of(group) for _, group in _groups_of_ranks(self.collection)]
        partners = [tables for tables in of_ranks if set(names) & set(tables)]
        return len(set(names)) == len(names) and all(tables == names for tables in partners)

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

    def zeros_of_weights(self) -> Tensor:
        """A state for each weight, zeros, float32, laid out as :meth:`flat_weights` and in the same kind of memory."""
        weights = self.flat_weights()
        if self.is_replicated or not self.module.weights_uvm.numel():
            return torch.zeros(weights.numel(), device=weights.device)
        like = torch.empty(1, device=weights.device)
        return torch.ops.fbgemm.new_managed_tensor(like, [weights.numel()]).zero_()

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


def find_lookups(model: nn.Module, *, replicated: bool = False) -> tuple[list[TbeLookup], list[Refusal]]:
    """The lookups of every sharded EmbeddingBagCollection in a model, and the tables that are out of reach.

    Lookups are fused ones, and data-parallel ones where ``replicated`` tables are asked for too.
    """
    lookups: list[TbeLookup] = []
    refusals: list[Refusal] = []
    for module in _outermost_collections(model):
        if not isinstance(module, ShardedEmbeddingBagCollection):
            refusals += [Refusal(table, _why_not(module)) for table in _table_names(module)]
            continue
        for kernel in _kernels(module):
            reason = _why_not_kernel(kernel, replicated)
            if reason:
                refusals += [Refusal(table.name, reason) for table in kernel._config.embedding_tables]
            else:
                lookups.append(TbeLookup(kernel, module))
    return lookups, refusals


def sharded_collections(model: nn.Module) -> Iterator[ShardedEmbeddingBagCollection]:
    """The sharded EmbeddingBagCollections of a model."""
    yield from (each for each in _outermost_collections(model) if isinstance(each, ShardedEmbeddingBagCollection))


def all_table_names(model: nn.Module) -> set[str]:
    """Names of all tables of a model on all ranks; also of those without a shard on this one."""
    return {name for module in _outermost_collections(model) for name in _table_names(module)}


def lookups_of_ranks(model: nn.Module) -> list[list[list[str]]]:
    """Table names of each fused lookup of each rank, [rank][lookup][table]; the same answer on all ranks."""
    ranks: list[list[list[str]]] = []
    for collection in sharded_collections(model):
        ranks += [[] for _ in range(collection._env.world_size - len(ranks))]
        for rank, group in _groups_of_ranks(collection):
            if group.compute_kernel == EmbeddingComputeKernel.FUSED:
                ranks[rank].append(_table_names_of(group))
    return ranks


def partly_spread_tables(model: nn.Module) -> set[str]:
    """Tables whose rows lie on some of the ranks, but neither on one nor on all; the same answer on all ranks."""
    return {
        name
        for collection in sharded_collections(model)
        for name, table in collection.module_sharding_plan.items()
        if _is_split(collection, name) and len(set(table.ranks)) != collection._env.world_size
    }


def column_split_tables(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Tables whose rows are cut into column shards, and the ranks that hold one; the same answer on all ranks."""
    return {
        name: ranks
        for collection in sharded_collections(model)
        for name in collection.module_sharding_plan
        if (ranks := _column_ranks(collection, name))
    }


def replicated_tables(model: nn.Module) -> set[str]:
    """Tables that every rank holds as a whole (data-parallel); the same answer on all ranks."""
    return {
        name
        for collection in sharded_collections(model)
        for name, table in collection.module_sharding_plan.items()
        if table.sharding_type == ShardingType.DATA_PARALLEL.value
    }


def contrary_lookups(model: nn.Module) -> tuple[str, str] | None:
    """Two column-split tables that ranks look up one after the other, but not all in the same order; None without."""
    order: dict[tuple[Any, ...], tuple[str, str]] = {}
    for module in sharded_collections(model):
        of_ranks: dict[int, list[tuple[Any, str]]] = {}
        for rank, group in _groups_of_ranks(module):
            split = [name for name in _table_names_of(group) if _column_ranks(module, name)]
            if split:
                of_ranks.setdefault(rank, []).append(((module, group.data_type, group.pooling), split[0]))
        for (one, name), (other, other_name) in chain(*(combinations(each, 2) for each in of_ranks.values())):
            if one == other or (other, one) in order:
                return name, other_name
            order[one, other] = name, other_name
    return None


def leave_ddp(collection: ShardedEmbeddingBagCollection) -> Callable[[], None]:
    """Takes replicated lookups out of the wrapper that all-reduces their whole tables; returns the way back."""
    wrapped = {n: each for n, each in enumerate(collection._lookups) if isinstance(each, DistributedDataParallel)}

    def rejoin() -> None:
        for place, lookup in wrapped.items():
            collection._lookups[place] = lookup

    for place, lookup in wrapped.items():
        collection._lookups[place] = lookup.module
    return rejoin


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


def _groups_of_ranks(collection: Any) -> Iterator[tuple[int, Any]]:
    """The lookups of all ranks, as (rank, what TorchRec knows of it), each rank's in the order of its own."""
    for sharding in collection._embedding_shardings:
        for rank, groups in enumerate(sharding._grouped_embedding_configs_per_rank):
            yield from ((rank, group) for group in groups)


def _table_names_of(group: Any) -> list[str]:
    return [table.name for table in group.embedding_tables]


def _shard_of(collection: Any, table: Any, weights: Tensor) -> TableShard:
    place = table.local_metadata
    first_row, first_column = place.shard_offsets if place is not None else (0, 0)
    ranks = _column_ranks(collection, table.name)
    rows, columns = weights.shape
    return TableShard(table.name, rows, first_row, columns, first_column, table.embedding_dim, ranks)


def _column_ranks(collection: Any, table: str) -> tuple[int, ...]:
    """Global ranks of a table's column shards, one for each; empty where its rows are whole."""
    plan, group = collection.module_sharding_plan[table], collection._env.process_group
    shards = plan.sharding_spec.shards if plan.sharding_spec is not None else ()
    if len({shard.shard_offsets[1] for shard in shards}) < 2:
        return ()
    return tuple(sorted(get_global_rank(group, rank) for rank in plan.ranks))


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


def _why_not_kernel(kernel: Any, replicated: bool) -> str | None:
    if isinstance(kernel, BatchedDenseEmbeddingBag) and kernel._config.embedding_tables[0].local_metadata is None:
        if replicated:
            return None
        return (
            "it is data-parallel and has no fused optimizer, so its gradient passes by; train it with cowrec's"
            ' EmbeddingAdam, or shard it row-, column- or table-wise with compute_kernel="fused"'
        )
    if not isinstance(kernel, BatchedFusedEmbeddingBag) or not isinstance(
        kernel.emb_module, SplitTableBatchedEmbeddingBagsCodegen
    ):
        return f'its compute kernel is {type(kernel).__name__}; shard it row- or table-wise with compute_kernel="fused"'
    tables = kernel._config.embedding_tables
    if any(table.local_cols < table.embedding_dim and table.local_rows < table.num_embeddings for table in tables):
        return "its rows and its columns are both cut (grid sharding); shard it row-, column- or table-wise"
    tbe = kernel.emb_module
    if any(spec[2] == EmbeddingLocation.MANAGED_CACHING for spec in tbe.embedding_specs):
        return (
            "its rows are cached on the device, apart from their memory, where their norms would be read too late;"
            ' shard it with compute_kernel="fused", or "fused_uvm" if the device has no room for it'
        )
    if len({view.untyped_storage().data_ptr() for view in tbe.split_embedding_weights()}) != 1:
        return "tables of its group lie in different memories; give them one placement"
    if len({view.dtype for view in tbe.split_embedding_weights()}) != 1 or not all(
        view.dtype.is_floating_point and view.element_size() > 1 for view in tbe.split_embedding_weights()
    ):
        return "its weights are quantised; use float32, float16 or bfloat16"
    return None


def _memory_of(tbe: SplitTableBatchedEmbeddingBagsCodegen | DenseTableBatchedEmbeddingBagsCodegen) -> Tensor:
    """The one memory that all tables of a lookup lie in; _why_not_kernel refuses several."""
    if isinstance(tbe, DenseTableBatchedEmbeddingBagsCodegen):
        return tbe.weights
    return next(memory for memory in (tbe.weights_dev, tbe.weights_host, tbe.weights_uvm) if memory.numel())
