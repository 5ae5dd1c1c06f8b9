"""Gathering and pooling of rows; compiled, without the GIL.

Sizes: B samples, S single-valued fields, F fields, V ids, P stored width.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from .store import EMPTY, NO_ROW, RESERVED, base_row, is_numbered, numbered_row, slot_of


class Bag(NamedTuple):
    """One list field of a batch.

    Attributes:
        field: its number.
        ids: [V]; sample b has those from ``offsets[b]`` to ``offsets[b + 1]``.
        offsets: [B + 1].
        weights: float32 [V], or empty if the field is not weighted.
        mean: whether rows are averaged instead of summed.
    """

    field: int
    ids: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray
    mean: bool


def _weight(rows, scales, halves, row, column):
    """A stored weight as float32; compiled code only, by the type of the rows."""
    raise NotImplementedError


@overload(_weight)
def _compiled_weight(rows, scales, halves, row, column):
    if isinstance(rows, types.NoneType):
        return lambda rows, scales, halves, row, column: np.float32(0)
    if rows.dtype == types.float32:
        return lambda rows, scales, halves, row, column: rows[row, column]
    if rows.dtype == types.uint16:
        return lambda rows, scales, halves, row, column: halves[rows[row, column]]
    return lambda rows, scales, halves, row, column: np.float32(rows[row, column]) * scales[row]


def _row(slots, over_slots, identifier, field, base, size):
    """Row as by `base_row`, or ``-1 - row`` of the overlay if it is there by its id; compiled code only."""
    raise NotImplementedError


@overload(_row)
def _compiled_row(slots, over_slots, identifier, field, base, size):
    if isinstance(over_slots, types.NoneType):
        return lambda slots, over_slots, identifier, field, base, size: base_row(slots, identifier, field, base, size)

    def row_by_id(slots, over_slots, identifier, field, base, size):
        if is_numbered(identifier, size):
            return numbered_row(identifier, base, size)
        value = over_slots[slot_of(over_slots, identifier, field), 1]
        if value == EMPTY:
            return base_row(slots, identifier, field, base, size)
        row = value & NO_ROW
        return base if row == NO_ROW else -1 - row

    return row_by_id


def _newest(over_slots, row, fields, base, size):
    """A row that `_row` returned, or the one in the overlay that takes precedence; compiled code only."""
    raise NotImplementedError


@overload(_newest)
def _compiled_newest(over_slots, row, fields, base, size):
    if isinstance(over_slots, types.NoneType):
        return lambda over_slots, row, fields, base, size: row

    def newest(over_slots, row, fields, base, size):
        if row >= 0 and (size >= 0 or row < base + RESERVED):
            value = over_slots[slot_of(over_slots, row, fields), 1]
            if value != EMPTY:
                return -1 - (value & NO_ROW)
        return row

    return newest


@njit(nogil=True, cache=True)
def gather(start, stop, ids, fields, tables, out):
    """Gathers the rows of single-valued fields for the samples from ``start`` to ``stop``.

    Reads ids [B, S] of the fields with the numbers ``fields`` [S], and writes the leading P columns of float32 out
    [B, F, P or more]. Returns how many ids had no row of their own.
    """
    bases, sizes, halves = tables.bases, tables.sizes, tables.halves
    slots, rows, scales = tables.base
    over_slots, over_rows, over_scales = tables.overlay
    unknown = 0
    for sample in range(start, stop):
        for s in range(len(fields)):
            field = fields[s]
            base, size = bases[field], sizes[field]
            row = _row(slots, over_slots, np.int64(ids[sample, s]), field, base, size)
            unknown += row == base
            row = _newest(over_slots, row, len(bases), base, size)
            if over_slots is None or row >= 0:
                for column in range(rows.shape[1]):
                    out[sample, field, column] = _weight(rows, scales, halves, row, column)
            else:
                for column in range(rows.shape[1]):
                    out[sample, field, column] = _weight(over_rows, over_scales, halves, -1 - row, column)
    return unknown


@njit(nogil=True, cache=True)
def gather_bag(start, stop, bag, tables, out):
    """Pools the rows of a list field for the samples from ``start`` to ``stop``, into float32 out [B, F, P or more].

    Returns how many ids had no row of their own.
    """
    ids, offsets, weights, field = bag.ids, bag.offsets, bag.weights, bag.field
    base, size = tables.bases[bag.field], tables.sizes[bag.field]
    halves, num_fields = tables.halves, len(tables.bases)
    slots, rows, scales = tables.base
    over_slots, over_rows, over_scales = tables.overlay
    unknown = 0
    for sample in range(start, stop):
        total = out[sample, field, : rows.shape[1]]
        total[:] = 0
        length = offsets[sample + 1] - offsets[sample]
        for k in range(offsets[sample], offsets[sample + 1]):
            row = _row(slots, over_slots, np.int64(ids[k]), field, base, size)
            unknown += row == base
            row = _newest(over_slots, row, num_fields, base, size)
            weight = weights[k] if len(weights) else np.float32(1)
            if over_slots is None or row >= 0:
                for column in range(len(total)):
                    total[column] += weight * _weight(rows, scales, halves, row, column)
            else:
                for column in range(len(total)):
                    total[column] += weight * _weight(over_rows, over_scales, halves, -1 - row, column)
        if bag.mean and length > 1:
            total /= np.float32(length)
    return unknown
