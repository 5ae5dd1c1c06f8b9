"""Unmodified TorchRec: a sharded EmbeddingBagCollection with FBGEMM's fused row-wise Adagrad, the rest with Adam.

No L2 and no clip; absent rows do not move. FBGEMM requires widths that are multiples of four, so a table row contains
the embedding and the linear part's weight.
"""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from .deepfm import DeepFM
from .timed_steps import EMBEDDING_DIM, EMBEDDING_STD, Job, work

WIDTH = 12


class Model(nn.Module):
    """DeepFM with one table per field."""

    def __init__(self, table_rows: list[int], num_dense: int) -> None:
        super().__init__()
        self.fields = [f"C{field + 1}" for field in range(len(table_rows))]
        tables = [
            EmbeddingBagConfig(
                name=field,
                embedding_dim=WIDTH,
                num_embeddings=rows,
                feature_names=[field],
                init_fn=lambda weights: nn.init.normal_(weights, std=EMBEDDING_STD),
            )
            for field, rows in zip(self.fields, table_rows, strict=True)
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.deepfm = DeepFM(len(table_rows), num_dense)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Returns logits [B] of dense features [B, N] and the fields' ids."""
        embedded = self.tables(sparse).to_dict()
        rows = torch.stack([embedded[field] for field in self.fields], dim=1)
        logits: Tensor = self.deepfm(dense, rows[:, :, :EMBEDDING_DIM], rows[:, :, EMBEDDING_DIM].sum(1))
        return logits


class TorchRecFusedAdagrad:
    def __init__(self, job: Job) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = Model(job.table_rows, job.num_dense)
        self.fields = model.fields
        apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.01})
        self.model = DistributedModelParallel(model, device=torch.device("cpu"))
        dense = [weights for _, weights in in_backward_optimizer_filter(self.model.named_parameters())]
        self.optimizer = torch.optim.Adam(dense)

    def batch(self, dense: np.ndarray, ids: np.ndarray, label: np.ndarray) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
        values = torch.from_numpy(ids.reshape(-1))
        sparse = KeyedJaggedTensor(self.fields, values, lengths=torch.ones(len(values), dtype=torch.int32))
        return torch.from_numpy(dense), sparse, torch.from_numpy(label)

    def step(self, dense: Tensor, sparse: KeyedJaggedTensor, label: Tensor) -> None:
        loss = F.binary_cross_entropy_with_logits(self.model(dense, sparse), label)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


if __name__ == "__main__":
    work(TorchRecFusedAdagrad, ["torch", "torchrec", "fbgemm-gpu-cpu"])
