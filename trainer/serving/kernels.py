"""Kernels of served tables: lookup of ids by open addressing, gathering and pooling of rows; compiled, without the GIL.

Sizes: B samples, S single-valued fields, F fields, V ids, n rows, P stored width.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from cowrec.sparse_opt.id_tables.kernels.hashing import id_hash

EMPTY = -1
_FIELD_SHIFT = 40
_ROW_MASK = (1 << _FIELD_SHIFT) - 1
_RESERVED = 2

HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
"""Every float16 number as float32, indexed by its bits."""


class Store(NamedTuple):
    """All tables of one stored width, one after the other in one array of rows.

    Attributes:
        bases: first row of each field's table, int64 [F].
        sizes: rows of each field's table, int64 [F], or -1 if it is collisionless: then raw ids 0 and 1 are its first
            two rows, and others are found in ``slots``.
        slots: int64 [slots, 2], each an id and ``field << 40 | row``, or -1 if it is empty.
        rows: float32 [n, P], float16 viewed as uint16, or int8 with scales.
        scales: float32 [n] for int8, else empty.
        halves: HALVES; as a global it would be a constant of every compiled kernel.
    """

    bases: np.ndarray
    sizes: np.ndarray
    slots: np.ndarray
    rows: np.ndarray
    scales: np.ndarray
    halves: np.ndarray


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


@overload(_weight, inline="always")
def _compiled_weight(rows, scales, halves, row, column):
    if rows.dtype == types.float32:
        return lambda rows, scales, halves, row, column: rows[row, column]
    if rows.dtype == types.uint16:
        return lambda rows, scales, halves, row, column: halves[rows[row, column]]
    return lambda rows, scales, halves, row, column: np.float32(rows[row, column]) * scales[row]


@njit(inline="always")
def _home_slot(identifier, field, mask):
    """First slot to probe for an id."""
    return np.int64(id_hash(identifier, field) & np.uint64(mask))


@njit(inline="always")
def _slot(slots, identifier, field):
    """Slot of an id, or the empty one in which it belongs."""
    mask = len(slots) - 1
    slot = _home_slot(identifier, field, mask)
    while slots[slot, 1] != EMPTY and (slots[slot, 0] != identifier or slots[slot, 1] >> _FIELD_SHIFT != field):
        slot = (slot + 1) & mask
    return slot


@njit(inline="always")
def _row(slots, identifier, field, base, size):
    """Row of an id, ``base`` if it is unknown."""
    if size >= 0:
        return base + identifier if 0 <= identifier < size else base
    if 0 <= identifier < _RESERVED:
        return base + identifier
    value = slots[_slot(slots, identifier, field), 1]
    return base if value == EMPTY else value & _ROW_MASK


@njit(nogil=True, cache=True)
def gather(start, stop, ids, fields, store, out):
    """Gathers the rows of single-valued fields for the samples from ``start`` to ``stop``.

    Reads ids [B, S] of the fields with the numbers ``fields`` [S], and writes the leading P columns of float32 out
    [B, F, P or more]. Returns how many ids had no row of their own.
    """
    bases, sizes, slots = store.bases, store.sizes, store.slots
    rows, scales, halves = store.rows, store.scales, store.halves
    unknown = 0
    for sample in range(start, stop):
        for s in range(len(fields)):
            field = fields[s]
            row = _row(slots, np.int64(ids[sample, s]), field, bases[field], sizes[field])
            unknown += row == bases[field]
            for column in range(rows.shape[1]):
                out[sample, field, column] = _weight(rows, scales, halves, row, column)
    return unknown


@njit(nogil=True, cache=True)
def gather_bag(start, stop, bag, store, out):
    """Pools the rows of a list field for the samples from ``start`` to ``stop``, into float32 out [B, F, P or more].

    Returns how many ids had no row of their own.
    """
    ids, offsets, weights, field = bag.ids, bag.offsets, bag.weights, bag.field
    slots, base, size = store.slots, store.bases[bag.field], store.sizes[bag.field]
    rows, scales, halves = store.rows, store.scales, store.halves
    unknown = 0
    for sample in range(start, stop):
        total = out[sample, field, : rows.shape[1]]
        total[:] = 0
        length = offsets[sample + 1] - offsets[sample]
        for k in range(offsets[sample], offsets[sample + 1]):
            row = _row(slots, np.int64(ids[k]), field, base, size)
            unknown += row == base
            weight = weights[k] if len(weights) else np.float32(1)
            for column in range(len(total)):
                total[column] += weight * _weight(rows, scales, halves, row, column)
        if bag.mean and length > 1:
            total /= np.float32(length)
    return unknown


@njit(nogil=True, cache=True)
def find(ids, fields, store, found):
    """Writes the row of each id [V] of fields [V] to ``found`` [V], -1 if it has none; returns how many have none."""
    missing = 0
    for i in range(len(ids)):
        base, size = store.bases[fields[i]], store.sizes[fields[i]]
        row = _row(store.slots, ids[i], fields[i], base, size)
        known = size >= 0 or 0 <= ids[i] < _RESERVED or row != base
        found[i] = row if known else -1
        missing += not known
    return missing


@njit(nogil=True, cache=True)
def write_rows(indices, stored, scale, store):
    """Copies stored rows [n, P], and for int8 their scales [n], to the rows with the indices [n]."""
    for i in range(len(indices)):
        store.rows[indices[i]] = stored[i]
        if len(scale):
            store.scales[indices[i]] = scale[i]


@njit(nogil=True, cache=True)
def insert(ids, fields, rows, slots):
    """Inserts absent ids [n] of fields [n] with their rows [n]; there must be enough empty slots."""
    for i in range(len(ids)):
        slot = _slot(slots, ids[i], fields[i])
        slots[slot, 0] = ids[i]
        slots[slot, 1] = fields[i] << _FIELD_SHIFT | rows[i]


@njit(nogil=True, cache=True)
def rehash(old, slots):
    """Empties the slots and inserts every entry of the old ones."""
    slots[:, 1] = EMPTY
    for i in range(len(old)):
        if old[i, 1] != EMPTY:
            slots[_slot(slots, old[i, 0], old[i, 1] >> _FIELD_SHIFT)] = old[i]


@njit(nogil=True, cache=True)
def copy_to_larger(old, new):
    """Copies an array into the first part of a larger one and writes zeros to the remainder, so that its pages exist.

    numpy would block other threads meanwhile.
    """
    new[: len(old)] = old
    new[len(old) :] = 0


@njit(nogil=True, cache=True)
def remove(ids, fields, slots, freed):
    """Removes ids [n] of fields [n]; returns how many were present, and writes their rows to ``freed`` [n]."""
    mask, count = len(slots) - 1, 0
    for i in range(len(ids)):
        hole = _slot(slots, ids[i], fields[i])
        if slots[hole, 1] == EMPTY:
            continue
        freed[count] = slots[hole, 1] & _ROW_MASK
        count += 1
        # Later entries of the cluster move back if they would not be found otherwise.
        slot = (hole + 1) & mask
        while slots[slot, 1] != EMPTY:
            home = _home_slot(slots[slot, 0], slots[slot, 1] >> _FIELD_SHIFT, mask)
            if (slot - home) & mask >= (slot - hole) & mask:
                slots[hole] = slots[slot]
                hole = slot
            slot = (slot + 1) & mask
        slots[hole, 1] = EMPTY
    return count


@njit(nogil=True, cache=True)
def entries_except(kept, slots, ids, fields):
    """Ids and fields of the entries whose row is not marked in ``kept``; returns how many there are."""
    count = 0
    for i in range(len(slots)):
        if slots[i, 1] != EMPTY and not kept[slots[i, 1] & _ROW_MASK]:
            ids[count], fields[count] = slots[i, 0], slots[i, 1] >> _FIELD_SHIFT
            count += 1
    return count
