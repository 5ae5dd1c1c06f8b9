"""CPU kernels that bring embedding rows up to date: the Adam steps that a row missed while its id was absent.

A missed step has no gradient but L2's. Its arithmetic is adam_formula.py's, step by step, so a row ends with the bits
that it would have had if it had taken every step in time. Three things make it cheap: many rows go through a step
together, in vector registers; only rows that an id asks for are touched; and a row that has come to *rest* takes no
more steps.

An element has come to rest when what it would still move by is at most ``rest`` (see replay.py): its first moment is
then set to zero and, where there is L2, its weight too. Once all elements of a row have, only the second moment still
changes, by a known factor a step; ``last_step`` then holds ``~t`` (negative), t being the step it came to rest. Rest is
looked for after steps that are multiples of 32, whatever brought the row there, so that it makes no difference when and
how often a row is read. Compiled by numba without the GIL, float32 only. Sizes: n rows, D columns.
"""

import numpy as np
from numba import njit

from .cpu_rows import clip_factor, divide, load_row, prefetch_row, root, step_of_element, store_row

REST_INTERVAL = 32
PLACE_BITS = 33
"""A row to be replayed is told by a key of 64 bits: its last step, and below it in so many bits its number."""
_LANES = 512
_VECTOR = 16


@njit(nogil=True, cache=True)
def stale_rows(tables, begins, num_rows, first_rows, indices, last_step, step, keys, used):
    """Rows behind ``step`` among the given tables' ids, each once, as keys (see PLACE_BITS); not rows at rest.

    They are written from ``begins[t]`` on, ``used[t]`` of them, and marked as being at ``step``.
    Returns the place in ``indices`` of an id outside its table, or -1; rows found before it are marked all the same.
    """
    for t in tables:
        count = begins[t]
        for i in range(begins[t], begins[t + 1]):
            row = indices[i]
            if row < 0 or row >= num_rows[t]:
                used[t] = count - begins[t]
                return i
            place = first_rows[t] + row
            last = last_step[place]
            if 0 <= last < step:
                keys[count] = np.int64(last) << PLACE_BITS | place
                last_step[place] = step
                count += 1
        used[t] = count - begins[t]
    return -1


@njit(nogil=True, cache=True, error_model="numpy")
def _steps(w, m, v, lanes, first, end, step_sizes, denominator_scales, beta1, rest1, beta2, rest2, eps, twice_l2):
    """Steps first + 1 .. end on the leading lanes, a multiple of the vector's width; no row is clipped."""
    for t in range(first, end):
        step_size, denominator_scale = step_sizes[t], denominator_scales[t]
        for i in range(lanes):
            w[i], m[i], v[i] = step_of_element(
                w[i], m[i], v[i], twice_l2 * w[i],
                beta1, rest1, beta2, rest2, eps, step_size, denominator_scale, root, divide,
            )  # fmt: skip


@njit(nogil=True, cache=True)
def _settle(w, m, lanes, twice_l2, lr, rest, rest_motion):
    """Sets the leading lanes' elements at rest to zero; without branches, so that it runs in vector registers."""
    for i in range(lanes):
        still = (abs(m[i]) * lr <= rest_motion) & ((twice_l2 == 0) | (abs(w[i]) <= rest))
        m[i] = np.float32(0) if still else m[i]
        w[i] = np.float32(0) if still & (twice_l2 > 0) else w[i]


@njit(nogil=True, cache=True)
def _is_at_rest(w, m, low, high, twice_l2):
    """Whether a row has been settled in all elements."""
    moving = False
    for i in range(low, high):
        moving |= (m[i] != 0) | ((twice_l2 > 0) & (w[i] != 0))
    return not moving


@njit(nogil=True, cache=True)
def replay_rows(
    part, parts, dim, starts, places, lasts, weights, exp_avg, exp_avg_sq, last_step, step,
    step_sizes, denominator_scales, beta1, rest1, beta2, rest2, eps, twice_l2, lr, rest, rest_motion,
):  # fmt: skip
    """Brings rows of width ``dim`` from their last steps to ``step``; no absent row may be over its limit.

    Rows come in order of their last step, in blocks; this call does every ``parts``-th block. A row joins its block's
    buffer at the first step it missed and leaves it at rest.

    Args:
        starts, places, lasts: each row's first element, number in the lookup and last step, [n].
        step_sizes, denominator_scales: of steps 1, 2, ..., float32.
        lr: the configured learning rate; what a first moment can still move is judged by it or the step's, if larger.
        rest, rest_motion: thresholds of the weight, and of first moment times learning rate.
    """
    rows = max(1, _LANES // dim)
    lanes = (rows * dim + _VECTOR - 1) // _VECTOR * _VECTOR
    w, m, v = np.zeros(lanes, np.float32), np.zeros(lanes, np.float32), np.zeros(lanes, np.float32)
    of_slot = np.empty(rows, np.int64)
    for begin in range(part * rows, len(starts), parts * rows):
        end = min(begin + rows, len(starts))
        for row in range(begin + parts * rows, min(begin + (parts + 1) * rows, len(starts))):
            prefetch_row(weights, exp_avg, exp_avg_sq, starts[row], dim)
        following, active, now = begin, 0, lasts[begin]
        while now < step:
            while following < end and lasts[following] <= now:
                start, low = starts[following], active * dim
                load_row(weights, exp_avg, exp_avg_sq, start, w, m, v, low, dim)
                of_slot[active] = following
                active += 1
                following += 1
            until = min(step, (now // REST_INTERVAL + 1) * REST_INTERVAL)
            if following < end:
                until = min(until, lasts[following])
            used = (active * dim + _VECTOR - 1) // _VECTOR * _VECTOR
            _steps(w, m, v, used, now, until, step_sizes, denominator_scales, beta1, rest1, beta2, rest2, eps, twice_l2)
            now = until
            if now % REST_INTERVAL == 0:
                _settle(w, m, used, twice_l2, max(lr, step_sizes[now - 1]), rest, rest_motion)
                slot = 0
                while slot < active:
                    low, high = slot * dim, slot * dim + dim
                    if not _is_at_rest(w, m, low, high, twice_l2):
                        slot += 1
                        continue
                    row = of_slot[slot]
                    store_row(w, m, v, low, weights, exp_avg, exp_avg_sq, starts[row], dim)
                    last_step[places[row]] = ~now
                    active -= 1
                    tail = active * dim
                    w[low:high], m[low:high], v[low:high] = (
                        w[tail : tail + dim],
                        m[tail : tail + dim],
                        v[tail : tail + dim],
                    )
                    of_slot[slot] = of_slot[active]
            if active == 0:
                if following == end:
                    break
                now = lasts[following]
        for slot in range(active):
            row = of_slot[slot]
            store_row(w, m, v, slot * dim, weights, exp_avg, exp_avg_sq, starts[row], dim)
            last_step[places[row]] = step


@njit(nogil=True, cache=True)
def replay_clipped_rows(
    part, parts, tables, clip_columns, r, floor, per_occurrence,
    dim, starts, places, lasts, weights, exp_avg, exp_avg_sq, last_step, step,
    step_sizes, denominator_scales, beta1, rest1, beta2, rest2, eps, twice_l2, lr, rest, rest_motion,
):  # fmt: skip
    """As :func:`replay_rows`, one row after the other, where L2's gradient of an absent row may be over its limit."""
    for row in range(part, len(starts), parts):
        t, start = tables[row], starts[row]
        w, m, v = weights[start : start + dim], exp_avg[start : start + dim], exp_avg_sq[start : start + dim]
        g = np.empty(dim, np.float32)
        last_step[places[row]] = step
        for now in range(lasts[row], step):
            for d in range(dim):
                g[d] = twice_l2 * w[d]
            factor, _ = clip_factor(w, g, 1, clip_columns[t], r[t], floor[t], per_occurrence[t])
            for d in range(clip_columns[t]):
                g[d] *= factor
            for d in range(dim):
                w[d], m[d], v[d] = step_of_element(
                    w[d], m[d], v[d], g[d],
                    beta1, rest1, beta2, rest2, eps, step_sizes[now], denominator_scales[now], root, divide,
                )  # fmt: skip
            if (now + 1) % REST_INTERVAL == 0:
                _settle(w, m, dim, twice_l2, max(lr, step_sizes[now]), rest, rest_motion)
                if _is_at_rest(w, m, 0, dim, twice_l2):
                    last_step[places[row]] = ~(now + 1)
                    break
