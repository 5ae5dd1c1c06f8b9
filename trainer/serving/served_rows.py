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
    copy_all,
    entries_but,
    find,
    gather,
    gather_bags,
    insert,
    insert_all,
    put,
    remove,
)

Ids = NDArray[np.int64]

_SLICE = 8192
"""Rows that change while predictions wait: less than a millisecond."""
_SAMPLES = 512
"""Samples that are looked up while changes wait."""
_NONE = np.empty(0, np.float32)
_YIELD = 1e-4
"""Seconds between two slices; the lock would otherwise be taken again before whoever waits for it wakes up."""
_LOAD = 0.6
"""Share of the slots that may be in use."""
_STORED = {"float32": np.float32, "float16": np.uint16, "int8": np.int8}


class ServedRows:
    """Rows by field and id.

    Looking up and writing may go on at the same time in several threads, writing in one: a lookup sees of each row what
    it was before or after. Memory grows by a quarter at a time, beside what is there, and is then exchanged.

    Args:
        schema: of the data.
        sizes: rows of each field's table, which fields may share by ``table_of``; -1 where it is collisionless.
        table_of: number of each field's table.
        width: P.
        precision: of what is stored.
    """

    def __init__(self, schema: Schema, sizes: Ids, table_of: Ids, width: int, precision: Precision) -> None:
        self._precision = precision
        lengths: dict[int, int] = {}
        for table, size in zip(table_of.tolist(), sizes.tolist(), strict=True):
            lengths[table] = size if size >= 0 else RESERVED_ROWS
        starts = dict(zip(lengths, np.cumsum([0, *lengths.values()]).tolist(), strict=False))
        self._bases = np.array([starts[table] for table in table_of.tolist()], np.int64)
        self._sizes, self._width = sizes, width
        self._used = sum(lengths.values())  # rows from here on are free
        self._rows = np.zeros((self._used, width), _STORED[precision])
        self._scales = np.zeros(self._used if precision == "int8" else 0, np.float32)
        self._slots = np.full((64, 2), EMPTY, np.int64)
        self._resident = 0
        self._free = np.empty(0, np.int64)
        self._lock = threading.Lock()
        place = {field.name: number for number, field in enumerate(schema.sparse)}
        self._singles = np.array([place[each.name] for each in schema.sparse if each.kind == "categorical"], np.int64)
        self._bags = [(place[each.name], each) for each in schema.sparse if each.kind != "categorical"]
        self._compile()

    @property
    def resident(self) -> int:
        """Ids of collisionless tables that have a row."""
        return self._resident

    def gather(self, samples: SampleBlock) -> tuple[Tensor, int]:
        """Pooled rows, float32 [B, F, P], and how many ids had no row of their own."""
        out = np.empty((len(samples), len(self._bases), self._width), np.float32)
        ids = np.ascontiguousarray(samples.ids.numpy())
        bags = [(number, field.pooling == "mean", samples.bags[field.name]) for number, field in self._bags]
        lists = [
            (
                bag.values.numpy(),
                bag.offsets.numpy(),
                _NONE if bag.weights is None else bag.weights.numpy(),
                mean,
                number,
            )
            for number, mean, bag in bags
        ]
        unknown = 0
        for start in range(0, len(samples), _SAMPLES):
            stop = min(start + _SAMPLES, len(samples))
            with self._lock:
                held = (self._bases, self._sizes, self._slots, self._rows, self._scales, HALVES, out)
                unknown += gather(start, stop, ids, self._singles, *held)
                for each in lists:
                    unknown += gather_bags(start, stop, *each, *held)
        return torch.from_numpy(out), unknown

    def load(self, ids: Ids, fields: Ids, rows: Tensor, scale: Tensor | None = None) -> None:
        """As :meth:`write`, of rows as they are stored, [n, P] and for int8 with scales [n]."""

        def stored(part: slice) -> dict[str, Tensor]:
            return {"rows": rows[part]} | ({} if scale is None else {"scale": scale[part]})

        self._write(ids, fields, stored)

    def write(self, ids: Ids, fields: Ids, rows: NDArray[np.float32]) -> None:
        """Sets the rows [n, P] of ids [n], no id twice, of the fields with the numbers ``fields`` [n]; new ids get one.

        Of a table with numbered rows any field that it serves will do.
        """
        self._write(ids, fields, lambda part: quantise(torch.tensor(rows[part]), self._precision))

    def _write(self, ids: Ids, fields: Ids, stored: Callable[[slice], dict[str, Tensor]]) -> None:
        ids, found = np.array(ids), np.empty(len(ids), np.int64)  # kernels are compiled for arrays that may be written
        missing = find(ids, fields, self._bases, self._sizes, self._slots, found)
        new = np.flatnonzero(found < 0)
        found[new] = self._room_for(missing)
        for part in _slices(len(ids)):
            content = {key: each.numpy() for key, each in stored(part).items()}
            whole = content["rows"].view(self._rows.dtype)
            with self._lock:
                put(found[part], whole, content.get("scale", _NONE), self._rows, self._scales)
        # An id is found once its row is what it is to be.
        for part in _slices(missing):
            entered = new[part]
            with self._lock:
                insert(ids[entered], fields[entered], found[entered], self._slots)
        self._resident += missing

    def remove(self, ids: Ids, fields: Ids) -> int:
        """Takes ids [n] of the fields with the numbers ``fields`` [n] out; returns how many were there."""
        ids, freed = np.array(ids), np.empty(len(ids), np.int64)
        total = 0
        for part in _slices(len(ids)):
            with self._lock:
                total += remove(ids[part], fields[part], self._slots, freed[total:])
        self._free = np.concatenate([self._free, freed[:total]])
        self._resident -= total
        return total

    def remove_others(self, ids: Ids, fields: Ids) -> int:
        """Takes all ids of collisionless tables out but these; returns how many."""
        ids, found = np.array(ids), np.empty(len(ids), np.int64)
        find(ids, fields, self._bases, self._sizes, self._slots, found)
        kept = np.zeros(len(self._rows), np.bool_)
        kept[found[found >= 0]] = True
        others, of_fields = np.empty(self._resident, np.int64), np.empty(self._resident, np.int64)
        count = entries_but(kept, self._slots, others, of_fields)
        return self.remove(others[:count], of_fields[:count])

    def _compile(self) -> None:
        """Compiles every kernel for the types it will meet: no other thread could run meanwhile."""
        none = np.empty(0, np.int64)
        held = (
            self._bases,
            self._sizes,
            self._slots,
            self._rows,
            self._scales,
            HALVES,
            np.empty((0, 1, 1), np.float32),
        )
        for kind in (np.int32, np.int64):
            gather(0, 0, np.empty((0, 0), kind), none, *held)
            gather_bags(0, 0, np.empty(0, kind), none, _NONE, False, 0, *held)
        find(none, none, self._bases, self._sizes, self._slots, none)
        put(none, self._rows[:0], _NONE, self._rows, self._scales)
        insert(none, none, none, self._slots)
        insert_all(self._slots, self._slots.copy())
        _longer(self._rows, len(self._rows)), _longer(self._scales, len(self._scales))
        remove(none, none, self._slots, none)
        entries_but(np.zeros(0, np.bool_), self._slots, none, none)

    def _room_for(self, count: int) -> Ids:
        """Rows for new ids, and slots for them; predictions go on while what is there is copied, and then freed."""
        needed = int((self._resident + count) / _LOAD)
        if needed > len(self._slots):
            slots = np.empty((1 << needed.bit_length(), 2), np.int64)
            insert_all(self._slots, slots)
            with self._lock:
                replaced, self._slots = self._slots, slots
            del replaced
        taken, self._free = self._free[:count], self._free[count:]
        fresh = np.arange(self._used, self._used + count - len(taken))
        self._used += len(fresh)
        if self._used > len(self._rows):
            capacity = max(self._used, len(self._rows) + len(self._rows) // 4)
            rows, scales = _longer(self._rows, capacity), _longer(self._scales, capacity)
            with self._lock:
                replaced, self._rows, self._scales = self._rows, rows, scales
            del replaced
        return np.concatenate([taken, fresh])


def _longer(array: NDArray[Any], capacity: int) -> NDArray[Any]:
    """The array in the first part of one of ``capacity`` rows; none stays none."""
    if not len(array):
        return array
    longer = np.empty((capacity, *array.shape[1:]), array.dtype)
    copy_all(array, longer)
    return longer


def _slices(count: int) -> Iterator[slice]:
    for start in range(0, count, _SLICE):
        if start:
            time.sleep(_YIELD)
        yield slice(start, start + _SLICE)
