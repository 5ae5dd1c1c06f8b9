"""The rows of all tables of a served model, and their lookup: of one version while the next one is written.

Sizes: B samples, F keys of the fields, n rows, m removed ids, P stored width. The number of a field is that of its
first key.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.dataset.schema import RESERVED_ROWS, Schema

from ..export.manifest import Precision, quantise
from . import row_kernels
from .row_kernels import Bag, Store, Tables

Ids = NDArray[np.int64]
NO_SCALES = NO_WEIGHTS = np.empty(0, np.float32)

_ROWS_AT_ONCE = 1 << 16
"""Rows that are quantised together, which limits the memory that takes."""
_MAX_LOAD = 0.6
"""Share of the slots that may be in use, also by removed ids."""
_LOAD_AFTER_REHASH = 0.5
_STORED = {"float32": np.float32, "float16": np.uint16, "int8": np.int8}
_HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


class RowChange(NamedTuple):
    """Changed rows of one table; for a table of numbered rows any field that it serves will do.

    Attributes:
        ids, fields: distinct ids and the numbers of their fields, int64 [n].
        rows: float32 [n, P].
        removed, removed_fields: ids that no longer have a row, int64 [m]; those that had none are ignored.
    """

    ids: Ids
    fields: Ids
    rows: NDArray[np.float32]
    removed: Ids
    removed_fields: Ids


class ServedRows:
    """Rows by field and id, which one thread changes.

    A version is applied in two steps. First its rows are written to an overlay, a small store that precedes the base;
    lookups that begin from then on are given both. When no lookup uses the base alone any more, the overlay is merged
    into it: no lookup reads what is being written, because it finds it in the overlay.

    Args:
        sizes: rows of each key's table, which keys may share by ``table_of``; -1 if it is collisionless.
        table_of: number of each key's table.
        widths: stored width of each key's rows, int64 [F].

    Attributes:
        tables: those of each width, in ascending order; for :meth:`gather`.
        removed: number of ids that deltas have removed.
    """

    def __init__(self, schema: Schema, sizes: Ids, table_of: Ids, widths: Ids, precision: Precision) -> None:
        self.removed = 0
        self._shape = (len(widths), int(max(widths)))
        numbers = {key: number for number, key in enumerate(schema.keys)}
        self._number = {field.name: numbers[field.keys[0]] for field in schema.sparse}
        fields = [(self._number[field.name], field) for field in schema.sparse]
        singles = np.array([number for number, field in fields if not field.is_list], np.int64)
        self._parts, self._of_width = dict[int, RowStore](), []
        for width in np.unique(widths).tolist():
            columns = np.flatnonzero(widths[singles] == width)  # of the samples' ids
            bags = [(number, field) for number, field in fields if field.is_list and widths[number] == width]
            self._of_width.append((columns, singles[columns], bags))
            self._parts[width] = RowStore(sizes, table_of, widths == width, width, precision)
        self.tables = tuple(store.tables for store in self._parts.values())

    @property
    def resident(self) -> int:
        """Ids of collisionless tables that have a row."""
        return sum(store.resident for store in self._parts.values())

    def gather(self, samples: SampleBlock, tables: Sequence[Tables], unknown: Ids) -> Tensor:
        """Pooled rows, float32 [B, F, largest P], in any thread.

        Numbers of ids without a row of their own are added to ``unknown``, int64 [F], at the first key of each field.
        Rows of a sequence are by position, zeros where there is no id. Any numbers follow the columns of narrower rows.
        ``tables`` are those of this object, now or at an earlier time.
        """
        out = np.empty((len(samples), *self._shape), np.float32)
        all_ids = samples.ids.numpy()
        for (columns, singles, bags), own in zip(self._of_width, tables, strict=True):
            ids = all_ids if len(columns) == all_ids.shape[1] else all_ids[:, columns]
            ids = np.ascontiguousarray(ids, np.int64)  # of one type, as each takes seconds to compile for
            row_kernels.gather(ids, singles, own, out, unknown)
            for number, field in bags:
                values = samples.bags[field.name]
                weights = NO_WEIGHTS if values.weights is None else values.weights.numpy()
                ids, offsets = values.values.numpy().astype(np.int64, copy=False), values.offsets.numpy()
                shared = self._number[field.vocabulary]
                bag = Bag(shared, number, field.max_length, ids, offsets, weights, field.pooling == "mean")
                row_kernels.gather_bag(bag, own, out, unknown)
        return torch.from_numpy(out)

    def load(self, ids: Ids, fields: Ids, rows: Tensor, scale: Tensor | None = None) -> None:
        """Sets rows in their stored form, [n, P], for int8 with scales [n], before there are lookups."""
        part = self._parts[rows.shape[1]]
        part.add(ids, fields, rows.numpy().view(part.dtype), NO_SCALES if scale is None else scale.numpy())
        self.tables = tuple(store.tables for store in self._parts.values())

    def overlay(self, changes: Sequence[RowChange]) -> None:
        """Changes ``tables`` to those with the changes; they must be merged before the next ones."""
        self.tables = tuple(part.overlaid(own) for part, own in self._by_width(changes))

    def merge(self, changes: Sequence[RowChange]) -> None:
        """Merges the changes of the overlay; ``tables`` are again those without one.

        No lookup may still use tables older than the overlay.
        """
        for (part, own), tables in zip(self._by_width(changes), self.tables, strict=True):
            part.merge(own, tables.overlay)
            self.removed += sum(part.remove(change.removed, change.removed_fields) for change in own)
        self.tables = tuple(store.tables for store in self._parts.values())

    def replace(self, changes: Sequence[RowChange]) -> None:
        """Changes ``tables`` to new ones, with these ids alone; numbered rows that are not among them remain."""
        parts = {part: part.replaced(own) for part, own in self._by_width(changes)}
        self._parts = {width: parts[part] for width, part in self._parts.items()}
        self.tables = tuple(store.tables for store in self._parts.values())

    def _by_width(self, changes: Sequence[RowChange]) -> Iterator[tuple["RowStore", list[RowChange]]]:
        for width, part in self._parts.items():
            yield part, [change for change in changes if change.rows.shape[1] == width]


class RowStore:
    """Rows of the fields whose rows have one width, P, with a hash table of their ids.

    ``sizes`` and ``table_of`` are those of :class:`ServedRows`; ``served``, bool [F], tells the keys whose rows have
    this width. ``resident`` counts the ids of collisionless tables that have a row.
    """

    def __init__(self, sizes: Ids, table_of: Ids, served: NDArray[np.bool_], width: int, precision: Precision) -> None:
        self.dtype = _STORED[precision]
        self._precision, self._width = precision, width
        lengths: dict[int, int] = {}
        for table, size in zip(table_of[served].tolist(), sizes[served].tolist(), strict=True):
            lengths[table] = size if size >= 0 else RESERVED_ROWS
        starts = dict(zip(lengths, np.cumsum([0, *lengths.values()]).tolist(), strict=False))
        bases = np.array([starts.get(table, 0) for table in table_of.tolist()], np.int64)
        self._numbered = sum(lengths.values())
        self._free: Ids
        none = Store(np.empty((0, 2), np.int64), self._rows(0), NO_SCALES)
        self.tables = Tables(bases, sizes, none, none, _HALVES)
        self._clear(0)
        for array in self.tables.base[1:]:
            array[:] = 0
        self._compile()

    def add(self, ids: Ids, fields: Ids, rows: NDArray[Any], scales: NDArray[np.float32]) -> None:
        """Sets rows, in their stored form, of distinct ids of one table."""
        ids, found = np.array(ids), np.empty(len(ids), np.int64)  # kernels are compiled for writable arrays
        missing = row_kernels.find(ids, fields, self.tables, found)
        new = np.flatnonzero(found < 0)
        found[new] = self._take_rows(missing)
        row_kernels.write_rows(found, rows, scales, self.tables.base)
        self._entries += row_kernels.insert(ids[new], fields[new], found[new], self.tables.base.slots)
        self.resident += missing

    def remove(self, ids: Ids, fields: Ids) -> int:
        freed = np.empty(len(ids), np.int64)
        count = int(row_kernels.remove(np.array(ids), fields, self.tables.base.slots, freed))
        self._free = np.concatenate([self._free, freed[:count]])
        self.resident -= count
        return count

    def overlaid(self, changes: Sequence[RowChange]) -> Tables:
        """The tables with an overlay of the changes."""
        if not changes:
            return self.tables
        written = sum(len(change.ids) for change in changes)
        slots = self._slots(written + sum(len(change.removed) for change in changes))
        overlay = Store(slots, self._rows(written), self._scales(written))
        first = 0
        for change in changes:
            for start, rows, scales in self._quantised(change.rows):
                part = slice(first + start, first + start + len(rows))
                row_kernels.copy_to_larger(rows, overlay.rows[part])
                row_kernels.copy_to_larger(scales, overlay.scales[part])
            row_kernels.overlay_ids(np.array(change.ids), change.fields, first, self.tables, slots)
            row_kernels.overlay_ids(np.array(change.removed), change.removed_fields, -1, self.tables, slots)
            first += len(change.ids)
        return self.tables._replace(overlay=overlay)

    def merge(self, changes: Sequence[RowChange], overlay: Store) -> None:
        first = 0
        for change in changes:
            part = slice(first, first + len(change.ids))
            self.add(change.ids, change.fields, overlay.rows[part], overlay.scales[part])
            first = part.stop

    def replaced(self, changes: Sequence[RowChange]) -> "RowStore":
        """Other rows of the same tables, in new arrays."""
        new = copy.copy(self)
        new._clear(sum(len(change.ids) for change in changes))
        for array, old in zip(new.tables.base[1:], self.tables.base[1:], strict=True):
            row_kernels.copy_to_larger(old[: self._numbered], array[: self._numbered])
        for change in changes:
            for start, rows, scales in self._quantised(change.rows):
                part = slice(start, start + len(rows))
                new.add(change.ids[part], change.fields[part], rows, scales)
        return new

    def _clear(self, ids: int) -> None:
        """Makes arrays with room for numbered rows and that many ids."""
        capacity = self._numbered + ids
        base = Store(self._slots(ids), self._rows(capacity), self._scales(capacity))
        self.tables = self.tables._replace(base=base)
        self.resident = self._entries = 0  # entries: slots in use, also those of removed ids
        self._used = self._numbered  # rows from here on are free
        self._free = np.empty(0, np.int64)

    def _slots(self, ids: int, load: float = _MAX_LOAD) -> Ids:
        """Empty slots, of which the ids will use at most the share ``load``."""
        slots = np.empty((1 << max(6, int(ids / load).bit_length()), 2), np.int64)
        row_kernels.rehash(np.empty((0, 2), np.int64), slots)
        return slots

    def _rows(self, count: int) -> NDArray[Any]:
        return np.empty((count, self._width), self.dtype)

    def _scales(self, count: int) -> NDArray[np.float32]:
        return np.empty((count if self._precision == "int8" else 0,), np.float32)

    def _quantised(self, rows: NDArray[np.float32]) -> Iterator[tuple[int, NDArray[Any], NDArray[np.float32]]]:
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            stored = quantise(torch.tensor(rows[start : start + _ROWS_AT_ONCE]), self._precision)
            scales = stored["scale"].numpy() if "scale" in stored else NO_SCALES
            yield start, stored["rows"].numpy().view(self.dtype), scales

    def _take_rows(self, count: int) -> Ids:
        """Rows for new ids, and slots for them."""
        base = self.tables.base
        if self._entries + count > _MAX_LOAD * len(base.slots):
            # Room remains, so that the slots of removed ids are not cleared at every version.
            slots = self._slots(self.resident + count, _LOAD_AFTER_REHASH)
            row_kernels.rehash(base.slots, slots)
            base, self._entries = base._replace(slots=slots), self.resident
        reused, self._free = self._free[:count], self._free[count:]
        fresh = np.arange(self._used, self._used + count - len(reused))
        self._used += len(fresh)
        available = len(base.rows)
        if self._used > available:
            capacity = max(self._used, available + available // 4)
            rows, scales = self._rows(capacity), self._scales(capacity)
            row_kernels.copy_to_larger(base.rows, rows)
            row_kernels.copy_to_larger(base.scales, scales)
            base = base._replace(rows=rows, scales=scales)
        self.tables = self.tables._replace(base=base)
        return np.concatenate([reused, fresh])

    def _compile(self) -> None:
        """Compiles every kernel for the types of its calls, because compiling blocks all other threads."""
        none, base, out = np.empty(0, np.int64), self.tables.base, np.empty((0, 1, 1), np.float32)
        row_kernels.find(none, none, self.tables, none)
        row_kernels.write_rows(none, base.rows[:0], NO_SCALES, base)
        row_kernels.insert(none, none, none, base.slots)
        row_kernels.overlay_ids(none, none, 0, self.tables, base.slots)
        (
            row_kernels.copy_to_larger(base.rows, base.rows.copy()),
            row_kernels.copy_to_larger(base.scales, base.scales.copy()),
        )
        row_kernels.remove(none, none, base.slots, none)
        row_kernels.gather(np.empty((0, 0), np.int64), none, self.tables, out, none)
        row_kernels.gather_bag(Bag(0, 0, 0, none, none, NO_WEIGHTS, False), self.tables, out, none)
