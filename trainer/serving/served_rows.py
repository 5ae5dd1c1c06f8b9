"""The rows of all tables of a served model, which change while they are looked up.

Sizes: B samples, F fields, n rows, P stored width.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.dataset.schema import RESERVED_ROWS, Schema
from cowrec.trainer.export.quantised_rows import Precision, quantise

from .kernels import (
    EMPTY,
    HALVES,
    Bag,
    Store,
    copy_to_larger,
    entries_except,
    find,
    gather,
    gather_bag,
    insert,
    rehash,
    remove,
    write_rows,
)

Ids = NDArray[np.int64]

_ROWS_AT_ONCE = 8192
"""Rows that change while predictions wait: less than a millisecond."""
_SAMPLES_AT_ONCE = 512
"""Samples that are looked up while changes wait."""
_NONE = np.empty(0, np.float32)
_YIELD_SECONDS = 1e-4
"""Pause between two chunks of a change; without it the lock is taken again before a waiting thread wakes up."""
_MAX_LOAD = 0.6
"""Share of the slots that may be in use."""
_STORED = {"float32": np.float32, "float16": np.uint16, "int8": np.int8}


class ServedRows:
    """Rows by field and id.

    Several threads may look up rows while one thread changes them: a lookup sees each row either before or after a
    change. Memory grows by a quarter at a time, in a copy that then replaces the original.

    Args:
        schema: of the data.
        sizes: rows of each field's table, which fields may share by ``table_of``; -1 if it is collisionless.
        table_of: number of each field's table.
        widths: stored width of each field's rows, int64 [F].
        precision: of the stored rows.
    """

    def __init__(self, schema: Schema, sizes: Ids, table_of: Ids, widths: Ids, precision: Precision) -> None:
        self._widths = widths
        self._of_width = {
            width: _RowsOfWidth(schema, sizes, table_of, widths == width, width, precision)
            for width in np.unique(widths).tolist()
        }

    @property
    def resident(self) -> int:
        """Ids of collisionless tables that have a row."""
        return sum(each.resident for each in self._of_width.values())

    def gather(self, samples: SampleBlock) -> tuple[Tensor, int]:
        """Pooled rows, float32 [B, F, largest P], and how many ids had no row of their own.

        Any numbers follow the columns of narrower rows.
        """
        out = np.empty((len(samples), len(self._widths), max(self._of_width)), np.float32)
        unknown = sum(each.gather(samples, out) for each in self._of_width.values())
        return torch.from_numpy(out), unknown

    def load(self, ids: Ids, fields: Ids, rows: Tensor, scale: Tensor | None = None) -> None:
        """Sets rows as :meth:`write` does, from their stored form: [n, P], for int8 with scales [n]."""
        self._of_width[rows.shape[1]].load(ids, fields, rows, scale)

    def write(self, ids: Ids, fields: Ids, rows: NDArray[np.float32]) -> None:
        """Sets the rows [n, P] of distinct ids [n] of one table; new ids are inserted.

        ``fields`` [n] are the numbers of the ids' fields. For a table of numbered rows any field that it serves will
        do.
        """
        self._of_width[rows.shape[1]].write(ids, fields, rows)

    def remove(self, ids: Ids, fields: Ids) -> int:
        """Removes ids [n] of the fields with the numbers ``fields`` [n]; returns how many were present."""
        return sum(part.remove(*own) for part, own in self._parts(ids, fields))

    def remove_others(self, ids: Ids, fields: Ids) -> int:
        """Removes all ids of collisionless tables except these; returns how many."""
        return sum(part.remove_others(*own) for part, own in self._parts(ids, fields))

    def _parts(self, ids: Ids, fields: Ids) -> Iterator[tuple["_RowsOfWidth", tuple[Ids, Ids]]]:
        for width, part in self._of_width.items():
            own = self._widths[fields] == width
            yield part, (ids[own], fields[own])


class _RowsOfWidth:
    """Rows of the fields whose rows have one width, P; the methods are those of :class:`ServedRows`."""

    def __init__(
        self,
        schema: Schema,
        sizes: Ids,
        table_of: Ids,
        served: NDArray[np.bool_],
        width: int,
        precision: Precision,
    ) -> None:
        self._precision = precision
        lengths: dict[int, int] = {}
        for table, size in zip(table_of[served].tolist(), sizes[served].tolist(), strict=True):
            lengths[table] = size if size >= 0 else RESERVED_ROWS
        starts = dict(zip(lengths, np.cumsum([0, *lengths.values()]).tolist(), strict=False))
        self._used = sum(lengths.values())  # rows from here on are free
        self._store = Store(
            np.array([starts.get(table, 0) for table in table_of.tolist()], np.int64),
            sizes,
            np.full((64, 2), EMPTY, np.int64),
            np.zeros((self._used, width), _STORED[precision]),
            np.zeros(self._used if precision == "int8" else 0, np.float32),
            HALVES,
        )
        self.resident = 0
        self._free = np.empty(0, np.int64)
        self._lock = threading.Lock()
        numbers = {field.name: number for number, field in enumerate(schema.sparse)}
        singles = np.array([numbers[field.name] for field in schema.sparse if field.kind == "categorical"], np.int64)
        self._columns = np.flatnonzero(served[singles])  # of the samples' ids
        self._singles = singles[self._columns]
        bags = [(numbers[field.name], field) for field in schema.sparse if field.kind != "categorical"]
        self._bags = [(number, field) for number, field in bags if served[number]]
        self._compile()

    def gather(self, samples: SampleBlock, out: NDArray[np.float32]) -> int:
        """Writes pooled rows into the leading columns of float32 [B, F, P or more]; returns how many were unknown."""
        ids = samples.ids.numpy()
        ids = np.ascontiguousarray(ids if len(self._columns) == ids.shape[1] else ids[:, self._columns])
        bags = []
        for number, field in self._bags:
            bag = samples.bags[field.name]
            weights = _NONE if bag.weights is None else bag.weights.numpy()
            bags.append(Bag(number, bag.values.numpy(), bag.offsets.numpy(), weights, field.pooling == "mean"))
        unknown = 0
        for start in range(0, len(samples), _SAMPLES_AT_ONCE):
            stop = min(start + _SAMPLES_AT_ONCE, len(samples))
            with self._lock:
                unknown += gather(start, stop, ids, self._singles, self._store, out)
                for each in bags:
                    unknown += gather_bag(start, stop, each, self._store, out)
        return unknown

    def load(self, ids: Ids, fields: Ids, rows: Tensor, scale: Tensor | None = None) -> None:
        def stored(part: slice) -> dict[str, Tensor]:
            return {"rows": rows[part]} | ({} if scale is None else {"scale": scale[part]})

        self._write(ids, fields, stored)

    def write(self, ids: Ids, fields: Ids, rows: NDArray[np.float32]) -> None:
        self._write(ids, fields, lambda part: quantise(torch.tensor(rows[part]), self._precision))

    def _write(self, ids: Ids, fields: Ids, stored: Callable[[slice], dict[str, Tensor]]) -> None:
        ids, found = np.array(ids), np.empty(len(ids), np.int64)  # kernels are compiled for writable arrays
        missing = find(ids, fields, self._store, found)
        new = np.flatnonzero(found < 0)
        found[new] = self._take_rows(missing)
        for part in _chunks(len(ids)):
            content = {key: each.numpy() for key, each in stored(part).items()}
            rows = content["rows"].view(self._store.rows.dtype)
            with self._lock:
                write_rows(found[part], rows, content.get("scale", _NONE), self._store)
        # Ids are inserted after their rows are written.
        for part in _chunks(missing):
            entered = new[part]
            with self._lock:
                insert(ids[entered], fields[entered], found[entered], self._store.slots)
        self.resident += missing

    def remove(self, ids: Ids, fields: Ids) -> int:
        ids, freed = np.array(ids), np.empty(len(ids), np.int64)
        total = 0
        for part in _chunks(len(ids)):
            with self._lock:
                total += remove(ids[part], fields[part], self._store.slots, freed[total:])
        self._free = np.concatenate([self._free, freed[:total]])
        self.resident -= total
        return total

    def remove_others(self, ids: Ids, fields: Ids) -> int:
        ids, found = np.array(ids), np.empty(len(ids), np.int64)
        find(ids, fields, self._store, found)
        kept = np.zeros(len(self._store.rows), np.bool_)
        kept[found[found >= 0]] = True
        other_ids, other_fields = np.empty(self.resident, np.int64), np.empty(self.resident, np.int64)
        count = entries_except(kept, self._store.slots, other_ids, other_fields)
        return self.remove(other_ids[:count], other_fields[:count])

    def _compile(self) -> None:
        """Compiles every kernel for the types it will be called with, because compiling blocks all other threads."""
        none, store, out = np.empty(0, np.int64), self._store, np.empty((0, 1, 1), np.float32)
        for kind in (np.int32, np.int64):
            gather(0, 0, np.empty((0, 0), kind), none, store, out)
            gather_bag(0, 0, Bag(0, np.empty(0, kind), none, _NONE, False), store, out)
        find(none, none, store, none)
        write_rows(none, store.rows[:0], _NONE, store)
        insert(none, none, none, store.slots)
        rehash(store.slots, store.slots.copy())
        _enlarged(store.rows, len(store.rows)), _enlarged(store.scales, len(store.scales))
        remove(none, none, store.slots, none)
        entries_except(np.zeros(0, np.bool_), store.slots, none, none)

    def _take_rows(self, count: int) -> Ids:
        """Rows for new ids, and slots for them; predictions continue while existing ones are copied."""
        needed = int((self.resident + count) / _MAX_LOAD)
        if needed > len(self._store.slots):
            slots = np.empty((1 << needed.bit_length(), 2), np.int64)
            rehash(self._store.slots, slots)
            self._replace(slots=slots)
        reused, self._free = self._free[:count], self._free[count:]
        fresh = np.arange(self._used, self._used + count - len(reused))
        self._used += len(fresh)
        available = len(self._store.rows)
        if self._used > available:
            capacity = max(self._used, available + available // 4)
            rows, scales = _enlarged(self._store.rows, capacity), _enlarged(self._store.scales, capacity)
            self._replace(rows=rows, scales=scales)
        return np.concatenate([reused, fresh])

    def _replace(self, **arrays: NDArray[Any]) -> None:
        replaced = self._store  # the reference frees the old arrays only after the lock is released
        with self._lock:
            self._store = replaced._replace(**arrays)


def _enlarged(array: NDArray[Any], capacity: int) -> NDArray[Any]:
    """Copy of an array with ``capacity`` rows; an empty one stays empty."""
    if not len(array):
        return array
    larger = np.empty((capacity, *array.shape[1:]), array.dtype)
    copy_to_larger(array, larger)
    return larger


def _chunks(count: int) -> Iterator[slice]:
    for start in range(0, count, _ROWS_AT_ONCE):
        if start:
            time.sleep(_YIELD_SECONDS)
        yield slice(start, start + _ROWS_AT_ONCE)
