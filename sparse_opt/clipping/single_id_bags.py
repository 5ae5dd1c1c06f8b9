"""The output gradient that gives a fused optimizer each row's gradient with L2 and clip, where bags hold one id.

FBGEMM adds the output gradient up over a row's ids. So the row's whole gradient is put at one of them and zero at the
others: the sum is then exactly that gradient, neither a frequent id's L2 nor anything else is lost to rounding. On CPU
in float32 one compiled pass does it (cpu_single_id.py), elsewhere torch. Sizes: B samples, D the widest table, nnz ids.
"""

import numpy as np
import torch
from torch import Tensor

from cowrec.sparse_opt.kernels import cpu_single_id
from cowrec.sparse_opt.kernels.torch_rows import RowGradients

from .clipped_lookup import Backward, LookupRows


def clipped_output_grad(rows: LookupRows, backward: Backward, l2: float) -> Tensor:
    """An output gradient whose sum over each row's ids is ``clip(g + 2 * l2 * w)``, of the shape and type of the given.

    Args:
        rows: the lookup's rows and their rule. Columns that it does not clip get their L2 all the same.
        backward: ids, one a bag at most and without weights, and the output gradient, float [B, sum D].
        l2: coefficient of ``l2 * sum(w^2)`` in the loss, over the batch's rows, >= 0.

    Raises:
        ValueError: an id outside its table (on CPU).
    """
    placed = torch.zeros_like(backward.output_grad, memory_format=torch.contiguous_format)
    if rows.runs_compiled(backward):
        bags = (*rows.bags_of(backward), backward.offsets.long().numpy())
        rows.run_kernel(cpu_single_id.place_row_gradients, backward, *bags, placed.numpy(), np.float32(2 * l2))
        return placed
    of_rows = rows.torch_gradients(rows.torch_sums(backward))
    of_rows.grad.add_(of_rows.weight, alpha=2 * l2)
    factors = rows.torch_factors(of_rows)
    of_rows.grad.mul_(torch.where(rows.clipped_lanes(of_rows), factors[:, None], 1))
    return _place(rows, of_rows, placed)


def _place(rows: LookupRows, of_rows: RowGradients, placed: Tensor) -> Tensor:
    """Puts each row's gradient at one of its ids."""
    batch, columns = placed.shape
    bag = of_rows.bag[of_rows.counts.occurrence]
    first = (bag % batch) * columns + rows.layout.feature_column[bag // batch]
    # Padding repeats a real row, whose places are then written the same values twice.
    lane = torch.arange(of_rows.grad.shape[1], device=placed.device)
    place = torch.where(of_rows.inside, first[:, None] + lane, first[:, None])
    values = torch.where(of_rows.inside, of_rows.grad, of_rows.grad[:, :1])
    placed.view(-1)[place] = values.to(placed.dtype)
    return placed
