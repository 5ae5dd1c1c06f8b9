"""CPU kernels for replay: the Adam steps that embedding rows missed while their ids were absent from the batches.

The gradient of a missed step is L2's alone. The kernels take these steps with the arithmetic of algorithm/adam.py, so a
row is bit-identical to one that took every step in time. The cost stays low because many rows take a step together in
vector registers, only rows that are looked up are replayed, and *decayed* rows take no more steps.

An element has decayed when it can still change by no more than the thresholds (see optim/replay.py): its first moment
is then set to zero and, where there is L2, its weight too. Once all elements of a row have decayed, only its second
moment still changes, by a constant factor a step; ``last_step`` then holds ``~t`` (negative), t being the step in which
the row decayed. Decoupled weight decay without L2 changes weights even then: a row decays only once they are zero, and
until then its steps are short. Rows are checked after steps that are multiples of 32, so that the result does not
depend on when and how often a row is read. Compiled by numba without the GIL, float32 only. Sizes: n rows, D columns.
"""

import numpy as np

from ..algorithm.adam import AdamScalars
from .compiled import compiled
from .layout import DECAY_INTERVAL
from .numba_rows import clip_factor, divide, load_row, prefetch_row, root, scalars_of_table, step_of_element, store_row

ROW_BITS = 33
"""Rows to be replayed are sorted by a key of 64 bits: the last step, and the index of the row in this many low bits."""
_ELEMENTS = 512
_VECTOR = 16


@compiled()
def stale_rows(tables, layout, bags, steps, keys, used):
    """Finds the distinct rows of the given tables' ids that are behind ``steps.taken`` and have not decayed.

    Writes their keys (see ROW_BITS) from the offset of each table's first id on, ``used[t]`` of them, and sets their
    last steps to ``steps.taken``. Returns the offset of an id outside its table, or -1; rows found before it are marked
    too.
    """
    begins, last_step, step = bags.begins, steps.last_step, np.int64(steps.taken[0])
    for t in tables:
        count = begins[t]
        for i in range(begins[t], begins[t + 1]):
            index = bags.indices[i]
            if index < 0 or index >= layout.rows[t]:
                used[t] = count - begins[t]
                return i
            row = layout.first_row[t] + index
            last = last_step[row]
            if 0 <= last < step:
                keys[count] = np.int64(last) << ROW_BITS | row
                last_step[row] = step
                count += 1
        used[t] = count - begins[t]
    return -1


@compiled()
def join_keys(keys, begins, used):
    """Moves the keys that :func:`stale_rows` wrote, from each ``begins[t]`` on, to the front; returns their number."""
    count = 0
    for t in range(len(used)):
        for i in range(begins[t], begins[t] + used[t]):
            keys[count] = keys[i]
            count += 1
    return count


@compiled()
def rows_of_keys(keys, layout):
    table, start, row = np.empty_like(keys), np.empty_like(keys), np.empty_like(keys)
    last = np.empty(len(keys), np.int32)
    for i in range(len(keys)):
        row[i], last[i] = keys[i] & ((1 << ROW_BITS) - 1), keys[i] >> ROW_BITS
        t = np.searchsorted(layout.first_row, row[i], side="right") - 1
        table[i], start[i] = t, layout.start[t] + (row[i] - layout.first_row[t]) * layout.dim[t]
    return table, start, row, last


@compiled(error_model="numpy")
def _scalars(steps, t, lr_factor):
    scalars = AdamScalars(steps.step_sizes[t], steps.denominator_scales[t], steps.decays[t])
    return scalars_of_table(scalars, lr_factor)


@compiled(error_model="numpy")
def _steps(w, m, v, count, first, end, lr_factor, steps, constants):
    """Takes steps first + 1 .. end on the leading elements, a multiple of the vector's width, without a clip."""
    for t in range(first, end):
        scalars = _scalars(steps, t, lr_factor)
        for i in range(count):
            gradient = constants.twice_l2 * w[i]
            w[i], m[i], v[i] = step_of_element(w[i], m[i], v[i], gradient, constants, scalars, root, divide)


@compiled(error_model="numpy")
def _steps_without_moments(w, v, count, first, end, lr_factor, steps, constants):
    """Does what :func:`_steps` does, where all first moments are zero and there is no L2."""
    for t in range(first, end):
        decay = _scalars(steps, t, lr_factor).decay
        for i in range(count):
            w[i] = w[i] - decay * w[i]
            v[i] = constants.beta2 * v[i]


@compiled()
def _all_zero(m, count):
    moving = False
    for i in range(count):
        moving |= m[i] != 0
    return not moving


@compiled()
def _zero_decayed(w, m, count, twice_l2, step_size, lr_factor, thresholds):
    """Sets decayed ones of the leading elements to zero; without branches, so that it runs in vector registers."""
    # A first moment that moves no weight for lack of a rate still decays as under any.
    lr = max(thresholds.lr, step_size) * (lr_factor if lr_factor > 0 else np.float32(1))
    for i in range(count):
        decayed = (abs(m[i]) * lr <= thresholds.motion) & ((twice_l2 == 0) | (abs(w[i]) <= thresholds.weight))
        m[i] = np.float32(0) if decayed else m[i]
        w[i] = np.float32(0) if decayed & (twice_l2 > 0) else w[i]


@compiled()
def _has_decayed(w, m, low, high, constants):
    """True if all elements of a row have decayed."""
    moving, shrinks = False, (constants.twice_l2 > 0) | (constants.weight_decay > 0)
    for i in range(low, high):
        moving |= (m[i] != 0) | (shrinks & (w[i] != 0))
    return not moving


@compiled()
def replay_rows(part, parts, dim, lr_factor, rows, state, steps, constants, thresholds):
    """Takes the missed steps of rows' leading ``dim`` columns, where no absent row can exceed its clip limit, in place.

    The rows are :class:`StaleRows` of tables whose learning rate is ``lr_factor`` times the steps', sorted by their
    last steps. This call takes every ``parts``-th row, so that all calls have about as many steps to take, and
    processes its rows in blocks. A row enters its block's buffers at the first step that it missed and leaves them when
    it has decayed.
    """
    last_step, step = steps.last_step, np.int64(steps.taken[0])
    capacity = max(1, _ELEMENTS // max(1, dim))
    elements = (capacity * dim + _VECTOR - 1) // _VECTOR * _VECTOR
    w, m, v = np.zeros(elements, np.float32), np.zeros(elements, np.float32), np.zeros(elements, np.float32)
    row_of_slot, block = np.empty(capacity, np.int64), capacity * parts
    for begin in range(part, len(rows.start), block):
        end = min(begin + block, len(rows.start))
        for i in range(begin + block, min(begin + 2 * block, len(rows.start)), parts):
            prefetch_row(state, rows.start[i], dim)
        following, active, now = begin, 0, rows.last[begin]
        while now < step:
            while following < end and rows.last[following] <= now:
                load_row(state, rows.start[following], w, m, v, active * dim, dim)
                row_of_slot[active] = following
                active += 1
                following += parts
            until = min(step, (now // DECAY_INTERVAL + 1) * DECAY_INTERVAL)
            if following < end:
                until = min(until, rows.last[following])
            used = (active * dim + _VECTOR - 1) // _VECTOR * _VECTOR
            if constants.weight_decay > 0 and constants.twice_l2 == 0 and _all_zero(m, used):
                _steps_without_moments(w, v, used, now, until, lr_factor, steps, constants)
            else:
                _steps(w, m, v, used, now, until, lr_factor, steps, constants)
            now = until
            if now % DECAY_INTERVAL == 0:
                _zero_decayed(w, m, used, constants.twice_l2, steps.step_sizes[now - 1], lr_factor, thresholds)
                slot = 0
                while slot < active:
                    low, high = slot * dim, slot * dim + dim
                    if not _has_decayed(w, m, low, high, constants):
                        slot += 1
                        continue
                    i = row_of_slot[slot]
                    store_row(w, m, v, low, state, rows.start[i], dim)
                    last_step[rows.row[i]] = ~now
                    active -= 1
                    tail = active * dim
                    for d in range(dim):
                        w[low + d], m[low + d], v[low + d] = w[tail + d], m[tail + d], v[tail + d]
                    row_of_slot[slot] = row_of_slot[active]
            if active == 0:
                if following >= end:
                    break
                now = rows.last[following]
        for slot in range(active):
            i = row_of_slot[slot]
            store_row(w, m, v, slot * dim, state, rows.start[i], dim)
            last_step[rows.row[i]] = step


@compiled()
def replay_clipped_rows(part, parts, dim, lr_factor, rows, state, steps, constants, thresholds, clips):
    """Does the work of :func:`replay_rows` row by row, where L2's gradient of an absent row may exceed its limit."""
    last_step, step = steps.last_step, np.int64(steps.taken[0])
    for i in range(part, len(rows.start), parts):
        t, start = rows.table[i], rows.start[i]
        w, m, v = (
            state.weights[start : start + dim],
            state.exp_avg[start : start + dim],
            state.exp_avg_sq[start : start + dim],
        )
        g = np.empty(dim, np.float32)
        last_step[rows.row[i]] = step
        for now in range(rows.last[i], step):
            scalars = _scalars(steps, now, lr_factor)
            for d in range(dim):
                g[d] = constants.twice_l2 * w[d]
            factor, _ = clip_factor(w, g, 1, clips, t)
            for d in range(clips.columns[t]):
                g[d] *= factor
            for d in range(dim):
                w[d], m[d], v[d] = step_of_element(w[d], m[d], v[d], g[d], constants, scalars, root, divide)
            if (now + 1) % DECAY_INTERVAL == 0:
                _zero_decayed(w, m, dim, constants.twice_l2, steps.step_sizes[now], lr_factor, thresholds)
                if _has_decayed(w, m, 0, dim, constants):
                    last_step[rows.row[i]] = ~(now + 1)
                    break
