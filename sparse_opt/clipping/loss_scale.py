"""Scaled losses: gradients that a GradScaler has multiplied are divided by its scale before they are clipped.

torch's GradScaler multiplies the loss, and divides the gradients of parameters before their optimizer's step, which it
skips if one of them is not finite. The update of embeddings runs inside the backward, before that.
"""

import warnings
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from cowrec.sparse_opt.tbe.discovery import grad_scalers_in_use
from cowrec.sparse_opt.tbe.lookup import LookupBackward

from .clipped_lookup import ClippedLookup


@dataclass(frozen=True)
class Unscaled:
    """A backward pass of a lookup without the loss' scale.

    Attributes:
        backward: with the output gradient of the unscaled loss, at least float32; zeros if it was not finite.
        scaled_grad: output gradient as it came, of its own type; zeros if it was not finite.
        factor: 1 / scale, float32 []; None without a scale.
        finite: whether all of the output gradient was finite, bool []; None without a scale.
    """

    backward: LookupBackward
    scaled_grad: Tensor
    factor: Tensor | None = None
    finite: Tensor | None = None


class LossScale:
    """Scale of a model's loss. Does not wait for the device.

    Args:
        scaler: of the loss; None if the loss is not scaled, which the first backward then doubts if another is in use.
    """

    def __init__(self, scaler: GradScaler | None):
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._is_checked = scaler is not None

    @property
    def is_used(self) -> bool:
        """True if the loss is scaled."""
        return self._scaler is not None

    def unscaled(self, clipped: ClippedLookup, backward: LookupBackward) -> Unscaled:
        """Divides the output gradient of a lookup by the scale."""
        grad = backward.output_grad
        if self._scaler is None:
            self._warn_once()
            return Unscaled(backward, grad)
        scale = self._scaler.scale(torch.ones((), device=grad.device))
        assert isinstance(scale, Tensor)
        factor, finite = scale.double().reciprocal().float(), grad.isfinite().all()
        if clipped.waits_for_ranks:  # they take one step together
            on_all = finite.int()
            dist.all_reduce(on_all, dist.ReduceOp.MIN, group=clipped.lookup.process_group)
            finite = on_all.bool()
        scaled = torch.where(finite, grad, 0)
        return Unscaled(replace(backward, output_grad=scaled.float() * factor), scaled, factor, finite)

    def _warn_once(self) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        for scaler in grad_scalers_in_use():
            warnings.warn(
                f"a GradScaler with scale {scaler.get_scale():g} is in use, and the tables were attached without it. If"
                " it scales this model's loss, row gradients are measured and applied multiplied by that scale: pass"
                " grad_scaler=scaler to attach_cowclip or EmbeddingAdam. If it does not, pass"
                " grad_scaler=GradScaler(enabled=False)",
                RuntimeWarning,
                stacklevel=2,
            )
