"""Plain PyTorch implementation of the full algorithm: dense gradients, L2 in the loss, CowClip, Adam.

Every row of every table has a gradient, is clipped and moves at every step. U rows of a table, D its width.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .deepfm import DeepFM
from .timed_steps import EMBEDDING_DIM, EMBEDDING_LR, EMBEDDING_STD, L2, Job, work

R, BOUND = 1.0, 1e-5
"""Published settings of the clip for Criteo."""


class Model(nn.Module):
    """DeepFM with an embedding table and a linear weight table per field."""

    def __init__(self, table_rows: list[int], num_dense: int) -> None:
        super().__init__()
        self.deep = nn.ModuleList(nn.Embedding(rows, EMBEDDING_DIM) for rows in table_rows)
        self.wide = nn.ModuleList(nn.Embedding(rows, 1) for rows in table_rows)
        for table in self.deep.parameters():
            nn.init.normal_(table, std=EMBEDDING_STD)
        for table in self.wide.parameters():
            nn.init.zeros_(table)
        self.deepfm = DeepFM(len(table_rows), num_dense)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Returns logits [B] of dense features [B, N] and ids [F, B]."""
        deep = torch.stack([table(field_ids) for table, field_ids in zip(self.deep, ids, strict=True)], dim=1)
        wide = torch.cat([table(field_ids) for table, field_ids in zip(self.wide, ids, strict=True)], dim=1)
        logits: Tensor = self.deepfm(dense, deep, wide.sum(1))
        return logits

    def tables(self) -> list[nn.Parameter]:
        return [*self.deep.parameters(), *self.wide.parameters()]


@torch.no_grad()
def clip(table: nn.Parameter, ids: Tensor) -> None:
    """Scales the rows of a table's gradient [U, D] to norms of at most R * cnt * max(||w||, R * sqrt(D) * BOUND).

    Args:
        table: weights [U, D] with their gradient.
        ids: int64 [B], ids of the batch; cnt is the count of a row in them, or 1 for an absent row.

    Source: the published code of CowClip (arXiv 2204.06240).
    """
    assert table.grad is not None
    counts = torch.bincount(ids, minlength=len(table)).clamp(min=1)
    limits = R * counts * table.norm(dim=1).clamp(min=R * table.shape[1] ** 0.5 * BOUND)
    norms = table.grad.norm(dim=1)
    # The floor avoids 0 / 0 for a row without a gradient.
    table.grad *= (limits / norms.clamp(min=1e-30)).clamp(max=1).unsqueeze(1)


class TorchDenseAdamCowClip:
    def __init__(self, job: Job) -> None:
        scale = job.batch_size / 1024
        self.l2 = L2 * scale
        self.model = Model(job.table_rows, job.num_dense)
        self.optimizers = [
            torch.optim.Adam(self.model.tables(), lr=EMBEDDING_LR),
            torch.optim.Adam(self.model.deepfm.parameters(), lr=8e-4 * scale**0.5),
        ]

    def batch(self, dense: np.ndarray, ids: np.ndarray, label: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        return torch.from_numpy(dense), torch.from_numpy(ids), torch.from_numpy(label)

    def step(self, dense: Tensor, ids: Tensor, label: Tensor) -> None:
        loss = F.binary_cross_entropy_with_logits(self.model(dense, ids), label)
        loss = loss + self.l2 * sum(table.square().sum() for table in self.model.tables())
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for table, field_ids in zip(self.model.deep.parameters(), ids, strict=True):
            clip(table, field_ids)
        for optimizer in self.optimizers:
            optimizer.step()


if __name__ == "__main__":
    work(TorchDenseAdamCowClip, ["torch"])
