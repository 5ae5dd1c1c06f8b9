"""Scale of a loss, as torch's GradScaler sets it.

A GradScaler multiplies the loss, and divides the gradients of parameters before their optimizer's step, which it skips
if one of them is not finite. The update of embeddings runs inside the backward, before that: row gradients are divided
by the scale before they are clipped.
"""

import gc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed import ProcessGroup

from ..kernels.layout import LookupBackward


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
        scaler: scaler of the loss; None if the loss is not scaled. The first backward then warns if a scaler is in use.
    """

    def __init__(self, scaler: GradScaler | None):
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._is_checked = scaler is not None

    @property
    def is_used(self) -> bool:
        """True if the loss is scaled."""
        return self._scaler is not None

    def unscaled(self, backward: LookupBackward, groups: Sequence[ProcessGroup]) -> Unscaled:
        """Divides the output gradient of a lookup by the scale.

        ``groups`` are those in which the ranks agree, one after the other, on whether it was finite.
        """
        grad = backward.output_grad
        if self._scaler is None:
            self._warn_once()
            return Unscaled(backward, grad)
        scale = self._scaler.scale(torch.ones((), dtype=torch.float32, device=grad.device))
        assert isinstance(scale, Tensor)
        factor, on_all = scale.double().reciprocal().float(), grad.isfinite().all().int()
        for group in groups:
            dist.all_reduce(on_all, dist.ReduceOp.MIN, group=group)
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


def grad_scalers_in_use() -> list[GradScaler]:
    """Finds the enabled scalers of this process that have scaled a loss.

    Searches all objects that refer to a scaler's class: take care to call it once, not in every step.
    """
    found = [each for each in gc.get_referrers(*_with_subclasses(GradScaler)) if isinstance(each, GradScaler)]
    # The scale is None until the first loss; get_scale() tells the initial one then.
    return [each for each in found if each.is_enabled() and each._scale is not None]


def _with_subclasses(kind: Any) -> set[Any]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
