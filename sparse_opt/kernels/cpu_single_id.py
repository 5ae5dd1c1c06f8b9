"""CPU kernel for bags of one id at most: each row's gradient with L2 and clip, laid out as an output gradient.

Compiled by numba as cpu_kernels.py is, from its parts. The plain definition is in output_gradients.py.
Sizes: U distinct rows, D columns, B bags per feature.
"""

import numpy as np
from numba import njit

from .cpu_rows import clip_factor


@njit(nogil=True, cache=True, error_model="numpy")
def place_row_gradients(
    tables, tops, rows, counts, slots, sums, begins, dims, starts, clip_columns, r, floor, per_occurrence, weights,
    firsts, lasts, columns, bags, offsets, placed, twice_l2, ratios, used_rows,
):  # fmt: skip
    """Writes the gradients of the tables' rows into ``placed`` [B, sum D], each at its first id; zeros are there."""
    grads = sums.astype(np.float32)
    done, next_row = 0, 0  # distinct rows are numbered in the order of their first ids
    for k, t in enumerate(tables):
        begin, dim = begins[t], dims[t]
        for feature in range(firsts[t], lasts[t]):
            column = columns[feature]
            for bag in range(bags):
                for _ in range(offsets[feature * bags + bag], offsets[feature * bags + bag + 1]):
                    u = slots[done]
                    done += 1
                    if u < next_row:
                        continue
                    next_row += 1
                    start = starts[t] + rows[u] * dim
                    w, g = weights[start : start + dim], grads[u]
                    for d in range(dim):
                        g[d] += twice_l2 * w[d]
                    factor, ratios[begin + u - tops[k]] = clip_factor(
                        w, g, counts[u], clip_columns[t], r[t], floor[t], per_occurrence[t]
                    )
                    for d in range(dim):
                        placed[bag, column + d] = g[d] * factor if d < clip_columns[t] else g[d]
        used_rows[t] = tops[k + 1] - tops[k]
