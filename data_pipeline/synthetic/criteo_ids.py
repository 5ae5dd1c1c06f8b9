"""Endless stream of ids with Criteo's fitted frequencies, for measurements without a data set.

Row numbers are frequency ranks, as `prepare` assigns them. Fields and samples are independent. Every id is a hash of
(seed, field, sample), so that any part of the stream can be drawn separately. F fields, S samples, C classes of equally
frequent ids.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from cowrec.errors import UserError

from ..parallel import available_cores
from ..splitmix import GOLDEN, splitmix
from .criteo_frequencies import CRITEO_FREQUENCIES, CRITEO_SIZES

_CLASS_BITS, _KEEP_BITS = 6, 26
_UNFOLDED = 1 << 31
_CHUNK = 1 << 16
"""Samples that are drawn at once: the arrays fit into a core's cache."""


class CriteoIds:
    """Rows that Criteo-like samples look up; `table_rows` are the numbers of rows of each field's table, int64 [F].

    A table has at most `max_rows` rows, 2 or more, by default Criteo's vocabulary size; larger ids are folded by
    modulo.
    """

    def __init__(self, seed: int = 0, max_rows: int | None = None) -> None:
        if max_rows is not None and max_rows < 2:
            raise UserError(f"tables need at least 2 rows, got {max_rows}")
        self.table_rows = np.minimum(CRITEO_SIZES, max_rows or max(CRITEO_SIZES))
        self._keys = np.random.SeedSequence(seed).generate_state(len(CRITEO_SIZES), np.uint64)
        self._classes = [_alias_table(np.array(classes)) for classes in CRITEO_FREQUENCIES]

    def rows(self, first: int, samples: int) -> np.ndarray:
        """Returns the rows that samples [first, first + samples) look up: int32 [F, S]."""
        return self._draw(first, samples, self.table_rows.tolist())

    def values(self, first: int, samples: int) -> np.ndarray:
        """Returns the ids of samples [first, first + samples) before folding into tables: int32 [F, S]."""
        return self._draw(first, samples, [_UNFOLDED] * len(self._keys))

    def _draw(self, first: int, samples: int, table_rows: Sequence[int]) -> np.ndarray:
        drawn = np.empty((len(self._keys), samples), np.int32)
        for begin in range(0, samples, _CHUNK):
            part = drawn[:, begin : begin + _CHUNK]
            for field, rows in enumerate(table_rows):
                part[field] = _rows(self._field(field), rows, first + begin, part.shape[1])
        return drawn

    def last_samples(self, samples: int, progress: Callable[[int], None] | None = None) -> np.ndarray:
        """Returns the number, from 1, of the last of the first `samples` samples to look up each row; 0 for none.

        The numbers, int32 [sum of table_rows], are concatenated by field. `samples` is below 2^31. `progress` is called
        with the number of ids just drawn.
        """
        last = np.zeros(self.table_rows.sum(), np.int32)
        tables = np.split(last, np.cumsum(self.table_rows)[:-1])

        def run_field(field: int) -> None:
            for first in range(0, samples, _CHUNK):
                count = min(_CHUNK, samples - first)
                rows = _rows(self._field(field), len(tables[field]), first, count)
                np.maximum.at(tables[field], rows, np.arange(first + 1, first + count + 1, dtype=np.int32))
                if progress is not None:
                    progress(count)

        # Largest tables first: drawing from them takes longest.
        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(run_field, np.argsort(-self.table_rows).tolist()))
        return last

    def _field(self, field: int) -> "_Field":
        return _Field(self._keys[field], *self._classes[field])


class _Field(NamedTuple):
    """Key and alias table of a field; see `_alias_table`."""

    key: np.uint64
    keep: np.ndarray
    other: np.ndarray
    firsts: np.ndarray
    sizes: np.ndarray


def _alias_table(classes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Builds an alias table (Walker 1977) over classes [C, 2] of (ids, share), padded to 2^_CLASS_BITS columns.

    Returns for each column the number of _KEEP_BITS below which its own class is drawn, uint64, and the class drawn
    otherwise, int64; for each class its first id, int64, and its number of ids, uint64.
    """
    columns = 1 << _CLASS_BITS
    assert len(classes) <= columns
    ids, shares = np.zeros(columns, np.int64), np.zeros(columns)
    ids[: len(classes)], shares[: len(classes)] = classes.T
    weight = shares / shares.sum() * columns
    keep, other = np.ones(columns), np.arange(columns)
    small = [column for column in range(columns) if weight[column] < 1]
    large = [column for column in range(columns) if weight[column] >= 1]
    while small and large:
        column, donor = small.pop(), large[-1]
        keep[column], other[column] = weight[column], donor
        weight[donor] -= 1 - weight[column]
        if weight[donor] < 1:
            small.append(large.pop())
    return np.round(keep * (1 << _KEEP_BITS)).astype(np.uint64), other, np.cumsum(ids) - ids, ids.astype(np.uint64)


def _rows(field: _Field, table_rows: int, first: int, count: int) -> np.ndarray:
    """Draws the rows of samples [first, first + count), int64 [count].

    6 bits of a sample's hash choose a column of the alias table, 26 its class or alias, 32 the id in the class.
    """
    bits = splitmix(field.key + np.arange(first, first + count, dtype=np.uint64) * GOLDEN)
    column = (bits >> np.uint64(64 - _CLASS_BITS)).astype(np.int64)
    aliased = (bits >> np.uint64(32)) & np.uint64((1 << _KEEP_BITS) - 1) >= field.keep[column]
    drawn = np.where(aliased, field.other[column], column)
    within = ((bits & np.uint64(0xFFFFFFFF)) * field.sizes[drawn]) >> np.uint64(32)
    rows = field.firsts[drawn] + within.astype(np.int64)
    found: np.ndarray = np.where(rows < table_rows, rows, rows % table_rows)
    return found
