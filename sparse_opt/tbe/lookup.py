"""One lookup of a sharded TorchRec model: its FBGEMM module, the module's tables, features and weights, and its bags.

Only this file, discovery.py and one_process.py use private attributes of TorchRec and FBGEMM; versions.py has the
versions they are tested with. Terms: a lookup is one table-batched embedding module (TBE) of FBGEMM; it holds shards of
several tables and reads T features (a table may serve several) for B bags each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor
from torch.distributed import ProcessGroup, get_global_rank
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed.tensor import DTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from cowrec.errors import UserError

from ..kernels.layout import Blocks, LookupBags, LookupLayout

ShardedCollection: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
_MOST_SIZES = 64
"""Batch sizes whose blocks a lookup keeps."""


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


@dataclass(frozen=True)
class TracedUpdate:
    """What a fused optimizer keeps of a row's gradient, which shows whichever gradient reached it.

    Attributes:
        name: what that is, for messages.
        kept: it for each table, float [rows, D] or [rows].
        step: (kept of a row, its gradient) -> kept after the step.
    """

    name: str
    kept: Sequence[Tensor]
    step: Callable[[Tensor, Tensor], Tensor]


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
        self._ones = torch.ones(0, dtype=torch.float32)

    @property
    def is_sequence(self) -> bool:
        """True if it returns the row of each id, not pooled: its output is float [nnz, D]."""
        return bool(self.module.pooling_mode == PoolingMode.NONE)

    @property
    def is_mean_pooled(self) -> bool:
        """True if it averages the rows of a bag."""
        return bool(self.module.pooling_mode == PoolingMode.MEAN)

    def pool_by(self, *, mean: bool) -> None:
        """Switches the TBE to means, or to sums; for a mean callers then weight ids by 1/length (exact everywhere)."""
        self.module.pooling_mode = PoolingMode.MEAN if mean else PoolingMode.SUM

    def follow_evictions(self, evicted: Callable[[int, Tensor], None]) -> Callable[[], None]:
        """Makes managed collision call ``evicted(table, rows)`` when it gives rows, int64 [n], of a table to new ids.

        Returns a function that ends it.
        """
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
                self._ones = torch.ones(len(indices), dtype=torch.float32)
            id_weights = self._ones[: len(indices)]
        pooled: Tensor = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            weights, *geometry, indices, offsets, pooling, id_weights, output
        )
        return pooled

    def empty_output(self, bags: LookupBags, inputs: Mapping[str, Any]) -> Tensor:
        """Memory for the output of a forward pass; inputs are its keyword arguments."""
        dims = [self.shards[table].embedding_dim for table in self.feature_table]
        width = dims[0] if self.is_sequence else sum(dims)
        flat = inputs.get("batch_size_per_feature_per_rank") is not None
        shape = (bags.size,) if flat else (bags.size // width, width)
        dtype = SparseType.from_int(int(self.module.output_dtype)).as_dtype()
        return torch.empty(shape, dtype=dtype, device=bags.indices.device)

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
    def initial_rate(self) -> float:
        """Learning rate with which the fused optimizer was made; 0 where there is none."""
        return 0.0 if self.has_dense_gradient else float(self.module.get_learning_rate())

    @property
    def is_plain_sgd(self) -> bool:
        """True if its fused optimizer is SGD, which has no state; dense tables have no fused optimizer at all."""
        return self.has_dense_gradient or self.module.optimizer == EmbOptimType.EXACT_SGD

    def traced_update(self) -> TracedUpdate | None:
        """The update of a fused optimizer, as a forward pass at this time fixes it; None where no rule is known here.

        Adagrad's first step is of one size whatever the gradient is, but the squares that it adds up are not.
        """
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
        # FBGEMM adds its own L2 to the gradient on CUDA, and on CPU does not.
        adds_l2 = args.weight_decay != 0 and args.weight_decay_mode == WeightDecayMode.L2.value
        counts = tbe.weight_decay_mode in (WeightDecayMode.COUNTER, WeightDecayMode.COWCLIP)
        if optimizer not in rules or adds_l2 or counts:
            return None
        name, step = rules[optimizer]
        return TracedUpdate(name, [own[0] for own in tbe.split_optimizer_states()], step)

    @property
    def shares_output_grads(self) -> bool:
        """True if ids share an element of the output gradient, which alone carries their rows' gradients."""
        return not self.is_sequence and not self.has_dense_gradient

    @property
    def parameter(self) -> Tensor:
        """Allocation that holds all its tables; discovery.py refuses lookups with several. With a dense gradient it is
        the parameter that has it.
        """
        tbe = self.module
        held = [tbe.weights] if self.has_dense_gradient else [tbe.weights_dev, tbe.weights_host, tbe.weights_uvm]
        weights: Tensor = next(each for each in held if each.numel())
        return weights

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
        return process_group_of(self.collection)

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
        return self.parameter.detach().view(-1)

    def zeros_of_weights(self) -> Tensor:
        """Allocates zeros, float32, laid out like :meth:`flat_weights` and in the same kind of memory."""
        weights = self.flat_weights()
        if self.has_dense_gradient or not self.module.weights_uvm.numel():
            return torch.zeros(weights.numel(), dtype=torch.float32, device=weights.device)
        like = torch.empty(1, dtype=torch.float32, device=weights.device)
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


def process_group_of(collection: ShardedCollection) -> ProcessGroup:
    """Processes that a collection is sharded over."""
    group: ProcessGroup = collection._env.process_group
    return group


def groups_of_ranks(collection: Any) -> Iterator[tuple[int, Any]]:
    """Lookups of all ranks as (rank, TorchRec's description of it), those of a rank in their order there."""
    sequences = getattr(collection, "_sharding_type_to_sharding", {}).values()
    for sharding in getattr(collection, "_embedding_shardings", sequences):
        for rank, groups in enumerate(sharding._grouped_embedding_configs_per_rank):
            yield from ((rank, group) for group in groups)


def table_names_of(group: Any) -> list[str]:
    """Names of the tables of a lookup that :func:`groups_of_ranks` found."""
    return [table.name for table in group.embedding_tables]


def ranks_of_columns(collection: Any, table: str) -> dict[int, tuple[int, ...]]:
    """Global ranks of the column shards of a table's rows, one for each, by the first of these rows.

    Several rows are first under grid sharding; none where columns are not sharded.
    """
    plan, group = collection.module_sharding_plan[table], collection._env.process_group
    shards = plan.sharding_spec.shards if plan.sharding_spec is not None else ()
    if len({shard.shard_offsets[1] for shard in shards}) < 2:
        return {}
    found: dict[int, list[int]] = {}
    for shard, rank in zip(shards, plan.ranks, strict=True):
        if not shard.shard_sizes[0]:
            continue  # all shards without rows begin at one row, in whichever part of the rows they are
        found.setdefault(shard.shard_offsets[0], []).append(get_global_rank(group, rank))
    return {first_row: tuple(sorted(ranks)) for first_row, ranks in found.items()}


def has_row_shards(collection: Any, table: str) -> bool:
    """True if a table has several shards with different rows."""
    spec = collection.module_sharding_plan[table].sharding_spec
    return spec is not None and len({shard.shard_offsets[0] for shard in spec.shards}) > 1


def sharded_like_weights(
    collection: ShardedCollection,
    lookups: Sequence[TbeLookup],
    flats: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    per_row: bool = False,
) -> dict[str, ShardedTensor | Tensor]:
    """Wraps state of the rows into tensors that are sharded, or replicated, like the weights.

    Args:
        collection: a collection, of which a rank may hold no lookup.
        lookups: all its lookups on this rank.
        flats: for each lookup a flat tensor as in :meth:`TbeLookup.view_of`; the result shares its memory.
        dtype: type of the flat tensors.
        per_row: whether they hold one value for each row; of column shards only the first one's is used.

    Returns:
        One tensor for each table, for ``torch.distributed.checkpoint``, by the key of its weight in the collection's
        ``state_dict()`` without ``.weight``. All ranks must call together.
    """
    by_address: dict[int, Tensor] = {}
    for lookup, flat in zip(lookups, flats, strict=True):
        for table, view in enumerate(lookup.module.split_embedding_weights()):
            by_address[view.data_ptr()] = lookup.view_of(flat, table)
    result: dict[str, ShardedTensor | Tensor] = {}
    for weight_key, weight in collection.state_dict().items():
        key = weight_key.removesuffix(".weight")
        if isinstance(weight, ShardedTensor):
            width = 1 if per_row else None
            parts = [
                # Shards without rows have no distinct address.
                by_address[shard.tensor.data_ptr()] if len(shard.tensor) else shard.tensor.to(dtype)[:, :width]
                for shard in weight.local_shards()
            ]
            result[key] = _sharded_like(weight, parts, dtype, per_row)
        elif isinstance(weight, DTensor):
            raise UserError(
                f"table {key!r} is given out as a DTensor, of which the optimizer's state cannot be saved and loaded;"
                " leave output_dtensor out of the ShardingEnv"
            )
        elif weight.data_ptr() in by_address:
            result[key] = by_address[weight.data_ptr()]
    return result


def _sharded_like(weight: ShardedTensor, parts: Sequence[Tensor], dtype: torch.dtype, per_row: bool) -> ShardedTensor:
    """Builds a tensor that is sharded like a weight, or over the rows alone."""

    def narrow(shard: ShardMetadata) -> ShardMetadata:
        return replace(shard, shard_sizes=[shard.shard_sizes[0], 1]) if per_row else shard

    def holds_rows(shard: ShardMetadata) -> bool:
        return not per_row or shard.shard_offsets[1] == 0

    complete = weight.metadata()
    metadata = ShardedTensorMetadata(
        shards_metadata=[narrow(each) for each in complete.shards_metadata if holds_rows(each)],
        size=torch.Size([complete.size[0], 1]) if per_row else complete.size,
        tensor_properties=replace(complete.tensor_properties, dtype=dtype),
    )
    shards = [
        Shard(part, narrow(each.metadata))
        for part, each in zip(parts, weight.local_shards(), strict=True)
        if holds_rows(each.metadata)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=weight._process_group
    )


def layout_of(lookup: TbeLookup) -> LookupLayout:
    """Computes the geometry of a lookup, on its device."""
    device = lookup.flat_weights().device
    rows = [shard.rows for shard in lookup.shards]
    dims = [shard.embedding_dim for shard in lookup.shards]

    def on_device(values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=device)

    return LookupLayout(
        rows=on_device(rows),
        dim=on_device(dims),
        start=on_device(lookup.weight_offsets),
        first_row=on_device(np.cumsum([0, *rows[:-1]])),
        max_dim=max(dims),
        size=lookup.flat_weights().numel(),
        tables=len(rows),
        num_rows=sum(rows),
    )


class BagsOfLookup:
    """Finds where the bags of a lookup's forward passes have their outputs.

    Args:
        feature_table: table of each feature, [T]; the features of a table are neighbours.
        dims: columns of each table.
        is_sequence: whether rows are not pooled; all tables then have the same columns.
    """

    def __init__(
        self, feature_table: Sequence[int], dims: Sequence[int], device: torch.device, *, is_sequence: bool = False
    ):
        self._tables, self._num_tables = np.array(feature_table), len(dims)
        self._dims, self._device, self.is_sequence = np.array(dims)[self._tables], device, is_sequence
        self._pooled: dict[int, tuple[Blocks, int]] = {}

    def of(self, inputs: Mapping[str, Any]) -> LookupBags:
        """Ids of a forward pass, from its keyword arguments: ``indices``, ``offsets`` and, under a variable batch size,
        ``batch_size_per_feature_per_rank``.

        Raises:
            ValueError: several lookups write into one output.
        """
        if inputs.get("vbe_output") is not None:
            raise UserError(
                "under a variable batch size per feature, tables that are looked up separately write into one output,"
                " whose gradient cannot be told apart; give all tables of the collection the same pooling, data type"
                " and fused_params, or one collection for each"
            )
        indices, offsets = inputs["indices"], inputs["offsets"]
        if self.is_sequence:
            return self._sequences(indices, offsets)
        if (sizes := inputs.get("batch_size_per_feature_per_rank")) is not None:
            # FBGEMM's output has the bags of the first rank, feature by feature, then those of the next.
            return LookupBags(indices, offsets, *self._blocks_of_ranks(np.array(sizes, np.int64)))
        return LookupBags(indices, offsets, *self._pooled_blocks((len(offsets) - 1) // len(self._dims)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The blocks of the batch sizes so far, which a CUDA graph must hold as long as it is replayed."""
        return tuple(each for blocks, _ in self._pooled.values() for each in blocks)

    def _pooled_blocks(self, size: int) -> tuple[Blocks, int]:
        """Blocks of batches of ``size`` samples, and the elements of their output; made once for each size."""
        if size not in self._pooled:
            if len(self._pooled) == _MOST_SIZES:
                self._pooled.clear()
            features, width = len(self._dims), int(self._dims.sum())
            address, stride = self._dims.cumsum() - self._dims, np.full(features, width)
            blocks = self._blocks(self._tables, np.arange(features + 1) * size, address, stride)
            self._pooled[size] = blocks, size * width
        return self._pooled[size]

    def _blocks_of_ranks(self, sizes: np.ndarray) -> tuple[Blocks, int]:
        elements = sizes * self._dims[:, None]
        ends = elements.T.cumsum().reshape(elements.T.shape).T
        first_bag = np.concatenate([[0], sizes.ravel().cumsum()])
        tables, dims = (np.repeat(each, sizes.shape[1]) for each in (self._tables, self._dims))
        return self._blocks(tables, first_bag, (ends - elements).ravel(), dims), int(elements.sum())

    def _sequences(self, indices: Tensor, offsets: Tensor) -> LookupBags:
        """Every id is a bag; the features' first ones stay on the device."""
        size, dim = (len(offsets) - 1) // len(self._dims), int(self._dims[0])
        first_bag = (
            offsets[::size].long().contiguous() if size else offsets.new_zeros(len(self._dims) + 1, dtype=torch.int64)
        )
        blocks = self._pooled_blocks(0)[0]._replace(
            first_bag=first_bag, address=first_bag[:-1] * dim, stride=torch.full_like(first_bag[:-1], dim)
        )
        each = torch.arange(indices.numel() + 1, device=indices.device)
        return LookupBags(indices, each, blocks, indices.numel() * dim)

    def _blocks(self, tables: np.ndarray, first_bag: np.ndarray, address: np.ndarray, stride: np.ndarray) -> Blocks:
        first_block = np.searchsorted(tables, np.arange(self._num_tables + 1))
        packed = torch.from_numpy(np.concatenate([tables, first_block, first_bag, address, stride]))
        if self._device.type == "cuda":
            packed = packed.pin_memory().to(self._device, non_blocking=True)
        blocks = len(tables)
        return Blocks(*packed.split([blocks, self._num_tables + 1, blocks + 1, blocks, blocks]))


def raise_bad_id(lookup: TbeLookup, bad: Sequence[int], begins: np.ndarray, indices: np.ndarray) -> None:
    """Raises ValueError for the first offset in ``indices`` that a kernel found outside its table; -1 is none."""
    for offset in bad:
        if offset >= 0:
            shard = lookup.shards[int(np.searchsorted(begins, offset, side="right")) - 1]
            raise UserError(
                f"id {int(indices[offset])} is outside table {shard.name!r}, which holds {shard.rows} rows here; "
                "map ids into [0, num_embeddings) before the lookup"
            )
