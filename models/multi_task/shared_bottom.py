"""Shared bottom (Caruana 1997): one MLP, and a tower for each task."""

from torch import Tensor, nn

from cowrec.models.config import ModelConfig
from cowrec.models.front import Front, Sparse
from cowrec.models.layers import Mlp
from cowrec.models.options import Sizes

from .towers import Towers


class SharedBottom(nn.Module):
    """logit_k = tower_k(MLP(x)). Source: MMoE (Ma et al., KDD 2018), equation 1. There is no linear part.

    Args:
        config: uses ``hidden``, of the shared MLP, and ``dropout``.
        front: embeddings and dense features.
        num_tasks: T.
        tower: widths of the layers of each tower.
    """

    def __init__(self, config: ModelConfig, front: Front, num_tasks: int, *, tower: Sizes = (64,)) -> None:
        super().__init__()
        self.front = front
        self.mlp = Mlp(front.width, config.hidden, config.dropout)
        self.towers = Towers(num_tasks, config.hidden[-1], tower, config.dropout)
        self._num_tasks = num_tasks

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        """Logits [B, T], or [B] of one task, of dense features [B, N] and the fields' ids."""
        return self.towers([self.mlp(self.front(dense, sparse).flat)] * self._num_tasks)
