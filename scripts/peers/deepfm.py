"""DeepFM (arXiv 1703.04247) on given embeddings in plain PyTorch, for peers without a model of their own.

B samples, F fields, D embedding width, N dense features.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from .timed_steps import EMBEDDING_DIM, HIDDEN


class DeepFM(nn.Module):
    """Linear part, pairwise products of the fields' embeddings, and an MLP.

    Args:
        num_fields: F.
        num_dense: N.
    """

    def __init__(self, num_fields: int, num_dense: int) -> None:
        super().__init__()
        widths = [num_fields * EMBEDDING_DIM + num_dense, *HIDDEN]
        layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
        self.mlp = nn.Sequential(*layers, nn.Linear(widths[-1], 1))
        self.linear = nn.Linear(num_dense, 1)

    def forward(self, dense: Tensor, deep: Tensor, wide: Tensor) -> Tensor:
        """Returns logits [B] of dense features [B, N], embeddings [B, F, D] and summed one-wide weights [B]."""
        products = 0.5 * (deep.sum(1).square() - deep.square().sum(1)).sum(1)
        flat = torch.cat([deep.flatten(1), dense], dim=1)
        logits: Tensor = wide + products + self.linear(dense).squeeze(1) + self.mlp(flat).squeeze(1)
        return logits
