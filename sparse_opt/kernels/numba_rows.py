"""CPU kernels for the rows of a batch: sums of their gradients, their clip, and their Adam step.

Numba compiles them without the GIL, so that groups of tables run in parallel threads; float32 only. Within a table,
sums run in the order of the batch, so the results do not depend on the number of threads. torch_rows.py is the plain
definition, which tests compare. Sizes: U distinct rows, D columns, S blocks of bags, nnz ids.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..algorithm.adam import AdamScalars, adam_element, ftrl_element, table_scalars
from .compiled import compiled
from .layout import Blocks, LookupBags, to_numpy

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BAGS = 32
"""Bags whose gradients are summed at a time, so that they fit the first-level cache."""


class Bags(NamedTuple):
    """:class:`LookupBags` for numba."""

    indices: np.ndarray  # row of each id in its table, int64 [nnz]
    offsets: np.ndarray  # offset of each bag's first id in ``indices``, int64 [bags + 1]
    begins: np.ndarray  # offset of each table's first id, and the number of ids, int64 [tables + 1]
    blocks: Blocks  # Blocks of arrays


class DistinctRows(NamedTuple):
    """Distinct rows of a group of tables and their gradients, table by table."""

    tops: np.ndarray  # first row of each table of the group, and the number of rows, int64 [tables of the group + 1]
    rows: np.ndarray  # index of each row in its table, int64 [>= U]
    counts: np.ndarray  # occurrences of each row, int32 [>= U]
    slots: np.ndarray  # row of each id, int32 [ids of the group]
    sums: np.ndarray  # gradients, float64 [U, D]; D is the widest table's


class Ratios(NamedTuple):
    """Results of a kernel for the clip statistics."""

    # ``||g|| / limit`` of a table's distinct rows, from the offset of the table's first id on, float32 [nnz]
    values: np.ndarray
    rows: np.ndarray  # distinct rows of each table, int64 [tables]


def bags_of(bags: LookupBags) -> Bags:
    offsets, blocks = bags.offsets.long().numpy(), to_numpy(bags.blocks)
    return Bags(bags.indices.long().numpy(), offsets, offsets[blocks.first_bag[blocks.first_block]], blocks)


@compiled(error_model="numpy")
def distinct(ids, num_rows, first, rows, counts, slots):
    """Numbers the distinct ids, from ``first`` on, in the order of their first occurrence.

    Writes each distinct id into ``rows``, its occurrences into ``counts`` (initially zeros), and the numbers of all ids
    into ``slots``. Returns the position of an id outside [0, num_rows) or -1, and one past the last number.
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
        probe = np.int64((np.uint64(row) * _GOLDEN) >> shift)
        while True:
            slot = table[probe]
            if slot < 0:
                table[probe] = used
                rows[used] = row
                slot = used
                used += 1
                break
            if rows[slot] == row:
                break
            probe = (probe + 1) & mask
        counts[slot] += 1
        slots[i] = slot
    return -1, used


@compiled(inline="always", error_model="numpy")
def _add_to(sums, slot, dim, weight, grad, address):
    """Adds an output gradient to a row's gradient, four columns at a time, which compile to one vector operation."""
    quads = dim // 4 * 4
    for low in range(0, quads, 4):
        for d in range(4):
            sums[slot, low + d] += weight * grad[address + low + d]
    for d in range(quads, dim):
        sums[slot, d] += weight * grad[address + d]


@compiled(error_model="numpy")
def sum_rows(tables, layout, bags, id_weights, grad):
    """Sums the output gradient, flat, over the occurrences of each distinct row of some tables.

    Sums are in float64, because a frequent id of a large batch has tens of thousands of terms of either sign. Returns
    the offset in ``bags.indices`` of an id outside its table, or -1; and the :class:`DistinctRows`.
    """
    begins = bags.begins
    n = 0
    for t in tables:
        n += begins[t + 1] - begins[t]
    rows, counts, slots = np.empty(n, np.int64), np.zeros(n, np.int32), np.empty(n, np.int32)
    tops, shifts = np.zeros(len(tables) + 1, np.int64), np.empty(len(tables), np.int64)
    used, done, dim = 0, 0, 0
    for k, t in enumerate(tables):
        begin, end = begins[t], begins[t + 1]
        shifts[k] = done - begin
        slots_of_table = slots[done : done + end - begin]
        bad, used = distinct(bags.indices[begin:end], layout.rows[t], used, rows, counts, slots_of_table)
        if bad >= 0:
            return begin + bad, DistinctRows(tops, rows, counts, slots, np.empty((0, 0), np.float64))
        tops[k + 1] = used
        done += end - begin
        dim = max(dim, layout.dim[t])
    sums = np.zeros((used, dim), np.float64)
    weighted = len(id_weights) > 0
    blocks, most = bags.blocks, 0
    for t in tables:
        for block in range(blocks.first_block[t], blocks.first_block[t + 1]):
            most = max(most, blocks.first_bag[block + 1] - blocks.first_bag[block])
    # Some bags of all tables before the next ones, so that each line of the gradient is fetched once.
    for low in range(0, most, _BAGS):
        for k, t in enumerate(tables):
            for block in range(blocks.first_block[t], blocks.first_block[t + 1]):
                first, address, stride = blocks.first_bag[block], blocks.address[block], blocks.stride[block]
                for bag in range(low, min(low + _BAGS, blocks.first_bag[block + 1] - first)):
                    for i in range(bags.offsets[first + bag], bags.offsets[first + bag + 1]):
                        weight = np.float64(id_weights[i]) if weighted else 1.0
                        _add_to(sums, slots[shifts[k] + i], layout.dim[t], weight, grad, address + bag * stride)
    return -1, DistinctRows(tops, rows, counts, slots, sums)


@compiled(inline="always", error_model="numpy")
def _norm(row, width):
    # A sum of float32 numbers in float64 as in row_norms of clip.py, which does not depend on the order.
    total = 0.0
    for d in range(width):
        value = np.float64(np.float32(row[d]))
        total += value * value
    return np.float32(np.sqrt(total))


@compiled(inline="always", error_model="numpy")
def clip_factor(weight, grad, count, clips, t):
    """Returns a row's clip factor and ratio ``||g|| / limit`` in table ``t``. Source: limits_of_norms in clip.py."""
    limit = max(clips.r[t] * _norm(weight, clips.columns[t]), clips.floor[t])
    if clips.per_occurrence[t]:
        limit *= np.float32(count)
    norm = _norm(grad, clips.columns[t])
    if norm > limit:
        return limit / norm, norm / limit if limit > 0 else np.float32(np.inf)
    return np.float32(1), norm / limit if norm > 0 else np.float32(0)


_AHEAD = 16
"""Number of rows between the request of a row's weights and their use."""
_LINE = 16
"""float32 numbers of a cache line."""


@intrinsic
def prefetch(typing_context, array, index):
    """Requests the cache line of ``array[index]`` for writing; a hint to the processor."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kinds = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kinds)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), pointer)
        builder.call(prefetch, [address, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@compiled(inline="always", error_model="numpy")
def prefetch_elements(flat, start, dim):
    """Requests a row of a flat array while earlier rows are computed."""
    for i in range(start, start + dim, _LINE):
        prefetch(flat, i)
    prefetch(flat, start + dim - 1)


@compiled()
def count_rows(ratios, begins, rows, clipped, bins, shift, first_bin):
    """Adds up rows and rows above their limits, int64 [tables], and rows by bin of their ratio, int64 [tables, bins].

    Returns the ratio and the table of each row, float32 and int64 [U]; see :func:`bins_of` in statistics.py.
    """
    total = ratios.rows.sum()
    values, tables = np.empty(total, np.float32), np.empty(total, np.int64)
    bits, last = ratios.values.view(np.int32), bins.shape[1] - 1
    n = 0
    for t in range(len(rows)):
        rows[t] += ratios.rows[t]
        for i in range(begins[t], begins[t] + ratios.rows[t]):
            values[n], tables[n] = ratios.values[i], t
            clipped[t] += ratios.values[i] > 1
            bins[t, min(max(((bits[i] - 1) >> shift) - first_bin, 0), last)] += 1
            n += 1
    return values, tables


@compiled(error_model="numpy")
def factors_of_ids(tables, distinct_rows, layout, bags, clips, ratios, weights, factors):
    """Writes the clip factor of every id of the given tables into ``factors`` [nnz]."""
    tops, rows, counts, slots, sums = distinct_rows
    factor = np.empty(len(sums), np.float32)
    done = 0
    for k, t in enumerate(tables):
        begin, dim, first = bags.begins[t], layout.dim[t], layout.start[t]
        for u in range(tops[k], tops[k + 1]):
            if u + _AHEAD < tops[k + 1]:
                prefetch_elements(weights, first + rows[u + _AHEAD] * dim, dim)
            weight = weights[first + rows[u] * dim : first + rows[u] * dim + dim]
            factor[u], ratios.values[begin + u - tops[k]] = clip_factor(weight, sums[u], counts[u], clips, t)
        for i in range(begin, bags.begins[t + 1]):
            factors[i] = factor[slots[done]]
            done += 1
        ratios.rows[t] = tops[k + 1] - tops[k]


@compiled(error_model="numpy")
def write_row_gradients(tables, distinct_rows, layout, bags, clips, ratios, weights, twice_l2, output_grad):
    """Writes each row's clipped gradient, L2 included, into ``output_grad``, flat zeros, at the row's first id."""
    tops, rows, counts, slots, sums = distinct_rows
    g, blocks = np.empty(sums.shape[1], np.float32), bags.blocks
    done, next_row = 0, 0  # distinct rows are numbered in the order of their first ids
    for k, t in enumerate(tables):
        begin, dim = bags.begins[t], layout.dim[t]
        for block in range(blocks.first_block[t], blocks.first_block[t + 1]):
            first = blocks.first_bag[block]
            for bag in range(first, blocks.first_bag[block + 1]):
                address = blocks.address[block] + (bag - first) * blocks.stride[block]
                for _ in range(bags.offsets[bag], bags.offsets[bag + 1]):
                    u = slots[done]
                    done += 1
                    if u < next_row:
                        continue
                    next_row += 1
                    start = layout.start[t] + rows[u] * dim
                    if u + _AHEAD < tops[k + 1]:
                        prefetch_elements(weights, layout.start[t] + rows[u + _AHEAD] * dim, dim)
                    w = weights[start : start + dim]
                    for d in range(dim):
                        g[d] = np.float32(sums[u, d]) + twice_l2 * w[d]
                    factor, ratios.values[begin + u - tops[k]] = clip_factor(w, g, counts[u], clips, t)
                    for d in range(dim):
                        output_grad[address + d] = g[d] * factor if d < clips.columns[t] else g[d]
        ratios.rows[t] = tops[k + 1] - tops[k]


_ROWS = 32
"""Rows that are updated at a time; their buffers fit the first-level cache."""


@compiled(inline="always", error_model="numpy")
def root(value):
    return np.sqrt(value)


@compiled(inline="always", error_model="numpy")
def divide(numerator, denominator):
    return numerator / denominator


step_of_element = compiled(inline="always")(adam_element)
ftrl_of_element = compiled(inline="always")(ftrl_element)
scalars_of_table = compiled(inline="always")(table_scalars)


@compiled(error_model="numpy")
def scalars_of_step(steps, t, lr_factor):
    """Returns the scalars of step ``t``, from 0, for a table."""
    scalars = AdamScalars(steps.step_sizes[t], steps.denominator_scales[t], steps.decays[t])
    return scalars_of_table(scalars, lr_factor)


@compiled(inline="always", error_model="numpy")
def prefetch_row(state, start, dim):
    prefetch_elements(state.weights, start, dim)
    prefetch_elements(state.exp_avg, start, dim)
    prefetch_elements(state.exp_avg_sq, start, dim)


@compiled(inline="always", error_model="numpy")
def load_row(state, start, w, m, v, low, dim):
    for d in range(dim):
        w[low + d] = state.weights[start + d]
    for d in range(dim):
        m[low + d] = state.exp_avg[start + d]
    for d in range(dim):
        v[low + d] = state.exp_avg_sq[start + d]


@compiled(inline="always", error_model="numpy")
def store_row(w, m, v, low, state, start, dim):
    for d in range(dim):
        state.weights[start + d] = w[low + d]
    for d in range(dim):
        state.exp_avg[start + d] = m[low + d]
    for d in range(dim):
        state.exp_avg_sq[start + d] = v[low + d]


@compiled(error_model="numpy")
def adam_rows(tables, distinct_rows, layout, bags, clips, ratios, state, constants, steps, ftrl):
    """Takes step ``steps.taken`` of Adam, and of FTRL in its columns, on the distinct rows of some tables, in place.

    Under replay, last steps are written, and a row at rest (see numba_replay.py) first catches up its moments' decay.
    """
    tops, rows, counts, sums = distinct_rows.tops, distinct_rows.rows, distinct_rows.counts, distinct_rows.sums
    last_step, step = steps.last_step, np.int64(steps.taken[0])
    elements = _ROWS * sums.shape[1]
    w, m, v = np.empty(elements, np.float32), np.empty(elements, np.float32), np.empty(elements, np.float32)
    g = np.empty(elements, np.float32)
    for k, t in enumerate(tables):
        dim, first, start, first_row = layout.dim[t], tops[k], layout.start[t], layout.first_row[t]
        own, alpha = scalars_of_step(steps, step - 1, steps.lr_factors[t]), ftrl.alpha * steps.lr_factors[t]
        for block in range(first, tops[k + 1], _ROWS):
            end = min(block + _ROWS, tops[k + 1])
            for u in range(block, end):
                load_row(state, start + rows[u] * dim, w, m, v, (u - block) * dim, dim)
            for u in range(block, end):
                low = (u - block) * dim
                if u + _ROWS < tops[k + 1]:
                    prefetch_row(state, start + rows[u + _ROWS] * dim, dim)
                    if len(last_step) > 0:
                        prefetch(last_step, first_row + rows[u + _ROWS])
                if len(last_step) > 0:
                    last = last_step[first_row + rows[u]]
                    if last < 0 and ~last < step - 1:
                        decay = np.float32(np.exp(steps.log_beta2[0] * (step - 1 - ~last)))
                        for d in range(dim):
                            v[low + d] *= decay
                    last_step[first_row + rows[u]] = step
                for d in range(dim):
                    g[low + d] = np.float32(sums[u, d]) + constants.twice_l2 * w[low + d]
                factor, ratios.values[bags.begins[t] + u - first] = clip_factor(
                    w[low : low + dim], g[low : low + dim], counts[u], clips, t
                )
                for d in range(clips.columns[t]):
                    g[low + d] *= factor
            for i in range((end - block) * dim):
                w[i], m[i], v[i] = step_of_element(w[i], m[i], v[i], g[i], constants, own, root, divide)
            for u in range(block, end):
                low, row = (u - block) * dim, start + rows[u] * dim
                for d in range(steps.adam_columns[t], dim):  # from memory, where Adam has not taken its step
                    weight, squares, gradient = state.weights[row + d], state.exp_avg_sq[row + d], sums[u, d]
                    w[low + d], v[low + d] = ftrl_of_element(
                        weight, squares, np.float32(gradient), alpha, ftrl, root, divide
                    )
                    m[low + d] = 0
                store_row(w, m, v, low, state, row, dim)
        ratios.rows[t] = tops[k + 1] - first
