"""Lookup of the rows of samples.

Sizes: B samples, F fields, P stored width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.dataset.schema import Schema

from .gathering import Bag, gather, gather_bag
from .store import Tables

_NONE = np.empty(0, np.float32)


class RowLookup:
    """Looks up the rows of samples, in any number of threads.

    Args:
        schema: of the data.
        widths: stored width of each field's rows, int64 [F].
    """

    def __init__(self, schema: Schema, widths: NDArray[np.int64]) -> None:
        self._shape = (len(widths), int(max(widths)))
        numbers = {field.name: number for number, field in enumerate(schema.sparse)}
        singles = np.array([numbers[field.name] for field in schema.sparse if field.kind == "categorical"], np.int64)
        bags = [(numbers[field.name], field) for field in schema.sparse if field.kind != "categorical"]
        self._of_width = []
        for width in np.unique(widths):
            columns = np.flatnonzero(widths[singles] == width)  # of the samples' ids
            own = [(number, field) for number, field in bags if widths[number] == width]
            self._of_width.append((columns, singles[columns], own))

    def compile(self, tables: Sequence[Tables]) -> None:
        """Compiles for such tables, because compiling blocks all other threads."""
        none, out = np.empty(0, np.int64), np.empty((0, 1, 1), np.float32)
        for each in [*tables, *(own._replace(overlay=own.base) for own in tables)]:
            gather(0, 0, np.empty((0, 0), np.int64), none, each, out)
            gather_bag(0, 0, Bag(0, none, none, _NONE, False), each, out)

    def gather(self, samples: SampleBlock, tables: Sequence[Tables]) -> tuple[Tensor, int]:
        """Pooled rows, float32 [B, F, largest P], and how many ids had no row of their own.

        Any numbers follow the columns of narrower rows. ``tables`` are those of each width, in ascending order.
        """
        out, unknown = np.empty((len(samples), *self._shape), np.float32), 0
        all_ids = samples.ids.numpy()
        for (columns, singles, bags), own in zip(self._of_width, tables, strict=True):
            ids = all_ids if len(columns) == all_ids.shape[1] else all_ids[:, columns]
            ids = np.ascontiguousarray(ids, np.int64)  # of one type, as each takes seconds to compile for
            unknown += gather(0, len(samples), ids, singles, own, out)
            for number, field in bags:
                values = samples.bags[field.name]
                weights = _NONE if values.weights is None else values.weights.numpy()
                ids, offsets = values.values.numpy().astype(np.int64, copy=False), values.offsets.numpy()
                bag = Bag(number, ids, offsets, weights, field.pooling == "mean")
                unknown += gather_bag(0, len(samples), bag, own, out)
        return torch.from_numpy(out), unknown
