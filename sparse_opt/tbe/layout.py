"""Geometry of a lookup for the row kernels, and the inputs of one of its backward passes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cowrec.sparse_opt.kernels.layout import LookupLayout
from cowrec.sparse_opt.kernels.torch_rows import LookupIds

from .lookup import TbeLookup


@dataclass(frozen=True)
class LookupBackward:
    """Inputs of one backward pass of a lookup. Sizes: T features, B bags each, nnz ids.

    Attributes:
        indices: row of each id in its table, int [nnz].
        offsets: offset of each bag in ``indices``, feature-major, int [T * B + 1].
        id_weights: factor of each id in its bag's sum, float [nnz]; None for ones.
        output_grad: gradient of the lookup's output, float [B, sum D].
        ids: rows of the ids, if the forward pass has found them already.
    """

    indices: Tensor
    offsets: Tensor
    id_weights: Tensor | None
    output_grad: Tensor
    ids: LookupIds | None = None


def layout_of(lookup: TbeLookup) -> LookupLayout:
    """Computes the geometry of a lookup, on its device."""
    device = lookup.flat_weights().device
    rows = [shard.rows for shard in lookup.shards]
    dims = [shard.embedding_dim for shard in lookup.shards]
    tables = np.arange(len(rows))

    def on_device(values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=device)

    return LookupLayout(
        feature_table=on_device(lookup.feature_table),
        feature_column=on_device(lookup.column_offsets),
        first_feature=on_device(np.searchsorted(lookup.feature_table, tables, "left")),
        end_feature=on_device(np.searchsorted(lookup.feature_table, tables, "right")),
        rows=on_device(rows),
        dim=on_device(dims),
        start=on_device(lookup.weight_offsets),
        first_row=on_device(np.cumsum([0, *rows[:-1]])),
        max_dim=max(dims),
        size=lookup.flat_weights().numel(),
        tables=len(rows),
        num_rows=sum(rows),
    )


def raise_bad_id(lookup: TbeLookup, bad: Sequence[int], begins: np.ndarray, indices: np.ndarray) -> None:
    """Raises ValueError for the first offset in ``indices`` that a kernel found outside its table; -1 is none."""
    for offset in bad:
        if offset >= 0:
            shard = lookup.shards[int(np.searchsorted(begins, offset, side="right")) - 1]
            raise ValueError(
                f"id {int(indices[offset])} is outside table {shard.name!r}, which holds {shard.rows} rows here; "
                "map ids into [0, num_embeddings) before the lookup"
            )
