"""Plain PyTorch: one EmbeddingBag per field with sparse gradients and SparseAdam, the dense part with Adam.

No L2 and no clip; absent rows do not move.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .deepfm import DeepFM
from .timed_steps import EMBEDDING_DIM, EMBEDDING_LR, EMBEDDING_STD, Job, work


class Model(nn.Module):
    """DeepFM with an embedding table and a linear weight table per field."""

    def __init__(self, table_rows: list[int], num_dense: int) -> None:
        super().__init__()
        self.deep = nn.ModuleList(nn.EmbeddingBag(rows, EMBEDDING_DIM, mode="sum", sparse=True) for rows in table_rows)
        self.wide = nn.ModuleList(nn.EmbeddingBag(rows, 1, mode="sum", sparse=True) for rows in table_rows)
        for weights in [*self.deep.parameters(), *self.wide.parameters()]:
            nn.init.normal_(weights, std=EMBEDDING_STD)
        self.deepfm = DeepFM(len(table_rows), num_dense)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Returns logits [B] of dense features [B, N] and ids [F, B, 1], bags of one id."""
        deep = torch.stack([table(bags) for table, bags in zip(self.deep, ids, strict=True)], dim=1)
        wide = torch.cat([table(bags) for table, bags in zip(self.wide, ids, strict=True)], dim=1)
        logits: Tensor = self.deepfm(dense, deep, wide.sum(1))
        return logits


class TorchSparseAdam:
    def __init__(self, job: Job) -> None:
        self.model = Model(job.table_rows, job.num_dense)
        tables = [*self.model.deep.parameters(), *self.model.wide.parameters()]
        self.optimizers = [
            torch.optim.SparseAdam(tables, lr=EMBEDDING_LR),
            torch.optim.Adam(self.model.deepfm.parameters()),
        ]

    def batch(self, dense: np.ndarray, ids: np.ndarray, label: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        return torch.from_numpy(dense), torch.from_numpy(ids).unsqueeze(2), torch.from_numpy(label)

    def step(self, dense: Tensor, ids: Tensor, label: Tensor) -> None:
        loss = F.binary_cross_entropy_with_logits(self.model(dense, ids), label)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()


if __name__ == "__main__":
    work(TorchSparseAdam, ["torch"])
