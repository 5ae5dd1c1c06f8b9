"""The loss of a rank, against a plain sum over the samples of the global batch."""

import pytest
import torch
from torch import nn

from cowrec.data_pipeline import Batch
from cowrec.models import LOSSES
from cowrec.trainer.sharded_model.task import MeanLoss, TrainTask


class OneLogit(nn.Module):
    """Uses the dense features alone."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.tensor([0.3, -0.7], dtype=torch.float64))

    def forward(self, dense: torch.Tensor, sparse: None) -> torch.Tensor:
        return dense @ self.kernel


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mean_weight", [1.0, 2.5])
def test_weights_of_samples_multiply_their_losses(world_size: int, mean_weight: float) -> None:
    torch.manual_seed(1)
    dense, label = torch.randn(7, 2, dtype=torch.float64), torch.tensor([1.0, 0, 0, 1, 1, 0, 1], dtype=torch.float64)
    weight = torch.tensor([0.0, 1, 2, 0.5, 3, 1, 10], dtype=torch.float64)
    losses_of_ranks = [MeanLoss(world_size, mean_weight=mean_weight) for _ in range(world_size)]
    tasks = [TrainTask(OneLogit(), each, 0.0, 0.0) for each in losses_of_ranks]
    losses = []
    for rank, task in enumerate(tasks):
        own = slice(rank * 4, 7 if rank == world_size - 1 else 4)
        batch = Batch(dense[own], None, label[own], 7, weight=weight[own])  # type: ignore[arg-type]
        loss, _ = task(batch)
        losses.append(loss)
    probability = torch.sigmoid(dense @ OneLogit().kernel)
    cross_entropy = -(label * probability.log() + (1 - label) * (1 - probability).log())
    expected = float((weight * cross_entropy).sum().detach()) / mean_weight / 7
    # TorchRec and DDP average over ranks.
    assert sum(map(torch.Tensor.item, losses)) / world_size == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["bce", "focal"])
def test_each_task_has_the_mean_over_its_known_labels(name: str, weighted: bool) -> None:
    """Loss and gradient against loops; the third task has no known label."""
    torch.manual_seed(2)
    logits = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    nan = float("nan")
    label = torch.tensor([[1, 0, nan], [nan, 1, nan], [0, nan, nan], [1, 1, nan], [nan, nan, nan], [0, 0, nan]])
    weight = torch.tensor([0.5, 2, 1, 0, 3, 1]) if weighted else None
    loss = MeanLoss(1, LOSSES[name], 2.0, (1.0, 0.25, 5.0))
    batch = Batch(torch.empty(6, 0), None, label.double(), weight=weight)  # type: ignore[arg-type]
    found, _ = loss(logits, batch)
    expected = torch.zeros((), dtype=torch.float64)
    for task, of_task in enumerate((1.0, 0.25)):
        terms = []
        for row in range(6):
            if not label[row, task].isnan():
                one = LOSSES[name](logits[row, task], label[row, task].double())
                terms.append(one * (1 if weight is None else weight[row] / 2))
        expected = expected + of_task * sum(terms) / len(terms)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    (gradient,), (wanted,) = (torch.autograd.grad(each, logits) for each in (found, expected))
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)
    assert not gradient[:, 2].any()
