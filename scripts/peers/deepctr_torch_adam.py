"""DeepCTR-Torch's DeepFM, trained as by its `fit` with "adam": dense gradients, L2 on all tables, no clip.

Its samples are one float matrix.
"""

import numpy as np
import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DeepFM
from torch import Tensor

from .timed_steps import EMBEDDING_DIM, HIDDEN, L2, Job, work


class DeepCTRTorch:
    def __init__(self, job: Job) -> None:
        columns = [SparseFeat(f"C{f + 1}", rows, EMBEDDING_DIM) for f, rows in enumerate(job.table_rows)]
        columns += [DenseFeat(f"I{n + 1}", 1) for n in range(job.num_dense)]
        self.model = DeepFM(columns, columns, dnn_hidden_units=HIDDEN, l2_reg_linear=L2, l2_reg_embedding=L2)
        self.model.compile("adam", "binary_crossentropy")
        self.model.train()

    def batch(self, dense: np.ndarray, ids: np.ndarray, label: np.ndarray) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(np.concatenate([ids.T.astype(np.float32), dense], axis=1)), torch.from_numpy(label)

    def step(self, x: Tensor, y: Tensor) -> None:
        # Same steps as `fit` for a batch of its loader, without metrics.
        predicted = self.model(x).squeeze(-1)
        self.model.optim.zero_grad()
        loss = self.model.loss_func(predicted, y, reduction="sum")
        total = loss + self.model.get_regularization_loss() + self.model.aux_loss
        loss.item(), total.item()
        total.backward()
        self.model.optim.step()


if __name__ == "__main__":
    work(DeepCTRTorch, ["deepctr-torch", "torch"])
