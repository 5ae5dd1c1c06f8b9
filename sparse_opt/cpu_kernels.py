"""CPU kernels for the rows of a lookup: distinct ids, row gradients, clip factors and Adam, one table at a time.

Compiled by numba without the GIL, so that several tables run at once in threads; float32 only. Within a table all sums
run in the order of the batch, whatever the number of threads, so results repeat to the last bit. The plain definition
is row_gradients.py; tests hold the two against each other. Sizes: U distinct rows, D columns, B bags per feature.
"""

import numpy as np
from numba import njit

from .adam_formula import adam_element

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@njit(nogil=True, cache=True)
def distinct(ids, num_rows):
    """Distinct ids in order of first occurrence: (bad position or -1, U, ids [n], counts [n], slot of each id [n])."""
    n = len(ids)
    bits = 4
    while (1 << bits) < 2 * n:
        bits += 1
    mask = np.int64((1 << bits) - 1)
    shift = np.uint64(64 - bits)
    table = np.full(1 << bits, -1, np.int32)
    rows = np.empty(n, np.int64)
    counts = np.zeros(n, np.int32)
    slots = np.empty(n, np.int32)
    used = 0
    for i in range(n):
        row = ids[i]
        if row < 0 or row >= num_rows:
            return i, used, rows, counts, slots
        place = np.int64((np.uint64(row) * _GOLDEN) >> shift)
        while True:
            slot = table[place]
            if slot < 0:
                table[place] = used
                rows[used] = row
                slot = used
                used += 1
                break
            if rows[slot] == row:
                break
            place = (place + 1) & mask
        counts[slot] += 1
        slots[i] = slot
    return -1, used, rows, counts, slots


@njit(nogil=True, cache=True)
def row_gradients(slots, used, dim, first, last, columns, bags, offsets, id_weights, grad):
    """Gradient of each distinct row, float32 [U, D]: the sum over its occurrences in features first..last-1.

    Summed in float64: a frequent id of a large batch adds tens of thousands of terms of either sign.
    """
    sums = np.zeros((used, dim), np.float64)
    weighted = len(id_weights) > 0
    begin = offsets[first * bags]
    for feature in range(first, last):
        column = columns[feature]
        for bag in range(bags):
            for i in range(offsets[feature * bags + bag], offsets[feature * bags + bag + 1]):
                slot = slots[i - begin]
                if weighted:
                    for d in range(dim):
                        sums[slot, d] += np.float64(id_weights[i]) * grad[bag, column + d]
                else:
                    for d in range(dim):
                        sums[slot, d] += grad[bag, column + d]
    return sums.astype(np.float32)


@njit(nogil=True, cache=True)
def _norm(row, width):
    # In float64, as row_norms in clip.py: the order of the sum then does not show.
    total = 0.0
    for d in range(width):
        total += np.float64(row[d]) * np.float64(row[d])
    return np.float32(np.sqrt(total))


@njit(nogil=True, cache=True)
def clip_factor(weight, grad, count, clip_columns, r, floor, per_occurrence):
    """Factor of one row and its ratio ||g|| / limit. Source: RowLimit in clip.py."""
    limit = max(r * _norm(weight, clip_columns), floor)
    if per_occurrence:
        limit *= np.float32(count)
    norm = _norm(grad, clip_columns)
    if norm > limit:
        return limit / norm, norm / limit if limit > 0 else np.float32(np.inf)
    return np.float32(1), norm / limit if norm > 0 else np.float32(0)


@njit(nogil=True, cache=True)
def factors_of_ids(
    tables, begins, firsts, lasts, columns, bags, num_rows, dims, starts, clip_columns, r, floor, per_occurrence,
    indices, offsets, id_weights, grad, weights, factors, ratios, used_rows,
):  # fmt: skip
    """Clip factor of every id of the given tables into ``factors`` [nnz]; ratios of a table's rows at its first id.

    Returns the place in ``indices`` of an id outside its table, or -1.
    """
    for t in tables:
        begin, end = begins[t], begins[t + 1]
        bad, used, rows, counts, slots = distinct(indices[begin:end], num_rows[t])
        if bad >= 0:
            return begin + bad
        dim = dims[t]
        sums = row_gradients(slots, used, dim, firsts[t], lasts[t], columns, bags, offsets, id_weights, grad)
        factor = np.empty(used, np.float32)
        for u in range(used):
            start = starts[t] + rows[u] * dim
            factor[u], ratios[begin + u] = clip_factor(
                weights[start : start + dim], sums[u], counts[u], clip_columns[t], r[t], floor[t], per_occurrence[t]
            )
        for i in range(end - begin):
            factors[begin + i] = factor[slots[i]]
        used_rows[t] = used
    return -1


@njit(nogil=True, cache=True, inline="always")
def root(value):
    return np.sqrt(value)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def divide(numerator, denominator):
    return numerator / denominator


step_of_element = njit(nogil=True, cache=True, inline="always")(adam_element)


@njit(nogil=True, cache=True)
def adam_rows(
    tables, begins, firsts, lasts, columns, bags, num_rows, dims, starts, clip_columns, r, floor, per_occurrence,
    indices, offsets, id_weights, grad, weights,
    exp_avg, exp_avg_sq, beta1, rest1, beta2, rest2, eps, twice_l2, step_size, denominator_scale,
    last_step, first_rows, step, log_beta2, ratios, used_rows,
):  # fmt: skip
    """Adam step ``step`` on the rows of the tables that the batch touches: L2, clip, moments, weights, in one pass.

    ``last_step`` is empty where nobody replays; else it is written, and a row at rest (see replay_kernels.py) first
    takes the decay of its second moment.
    Returns the place in ``indices`` of an id outside its table, or -1; nothing of that table is then changed.
    """
    for t in tables:
        begin, end = begins[t], begins[t + 1]
        bad, used, rows, counts, slots = distinct(indices[begin:end], num_rows[t])
        if bad >= 0:
            return begin + bad
        dim = dims[t]
        sums = row_gradients(slots, used, dim, firsts[t], lasts[t], columns, bags, offsets, id_weights, grad)
        for u in range(used):
            start = starts[t] + rows[u] * dim
            stop = start + dim
            w, m, v = weights[start:stop], exp_avg[start:stop], exp_avg_sq[start:stop]
            if len(last_step) > 0:
                last = last_step[first_rows[t] + rows[u]]
                if last < 0 and ~last < step - 1:
                    decay = np.float32(np.exp(log_beta2 * (step - 1 - ~last)))
                    for d in range(dim):
                        v[d] *= decay
                last_step[first_rows[t] + rows[u]] = step
            g = sums[u]
            for d in range(dim):
                g[d] += twice_l2 * w[d]
            factor, ratios[begin + u] = clip_factor(w, g, counts[u], clip_columns[t], r[t], floor[t], per_occurrence[t])
            for d in range(clip_columns[t]):
                g[d] *= factor
            for d in range(dim):
                w[d], m[d], v[d] = step_of_element(
                    w[d], m[d], v[d], g[d], beta1, rest1, beta2, rest2, eps, step_size, denominator_scale, root, divide
                )
        used_rows[t] = used
    return -1
