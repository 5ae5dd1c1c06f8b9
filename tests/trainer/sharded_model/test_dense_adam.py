"""Dense optimizer and the loss of a rank against plain loops; initial values of tables."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from cowrec.data_pipeline import Batch
from cowrec.models import LOSSES
from cowrec.sparse_opt import Hyperparameters
from cowrec.trainer.sharded_model.build import _BLOCK_ROWS, _fill_shard
from cowrec.trainer.sharded_model.step import DenseAdam, MeanLoss, TrainTask


@pytest.mark.parametrize("epsilon", ["keras", "torch"])
@pytest.mark.parametrize("betas", [(0.8, 0.99), (0.0, 0.5), (0.7, 0.0)])
def test_dense_adam_equals_a_loop(epsilon: str, betas: tuple[float, float]) -> None:
    """In float64, by the formulas of Keras (epsilon outside the correction) and torch; float32 rounds each step.

    Gradients from 1e-8 to 1 are on both sides of eps, so that its form matters.
    """
    rng, (beta1, beta2), eps = np.random.default_rng(1), betas, 1e-5
    w, m, v = rng.normal(size=40), np.zeros(40), np.zeros(40)
    parameter = nn.Parameter(torch.from_numpy(w.astype(np.float32)))
    optimizer = DenseAdam({"weight": parameter}, Hyperparameters(0.0, 0.1, 0.0, betas=betas, eps=eps), epsilon)
    for step in range(9):
        lr, grad = 0.1 / (1 + step), rng.normal(size=40) * 10 ** rng.uniform(-8, 0, 40)
        optimizer.prepare(step, lr)
        parameter.grad = torch.from_numpy(grad.astype(np.float32))
        optimizer.step()
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
        left1, left2 = beta1 ** (step + 1), beta2 ** (step + 1)
        if epsilon == "keras":
            w = w - lr * math.sqrt(1 - left2) / (1 - left1) * m / (np.sqrt(v) + eps)
        else:
            w = w - lr * (m / (1 - left1)) / (np.sqrt(v / (1 - left2)) + eps)
    np.testing.assert_allclose(parameter.detach().numpy(), w, rtol=4e-7, atol=2e-6)
    assert all(tensor.isfinite().all() for tensor in optimizer.tensors()["weight"].values()), (
        "checkpoints refuse others"
    )


@pytest.mark.parametrize("epsilon", ["keras", "torch"])
def test_weight_decay_is_that_of_torchs_adamw(epsilon: str) -> None:
    """Under rates that change, and with a parameter without a gradient. Epsilon is too small for its form to matter."""
    grads, values = torch.randn(9, 40), Hyperparameters(0.0, 0.1, 0.0, eps=1e-20, dense_weight_decay=0.4)
    ours, theirs, unused = (nn.Parameter(torch.linspace(-1, 1, 40)) for _ in range(3))
    optimizer = DenseAdam({"w": ours, "unused": unused}, values, epsilon)
    adamw = torch.optim.AdamW([theirs], eps=1e-20, weight_decay=0.4)
    for step, grad in enumerate(grads):
        optimizer.prepare(step, 0.1 / (1 + step))
        adamw.param_groups[0]["lr"] = 0.1 / (1 + step)
        ours.grad, theirs.grad = grad, grad.clone()
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert torch.equal(unused, torch.linspace(-1, 1, 40))


@pytest.mark.parametrize("border", [1, _BLOCK_ROWS, 2 * _BLOCK_ROWS + 7])
def test_initial_rows_do_not_depend_on_the_sharding(border: int) -> None:
    given = ("city", 5, 0.01, 3)
    complete, parts, by_columns = (torch.full((2 * _BLOCK_ROWS + 20, 8), torch.nan) for _ in range(3))
    _fill_shard(complete, (0, 0), *given)
    _fill_shard(parts[:border], (0, 0), *given)
    _fill_shard(parts[border:], (border, 0), *given)
    assert torch.equal(complete, parts)
    for column in (0, 4):
        shard = torch.empty(len(complete), 4)
        _fill_shard(shard, (0, column), *given)
        by_columns[:, column : column + 4] = shard
    assert torch.equal(complete, by_columns)
    assert not complete[:, 5:].any()
    assert complete[:, :5].std().item() == pytest.approx(0.01, rel=0.02)
    assert len(complete[:, 0].unique()) > 0.99 * len(complete)


def test_initial_rows_depend_on_seed_and_table() -> None:
    tables = {given: torch.zeros(9, 8) for given in [("a", 0), ("b", 0), ("a", 1)]}
    for (name, seed), table in tables.items():
        _fill_shard(table, (0, 0), name, 5, 0.01, seed)
    assert not any(torch.equal(tables["a", 0], tables[other]) for other in [("b", 0), ("a", 1)])


class OneLogit(nn.Module):
    """Uses the dense features alone."""

    kernel = torch.tensor([0.3, -0.7], dtype=torch.float64)

    def forward(self, dense: torch.Tensor, sparse: None) -> torch.Tensor:
        return dense @ self.kernel


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mean_weight", [1.0, 2.5])
def test_weights_of_samples_multiply_their_losses(world_size: int, mean_weight: float) -> None:
    torch.manual_seed(1)
    dense, label = torch.randn(7, 2, dtype=torch.float64), torch.tensor([1.0, 0, 0, 1, 1, 0, 1], dtype=torch.float64)
    weight = torch.tensor([0.0, 1, 2, 0.5, 3, 1, 10], dtype=torch.float64)
    losses = []
    for rank in range(world_size):
        task = TrainTask(OneLogit(), MeanLoss(world_size, mean_weight=mean_weight), 0.0, 0.0)
        own = slice(rank * 4, 7 if rank == world_size - 1 else 4)
        loss, _ = task(Batch(dense[own], None, label[own], 7, weight=weight[own]))
        losses.append(loss)
    probability = torch.sigmoid(dense @ OneLogit.kernel)
    cross_entropy = -(label * probability.log() + (1 - label) * (1 - probability).log())
    expected = float((weight * cross_entropy).sum()) / mean_weight / 7
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
    batch = Batch(torch.empty(6, 0), None, label.double(), weight=weight)
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
    (gradient,), (wanted,) = (torch.autograd.grad(loss, logits) for loss in (found, expected))
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)
    assert not gradient[:, 2].any()
