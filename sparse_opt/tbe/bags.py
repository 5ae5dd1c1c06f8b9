"""Geometry of a lookup and of its bags: where tables lie in the weights, and where bags have their outputs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cowrec.errors import UserError

from ..kernels.layout import Blocks, LookupBags, LookupLayout
from .lookup import TbeLookup

_MOST_SIZES = 64
"""Batch sizes whose blocks a lookup keeps."""


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
