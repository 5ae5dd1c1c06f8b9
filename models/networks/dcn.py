"""Deep & Cross networks: a linear model, and cross layers beside an MLP under one output kernel."""

import torch
from torch import Tensor, nn

from cowrec.models.config import ModelConfig
from cowrec.models.front import Front, Sparse
from cowrec.models.layers import LinearPart, LogitKernel, Mlp
from cowrec.models.options import Size

from .cross import MatrixCross, MixtureCross, VectorCross


class CrossAndDeep(nn.Module):
    """logit = linear + kernel . [cross(x), MLP(x)].

    Args:
        config: uses ``hidden`` and ``dropout``.
        front: embeddings and dense features.
        cross: a module [B, K] -> [B, K] with K = ``front.width``.
    """

    def __init__(self, config: ModelConfig, front: Front, cross: nn.Module) -> None:
        super().__init__()
        self.front = front
        self.linear = LinearPart(front.num_dense)
        self.cross = cross
        self.mlp = Mlp(front.width, config.hidden, config.dropout)
        self.output = LogitKernel(front.width + config.hidden[-1])

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        """Logits [B] of dense features [B, N] and the fields' ids."""
        x = self.front(dense, sparse)
        both = torch.cat([self.cross(x.flat), self.mlp(x.flat)], dim=1)
        return self.linear(x.wide, dense) + self.output(both)


class DCN(CrossAndDeep):
    """Cross layers with a vector each (arXiv 1708.05123).

    Args:
        config: see :class:`CrossAndDeep`.
        front: embeddings and dense features.
        layers: number of cross layers.
    """

    def __init__(self, config: ModelConfig, front: Front, *, layers: Size = 3) -> None:
        super().__init__(config, front, VectorCross(front.width, layers))


class DCNMix(CrossAndDeep):
    """Cross layers of low-rank experts, called DCNv2 in the CowClip paper and its reference.

    Args:
        config: see :class:`CrossAndDeep`.
        front: embeddings and dense features.
        layers: number of cross layers.
        experts: number of experts in each cross layer.
        rank: rank of each expert's matrices.
    """

    def __init__(
        self, config: ModelConfig, front: Front, *, layers: Size = 3, experts: Size = 4, rank: Size = 32
    ) -> None:
        super().__init__(config, front, MixtureCross(front.width, layers, experts, rank))


class DCNv2(CrossAndDeep):
    """Cross layers with a full matrix each (arXiv 2008.13535).

    Args:
        config: see :class:`CrossAndDeep`.
        front: embeddings and dense features.
        layers: number of cross layers.
    """

    def __init__(self, config: ModelConfig, front: Front, *, layers: Size = 3) -> None:
        super().__init__(config, front, MatrixCross(front.width, layers))
