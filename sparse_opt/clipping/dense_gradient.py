"""Clip of tables whose gradient a dense optimizer applies: data-parallel tables and ``compute_kernel="dense"``.

The backward of such a lookup writes the clipped gradient of its rows into the gradient of the table. Of data-parallel
tables it is the gradient of the global batch, so that they need no DistributedDataParallel: the ranks exchange the rows
of their batches instead of complete tables, and bound them by their occurrences in the global batch.
"""

import torch
from torch import Tensor

from cowrec.sparse_opt.kernels.torch_rows import scatter_rows
from cowrec.sparse_opt.tbe.lookup import LookupBackward

from .clipped_lookup import ClippedLookup


def clipped_dense_gradient(clipped: ClippedLookup, l2: float, backward: LookupBackward) -> Tensor:
    """Gradient of a lookup's flat weights, float [sum rows * D]: clipped rows, and zeros elsewhere.

    Args:
        clipped: the lookup and its rule.
        l2: as in :func:`attach_cowclip`; bags may be of any kind.
        backward: a backward pass.
    """
    grad = torch.zeros_like(clipped.lookup.flat_weights())
    if backward.bags.indices.numel() or clipped.waits_for_ranks:
        rows = clipped.row_gradients(clipped.sum_rows(backward))
        rows.grad.add_(rows.weight, alpha=2 * l2)
        factors = clipped.factors.of_rows(rows)[:, None]
        rows.grad.mul_(torch.where(clipped.factors.clipped_columns(rows), factors, 1))
        scatter_rows(grad, rows.element, rows)
    return grad
