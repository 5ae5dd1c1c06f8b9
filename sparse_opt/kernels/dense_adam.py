"""The published algorithm as it was published: Adam over every row of a table at every step. Slow, and right.

It is what ``absent_rows = "dense"`` runs, and what the faster ways are held against. V is the number of a table's rows,
D its width.
"""

import torch
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import AdamConfig, AdamScalars, adam_constants, adam_element
from cowrec.sparse_opt.algorithm.clip import RowLimit, row_norms, scales_of_norms

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
    """One step on a whole table, in place: L2 into the gradient, the clip, moments, weights.

    Source: the CowClip reference, whose L2 term is in the loss, so that every row has a gradient at every step, and
    whose clip counts an absent row once.

    Args:
        weights, exp_avg, exp_avg_sq: the table and its moments, float [V, D].
        grad: gradient of the mean loss over the global batch, without L2, float [V, D]; zero in absent rows.
        counts: occurrences of each row in the global batch, int [V]; 1 for absent rows.
        limit: the clip's.
        clip_columns: leading columns that are measured and clipped; the others are only regularised.
        config: Adam's settings.
        scalars: of this step.
        norms: of each row's gradient and weights, or of what else the limit holds for, float32 [2, V], where more than
            these columns decides them; see :func:`row_squares`.
    """
    constants = adam_constants(config)
    grad = grad + constants.twice_l2 * weights
    clipped, passed = grad[:, :clip_columns], grad[:, clip_columns:]
    if norms is None:
        norms = torch.stack([row_norms(clipped), row_norms(weights[:, :clip_columns])])
    scales = scales_of_norms(norms[0], limit.of(norms[1], counts))
    stepped = adam_element(
        weights,
        exp_avg,
        exp_avg_sq,
        torch.cat([clipped * scales[:, None], passed], dim=1),
        *(constants.beta1, constants.rest1, constants.beta2, constants.rest2, constants.eps),
        *(scalars.step_size, scalars.denominator_scale),
        exact_root,
        torch.div,
    )
    for state, value in zip((weights, exp_avg, exp_avg_sq), stepped, strict=True):
        state.copy_(value)


def row_squares(weights: Tensor, grad: Tensor, *, clip_columns: int, l2: float) -> Tensor:
    """Squared norms of a table's rows: of their gradients, L2 included, and of their weights; float64 [2, V].

    Args as in :func:`dense_adam_`; ``l2`` is the coefficient of the squared weights in the loss.
    """
    with_l2 = grad + 2 * l2 * weights
    return torch.stack([part[:, :clip_columns].double().square().sum(1) for part in (with_l2, weights)])


def dense_gradient(rows: RowGradients | None, table: int, start: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """A table's gradient, float32 [V, D], and counts, int64 [V], with absent rows as dense_adam_ wants them."""
    grad, counts = torch.zeros_like(like), torch.ones(len(like), dtype=torch.int64, device=like.device)
    if rows:
        here = rows.counts.real & (rows.table == table)
        row = (rows.place[here, 0] - start) // like.shape[1]
        grad[row] = rows.grad[here, : like.shape[1]].to(grad.dtype)
        counts[row] = rows.counts.count[here]
    return grad, counts


def exact_root(values: Tensor) -> Tensor:
    """Square root rounded correctly; torch's own of float32 on CPU may be off by a bit."""
    return values.double().sqrt().to(values.dtype)
