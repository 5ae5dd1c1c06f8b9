"""The module that training and evaluation run: a model with its loss, in the form that TorchRec's pipelines drive."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from cowrec.data_pipeline import Batch
from cowrec.models import l2_kernels

from .mean_loss import MeanLoss


class TrainTask(nn.Module):
    """A model with its loss. B samples of this rank.

    ``forward(batch)`` returns ``(loss, (loss, logits, label))``, the latter detached and [B], or [B, T] of T > 1 tasks.
    The loss is the one of :class:`MeanLoss` and the penalties of dense kernels, times
    the batch's share of its step.

    Args:
        model: ``forward(dense, sparse) -> logits``.
        loss: mean loss of the logits.
        linear_l2: L2 coefficient of the model's linear kernels.
        cross_l2: L2 coefficient of its cross kernels.
        bfloat16_device: type of the device whose matrix products are computed in bfloat16; "" for none.
    """

    def __init__(
        self, model: nn.Module, loss: MeanLoss, linear_l2: float, cross_l2: float, bfloat16_device: str = ""
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._bfloat16_device = bfloat16_device
        self._cross_l2 = cross_l2
        self.set_linear_l2(linear_l2)

    def set_linear_l2(self, coefficient: float) -> None:
        """Changes the L2 coefficient of the model's linear kernels in the coming steps."""
        kernels = l2_kernels(self.model)
        self._penalties = [(coefficient, each) for each in kernels["linear"] if coefficient > 0]
        self._penalties += [(self._cross_l2, each) for each in kernels["cross"] if self._cross_l2 > 0]

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        device = self._bfloat16_device
        with torch.autocast(device, torch.bfloat16) if device else nullcontext():
            logits = self.model(batch.dense, batch.sparse)
        if device:  # a network of the user's own may end with a product in bfloat16
            logits = logits.float()
        loss, logits = self.loss(logits, batch)
        for coefficient, kernel in self._penalties:
            loss = loss + coefficient * batch.share * kernel.square().sum()
        return loss, (loss.detach(), logits.detach(), batch.label)
