"""The rows of all tables of a served model, and their lookup: of one version while the next one is written.

Sizes: B samples, F keys of the fields, n rows, m removed ids, P stored width. The number of a field is that of its
first key.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.dataset.schema import Schema

from ..export.manifest import Precision
from .row_kernels import Bag, Tables, gather, gather_bag
from .row_store import NO_SCALES, NO_WEIGHTS, Ids, RowChange, RowStore


class ServedRows:
    """Rows by field and id, which one thread changes.

    A version is applied in two steps. First its rows are written to an overlay, a small store that precedes the base;
    lookups that begin from then on are given both. When no lookup uses the base alone any more, the overlay is merged
    into it: no lookup reads what is being written, because it finds it in the overlay.

    Args:
        schema: names the fields.
        sizes: rows of each key's table, which keys may share by ``table_of``; -1 if it is collisionless.
        table_of: number of each key's table.
        widths: stored width of each key's rows, int64 [F].
        precision: of the stored rows.

    Attributes:
        tables: those of each width, in ascending order; for :meth:`gather`.
        removed: ids that deltas have removed.
    """

    def __init__(self, schema: Schema, sizes: Ids, table_of: Ids, widths: Ids, precision: Precision) -> None:
        self.removed = 0
        self._shape = (len(widths), int(max(widths)))
        numbers = {key: number for number, key in enumerate(schema.keys)}
        self._number = {field.name: numbers[field.keys[0]] for field in schema.sparse}
        fields = [(self._number[field.name], field) for field in schema.sparse]
        singles = np.array([number for number, field in fields if field.kind == "categorical"], np.int64)
        self._parts, self._of_width = dict[int, RowStore](), []
        for width in np.unique(widths).tolist():
            columns = np.flatnonzero(widths[singles] == width)  # of the samples' ids
            bags = [each for each in fields if each[1].kind != "categorical" and widths[each[0]] == width]
            self._of_width.append((columns, singles[columns], bags))
            self._parts[width] = RowStore(sizes, table_of, widths == width, width, precision)
        self.tables = tuple(each.tables for each in self._parts.values())

    @property
    def resident(self) -> int:
        """Ids of collisionless tables that have a row."""
        return sum(each.resident for each in self._parts.values())

    def gather(self, samples: SampleBlock, tables: Sequence[Tables], unknown: Ids) -> Tensor:
        """Pooled rows, float32 [B, F, largest P], in any thread; adds numbers of ids without a row of their own.

        The numbers are added to ``unknown``, int64 [F], at the first key of each field. Rows of a sequence are by
        position, zeros where there is no id. Any numbers follow the columns of narrower rows. ``tables`` are those of
        this object, now or at an earlier time.
        """
        out = np.empty((len(samples), *self._shape), np.float32)
        all_ids = samples.ids.numpy()
        for (columns, singles, bags), own in zip(self._of_width, tables, strict=True):
            ids = all_ids if len(columns) == all_ids.shape[1] else all_ids[:, columns]
            ids = np.ascontiguousarray(ids, np.int64)  # of one type, as each takes seconds to compile for
            gather(ids, singles, own, out, unknown)
            for number, field in bags:
                values = samples.bags[field.name]
                weights = NO_WEIGHTS if values.weights is None else values.weights.numpy()
                ids, offsets = values.values.numpy().astype(np.int64, copy=False), values.offsets.numpy()
                shared = self._number[field.vocabulary]
                bag = Bag(shared, number, field.max_length, ids, offsets, weights, field.pooling == "mean")
                gather_bag(bag, own, out, unknown)
        return torch.from_numpy(out)

    def load(self, ids: Ids, fields: Ids, rows: Tensor, scale: Tensor | None = None) -> None:
        """Sets rows before there are lookups; for the arguments see `RowChange`.

        They are in their stored form: [n, P], for int8 with scales [n].
        """
        part = self._parts[rows.shape[1]]
        part.add(ids, fields, rows.numpy().view(part.dtype), NO_SCALES if scale is None else scale.numpy())
        self.tables = tuple(each.tables for each in self._parts.values())

    def overlay(self, changes: Sequence[RowChange]) -> None:
        """Changes ``tables`` to those with the changes; they must be merged before the next ones."""
        self.tables = tuple(part.overlaid(own) for part, own in self._by_width(changes))

    def merge(self, changes: Sequence[RowChange]) -> None:
        """Merges the changes of the overlay; ``tables`` are again those without one.

        No lookup may use any tables before those of the overlay.
        """
        for (part, own), tables in zip(self._by_width(changes), self.tables, strict=True):
            part.merge(own, tables.overlay)
            self.removed += sum(part.remove(each.removed, each.removed_fields) for each in own)
        self.tables = tuple(each.tables for each in self._parts.values())

    def replace(self, changes: Sequence[RowChange]) -> None:
        """Changes ``tables`` to new ones, which have only these ids; numbered rows that are not among them remain."""
        parts = {part: part.replaced(own) for part, own in self._by_width(changes)}
        self._parts = {width: parts[part] for width, part in self._parts.items()}
        self.tables = tuple(each.tables for each in self._parts.values())

    def _by_width(self, changes: Sequence[RowChange]) -> Iterator[tuple[RowStore, list[RowChange]]]:
        for width, part in self._parts.items():
            yield part, [each for each in changes if each.rows.shape[1] == width]
