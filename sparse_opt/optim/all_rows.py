"""The paper's algorithm in plain form: Adam over every row of a table at every step.

``absent_rows = "dense"`` runs it, and tests compare the faster updates with it. Sizes: V rows of a table, D columns.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from ..algorithm import adam
from ..algorithm.adam import AdamConfig, AdamScalars
from ..algorithm.clip import RowLimit, limits_of_norms, row_norms, scales_of_norms
from ..kernels.layout import AdamState, LookupBackward, to_float32
from ..kernels.torch_rows import RowGradients, exact_root
from ..lookups.wrapped_lookup import WrappedLookup

_ROWS_AT_ONCE = 1 << 20


def update_all_rows(
    wrapped: WrappedLookup,
    state: AdamState,
    backward: LookupBackward,
    config: AdamConfig,
    scalars: AdamScalars,
    lr_factors: Tensor,
) -> None:
    """Takes a step on every table of a lookup, in place; ``lr_factors`` are float32 [tables], on the CPU."""
    batch_rows, rows = None, wrapped.in_torch
    if backward.bags.indices.numel() or rows.gathers_rows:
        batch_rows = rows.row_gradients(rows.sum_rows(backward))
    norms = _norms_beyond_rows(wrapped, state, batch_rows, config)
    if not batch_rows:
        wrapped.statistics.record_no_rows()
    else:
        _record_clips(wrapped, replace(batch_rows, grad=batch_rows.grad + 2 * config.l2 * batch_rows.weight), norms)
    for table, (shard, lr_factor) in enumerate(zip(wrapped.lookup.shards, lr_factors.tolist(), strict=True)):
        own = AdamScalars(*map(float, adam.table_scalars(to_float32(scalars), np.float32(lr_factor))))
        alpha = float(to_float32(adam.ftrl_constants(config.wide)).alpha * np.float32(lr_factor))
        limit, columns = wrapped.limits.per_table[table], wrapped.limits.columns[table]
        row_norms = norms[table].expand(2, shard.rows).split(_ROWS_AT_ONCE, dim=1) if norms else repeat(None)
        for part, part_norms in zip(_parts(wrapped, state, table, batch_rows), row_norms, strict=False):
            dense_adam_(
                *part, limit=limit, clip_columns=columns, config=config, scalars=own, alpha=alpha, norms=part_norms
            )


def _norms_beyond_rows(
    wrapped: WrappedLookup, state: AdamState, batch_rows: RowGradients | None, config: AdamConfig
) -> list[Tensor] | None:
    """Computes norms that include other rows or ranks: float32 [2, V] or [2, 1] of each table; None if none do."""
    columns = wrapped.in_torch.columns
    if wrapped.limits.scope == "row" and columns is None:
        return None
    squares = [
        torch.cat(
            [
                row_squares(weights, grad, clip_columns=clip_columns, l2=config.l2)
                for weights, _, _, grad, _ in _parts(wrapped, state, table, batch_rows)
            ],
            dim=1,
        )
        for table, clip_columns in enumerate(wrapped.limits.columns)
    ]
    if columns:
        return [of_table.sqrt().float() for of_table in columns.add_up_tables(squares)]
    summed = torch.stack([of_table.sum(1) for of_table in squares], dim=1)
    return list(wrapped.in_torch.group_norms(summed).float().split(1, dim=1))


def _parts(
    wrapped: WrappedLookup, state: AdamState, table: int, batch_rows: RowGradients | None
) -> Iterator[tuple[Tensor, ...]]:
    """Yields weights, moments, gradient and counts of a table for dense_adam_, some rows at a time."""
    lookup = wrapped.lookup
    views = [lookup.view_of(flat, table) for flat in state]
    tensors = (*views, *dense_gradient(batch_rows, table, lookup.weight_offsets[table], views[1]))
    yield from zip(*(tensor.split(_ROWS_AT_ONCE) for tensor in tensors), strict=True)


def _record_clips(wrapped: WrappedLookup, batch_rows: RowGradients, norms: list[Tensor] | None) -> None:
    """Records statistics of the batch's rows, whose gradients include L2. dense_adam_ computes factors again."""
    if norms is None or wrapped.limits.scope == "row":
        wrapped.in_torch.factors(batch_rows)
    else:
        wrapped.in_torch.factors_of_norms(batch_rows, *torch.cat(norms, dim=1)[:, batch_rows.table])


def dense_adam_(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    counts: Tensor,
    *,
    limit: RowLimit,
    clip_columns: int,
    config: AdamConfig,
    scalars: AdamScalars,
    alpha: float = 0.0,
    norms: Tensor | None = None,
) -> None:
    """Takes one step on a complete table, in place: adds L2 to the gradient, clips it, updates moments and weights.

    Source: the CowClip reference, whose loss includes the L2 term, so that every row has a gradient in every step, and
    whose clip counts an absent row once.

    Args:
        weights, exp_avg, exp_avg_sq: the table and its moments, float [V, D].
        grad: gradient of the mean loss over the global batch, without L2, float [V, D]; zero in absent rows.
        counts: occurrences of each row in the global batch, int [V]; 1 for absent rows.
        clip_columns: number of leading columns that are measured and clipped; under FTRL the others belong to FTRL.
        alpha: FTRL's alpha of this table.
        norms: norms of gradients and weights for the limit, float32 [2, V]; None for the norms of the clipped columns.
    """
    constants, values, own_grad = adam.adam_constants(config), _at_least_float32(weights), grad
    grad = grad + constants.twice_l2 * values
    clipped, unclipped = grad[:, :clip_columns], grad[:, clip_columns:]
    if norms is None:
        norms = torch.stack([row_norms(clipped), row_norms(values[:, :clip_columns])])
    scales = scales_of_norms(norms[0], limits_of_norms(norms[1], counts, *limit))
    stepped = adam.adam_element(
        values,
        exp_avg,
        exp_avg_sq,
        torch.cat([clipped * scales[:, None], unclipped], dim=1),
        constants,
        scalars,
        exact_root,
        torch.div,
    )
    if config.wide:
        weight, squares, own_grad = (values_[:, clip_columns:] for values_ in (values, exp_avg_sq, own_grad))
        numbers = (alpha, adam.ftrl_constants(config.wide))
        weight, squares = adam.ftrl_element(weight, squares, own_grad, *numbers, exact_root, torch.div)
        for whole, part in zip(stepped, (weight, torch.zeros_like(weight), squares), strict=True):
            whole[:, clip_columns:] = part
    for state, stepped_value in zip((weights, exp_avg, exp_avg_sq), stepped, strict=True):
        state.copy_(stepped_value)


def row_squares(weights: Tensor, grad: Tensor, *, clip_columns: int, l2: float) -> Tensor:
    """Computes squared norms of the gradients, L2 included, and of the weights of a table's rows; float64 [2, V]."""
    values = _at_least_float32(weights)
    with_l2 = grad + 2 * l2 * values
    return torch.stack([part[:, :clip_columns].double().square().sum(1) for part in (with_l2, values)])


def dense_gradient(rows: RowGradients | None, table: int, start: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Spreads row gradients over a complete table: gradient, float32 [V, D], and counts, int64 [V], for dense_adam_."""
    grad, counts = torch.zeros_like(like), torch.ones(len(like), dtype=torch.int64, device=like.device)
    if rows:
        here = rows.counts.real & (rows.table == table)
        row = (rows.element[here, 0] - start) // like.shape[1]
        grad[row] = rows.grad[here, : like.shape[1]].to(grad.dtype)
        counts[row] = rows.counts.count[here]
    return grad, counts


def _at_least_float32(values: Tensor) -> Tensor:
    """Converts half precision, in which a small L2 underflows."""
    return values.float() if values.element_size() < 4 else values
