"""Adam step on all rows of a lookup's tables, as published; tests compare the other updates with it."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import AdamConfig, AdamScalars, table_scalars
from cowrec.sparse_opt.clipping.clipped_lookup import ClippedLookup
from cowrec.sparse_opt.kernels.dense_adam import dense_adam_, dense_gradient, row_squares
from cowrec.sparse_opt.kernels.layout import AdamState, to_float32
from cowrec.sparse_opt.kernels.torch_rows import RowGradients
from cowrec.sparse_opt.tbe.lookup import LookupBackward

_ROWS_AT_ONCE = 1 << 20


def update_all_rows(
    clipped: ClippedLookup,
    state: AdamState,
    backward: LookupBackward,
    config: AdamConfig,
    scalars: AdamScalars,
    lr_factors: Tensor,
) -> None:
    """Takes a step on every table of a lookup, in place, some of its rows at a time.

    The learning rate of a table is that of the scalars times its factor, float32 [tables] on the CPU.
    """
    batch_rows = None
    if backward.bags.indices.numel() or clipped.gathers_rows:
        batch_rows = clipped.row_gradients(clipped.sum_rows(backward))
    norms = _norms_beyond_rows(clipped, state, batch_rows, config)
    if batch_rows:
        _record_clips(clipped, replace(batch_rows, grad=batch_rows.grad + 2 * config.l2 * batch_rows.weight), norms)
    for table, (shard, lr_factor) in enumerate(zip(clipped.lookup.shards, lr_factors.tolist(), strict=True)):
        own = AdamScalars(*map(float, table_scalars(to_float32(scalars), np.float32(lr_factor))))
        limit, columns = clipped.limits.per_table[table], clipped.limits.columns[table]
        row_norms = norms[table].expand(2, shard.rows).split(_ROWS_AT_ONCE, dim=1) if norms else repeat(None)
        for part, part_norms in zip(_parts(clipped, state, table, batch_rows), row_norms, strict=False):
            dense_adam_(*part, limit=limit, clip_columns=columns, config=config, scalars=own, norms=part_norms)


def _norms_beyond_rows(
    clipped: ClippedLookup, state: AdamState, batch_rows: RowGradients | None, config: AdamConfig
) -> list[Tensor] | None:
    """Norms of gradients and weights that the limits apply to, float32 [2, V] or [2, 1] of each table.

    None if a row's norm depends only on its columns here.
    """
    columns = clipped.factors.columns
    if clipped.limits.scope == "row" and columns is None:
        return None
    squares = [
        torch.cat(
            [
                row_squares(weights, grad, clip_columns=clip_columns, l2=config.l2)
                for weights, _, _, grad, _ in _parts(clipped, state, table, batch_rows)
            ],
            dim=1,
        )
        for table, clip_columns in enumerate(clipped.limits.columns)
    ]
    if columns:
        return [each.sqrt().float() for each in columns.add_up_tables(squares)]
    summed = torch.stack([each.sum(1) for each in squares], dim=1)
    return list(clipped.factors.group_norms(summed).float().split(1, dim=1))


def _parts(
    clipped: ClippedLookup, state: AdamState, table: int, batch_rows: RowGradients | None
) -> Iterator[tuple[Tensor, ...]]:
    """Weights, moments, gradient and counts of a table for dense_adam_, some rows at a time."""
    lookup = clipped.lookup
    views = [lookup.view_of(flat, table) for flat in state]
    tensors = (*views, *dense_gradient(batch_rows, table, lookup.weight_offsets[table], views[1]))
    yield from zip(*(each.split(_ROWS_AT_ONCE) for each in tensors), strict=True)


def _record_clips(clipped: ClippedLookup, batch_rows: RowGradients, norms: list[Tensor] | None) -> None:
    """Records statistics of the batch's rows, whose gradients include L2; dense_adam_ computes its own factors."""
    if norms is None or clipped.limits.scope == "row":
        clipped.factors.of_rows(batch_rows)
    else:
        clipped.factors.of_norms(batch_rows, *torch.cat(norms, dim=1)[:, batch_rows.table])
