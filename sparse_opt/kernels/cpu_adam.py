"""CPU kernel for the Adam step of a batch's rows: L2, clip, moments and weights in one pass over memory.

Compiled by numba, as cpu_rows.py. Sizes: U distinct rows, D columns.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from cowrec.sparse_opt.algorithm.adam import adam_element, table_scalars

from .cpu_rows import clip_factor

_ROWS = 32
"""Rows that are updated at a time; their buffers fit the first-level cache."""
_LINE = 16
"""float32 numbers of a cache line."""


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def root(value):
    return np.sqrt(value)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def divide(numerator, denominator):
    return numerator / denominator


step_of_element = njit(nogil=True, cache=True, inline="always")(adam_element)
scalars_of_table = njit(nogil=True, cache=True, inline="always")(table_scalars)


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


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def prefetch_row(state, start, dim):
    """Requests a row and its moments, which may be anywhere in memory, while earlier rows are computed."""
    for i in range(start, start + dim, _LINE):
        prefetch(state.weights, i)
        prefetch(state.exp_avg, i)
        prefetch(state.exp_avg_sq, i)
    prefetch(state.weights, start + dim - 1)
    prefetch(state.exp_avg, start + dim - 1)
    prefetch(state.exp_avg_sq, start + dim - 1)


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def load_row(state, start, w, m, v, low, dim):
    """Copies a row and its moments to ``low`` in the buffers w, m and v."""
    for d in range(dim):
        w[low + d] = state.weights[start + d]
    for d in range(dim):
        m[low + d] = state.exp_avg[start + d]
    for d in range(dim):
        v[low + d] = state.exp_avg_sq[start + d]


@njit(nogil=True, cache=True, inline="always", error_model="numpy")
def store_row(w, m, v, low, state, start, dim):
    """Copies a row and its moments back."""
    for d in range(dim):
        state.weights[start + d] = w[low + d]
    for d in range(dim):
        state.exp_avg[start + d] = m[low + d]
    for d in range(dim):
        state.exp_avg_sq[start + d] = v[low + d]


@njit(nogil=True, cache=True, error_model="numpy")
def adam_rows(tables, distinct_rows, layout, bags, clips, ratios, state, constants, scalars, lr_factors, progress):
    """Takes Adam step ``progress.step`` on the distinct rows of some tables, in place.

    Where rows are replayed, writes their last steps; a decayed row (see cpu_replay.py) first catches up the decay of
    its second moment.
    """
    tops, rows, counts, sums = distinct_rows.tops, distinct_rows.rows, distinct_rows.counts, distinct_rows.sums
    last_step, step = progress.last_step, progress.step
    elements = _ROWS * sums.shape[1]
    w, m, v = np.empty(elements, np.float32), np.empty(elements, np.float32), np.empty(elements, np.float32)
    g = np.empty(elements, np.float32)
    for k, t in enumerate(tables):
        dim, first, start, first_row = layout.dim[t], tops[k], layout.start[t], layout.first_row[t]
        own = scalars_of_table(scalars, lr_factors[t])
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
                        decay = np.float32(np.exp(progress.log_beta2 * (step - 1 - ~last)))
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
                store_row(w, m, v, (u - block) * dim, state, start + rows[u] * dim, dim)
        ratios.rows[t] = tops[k + 1] - first
