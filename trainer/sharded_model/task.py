"""The module that training and evaluation run: a model with its loss, in the form that TorchRec's pipelines drive."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cowrec.data_pipeline import Batch
from cowrec.models import l2_kernels


class TrainTask(nn.Module):
    """A model with its loss. B samples of this rank.

    ``forward(batch)`` returns ``(loss, (loss, logits [B], label [B]))``, the latter detached. The loss is this rank's
    share of the mean over the global batch, multiplied by the world size because TorchRec and DDP average gradients
    over ranks. Slices of a global batch may differ in size.

    Args:
        model: ``forward(dense, sparse) -> logits``.
        world_size: number of ranks.
        linear_l2: L2 coefficient of the model's linear kernels.
        cross_l2: L2 coefficient of its cross kernels.
        bfloat16_device: type of the device whose matrix products are computed in bfloat16; "" for none.
    """

    def __init__(
        self, model: nn.Module, world_size: int, linear_l2: float, cross_l2: float, bfloat16_device: str = ""
    ) -> None:
        super().__init__()
        self.model = model
        self._bfloat16_device = bfloat16_device
        self._world_size = world_size
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
        if self._world_size > 1:  # samples after the last label are padding; see even_slices
            logits = logits[: batch.label.numel()]
        total = F.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
        if self._world_size > 1:
            total = total * self._world_size
        loss = total / batch.global_batch_size
        for coefficient, kernel in self._penalties:
            loss = loss + coefficient * kernel.square().sum()
        return loss, (loss.detach(), logits.detach(), batch.label)
