"""One lookup of a sharded TorchRec model: the tables, features and weights of an FBGEMM module.

Only this file, plans.py, discovery.py and one_process.py use private attributes of TorchRec and FBGEMM; their tests in
tests/sparse_opt/tbe name the versions they were tested with. Terms: a lookup is one table-batched embedding module
(TBE) of FBGEMM; it holds shards of several tables and reads T features (a table may serve several) for B bags each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from cowrec.sparse_opt.kernels.layout import RowCache

from .plans import groups_of_ranks, has_row_shards, ranks_of_columns, table_names_of

ShardedCollection: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection


@dataclass(frozen=True)
class TableShard:
    """Part of a table that a lookup holds.

    Attributes:
        name: the table's name in the model; a lookup may hold several shards of a table.
        table: its name in the collection; the same unless several collections have it.
        rows: rows held here.
        first_row: index of the first of them in the table.
        embedding_dim: columns of a row held here.
        first_column: index of the first of them in the table's row.
        table_dim: columns of the table's row on all ranks.
        column_ranks: under column-wise sharding the ranks that hold the row's column shards, in ascending order, one
            for each shard; empty where rows are not sharded.
    """

    name: str
    table: str
    rows: int
    first_row: int
    embedding_dim: int
    first_column: int
    table_dim: int
    column_ranks: tuple[int, ...]


class TbeLookup:
    """FBGEMM module of a sharded collection, and the tables, features and weights that it looks up.

    Attributes:
        module: the TBE; its forward takes ``indices`` [nnz], ``offsets`` [T * B + 1] and returns float [B, sum D].
        has_dense_gradient: its weights are a parameter with a gradient, which a dense optimizer applies.
        is_replicated: every rank holds all of its tables and looks up its own samples in them (data-parallel).
        collection: the sharded collection that it belongs to.
        shards: shards that it holds, in the TBE's order.
        feature_table: table number of each feature, [T]; features of one table are neighbours.
    """

    def __init__(self, kernel: Any, collection: ShardedCollection, names: Mapping[str, str]):
        self.module: SplitTableBatchedEmbeddingBagsCodegen | DenseTableBatchedEmbeddingBagsCodegen = kernel.emb_module
        self.collection = collection
        self.has_dense_gradient = isinstance(self.module, DenseTableBatchedEmbeddingBagsCodegen)
        tables, views = kernel._config.embedding_tables, self.module.split_embedding_weights()
        self.is_replicated = all(table.local_metadata is None for table in tables)
        self.shards = tuple(
            _shard_of(collection, table, view, names[table.name]) for table, view in zip(tables, views, strict=True)
        )
        self.feature_table: list[int] = list(kernel._feature_table_map)
        self._ones = torch.ones(0)

    @property
    def is_sequence(self) -> bool:
        """True if it returns the row of each id, not pooled: its output is float [nnz, D]."""
        return bool(self.module.pooling_mode == PoolingMode.NONE)

    @property
    def is_mean_pooled(self) -> bool:
        """True if it averages the rows of a bag."""
        return bool(self.module.pooling_mode == PoolingMode.MEAN)

    def pool_by_weighted_sum(self) -> None:
        """Switches the TBE to sums; for a mean, callers then pass 1/length as the ids' weights (exact everywhere)."""
        self.module.pooling_mode = PoolingMode.SUM

    def pool_by_mean(self) -> None:
        """Switches the TBE back to means."""
        self.module.pooling_mode = PoolingMode.MEAN

    @property
    def pools_on_cpu(self) -> bool:
        """True if :meth:`pool_on_cpu` can look its rows up."""
        pools_by_sum = self.module.pooling_mode == PoolingMode.SUM
        return not self.has_dense_gradient and bool(self.module.use_cpu) and pools_by_sum

    def pool_on_cpu(self, indices: Tensor, offsets: Tensor, id_weights: Tensor | None) -> Tensor:
        """Pooled rows, float [B, sum D], without a gradient: FBGEMM's check and lookup, without its Python.

        That Python takes ten times as long as the lookup of a small batch. Arguments as the module's forward gets them.
        """
        tbe, offsets = self.module, offsets.to(indices.dtype)
        id_weights = None if id_weights is None else id_weights.float()
        mode = tbe.bounds_check_mode_int
        if mode != BoundsCheckMode.NONE.value:
            torch.ops.fbgemm.bounds_check_indices(
                tbe.rows_per_table, indices, offsets, mode, tbe.bounds_check_warning, id_weights
            )
        weights, pooling, output = tbe.weights_host, int(tbe.pooling_mode), tbe.output_dtype
        geometry = (tbe.weights_offsets, tbe.D_offsets, tbe.total_D, tbe.hash_size_cumsum)
        if id_weights is None:  # the operator needs some: 1 changes no bit
            if len(self._ones) < len(indices):
                self._ones = torch.ones(len(indices))
            id_weights = self._ones[: len(indices)]
        pooled: Tensor = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            weights, *geometry, indices, offsets, pooling, id_weights, output
        )
        return pooled

    def look_up_uncounted(self, forward: Callable[..., Tensor], inputs: Mapping[str, Any]) -> Tensor:
        """Output of the module's ``forward`` without a gradient, which its optimizer does not count as a step."""
        counted = getattr(self.module, "iter_cpu", torch.zeros(1))
        before = int(counted)
        with torch.no_grad():
            output = forward(**inputs)
        if int(getattr(self.module, "iter_cpu", counted)) != before:
            self.module.iter_cpu.sub_(1)
            self.module.iter.sub_(1)
        return output

    @property
    def is_plain_sgd(self) -> bool:
        """True if its fused optimizer is SGD, which has no state; dense tables have no fused optimizer at all."""
        return self.has_dense_gradient or self.module.optimizer == EmbOptimType.EXACT_SGD

    @property
    def shares_output_grads(self) -> bool:
        """True if ids share an element of the output gradient, which alone carries their rows' gradients."""
        return not self.is_sequence and not self.has_dense_gradient

    @property
    def parameter(self) -> Tensor:
        """Parameter that shares the memory of :meth:`flat_weights`, of a lookup with a dense gradient."""
        return _memory_of(self.module)

    @property
    def max_gradient(self) -> float | None:
        """Bound to which FBGEMM clamps the elements of output gradients; None if it does not."""
        if self.has_dense_gradient or not self.module.optimizer_args.gradient_clipping:
            return None
        return float(self.module.optimizer_args.max_gradient)

    @property
    def output_is_half(self) -> bool:
        """True if its output, and hence the output's gradient, has less than float32's precision."""
        return not self.has_dense_gradient and self.module.output_dtype != SparseType.FP32.as_int()

    @property
    def process_group(self) -> ProcessGroup:
        """Processes that its collection is sharded over."""
        group: ProcessGroup = self.collection._env.process_group
        return group

    @property
    def num_ranks(self) -> int:
        """Number of these processes."""
        return self.process_group.size()

    @property
    def splits_rows(self) -> bool:
        """True if other ranks hold more rows of its tables."""
        return any(has_row_shards(self.collection, shard.table) for shard in self.shards)

    @property
    def splits_columns(self) -> bool:
        """True if it holds column shards."""
        return any(shard.column_ranks for shard in self.shards)

    @property
    def has_equal_partners(self) -> bool:
        """True if all ranks with columns of its tables look up the same tables, one column shard of each."""
        names = [shard.table for shard in self.shards]
        tables_of_ranks = [table_names_of(group) for _, group in groups_of_ranks(self.collection)]
        partners = [tables for tables in tables_of_ranks if set(names) & set(tables)]
        return len(set(names)) == len(names) and all(tables == names for tables in partners)

    @cached_property
    def weight_offsets(self) -> list[int]:
        """Offset of each table's first weight in :meth:`flat_weights`, in elements, [number of shards]."""
        first = self.flat_weights().storage_offset()
        return [view.storage_offset() - first for view in self.module.split_embedding_weights()]

    @property
    def iterations(self) -> int:
        """Forward passes that FBGEMM has counted, in evaluation too; some of its optimizers use this count."""
        return 0 if self.has_dense_gradient else int(self.module.iter)

    def flat_weights(self) -> Tensor:
        """Weights held here as one flat tensor that shares their memory, float [sum rows * D]."""
        return _memory_of(self.module).detach().view(-1)

    @property
    def is_cached(self) -> bool:
        """True if FBGEMM caches rows of host memory on the device (``fused_uvm_caching``)."""
        return not self.has_dense_gradient and bool(self.module.lxu_cache_weights.numel())

    @property
    def prefetches(self) -> bool:
        """True if FBGEMM fills its cache for the next batch meanwhile, which only its own backward waits for."""
        return not self.has_dense_gradient and bool(self.module.prefetch_pipeline)

    def cache_of(self, row: Tensor) -> RowCache | None:
        """Finds rows, by their indices among those of all tables, int [n], in FBGEMM's cache; None if it has none."""
        if not self.is_cached:
            return None
        # All tables of the lookup are cached, so that FBGEMM numbers their rows in the same way.
        tbe = self.module
        found = torch.ops.fbgemm.lxu_cache_lookup(row.long(), tbe.lxu_cache_state, tbe.total_cache_hash_size)
        return RowCache(found, tbe.lxu_cache_weights, tbe.lxu_cache_weights.shape[1])

    def empty_cache(self) -> None:
        """Writes cached rows back, so that :meth:`flat_weights` has all of them, and removes them from the cache."""
        if self.is_cached:
            self.module.flush()
            self.module.reset_cache_states()

    def zeros_of_weights(self) -> Tensor:
        """Allocates zeros, float32, laid out like :meth:`flat_weights` and in the same kind of memory."""
        weights = self.flat_weights()
        if self.has_dense_gradient or not self.module.weights_uvm.numel():
            return torch.zeros(weights.numel(), device=weights.device)
        like = torch.empty(1, device=weights.device)
        state: Tensor = torch.ops.fbgemm.new_managed_tensor(like, [weights.numel()])
        return state.zero_()

    def view_of(self, flat: Tensor, table: int) -> Tensor:
        """View of a table in a flat tensor that is laid out like :meth:`flat_weights`, [rows, D], or that has one value
        for each row of all tables, [rows, 1].
        """
        shard = self.shards[table]
        if flat.numel() == sum(each.rows for each in self.shards):
            first = sum(each.rows for each in self.shards[:table])
            return flat[first : first + shard.rows].view(shard.rows, 1)
        start = self.weight_offsets[table]
        return flat[start : start + shard.rows * shard.embedding_dim].view(shard.rows, shard.embedding_dim)


def _shard_of(collection: Any, table: Any, weights: Tensor, name: str) -> TableShard:
    metadata = table.local_metadata
    first_row, first_column = metadata.shard_offsets if metadata is not None else (0, 0)
    ranks = ranks_of_columns(collection, table.name).get(first_row, ())
    rows, columns = weights.shape
    return TableShard(name, table.name, rows, first_row, columns, first_column, table.embedding_dim, ranks)


def _memory_of(tbe: SplitTableBatchedEmbeddingBagsCodegen | DenseTableBatchedEmbeddingBagsCodegen) -> Tensor:
    """Allocation that holds all tables of a lookup; discovery.py refuses lookups with several."""
    weights: Tensor
    if isinstance(tbe, DenseTableBatchedEmbeddingBagsCodegen):
        weights = tbe.weights
    else:
        weights = next(each for each in (tbe.weights_dev, tbe.weights_host, tbe.weights_uvm) if each.numel())
    return weights
