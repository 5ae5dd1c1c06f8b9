"""Published algorithm in plain form: Adam over every row of a table at every step.

``absent_rows = "dense"`` runs it, and tests compare the faster updates with it. V is the number of a table's rows, D
its width.
"""

import torch
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import AdamConfig, AdamScalars, adam_constants, adam_element
from cowrec.sparse_opt.algorithm.clip import RowLimit, limits_of_norms, row_norms, scales_of_norms

from .torch_rows import RowGradients


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
    norms: Tensor | None = None,
) -> None:
    """Takes one step on a complete table, in place: adds L2 to the gradient, clips it, updates moments and weights.

    Source: the CowClip reference, whose loss includes the L2 term, so that every row has a gradient in every step, and
    whose clip counts an absent row once.

    Args:
        weights, exp_avg, exp_avg_sq: the table and its moments, float [V, D].
        grad: gradient of the mean loss over the global batch, without L2, float [V, D]; zero in absent rows.
        counts: occurrences of each row in the global batch, int [V]; 1 for absent rows.
        limit: limit of the clip rule.
        clip_columns: leading columns that are measured and clipped; the others are only regularised.
        config: Adam's settings.
        scalars: scalars of this step.
        norms: norms of gradients and weights that the limit applies to, float32 [2, V]; None to measure each row's
            clipped columns. Needed where a norm includes other rows or columns; see :func:`row_squares`.
    """
    constants, values = adam_constants(config), _at_least_float32(weights)
    grad = grad + constants.twice_l2 * values
    clipped, unclipped = grad[:, :clip_columns], grad[:, clip_columns:]
    if norms is None:
        norms = torch.stack([row_norms(clipped), row_norms(values[:, :clip_columns])])
    scales = scales_of_norms(norms[0], limits_of_norms(norms[1], counts, *limit))
    stepped = adam_element(
        values,
        exp_avg,
        exp_avg_sq,
        torch.cat([clipped * scales[:, None], unclipped], dim=1),
        constants,
        scalars,
        exact_root,
        torch.div,
    )
    for state, stepped_value in zip((weights, exp_avg, exp_avg_sq), stepped, strict=True):
        state.copy_(stepped_value)


def row_squares(weights: Tensor, grad: Tensor, *, clip_columns: int, l2: float) -> Tensor:
    """Computes squared norms of the gradients, L2 included, and of the weights of a table's rows; float64 [2, V].

    Args as in :func:`dense_adam_`; ``l2`` is the coefficient of the squared weights in the loss.
    """
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
    """Values to compute with: in half precision a small L2 underflows."""
    return values.float() if values.element_size() < 4 else values


def exact_root(values: Tensor) -> Tensor:
    """Computes correctly rounded square roots; torch's own in float32 on CPU may be off by one bit."""
    return values.double().sqrt().to(values.dtype)
