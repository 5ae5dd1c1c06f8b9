"""CPU kernels for the rows of a lookup: distinct ids, row gradients, clip factors and Adam, some tables at a time.

Compiled by numba without the GIL, so that groups of tables run at once in threads; float32 only. Within a table sums
run in the order of the batch, whatever the number of threads, so results repeat to the last bit. The plain definition
is row_gradients.py; tests hold the two against each other. Sizes: U distinct rows, D columns, B bags per feature.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from cowrec.sparse_opt.algorithm.adam import adam_element

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BAGS, _ROWS = 32, 32
"""Bags whose gradients are summed, and rows that are updated, at a time; what they touch fits the first cache."""
_LINE = 16
"""float32 numbers of a cache line."""


@njit(nogil=True, cache=True, error_model="numpy")
def distinct(ids, num_rows, first, rows, counts, slots):
    """Numbers the distinct ids from ``first`` on in the order of their first occurrence.

    Writes each one's id into ``rows``, its occurrences into ``counts`` (zeros before), and the number of each id into
    ``slots``. Returns the place of an id outside [0, num_rows) or -1, and one past the last number.
    """
    n = len(ids)
    bits = 4
    while (1 << bits) < 2 * n:
        bits += 1
    mask = np.int64((1 << bits) - 1)
    shift = np.uint64(64 - bits)
    table = np.full(1 << bits, -1, np.int32)
    used = first
    for i in range(n):
        row = ids[i]
        if row < 0 or row >= num_rows:
            return i, used
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
    return -1, used


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def _add_to(sums, slot, dim, weight, grad, bag, column):
    """Adds an output gradient to a row's; four columns at a time, which compile to one vector operation."""
    quads = dim // 4 * 4
    for low in range(0, quads, 4):
        for d in range(4):
            sums[slot, low + d] += weight * grad[bag, column + low + d]
    for d in range(quads, dim):
        sums[slot, d] += weight * grad[bag, column + d]


@njit(nogil=True, cache=True, error_model="numpy")
def sum_rows(tables, begins, firsts, lasts, columns, bags, num_rows, dims, indices, offsets, id_weights, grad):
    """The distinct rows of some tables and their gradients, the sums over their occurrences.

    Summed in float64: a frequent id of a large batch adds tens of thousands of terms of either sign.

    Returns:
        the place in ``indices`` of an id outside its table, or -1; and what the kernels below begin with: the number of
        each table's first row and one past the last's, int64 [tables + 1]; rows in their tables, int64 [>= U]; their
        occurrences, int32 [>= U]; number of the row of each of the tables' ids, int32 [n], table by table; gradients,
        float64 [U, D] (D is the widest's).
    """
    n = 0
    for t in tables:
        n += begins[t + 1] - begins[t]
    rows, counts, slots = np.empty(n, np.int64), np.zeros(n, np.int32), np.empty(n, np.int32)
    tops, shifts = np.zeros(len(tables) + 1, np.int64), np.empty(len(tables), np.int64)
    used, done, dim = 0, 0, 0
    for k, t in enumerate(tables):
        begin, end = begins[t], begins[t + 1]
        shifts[k] = done - begin
        bad, used = distinct(indices[begin:end], num_rows[t], used, rows, counts, slots[done : done + end - begin])
        if bad >= 0:
            return begin + bad, (tops, rows, counts, slots, np.empty((0, 0), np.float64))
        tops[k + 1] = used
        done += end - begin
        dim = max(dim, dims[t])
    sums = np.zeros((used, dim), np.float64)
    weighted = len(id_weights) > 0
    # Some bags of all tables before the next ones, so that each line of the gradient is fetched once.
    for low in range(0, bags, _BAGS):
        high = min(low + _BAGS, bags)
        for k, t in enumerate(tables):
            for feature in range(firsts[t], lasts[t]):
                for bag in range(low, high):
                    for i in range(offsets[feature * bags + bag], offsets[feature * bags + bag + 1]):
                        weight = np.float64(id_weights[i]) if weighted else 1.0
                        _add_to(sums, slots[shifts[k] + i], dims[t], weight, grad, bag, columns[feature])
    return -1, (tops, rows, counts, slots, sums)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def _norm(row, width):
    # In float64, as row_norms in clip.py: the order of the sum then does not show.
    total = 0.0
    for d in range(width):
        total += np.float64(row[d]) * np.float64(row[d])
    return np.float32(np.sqrt(total))


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def clip_factor(weight, grad, count, clip_columns, r, floor, per_occurrence):
    """Factor of one row and its ratio ||g|| / limit. Source: RowLimit in clip.py."""
    limit = max(r * _norm(weight, clip_columns), floor)
    if per_occurrence:
        limit *= np.float32(count)
    norm = _norm(grad, clip_columns)
    if norm > limit:
        return limit / norm, norm / limit if limit > 0 else np.float32(np.inf)
    return np.float32(1), norm / limit if norm > 0 else np.float32(0)


@njit(nogil=True, cache=True, error_model="numpy")
def factors_of_ids(
    tables, tops, rows, counts, slots, sums, begins, dims, starts, clip_columns, r, floor, per_occurrence,
    weights, factors, ratios, used_rows,
):  # fmt: skip
    """Clip factor of every id of the given tables into ``factors`` [nnz]; ratios of a table's rows at its first id."""
    grads, factor = sums.astype(np.float32), np.empty(len(sums), np.float32)
    done = 0
    for k, t in enumerate(tables):
        begin, dim = begins[t], dims[t]
        for u in range(tops[k], tops[k + 1]):
            start = starts[t] + rows[u] * dim
            factor[u], ratios[begin + u - tops[k]] = clip_factor(
                weights[start : start + dim], grads[u], counts[u], clip_columns[t], r[t], floor[t], per_occurrence[t]
            )
        for i in range(begin, begins[t + 1]):
            factors[i] = factor[slots[done]]
            done += 1
        used_rows[t] = tops[k + 1] - tops[k]


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def root(value):
    return np.sqrt(value)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def divide(numerator, denominator):
    return numerator / denominator


step_of_element = njit(nogil=True, cache=True, inline="always")(adam_element)


@intrinsic
def prefetch(typing_context, array, place):
    """Asks for the cache line of ``array[place]``, to be written soon; no more than a hint to the processor."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kinds = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kinds)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), pointer)
        builder.call(prefetch, [address, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def prefetch_row(weights, exp_avg, exp_avg_sq, start, dim):
    """Rows lie anywhere in memory: their lines are under way while the rows before them are computed."""
    for place in range(start, start + dim, _LINE):
        prefetch(weights, place)
        prefetch(exp_avg, place)
        prefetch(exp_avg_sq, place)
    prefetch(weights, start + dim - 1)
    prefetch(exp_avg, start + dim - 1)
    prefetch(exp_avg_sq, start + dim - 1)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def load_row(weights, exp_avg, exp_avg_sq, start, w, m, v, low, dim):
    """Copies a row and its moments to ``low`` in the buffers w, m and v."""
    for d in range(dim):
        w[low + d] = weights[start + d]
    for d in range(dim):
        m[low + d] = exp_avg[start + d]
    for d in range(dim):
        v[low + d] = exp_avg_sq[start + d]


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def store_row(w, m, v, low, weights, exp_avg, exp_avg_sq, start, dim):
    """Copies a row and its moments back."""
    for d in range(dim):
        weights[start + d] = w[low + d]
    for d in range(dim):
        exp_avg[start + d] = m[low + d]
    for d in range(dim):
        exp_avg_sq[start + d] = v[low + d]


@njit(nogil=True, cache=True, error_model="numpy")
def adam_rows(
    tables, tops, rows, counts, slots, sums, begins, dims, starts, clip_columns, r, floor, per_occurrence, weights,
    exp_avg, exp_avg_sq, beta1, rest1, beta2, rest2, eps, twice_l2, step_size, denominator_scale,
    last_step, first_rows, step, log_beta2, ratios, used_rows,
):  # fmt: skip
    """Adam step ``step`` on the rows of the tables that the batch touches: L2, clip, moments, weights, in one pass.

    ``last_step`` is empty where nobody replays; else it is written, and a row at rest (see replay_kernels.py) first
    takes the decay of its second moment.
    """
    lanes = _ROWS * sums.shape[1]
    w, m, v = np.empty(lanes, np.float32), np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    g = np.empty(lanes, np.float32)
    for k, t in enumerate(tables):
        dim, first = dims[t], tops[k]
        for block in range(first, tops[k + 1], _ROWS):
            end = min(block + _ROWS, tops[k + 1])
            for u in range(block, end):
                load_row(weights, exp_avg, exp_avg_sq, starts[t] + rows[u] * dim, w, m, v, (u - block) * dim, dim)
            for u in range(block, end):
                low = (u - block) * dim
                if u + _ROWS < tops[k + 1]:
                    prefetch_row(weights, exp_avg, exp_avg_sq, starts[t] + rows[u + _ROWS] * dim, dim)
                    if len(last_step) > 0:
                        prefetch(last_step, first_rows[t] + rows[u + _ROWS])
                if len(last_step) > 0:
                    last = last_step[first_rows[t] + rows[u]]
                    if last < 0 and ~last < step - 1:
                        decay = np.float32(np.exp(log_beta2 * (step - 1 - ~last)))
                        for d in range(dim):
                            v[low + d] *= decay
                    last_step[first_rows[t] + rows[u]] = step
                for d in range(dim):
                    g[low + d] = np.float32(sums[u, d]) + twice_l2 * w[low + d]
                factor, ratios[begins[t] + u - first] = clip_factor(
                    w[low : low + dim], g[low : low + dim],
                    counts[u], clip_columns[t], r[t], floor[t], per_occurrence[t],
                )  # fmt: skip
                for d in range(clip_columns[t]):
                    g[low + d] *= factor
            for i in range((end - block) * dim):
                w[i], m[i], v[i] = step_of_element(
                    w[i], m[i], v[i], g[i], beta1, rest1, beta2, rest2, eps, step_size, denominator_scale, root, divide
                )
            for u in range(block, end):
                store_row(w, m, v, (u - block) * dim, weights, exp_avg, exp_avg_sq, starts[t] + rows[u] * dim, dim)
        used_rows[t] = tops[k + 1] - first
