"""Output gradients that carry each row's clipped gradient to a fused optimizer, for bags of at most one id.

FBGEMM adds up the output gradient over a row's ids. The row's complete gradient, L2 included, is therefore written at
one of its ids and zeros at the others: the sum is that gradient, and nothing is lost to rounding. On CPU in float32 one
compiled pass does it (kernels/cpu_rows.py), on CUDA one kernel (kernels/triton_update.py), elsewhere torch.
"""

import numpy as np
import torch
from torch import Tensor

from cowrec.sparse_opt.kernels import cpu_rows
from cowrec.sparse_opt.kernels.torch_rows import RowGradients, scatter_rows
from cowrec.sparse_opt.tbe.lookup import LookupBackward

from .clipped_lookup import ClippedLookup


def clipped_output_grad(clipped: ClippedLookup, backward: LookupBackward, l2: float) -> Tensor:
    """Computes an output gradient whose sum over each row's ids is ``clip(g + 2 * l2 * w)``.

    Args:
        clipped: the lookup and its rule. Columns that it does not clip get their L2 too.
        backward: ids, at most one in a bag and without weights, and the output gradient.
        l2: coefficient of ``l2 * sum(w^2)`` in the loss, over the batch's rows, >= 0.

    Returns:
        float, of the shape and the type of the output gradient.

    Raises:
        ValueError: an id is outside its table (on CPU).
    """
    if clipped.runs_on_device and backward.bags.indices.numel():
        rows_on_device = clipped.device_rows(backward)
        written, results = rows_on_device.written(clipped.limits.clips, clipped.lookup.flat_weights(), 2 * l2)
        clipped.statistics.record_on_device(results, rows_on_device)
        return written
    output_grad = torch.zeros_like(backward.output_grad, memory_format=torch.contiguous_format)
    if clipped.runs_compiled(backward):
        weights = clipped.lookup.flat_weights().numpy()
        sums, flat = clipped.compiled.sum_rows(backward), output_grad.view(-1).numpy()
        clipped.compiled.run(cpu_rows.write_row_gradients, sums, weights, np.float32(2 * l2), flat)
        return output_grad
    rows = clipped.row_gradients(clipped.sum_rows(backward))
    rows.grad.add_(rows.weight, alpha=2 * l2)
    factors = clipped.factors.of_rows(rows)
    rows.grad.mul_(torch.where(clipped.factors.clipped_columns(rows), factors[:, None], 1))
    _write_row_gradients(rows, output_grad)
    return output_grad


def _write_row_gradients(rows: RowGradients, output_grad: Tensor) -> None:
    """Writes each row's gradient at one of its ids into an output gradient of zeros."""
    first = rows.address[rows.counts.occurrence]
    column = torch.arange(rows.grad.shape[1], device=output_grad.device)
    scatter_rows(output_grad.view(-1), torch.where(rows.inside, first[:, None] + column, first[:, None]), rows)
