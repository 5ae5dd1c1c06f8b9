"""The mean loss over the global batch, as each rank computes its share of it.

B samples of this rank, T tasks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cowrec.data_pipeline import Batch
from cowrec.models.losses import Loss, bce


class MeanLoss(nn.Module):
    """The mean of a loss over the samples of the global batch, and the logits without those of padding.

    It returns this rank's share multiplied by the world size, because TorchRec and DDP average gradients over ranks.
    Slices of a global batch may differ in size. A module is one operation for TorchRec's pipeline, which traces the
    code that calls the tables.

    Args:
        world_size: number of ranks.
        loss: of each sample.
        mean_weight: mean weight of the training samples. The loss of a sample is multiplied by its weight divided by
            this mean, so that the loss has the same scale with and without weights.
        task_weights: weight of each of T > 1 tasks. The loss is then the sum over the tasks of the weight times the
            mean over the samples of the global batch whose label is known; 0 for a task without such samples.
    """

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
        if self._world_size > 1:  # samples after the last label are padding; see even_slices
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
        losses = self._loss(logits, batch.label)
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
