"""The module that training and evaluation run: a model with its loss, in the form that TorchRec's pipelines drive.

B samples of this rank, T tasks.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cowrec.data_pipeline import Batch
from cowrec.models import l2_kernels
from cowrec.models.losses import Loss, bce


class TrainTask(nn.Module):
    """A model with its loss.

    ``forward(batch)`` returns ``(loss, (loss, logits, label))``, the latter detached and [B], or [B, T] of T > 1 tasks.
    The loss is the one of :class:`MeanLoss` and the penalties of dense kernels, times the batch's share of its step.

    Args:
        model: ``forward(dense, sparse) -> logits``.
        loss: mean loss of the logits.
        linear_l2: L2 coefficient of the model's linear kernels.
        cross_l2: L2 coefficient of its cross kernels.
        bfloat16_device: type of the device whose matrix products are computed in bfloat16; "" for none.
    """

    def __init__(
        self, model: nn.Module, loss: "MeanLoss", linear_l2: float, cross_l2: float, bfloat16_device: str = ""
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._bfloat16_device = bfloat16_device
        kernels = l2_kernels(model)
        self._penalties = [(linear_l2, each) for each in kernels["linear"] if linear_l2 > 0]
        self._penalties += [(cross_l2, each) for each in kernels["cross"] if cross_l2 > 0]

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


class MeanLoss(nn.Module):
    """The mean of a loss over the samples of the global batch, and the logits without those of padding.

    It returns this rank's share multiplied by the world size, because TorchRec and DDP average gradients over ranks.
    Slices of a global batch may differ in size. A module is one operation for TorchRec's pipeline, which traces the
    code that calls the tables.

    Args:
        mean_weight: mean weight of the training samples. The loss of a sample is multiplied by its weight divided by
            this mean, so that the loss has the same scale with and without weights.
        task_weights: weight of each of T > 1 tasks. The loss is then the sum over the tasks of the weight times the
            mean over the samples of the global batch whose label is known; 0 for a task without such samples.

    Attributes:
        tell_samples: called in every forward with the samples of the step's global batch, where it is set.
    """

    tell_samples: Callable[[int], None] | None = None

    _task_weights: Tensor

    def __init__(
        self, world_size: int, loss: Loss = bce, mean_weight: float = 1.0, task_weights: Sequence[float] = (1.0,)
    ) -> None:
        super().__init__()
        self._world_size, self._loss, self._mean_weight = world_size, loss, mean_weight
        self._num_tasks = len(task_weights)
        if self._num_tasks > 1:
            self.register_buffer("_task_weights", torch.tensor(task_weights), persistent=False)

    def forward(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, a scalar, and the logits, [B] or [B, T], of logits of B or more samples."""
        if self.tell_samples:
            self.tell_samples(round(batch.global_batch_size / batch.share))
        if self._world_size > 1:  # samples after the last label are padding; see even_slice
            logits = logits[: len(batch.label)]
        if self._num_tasks > 1:
            return self._of_tasks(logits, batch), logits
        total = self._sum(logits, batch)
        if self._world_size > 1:
            total = total * self._world_size
        return total / (batch.global_batch_size / batch.share), logits

    def _sum(self, logits: Tensor, batch: Batch) -> Tensor:
        weight = None if batch.weight is None else batch.weight / self._mean_weight
        if self._loss is bce:
            return F.binary_cross_entropy_with_logits(logits, batch.label, weight, reduction="sum")
        # Samples that are predicted may have no label, which the user's own code need not know.
        losses = self._loss(logits, batch.label if self.training else batch.label.nan_to_num())
        return (losses if weight is None else losses * weight).sum()

    def _of_tasks(self, logits: Tensor, batch: Batch) -> Tensor:
        known = ~batch.label.isnan()
        losses = torch.where(known, self._loss(logits, torch.where(known, batch.label, 0)), 0)
        if batch.weight is not None:
            losses = losses * (batch.weight / self._mean_weight)[:, None]
        count = known.sum(0)
        if self._world_size > 1:
            dist.all_reduce(count)
        return (losses.sum(0) / count.clamp_min(1) * self._task_weights).sum() * (self._world_size * batch.share)
