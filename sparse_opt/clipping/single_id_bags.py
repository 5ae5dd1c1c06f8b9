"""Output gradients that carry each row's clipped gradient to a fused optimizer, for bags of at most one id.

FBGEMM adds up the output gradient over a row's ids. The row's complete gradient, L2 included, is therefore written at
one of its ids and zeros at the others: the sum is that gradient, and nothing is lost to rounding. On CPU in float32 one
compiled pass does it (kernels/cpu_rows.py), on CUDA one kernel (kernels/triton_update.py), elsewhere torch. Sizes: B
samples, D the widest table, nnz ids.
"""

import numpy as np
import torch
from torch import Tensor

from cowrec.sparse_opt.kernels import cpu_rows
from cowrec.sparse_opt.kernels.torch_rows import RowGradients
from cowrec.sparse_opt.tbe.layout import LookupBackward

from .clipped_lookup import ClippedLookup


def clipped_output_grad(clipped: ClippedLookup, backward: LookupBackward, l2: float) -> Tensor:
    """Computes an output gradient whose sum over each row's ids is ``clip(g + 2 * l2 * w)``.

    Args:
        clipped: the lookup and its rule. Columns that it does not clip get their L2 too.
        backward: ids, at most one in a bag and without weights, and the output gradient, float [B, sum D].
        l2: coefficient of ``l2 * sum(w^2)`` in the loss, over the batch's rows, >= 0.

    Returns:
        float [B, sum D], of the type of the output gradient.

    Raises:
        ValueError: an id is outside its table (on CPU).
    """
    if clipped.runs_on_device and backward.indices.numel():
        rows_on_device = clipped.device_rows(backward)
        written, results = rows_on_device.written(clipped.limits.clips, clipped.lookup.flat_weights(), 2 * l2)
        clipped.statistics.record_on_device(results, rows_on_device)
        return written
    output_grad = torch.zeros_like(backward.output_grad, memory_format=torch.contiguous_format)
    if clipped.runs_compiled(backward):
        weights = clipped.lookup.flat_weights().numpy()
        sums = clipped.compiled.sum_rows(backward)
        clipped.compiled.run(cpu_rows.write_row_gradients, sums, weights, np.float32(2 * l2), output_grad.numpy())
        return output_grad
    rows = clipped.row_gradients(clipped.sum_rows(backward))
    rows.grad.add_(rows.weight, alpha=2 * l2)
    factors = clipped.factors.of_rows(rows)
    rows.grad.mul_(torch.where(clipped.factors.clipped_columns(rows), factors[:, None], 1))
    _write_row_gradients(rows, clipped.layout.feature_column, output_grad)
    return output_grad


def _write_row_gradients(rows: RowGradients, feature_column: Tensor, output_grad: Tensor) -> None:
    """Writes each row's gradient at one of its ids into an output gradient of zeros."""
    batch, columns = output_grad.shape
    bag = rows.bag[rows.counts.occurrence]
    first = (bag % batch) * columns + feature_column[bag // batch]
    # Padding repeats a real row, whose elements are then written twice with the same values.
    column = torch.arange(rows.grad.shape[1], device=output_grad.device)
    element = torch.where(rows.inside, first[:, None] + column, first[:, None])
    values = torch.where(rows.inside, rows.grad, rows.grad[:, :1])
    output_grad.view(-1)[element] = values.to(output_grad.dtype)
