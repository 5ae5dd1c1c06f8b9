"""FinalNet (Zhu et al., SIGIR 2023): layers whose outputs are multiplied with each other, in two blocks.

Sizes: B samples, F fields, D embedding width, N dense features, K width of a layer's input, O of its output.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from ..config import ModelConfig
from ..front import Front, Sparse
from ..layers import LogitKernel, glorot_normal


class FactorizedInteraction(nn.Module):
    """relu(u + u * v) of two linear maps u and v of x; each layer doubles the degree of the features.

    Source: the factorized interaction layer of the paper, with the residual as a sum.
    """

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.kernel, self.bias = glorot_normal(fan_in, 2 * fan_out), nn.Parameter(torch.zeros(2 * fan_out))

    def forward(self, x: Tensor) -> Tensor:
        """[B, K] -> [B, O]."""
        first, second = (x @ self.kernel + self.bias).chunk(2, 1)
        return torch.relu(first + first * second)


class FinalNet(nn.Module):
    """logit = mean of the logits of two blocks of factorized interactions. There is no linear part.

    The paper's batch normalisation, whose means would be those of one process, and its self-distillation, which needs
    the logits of both blocks in the loss, are left out. ``hidden`` of the configuration are the widths of each block.
    """

    def __init__(self, config: ModelConfig, front: Front) -> None:
        super().__init__()
        self.front = front
        self.blocks = nn.ModuleList(self._block([front.width, *config.hidden], config.dropout) for _ in range(2))
        self.outputs = nn.ModuleList(LogitKernel(config.hidden[-1], bias=True) for _ in range(2))

    @staticmethod
    def _block(widths: list[int], dropout: float) -> nn.Sequential:
        layers = nn.Sequential()
        for number, sizes in enumerate(pairwise(widths)):
            layers.add_module(str(number), FactorizedInteraction(*sizes))  # see Mlp
            if dropout > 0:
                layers.add_module(f"dropout{number}", nn.Dropout(dropout))
        return layers

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.front(dense, sparse).flat
        first, second = (output(block(x)) for block, output in zip(self.blocks, self.outputs, strict=True))
        logits: Tensor = (first + second) / 2
        return logits
