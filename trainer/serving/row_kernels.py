"""Stores of rows by id, in which ids are found by open addressing, and the gathering and pooling of their rows.

Compiled, without the GIL. Sizes: B samples, S single-valued fields, F keys of the fields, one for each position of a
sequence, V ids, n rows, P stored width. The number of a field is that of its first key.
"""

from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import overload

from cowrec.sparse_opt.id_tables.kernels.hashing import id_hash
from cowrec.sparse_opt.kernels.compiled import compiled

EMPTY = -1
_FIELD_SHIFT = 40
NO_ROW = (1 << _FIELD_SHIFT) - 1
"""Row of a removed id; as the row bits of EMPTY are the same, one comparison finds both."""
RESERVED = 2


class Store(NamedTuple):
    """Rows and a hash table of their ids.

    The id and the field of a slot never change once they are written, so a lookup of one id is correct while another id
    is inserted or removed, without a lock.

    Attributes:
        slots: int64 [slots, 2], each an id and ``field << 40 | row``, or 0 and -1 if it is empty. No id 0 is looked up
            in a table that changes. The row of a removed id is all ones.
        rows: float32 [n, P], float16 viewed as uint16, or int8 with scales.
        scales: float32 [n] for int8, else empty.
    """

    slots: np.ndarray
    rows: np.ndarray
    scales: np.ndarray


class Tables(NamedTuple):
    """All tables of one stored width.

    Attributes:
        bases: first row of each field's table, int64 [F].
        sizes: rows of each field's table, int64 [F], or -1 if it is collisionless: then raw ids 0 and 1 are its first
            two rows, and others are found in the slots.
        base: the rows of all tables, one table's after the other's.
        overlay: rows that take precedence over those of the base, and removed ids; without slots if there are none.
            Rows of the base that are numbered or reserved are entered by their number in place of an id, and F in place
            of a field.
        halves: every float16 number as float32, by its bits; as a global it would be a constant of every kernel.
    """

    bases: np.ndarray
    sizes: np.ndarray
    base: Store
    overlay: Store
    halves: np.ndarray


class Bag(NamedTuple):
    """One list field of a batch.

    Attributes:
        field: number of the field under which its ids are known, which a sequence may share.
        first: its own number.
        positions: of a sequence, whose rows are not pooled; else 0.
        ids: [V]; sample b has those from ``offsets[b]`` to ``offsets[b + 1]``.
        weights: float32 [V], or empty if the field is not weighted.
        mean: whether rows are averaged instead of summed.
    """

    field: int
    first: int
    positions: int
    ids: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray
    mean: bool


@njit
def slot_of(slots, identifier, field):
    """Slot of an id, or the empty one in which it belongs."""
    mask = len(slots) - 1
    slot = np.int64(id_hash(identifier, field) & np.uint64(mask))
    while slots[slot, 1] != EMPTY and (slots[slot, 0] != identifier or slots[slot, 1] >> _FIELD_SHIFT != field):
        slot = (slot + 1) & mask
    return slot


@njit
def is_numbered(identifier, size):
    """Whether the row of an id follows from its number."""
    return size >= 0 or 0 <= identifier < RESERVED


@njit
def numbered_row(identifier, base, size):
    return base + identifier if size < 0 or 0 <= identifier < size else base


@njit
def base_row(slots, identifier, field, base, size):
    """Row of an id in the base, ``base`` if it is unknown."""
    if is_numbered(identifier, size):
        return numbered_row(identifier, base, size)
    row = slots[slot_of(slots, identifier, field), 1] & NO_ROW
    return base if row == NO_ROW else row


@compiled()
def find(ids, fields, tables, found):
    """Writes the base's row of each id [V] of fields [V] to ``found`` [V], -1 if it has none; returns how many have
    none.
    """
    bases, sizes, slots = tables.bases, tables.sizes, tables.base.slots
    missing = 0
    for i in range(len(ids)):
        base, size = bases[fields[i]], sizes[fields[i]]
        row = base_row(slots, ids[i], fields[i], base, size)
        known = is_numbered(ids[i], size) or row != base
        found[i] = row if known else -1
        missing += not known
    return missing


@compiled()
def write_rows(indices, stored, scale, store):
    """Copies stored rows [n, P], and for int8 their scales [n], to the rows with the indices [n]."""
    rows, scales = store.rows, store.scales
    for i in range(len(indices)):
        rows[indices[i]] = stored[i]
        if len(scale):
            scales[indices[i]] = scale[i]


@njit
def _enter(slots, identifier, field, row):
    """Enters an id with its row; returns whether it took an empty slot."""
    slot = slot_of(slots, identifier, field)
    fresh = slots[slot, 1] == EMPTY
    if fresh:
        slots[slot, 0] = identifier
    slots[slot, 1] = field << _FIELD_SHIFT | row
    return fresh


@compiled()
def insert(ids, fields, rows, slots):
    """Inserts ids [n] of fields [n] with their rows [n] in empty slots; returns how many slots it took."""
    taken = 0
    for i in range(len(ids)):
        taken += _enter(slots, ids[i], fields[i], rows[i])
    return taken


@compiled()
def overlay_ids(ids, fields, first, tables, slots):
    """Enters ids [n] of fields [n] in the slots of an overlay, with its rows from ``first`` on.

    With -1 the ids are entered as removed, except for numbered and reserved rows, which always exist.
    """
    bases, sizes = tables.bases, tables.sizes
    for i in range(len(ids)):
        base, size = bases[fields[i]], sizes[fields[i]]
        if not is_numbered(ids[i], size):
            _enter(slots, ids[i], fields[i], NO_ROW if first < 0 else first + i)
        elif first >= 0:
            _enter(slots, numbered_row(ids[i], base, size), len(bases), first + i)


@compiled()
def rehash(old, slots):
    """Empties the slots and inserts every id of the old ones that has a row."""
    slots[:, 0] = 0
    slots[:, 1] = EMPTY
    for i in range(len(old)):
        if old[i, 1] & NO_ROW != NO_ROW:
            slots[slot_of(slots, old[i, 0], old[i, 1] >> _FIELD_SHIFT)] = old[i]


@compiled()
def copy_to_larger(old, new):
    """Copies an array into the first part of a larger one, and zeros into the remainder, so that its pages exist.

    numpy would block other threads meanwhile.
    """
    new[: len(old)] = old
    new[len(old) :] = 0


@compiled()
def remove(ids, fields, slots, freed):
    """Removes ids [n] of fields [n]; returns how many were present, and writes their rows to ``freed`` [n]."""
    count = 0
    for i in range(len(ids)):
        slot = slot_of(slots, ids[i], fields[i])
        row = slots[slot, 1] & NO_ROW
        if row != NO_ROW:
            freed[count] = row
            count += 1
            slots[slot, 1] |= NO_ROW
    return count


def _weight(rows, scales, halves, row, column):
    """A stored weight as float32; compiled code only, by the type of the rows."""
    raise NotImplementedError


@overload(_weight)
def _compiled_weight(rows, scales, halves, row, column):
    if rows.dtype == types.float32:
        return lambda rows, scales, halves, row, column: rows[row, column]
    if rows.dtype == types.uint16:
        return lambda rows, scales, halves, row, column: halves[rows[row, column]]
    return lambda rows, scales, halves, row, column: np.float32(rows[row, column]) * scales[row]


@njit
def _look_up(slots, over_slots, identifier, field, fields, base, size):
    """Row of an id in the base, or ``-1 - row`` of the overlay; and whether the id has no row of its own."""
    row = EMPTY
    if len(over_slots) and not is_numbered(identifier, size):
        value = over_slots[slot_of(over_slots, identifier, field), 1]
        if value != EMPTY:
            row = value & NO_ROW
            if row != NO_ROW:
                return -1 - row, False
            row = base
    if row == EMPTY:
        row = base_row(slots, identifier, field, base, size)
    unknown = row == base
    if len(over_slots) and (size >= 0 or row < base + RESERVED):
        value = over_slots[slot_of(over_slots, row, fields), 1]
        if value != EMPTY:
            row = -1 - (value & NO_ROW)
    return row, unknown


@compiled()
def gather(ids, fields, tables, out, unknown):
    """Gathers the rows of single-valued fields.

    Reads ids [B, S] of the fields with the numbers ``fields`` [S], and writes the leading P columns of float32 out
    [B, F, P or more]. Adds the number of ids without a row of their own to ``unknown``, int64 [F].
    """
    bases, sizes, halves = tables.bases, tables.sizes, tables.halves
    slots, rows, scales = tables.base
    over_slots, over_rows, over_scales = tables.overlay
    for sample in range(len(out)):
        for s in range(len(fields)):
            field = fields[s]
            base, size = bases[field], sizes[field]
            row, is_unknown = _look_up(slots, over_slots, ids[sample, s], field, len(bases), base, size)
            unknown[field] += is_unknown
            if row >= 0:
                for column in range(rows.shape[1]):
                    out[sample, field, column] = _weight(rows, scales, halves, row, column)
            else:
                for column in range(rows.shape[1]):
                    out[sample, field, column] = _weight(over_rows, over_scales, halves, -1 - row, column)


@compiled()
def gather_bag(bag, tables, out, unknown):
    """Pools the rows of a list field into float32 out [B, F, P or more].

    Rows of a sequence are written to its positions, the last one last, after zeros. Adds the number of ids without a
    row of their own to ``unknown``, int64 [F].
    """
    ids, offsets, weights, field, positions = bag.ids, bag.offsets, bag.weights, bag.field, bag.positions
    base, size = tables.bases[bag.field], tables.sizes[bag.field]
    halves, num_fields = tables.halves, len(tables.bases)
    slots, rows, scales = tables.base
    over_slots, over_rows, over_scales = tables.overlay
    for sample in range(len(out)):
        own = out[sample, bag.first : bag.first + max(positions, 1), : rows.shape[1]]
        own[:] = 0
        total = own[0]
        end = offsets[sample + 1]
        length = min(end - offsets[sample], positions) if positions else end - offsets[sample]
        for k in range(end - length, end):
            if positions:
                total = own[positions - (end - k)]
            row, is_unknown = _look_up(slots, over_slots, ids[k], field, num_fields, base, size)
            unknown[bag.first] += is_unknown
            weight = weights[k] if len(weights) else np.float32(1)
            if row >= 0:
                for column in range(len(total)):
                    total[column] += weight * _weight(rows, scales, halves, row, column)
            else:
                for column in range(len(total)):
                    total[column] += weight * _weight(over_rows, over_scales, halves, -1 - row, column)
        if bag.mean and length > 1:
            total /= np.float32(length)
