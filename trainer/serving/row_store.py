"""The store of the rows whose stored width is P: they are added, changed in an overlay, merged, removed, replaced.

Sizes: F keys of the fields, n rows, m removed ids.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cowrec.data_pipeline.dataset.schema import RESERVED_ROWS

from ..export.manifest import Precision, quantise
from .row_kernels import (
    Bag,
    Store,
    Tables,
    copy_to_larger,
    find,
    gather,
    gather_bag,
    insert,
    overlay_ids,
    rehash,
    remove,
    write_rows,
)

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
        ids: distinct, int64 [n].
        fields: numbers of their fields, int64 [n].
        rows: float32 [n, P].
        removed: ids that no longer have a row, int64 [m]; those that had none are ignored.
        removed_fields: int64 [m].
    """

    ids: Ids
    fields: Ids
    rows: NDArray[np.float32]
    removed: Ids
    removed_fields: Ids


class RowStore:
    """Rows of the fields whose rows have one width, P; for the two steps of a change see :class:`ServedRows`.

    Args:
        sizes: rows of each key's table; -1 if it is collisionless.
        table_of: number of each key's table.
        served: the keys whose rows have this width, bool [F].
        precision: of the stored rows.

    Attributes:
        dtype: of the stored rows.
        tables: what lookups read.
        resident: ids of collisionless tables that have a row.
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
        missing = find(ids, fields, self.tables, found)
        new = np.flatnonzero(found < 0)
        found[new] = self._take_rows(missing)
        write_rows(found, rows, scales, self.tables.base)
        self._entries += insert(ids[new], fields[new], found[new], self.tables.base.slots)
        self.resident += missing

    def remove(self, ids: Ids, fields: Ids) -> int:
        freed = np.empty(len(ids), np.int64)
        count = int(remove(np.array(ids), fields, self.tables.base.slots, freed))
        self._free = np.concatenate([self._free, freed[:count]])
        self.resident -= count
        return count

    def overlaid(self, changes: Sequence[RowChange]) -> Tables:
        """The tables with an overlay of the changes."""
        if not changes:
            return self.tables
        written = sum(len(each.ids) for each in changes)
        slots = self._slots(written + sum(len(each.removed) for each in changes))
        overlay = Store(slots, self._rows(written), self._scales(written))
        first = 0
        for change in changes:
            for start, rows, scales in self._quantised(change.rows):
                part = slice(first + start, first + start + len(rows))
                copy_to_larger(rows, overlay.rows[part])
                copy_to_larger(scales, overlay.scales[part])
            overlay_ids(np.array(change.ids), change.fields, first, self.tables, slots)
            overlay_ids(np.array(change.removed), change.removed_fields, -1, self.tables, slots)
            first += len(change.ids)
        return self.tables._replace(overlay=overlay)

    def merge(self, changes: Sequence[RowChange], overlay: Store) -> None:
        first = 0
        for change in changes:
            part = slice(first, first + len(change.ids))
            self.add(change.ids, change.fields, overlay.rows[part], overlay.scales[part])
            first = part.stop

    def replaced(self, changes: Sequence[RowChange]) -> "RowStore":
        """Other rows of the same tables, in arrays of their own."""
        new = copy.copy(self)
        new._clear(sum(len(each.ids) for each in changes))
        for array, old in zip(new.tables.base[1:], self.tables.base[1:], strict=True):
            copy_to_larger(old[: self._numbered], array[: self._numbered])
        for change in changes:
            for start, rows, scales in self._quantised(change.rows):
                part = slice(start, start + len(rows))
                new.add(change.ids[part], change.fields[part], rows, scales)
        return new

    def _clear(self, ids: int) -> None:
        """New arrays with room for numbered rows and that many ids."""
        capacity = self._numbered + ids
        base = Store(self._slots(ids), self._rows(capacity), self._scales(capacity))
        self.tables = self.tables._replace(base=base)
        self.resident = self._entries = 0  # entries: slots in use, also those of removed ids
        self._used = self._numbered  # rows from here on are free
        self._free = np.empty(0, np.int64)

    def _slots(self, ids: int, load: float = _MAX_LOAD) -> Ids:
        """Empty slots, of which the ids will use at most that share."""
        slots = np.empty((1 << max(6, int(ids / load).bit_length()), 2), np.int64)
        rehash(np.empty((0, 2), np.int64), slots)
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
            rehash(base.slots, slots)
            base, self._entries = base._replace(slots=slots), self.resident
        reused, self._free = self._free[:count], self._free[count:]
        fresh = np.arange(self._used, self._used + count - len(reused))
        self._used += len(fresh)
        available = len(base.rows)
        if self._used > available:
            capacity = max(self._used, available + available // 4)
            rows, scales = self._rows(capacity), self._scales(capacity)
            copy_to_larger(base.rows, rows)
            copy_to_larger(base.scales, scales)
            base = base._replace(rows=rows, scales=scales)
        self.tables = self.tables._replace(base=base)
        return np.concatenate([reused, fresh])

    def _compile(self) -> None:
        """Compiles every kernel for the types it will be called with, because compiling blocks all other threads."""
        none, base, out = np.empty(0, np.int64), self.tables.base, np.empty((0, 1, 1), np.float32)
        find(none, none, self.tables, none)
        write_rows(none, base.rows[:0], NO_SCALES, base)
        insert(none, none, none, base.slots)
        overlay_ids(none, none, 0, self.tables, base.slots)
        copy_to_larger(base.rows, base.rows.copy()), copy_to_larger(base.scales, base.scales.copy())
        remove(none, none, base.slots, none)
        gather(np.empty((0, 0), np.int64), none, self.tables, out, none)
        gather_bag(Bag(0, 0, 0, none, none, NO_WEIGHTS, False), self.tables, out, none)
