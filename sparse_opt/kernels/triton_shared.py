"""Parts of the CUDA kernels for embedding rows, which are written in Triton.

Fused multiply-adds are off and roots and divisions are correctly rounded, so that the arithmetic of algorithm/adam.py
gives the same bits on every back end. Numbers that change from step to step are read from the device, so that a
captured CUDA graph can repeat the launches.
"""

from types import FunctionType

import triton
import triton.language as tl

from cowrec.sparse_opt.algorithm.adam import AdamScalars, adam_element, table_scalars

MOST_PROGRAMS = 1 << 16
"""Largest grid; programs take several blocks of rows in turn. Starting more would cost more than they save."""

# Triton looks its language up in a function's globals, and algorithm/adam.py must not import Triton.
step_of_element = triton.jit(FunctionType(adam_element.__code__, globals()))
scalars_of_table = triton.jit(FunctionType(table_scalars.__code__, globals()))


@triton.jit
def scalars_of_rows(steps, step, lr_factor):
    """Returns the scalars of step ``step``, from 0, for rows whose tables have these factors of the rate, [R]."""
    scalars = AdamScalars(
        tl.load(steps.step_sizes + step), tl.load(steps.denominator_scales + step), tl.load(steps.decays + step)
    )
    return scalars_of_table(scalars, lr_factor[:, None])


@triton.jit
def root(value):
    return tl.sqrt_rn(value)


@triton.jit
def divide(numerator, denominator):
    return tl.div_rn(numerator, denominator)


@triton.jit
def norms_of(rows):
    wide = rows.to(tl.float64)
    return tl.sqrt(tl.sum(wide * wide, axis=1)).to(tl.float32)


@triton.jit
def clip_factors(w, g, measured, r, floor, occurrences):
    """Returns each row's clip factor and ``||g|| / limit``. Source: limits_of_norms in clip.py."""
    limit = tl.maximum(r * norms_of(tl.where(measured, w, 0.0)), floor) * occurrences
    norm = norms_of(tl.where(measured, g, 0.0))
    factor = tl.where(norm > limit, divide(limit, tl.where(norm > limit, norm, 1.0)), 1.0)
    ratio = tl.where(norm > 0.0, divide(norm, tl.where(limit > 0.0, limit, 1.0)), 0.0)
    return factor, tl.where((norm > 0.0) & (limit == 0.0), float("inf"), ratio)


@triton.jit
def tables_of(row, first_row, tables, HALVINGS: tl.constexpr):
    """Finds the table of each row: the last one that does not begin after it."""
    table = tl.zeros_like(row)
    for k in tl.static_range(HALVINGS):
        later = table + (1 << (HALVINGS - 1 - k))
        begins = tl.load(first_row + later, mask=later < tables, other=0)
        table = tl.where((later < tables) & (begins <= row), later, table)
    return table


@triton.jit
def weights_at(weights, element, cache, begin, exists, column, CACHED: tl.constexpr):
    """Returns pointers to rows' weights: in FBGEMM's cache where it has the row."""
    pointers = weights + element
    if CACHED:
        location = tl.load(cache.location + begin, mask=exists, other=-1).to(tl.int64)
        cached = cache.weights + location[:, None] * cache.columns + column[None, :]
        pointers = tl.where((location >= 0)[:, None], cached, pointers)
    return pointers


def halvings(tables: int) -> int:
    """Steps of the binary search in :func:`tables_of`."""
    return max(tables - 1, 0).bit_length()


def programs(rows: int, per_program: int) -> tuple[int]:
    """Grid of a kernel that takes ``per_program`` rows at a time."""
    return (min(triton.cdiv(rows, per_program), MOST_PROGRAMS),)


def warps(elements: int) -> int:
    """Warps of a program for this many elements; few, because a row's steps depend on each other."""
    return 1 if elements <= 256 else 4 if elements <= 1024 else 8
