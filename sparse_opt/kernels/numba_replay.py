"""CPU kernels for replay: the Adam steps that embedding rows missed while their ids were absent from the batches.

The gradient of a missed step is that of L2 alone. The kernels take the steps with the arithmetic of algorithm/adam.py,
so a row is bit-identical to a row that took every step in time. The cost is low because many rows take a step together
in vector registers, only rows that are looked up are replayed, and rows *at rest* take no more steps.

An element is at rest when it can change by no more than the thresholds (see optim/replay.py): its first moment is then
set to zero and, under L2, its weight too. Once all elements of a row are at rest, only the second moments change, by a
constant factor a step. ``last_step`` is then ``~t`` (negative) for the step t in which the row came to rest. Decoupled
weight decay without L2 still changes weights; such a row comes to rest only when they are zero, and its steps are short
until then. Rows are checked after steps that are multiples of 32, so that the result does not depend on when and how
often a row is read. Compiled by numba without the GIL, float32 only. Sizes: n rows, D columns.
"""

import numpy as np

from .compiled import compiled
from .layout import REST_INTERVAL
from .numba_rows import clip_factor, divide, load_row, prefetch_row, root, scalars_of_step, step_of_element, store_row

ROW_BITS = 33
"""Low bits of the 64-bit keys by which rows are sorted; they hold the row's index, and the high bits its last step."""
_ELEMENTS = 512
_VECTOR = 16


@compiled()
def stale_rows(tables, layout, bags, steps, keys, used):
    """Finds the distinct rows of the given tables' ids that are behind ``steps.taken`` and not at rest.

    Writes the rows' keys (see ROW_BITS), ``used[t]`` of them from the offset of a table's first id on, and sets the
    rows' last steps to ``steps.taken``. Returns the offset of an id outside its table, or -1. Rows that were found
    before that id have been written too.
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
    """Moves the keys that :func:`stale_rows` wrote to the front; returns their number."""
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
def _steps(w, m, v, count, first, end, lr_factor, steps, constants):
    """Takes steps first + 1 .. end on the ``count`` leading elements, a multiple of _VECTOR, without a clip."""
    for t in range(first, end):
        scalars = scalars_of_step(steps, t, lr_factor)
        for i in range(count):
            gradient = constants.twice_l2 * w[i]
            w[i], m[i], v[i] = step_of_element(w[i], m[i], v[i], gradient, constants, scalars, root, divide)


@compiled(error_model="numpy")
def _steps_without_moments(w, v, count, first, end, lr_factor, steps, constants):
    """Does :func:`_steps` where all first moments are zero and there is no L2."""
    for t in range(first, end):
        decay = scalars_of_step(steps, t, lr_factor).decay
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
def _zero_at_rest(w, m, count, twice_l2, step_size, lr_factor, thresholds):
    """Sets leading elements at rest to zero; without branches, so that the loop runs in vector registers."""
    # Under a factor of 0, first moments come to rest as under a factor of 1.
    lr = max(thresholds.lr, step_size) * (lr_factor if lr_factor > 0 else np.float32(1))
    for i in range(count):
        rests = (abs(m[i]) * lr <= thresholds.motion) & ((twice_l2 == 0) | (abs(w[i]) <= thresholds.weight))
        m[i] = np.float32(0) if rests else m[i]
        w[i] = np.float32(0) if rests & (twice_l2 > 0) else w[i]


@compiled()
def _is_at_rest(w, m, low, high, constants):
    """True if all elements of a row are at rest."""
    moving, shrinks = False, (constants.twice_l2 > 0) | (constants.weight_decay > 0)
    for i in range(low, high):
        moving |= (m[i] != 0) | (shrinks & (w[i] != 0))
    return not moving


@compiled()
def replay_rows(part, parts, dim, lr_factor, rows, state, steps, constants, thresholds):
    """Takes the missed steps of rows' leading ``dim`` columns, where no absent row can exceed its clip limit, in place.

    ``rows`` are :class:`StaleRows`, sorted by their last steps, of tables whose learning rate is ``lr_factor`` times
    the steps'. A call takes every ``parts``-th row, so that all calls have about equally many steps to take, and
    processes its rows in blocks. A row enters the buffers of its block at the first step that it missed, and leaves
    them when it comes to rest.
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
            until = min(step, (now // REST_INTERVAL + 1) * REST_INTERVAL)
            if following < end:
                until = min(until, rows.last[following])
            used = (active * dim + _VECTOR - 1) // _VECTOR * _VECTOR
            if constants.weight_decay > 0 and constants.twice_l2 == 0 and _all_zero(m, used):
                _steps_without_moments(w, v, used, now, until, lr_factor, steps, constants)
            else:
                _steps(w, m, v, used, now, until, lr_factor, steps, constants)
            now = until
            if now % REST_INTERVAL == 0:
                _zero_at_rest(w, m, used, constants.twice_l2, steps.step_sizes[now - 1], lr_factor, thresholds)
                slot = 0
                while slot < active:
                    low, high = slot * dim, slot * dim + dim
                    if not _is_at_rest(w, m, low, high, constants):
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
    """Does :func:`replay_rows` row by row, where the L2 gradient of an absent row may exceed the row's limit."""
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
            scalars = scalars_of_step(steps, now, lr_factor)
            for d in range(dim):
                g[d] = constants.twice_l2 * w[d]
            factor, _ = clip_factor(w, g, 1, clips, t)
            for d in range(clips.columns[t]):
                g[d] *= factor
            for d in range(dim):
                w[d], m[d], v[d] = step_of_element(w[d], m[d], v[d], g[d], constants, scalars, root, divide)
            if (now + 1) % REST_INTERVAL == 0:
                _zero_at_rest(w, m, dim, constants.twice_l2, steps.step_sizes[now], lr_factor, thresholds)
                if _is_at_rest(w, m, 0, dim, constants):
                    last_step[rows.row[i]] = ~(now + 1)
                    break
