"""Kernels of served tables: ids to rows by open addressing, and rows gathered and pooled; compiled, without the GIL.

All tables lie one after the other in one array of rows. A field's rows begin at its ``base``; ``size`` is their number,
or -1 where the table is collisionless: then raw ids 0 and 1 are the rows from ``base`` on, and others are found in
``slots``, int64 [slots, 2] of which each is an id and ``field << 40 | row``, or -1 where it is empty. Rows are float32,
float16 seen as uint16, or int8 with a scale. Sizes: B samples, S single-valued fields, F fields, V ids, P stored width.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from cowrec.sparse_opt.id_tables.records import id_hash

EMPTY = -1
_FIELD = 40
_ROW = (1 << _FIELD) - 1
_RESERVED = 2

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""Every float16 number, by its bits."""


def _weight(rows, scales, halves, row, column):
    raise NotImplementedError


@overload(_weight, inline="always")
def _weight_of_kind(rows, scales, halves, row, column):
    """A stored weight as float32, by the type of the rows."""
    if rows.dtype == types.float32:
        return lambda rows, scales, halves, row, column: rows[row, column]
    if rows.dtype == types.uint16:
        return lambda rows, scales, halves, row, column: halves[rows[row, column]]
    return lambda rows, scales, halves, row, column: np.float32(rows[row, column]) * scales[row]


@njit(inline="always")
def _home(identifier, field, mask):
    """Where the search for an id begins."""
    return np.int64(id_hash(identifier, field) & np.uint64(mask))


@njit(inline="always")
def _slot(slots, identifier, field):
    """The slot of an id, or the empty one where it belongs."""
    mask = len(slots) - 1
    at = _home(identifier, field, mask)
    while slots[at, 1] != EMPTY and (slots[at, 0] != identifier or slots[at, 1] >> _FIELD != field):
        at = (at + 1) & mask
    return at


@njit(inline="always")
def _row(slots, identifier, field, base, size):
    """The row of an id, ``base`` where it is unknown."""
    if size >= 0:
        return base + identifier if 0 <= identifier < size else base
    if 0 <= identifier < _RESERVED:
        return base + identifier
    held = slots[_slot(slots, identifier, field), 1]
    return base if held == EMPTY else held & _ROW


@njit(nogil=True, cache=True)
def gather(start, stop, ids, fields, bases, sizes, slots, rows, scales, halves, out):
    """Single-valued fields: ids [B, S] of the fields with numbers ``fields`` [S], into float32 out [B, F, P].

    Does the samples from ``start`` to ``stop``; returns how many ids had no row of their own.
    """
    unknown = 0
    for sample in range(start, stop):
        for place in range(len(fields)):
            field = fields[place]
            row = _row(slots, np.int64(ids[sample, place]), field, bases[field], sizes[field])
            unknown += row == bases[field]
            for column in range(out.shape[2]):
                out[sample, field, column] = _weight(rows, scales, halves, row, column)
    return unknown


@njit(nogil=True, cache=True)
def gather_bags(start, stop, ids, offsets, weights, mean, field, bases, sizes, slots, rows, scales, halves, out):
    """One list field: ids [V], sample b's at ``offsets[b]`` to ``offsets[b + 1]``, into the field's part of out.

    Weighted where ``weights`` has V numbers instead of none. Does the samples from ``start`` to ``stop``; returns how
    many ids had no row of their own.
    """
    unknown = 0
    for sample in range(start, stop):
        total = out[sample, field]
        total[:] = 0
        length = offsets[sample + 1] - offsets[sample]
        for at in range(offsets[sample], offsets[sample + 1]):
            row = _row(slots, np.int64(ids[at]), field, bases[field], sizes[field])
            unknown += row == bases[field]
            weight = weights[at] if len(weights) else np.float32(1)
            for column in range(len(total)):
                total[column] += weight * _weight(rows, scales, halves, row, column)
        if mean and length > 1:
            total /= np.float32(length)
    return unknown


@njit(nogil=True, cache=True)
def find(ids, fields, bases, sizes, slots, found):
    """The row of each id [V] of each field [V] into ``found`` [V], -1 where it has none; returns how many have none."""
    missing = 0
    for i in range(len(ids)):
        row = _row(slots, ids[i], fields[i], bases[fields[i]], sizes[fields[i]])
        reserved = sizes[fields[i]] >= 0 or 0 <= ids[i] < _RESERVED
        found[i] = row if reserved or row != bases[fields[i]] else -1
        missing += found[i] < 0
    return missing


@njit(nogil=True, cache=True)
def put(places, stored, scale, rows, scales):
    """Sets the rows at ``places`` [n] to stored ones [n, P], and their scales to those [n] of int8."""
    for i in range(len(places)):
        rows[places[i]] = stored[i]
        if len(scale):
            scales[places[i]] = scale[i]


@njit(nogil=True, cache=True)
def insert(ids, fields, given, slots):
    """Enters ids [n] of fields [n] that are not there, with the rows ``given`` [n]; there must be empty slots."""
    for i in range(len(ids)):
        at = _slot(slots, ids[i], fields[i])
        slots[at, 0] = ids[i]
        slots[at, 1] = fields[i] << _FIELD | given[i]


@njit(nogil=True, cache=True)
def insert_all(old, slots):
    """Empties slots and enters everything that ``old`` ones hold."""
    slots[:, 1] = EMPTY
    for i in range(len(old)):
        if old[i, 1] != EMPTY:
            at = _slot(slots, old[i, 0], old[i, 1] >> _FIELD)
            slots[at, 0], slots[at, 1] = old[i, 0], old[i, 1]


@njit(nogil=True, cache=True)
def copy_all(old, new):
    """Copies an array into the first part of a larger one, and touches the rest, so that no later write waits for it.

    numpy would keep other threads from running meanwhile.
    """
    new[: len(old)] = old
    new[len(old) :] = 0


@njit(nogil=True, cache=True)
def remove(ids, fields, slots, freed):
    """Takes ids [n] of fields [n] out; returns how many were there, whose rows are then the first of ``freed`` [n]."""
    mask, count = len(slots) - 1, 0
    for i in range(len(ids)):
        hole = _slot(slots, ids[i], fields[i])
        if slots[hole, 1] == EMPTY:
            continue
        freed[count] = slots[hole, 1] & _ROW
        count += 1
        # What follows without a gap moves up where it would otherwise not be found.
        at = (hole + 1) & mask
        while slots[at, 1] != EMPTY:
            home = _home(slots[at, 0], slots[at, 1] >> _FIELD, mask)
            if (at - home) & mask >= (at - hole) & mask:
                slots[hole, 0], slots[hole, 1] = slots[at, 0], slots[at, 1]
                hole = at
            at = (at + 1) & mask
        slots[hole, 1] = EMPTY
    return count


@njit(nogil=True, cache=True)
def entries_but(kept, slots, ids, fields):
    """Ids and fields of the entries whose row is not marked in ``kept``; returns how many there are."""
    count = 0
    for i in range(len(slots)):
        if slots[i, 1] != EMPTY and not kept[slots[i, 1] & _ROW]:
            ids[count], fields[count] = slots[i, 0], slots[i, 1] >> _FIELD
            count += 1
    return count
