"""One lookup of a sharded TorchRec model: its module of FBGEMM, with tables, features and weights.

A lookup is one table-batched embedding module (TBE) of FBGEMM. It holds shards of several tables and reads T features
of B bags. A table may serve several features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from cowrec.errors import UserError

from ..kernels.layout import LookupBags, LookupLayout
from .plan import ShardedCollection, Table, lookups_of_ranks, process_group_of


@dataclass(frozen=True)
class TableShard:
    """Part of a table that a lookup holds; a lookup may hold several shards of a table."""

    table: Table
    rows: int  # rows held here
    first_row: int  # index of the shard's first row in the table
    embedding_dim: int  # columns of a row held here
    first_column: int  # index of the shard's first column in the table's row
    table_dim: int  # columns of the table's row on all ranks

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def column_ranks(self) -> tuple[int, ...]:
        """Global ranks of the column shards of these rows; empty where columns are not sharded."""
        return self.table.column_ranks.get(self.first_row, ())


@dataclass(frozen=True)
class TracedUpdate:
    """A tensor of a fused optimizer whose change shows the gradient that reached a row."""

    name: str  # name of the tensor, for messages
    kept: Sequence[Tensor]  # the tensor of each table, float [rows, D] or [rows]
    step: Callable[[Tensor, Tensor], Tensor]  # (values of a row, the row's gradient) -> values after the step


class TbeLookup:
    """Module of FBGEMM of a sharded collection, with its tables, features and weights.

    Attributes:
        module: the TBE, whose forward takes ``indices`` [nnz], ``offsets`` [T * B + 1] and returns float [B, sum D].
        has_dense_gradient: whether the weights are a parameter whose gradient a dense optimizer applies.
        is_replicated: whether every rank holds all tables and looks up its own samples in them (data-parallel).
        feature_table: table number of each feature, [T]; features of one table are neighbours.
    """

    def __init__(self, kernel: Any, collection: ShardedCollection, tables: Mapping[str, Table]):
        self.module: SplitTableBatchedEmbeddingBagsCodegen | DenseTableBatchedEmbeddingBagsCodegen = kernel.emb_module
        self.collection = collection
        self.has_dense_gradient = isinstance(self.module, DenseTableBatchedEmbeddingBagsCodegen)
        configs, views = kernel._config.embedding_tables, self.module.split_embedding_weights()
        self.is_replicated = all(config.local_metadata is None for config in configs)
        self.shards = tuple(
            _shard_of(tables[config.name], config, view) for config, view in zip(configs, views, strict=True)
        )
        self.feature_table: list[int] = list(kernel._feature_table_map)
        self._ones = torch.ones(0, dtype=torch.float32)

    @property
    def is_sequence(self) -> bool:
        """True if the lookup does not pool: the output is the row of each id, float [nnz, D]."""
        return bool(self.module.pooling_mode == PoolingMode.NONE)

    @property
    def is_mean_pooled(self) -> bool:
        return bool(self.module.pooling_mode == PoolingMode.MEAN)

    def pool_by(self, *, mean: bool) -> None:
        self.module.pooling_mode = PoolingMode.MEAN if mean else PoolingMode.SUM

    def follow_evictions(self, evicted: Callable[[int, Tensor], None]) -> Callable[[], None]:
        """Calls ``evicted(table, rows)`` when managed collision gives rows to new ids; returns an undo function."""
        module: Any = self.module
        if self.has_dense_gradient:
            return lambda: None
        reset_fused = module.reset_embedding_weight_momentum

        def reset(
            pruned_indices: Tensor, pruned_indices_offsets: Tensor, logical_table_ids: Tensor, buffer_ids: Tensor
        ) -> None:
            reset_fused(pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids)
            offsets = pruned_indices_offsets.tolist()
            for table, buffer in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
                evicted(table, pruned_indices[offsets[buffer] : offsets[buffer + 1]])

        module.reset_embedding_weight_momentum = reset
        return partial(delattr, module, "reset_embedding_weight_momentum")

    @property
    def pools_on_cpu(self) -> bool:
        """True if :meth:`pool_on_cpu` can look up the rows."""
        pools_by_sum = self.module.pooling_mode == PoolingMode.SUM
        return not self.has_dense_gradient and bool(self.module.use_cpu) and pools_by_sum

    def pool_on_cpu(self, indices: Tensor, offsets: Tensor, id_weights: Tensor | None) -> Tensor:
        """Pools rows to float [B, sum D] without a gradient, by FBGEMM's operator: its Python is ten times as slow."""
        tbe, offsets = self.module, offsets.to(indices.dtype)
        id_weights = None if id_weights is None else id_weights.float()
        mode = tbe.bounds_check_mode_int
        if mode != BoundsCheckMode.NONE.value:
            torch.ops.fbgemm.bounds_check_indices(
                tbe.rows_per_table, indices, offsets, mode, tbe.bounds_check_warning, id_weights
            )
        weights, pooling, output = tbe.weights_host, int(tbe.pooling_mode), tbe.output_dtype
        geometry = (tbe.weights_offsets, tbe.D_offsets, tbe.total_D, tbe.hash_size_cumsum)
        if id_weights is None:  # the operator needs weights, and 1 changes no bit
            if len(self._ones) < len(indices):
                self._ones = torch.ones(len(indices), dtype=torch.float32)
            id_weights = self._ones[: len(indices)]
        pooled: Tensor = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            weights, *geometry, indices, offsets, pooling, id_weights, output
        )
        return pooled

    def empty_output(self, bags: LookupBags, inputs: Mapping[str, Any]) -> Tensor:
        dims = [self.shards[table].embedding_dim for table in self.feature_table]
        width = dims[0] if self.is_sequence else sum(dims)
        flat = inputs.get("batch_size_per_feature_per_rank") is not None
        shape = (bags.size,) if flat else (bags.size // width, width)
        dtype = SparseType.from_int(int(self.module.output_dtype)).as_dtype()
        return torch.empty(shape, dtype=dtype, device=bags.indices.device)

    def look_up_uncounted(self, forward: Callable[..., Tensor], inputs: Mapping[str, Any]) -> Tensor:
        """Runs the module's ``forward`` without a gradient, and without a step in the count of its optimizer."""
        counted = getattr(self.module, "iter_cpu", torch.zeros(1))
        before = int(counted)
        with torch.no_grad():
            output = forward(**inputs)
        if int(getattr(self.module, "iter_cpu", counted)) != before:
            self.module.iter_cpu.sub_(1)
            self.module.iter.sub_(1)
        return output

    @property
    def initial_rate(self) -> float:
        """Learning rate with which the fused optimizer was made; 0 without a fused optimizer."""
        return 0.0 if self.has_dense_gradient else float(self.module.get_learning_rate())

    @property
    def is_plain_sgd(self) -> bool:
        """True if there is no fused optimizer other than SGD, which has no state."""
        return self.has_dense_gradient or self.module.optimizer == EmbOptimType.EXACT_SGD

    def traced_update(self) -> TracedUpdate | None:
        """Describes the fused optimizer's update of the coming step; None for an optimizer that is not known here."""
        tbe, optimizer, args = self.module, self.module.optimizer, self.module.optimizer_args
        lr, beta1 = tbe.get_learning_rate(), args.beta1
        if optimizer == EmbOptimType.EXACT_SGD:
            views = [self.view_of(self.flat_weights(), table) for table in range(len(self.shards))]
            return TracedUpdate("weights", views, lambda kept, grad: kept - lr * grad)
        rules: dict[Any, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
            EmbOptimType.EXACT_ADAGRAD: ("sum of squares", lambda kept, grad: kept + grad.square()),
            EmbOptimType.EXACT_ROWWISE_ADAGRAD: ("sum of mean squares", lambda kept, grad: kept + grad.square().mean()),
            EmbOptimType.ADAM: ("first moment", lambda kept, grad: beta1 * kept + (1 - beta1) * grad),
        }
        # FBGEMM adds L2 to the gradient on CUDA, but not on CPU.
        adds_l2 = args.weight_decay != 0 and args.weight_decay_mode == WeightDecayMode.L2.value
        counts = tbe.weight_decay_mode in (WeightDecayMode.COUNTER, WeightDecayMode.COWCLIP)
        if optimizer not in rules or adds_l2 or counts:
            return None
        name, step = rules[optimizer]
        return TracedUpdate(name, [own[0] for own in tbe.split_optimizer_states()], step)

    @property
    def shares_output_grads(self) -> bool:
        """True if several ids may share an element of the output gradient that FBGEMM's update reads."""
        return not self.is_sequence and not self.has_dense_gradient

    @property
    def parameter(self) -> Tensor:
        """Allocation that holds all tables; with a dense gradient, the parameter of that gradient."""
        tbe = self.module
        held = [tbe.weights] if self.has_dense_gradient else [tbe.weights_dev, tbe.weights_host, tbe.weights_uvm]
        parameter: Tensor = next(weights for weights in held if weights.numel())
        return parameter

    @property
    def max_gradient(self) -> float | None:
        """Bound to which FBGEMM clamps the elements of output gradients, or None."""
        if self.has_dense_gradient or not self.module.optimizer_args.gradient_clipping:
            return None
        return float(self.module.optimizer_args.max_gradient)

    @property
    def output_is_half(self) -> bool:
        """True if the output, and hence the output's gradient, has less than float32's precision."""
        return not self.has_dense_gradient and self.module.output_dtype != SparseType.FP32.as_int()

    @property
    def process_group(self) -> ProcessGroup:
        return process_group_of(self.collection)

    @property
    def num_ranks(self) -> int:
        return self.process_group.size()

    @property
    def splits_rows(self) -> bool:
        return any(shard.table.splits_rows for shard in self.shards)

    @property
    def splits_columns(self) -> bool:
        return any(shard.column_ranks for shard in self.shards)

    @property
    def has_equal_partners(self) -> bool:
        """True if all ranks with columns of these tables look up the same tables, and one column shard of each."""
        names = [shard.table.own_name for shard in self.shards]
        partners = [lookup.tables for lookup in lookups_of_ranks(self.collection) if set(names) & set(lookup.tables)]
        return len(set(names)) == len(names) and all(tables == names for tables in partners)

    @cached_property
    def weight_offsets(self) -> list[int]:
        """Offset of each table's first weight in :meth:`flat_weights`, in elements, [number of shards]."""
        first = self.flat_weights().storage_offset()
        return [view.storage_offset() - first for view in self.module.split_embedding_weights()]

    @property
    def iterations(self) -> int:
        """Forward passes that FBGEMM has counted, in evaluation too; some fused optimizers use this count."""
        return 0 if self.has_dense_gradient else int(self.module.iter)

    def flat_weights(self) -> Tensor:
        """Returns the weights held here as one flat tensor in the same memory, float [sum rows * D]."""
        return self.parameter.detach().view(-1)

    def zeros_of_weights(self) -> Tensor:
        """Allocates zeros, float32, with the layout of :meth:`flat_weights` and in the same kind of memory."""
        weights = self.flat_weights()
        if self.has_dense_gradient or not self.module.weights_uvm.numel():
            return torch.zeros(weights.numel(), dtype=torch.float32, device=weights.device)
        like = torch.empty(1, dtype=torch.float32, device=weights.device)
        state: Tensor = torch.ops.fbgemm.new_managed_tensor(like, [weights.numel()])
        return state.zero_()

    def view_of(self, flat: Tensor, table: int) -> Tensor:
        """Returns the view of a table in a flat tensor: [rows, D], or [rows, 1] if a row has one value."""
        shard = self.shards[table]
        if flat.numel() == sum(shard.rows for shard in self.shards):
            first = sum(shard.rows for shard in self.shards[:table])
            return flat[first : first + shard.rows].view(shard.rows, 1)
        start = self.weight_offsets[table]
        return flat[start : start + shard.rows * shard.embedding_dim].view(shard.rows, shard.embedding_dim)

    def layout(self) -> LookupLayout:
        weights = self.flat_weights()
        rows = [shard.rows for shard in self.shards]
        dims = [shard.embedding_dim for shard in self.shards]
        columns = (rows, dims, self.weight_offsets, np.cumsum([0, *rows[:-1]]))
        rows_of, dim_of, start, first_row = (
            torch.as_tensor(values, dtype=torch.int64, device=weights.device) for values in columns
        )
        return LookupLayout(
            rows_of, dim_of, start, first_row, max(dims), size=weights.numel(), tables=len(rows), num_rows=sum(rows)
        )

    def raise_bad_id(self, bad: Sequence[int], begins: np.ndarray, indices: np.ndarray) -> None:
        """Raises ValueError for an id outside its table, given kernels' offsets of such ids in ``indices`` or -1."""
        for offset in bad:
            if offset >= 0:
                shard = self.shards[int(np.searchsorted(begins, offset, side="right")) - 1]
                raise UserError(
                    f"id {int(indices[offset])} is outside table {shard.name!r}, which holds {shard.rows} rows here; "
                    "map ids into [0, num_embeddings) before the lookup"
                )


def _shard_of(table: Table, config: Any, weights: Tensor) -> TableShard:
    first_row, first_column = config.local_metadata.shard_offsets if config.local_metadata is not None else (0, 0)
    rows, columns = weights.shape
    return TableShard(table, rows, first_row, columns, first_column, config.embedding_dim)


def lookup_modules(collection: ShardedCollection) -> list[nn.Module]:
    """Lists a collection's modules of lookups, one for each kind of sharding. Resharding makes new modules."""
    return [lookup.module if isinstance(lookup, DistributedDataParallel) else lookup for lookup in collection._lookups]
