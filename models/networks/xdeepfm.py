"""xDeepFM (arXiv 1803.05170): a linear model, a compressed interaction network (CIN) of the embeddings, and an MLP.

Sizes: B samples, F fields, D embedding width, H feature maps.
"""

import torch
from torch import Tensor, nn

from ..config import ModelConfig, Sizes
from ..front import Front, Sparse
from ..layers import CrossLayers, LinearPart, LogitKernel, Mlp, glorot_normal


class CompressedInteractions(CrossLayers):
    """x_h <- sum over i, j of W_hij x_i * x0_j; the outputs are the sums of all feature maps over the D columns.

    Source: equations 6 and 7 of the paper. Every feature map has an output and is an input of the next layer.
    """

    def __init__(self, num_fields: int, maps: Sizes) -> None:
        super().__init__()
        inputs = [num_fields, *maps[:-1]]
        self.kernels = nn.ParameterList(
            glorot_normal(out, count * num_fields) for out, count in zip(maps, inputs, strict=True)
        )

    def forward(self, x0: Tensor) -> Tensor:
        """[B, F, D] -> [B, sum of H]."""
        x, sums = x0, []
        for kernel in self.kernels:
            products = (x[:, :, None] * x0[:, None]).flatten(1, 2)  # [B, H * F, D]
            x = kernel @ products
            sums.append(x.sum(2))
        return torch.cat(sums, dim=1)


class XDeepFM(nn.Module):
    """logit = linear + kernel . CIN(embeddings) + MLP. Source: equation 9 of the paper.

    ``maps`` are the numbers of feature maps of the CIN's layers.
    """

    def __init__(self, config: ModelConfig, front: Front, *, maps: Sizes = (200, 200, 200)) -> None:
        super().__init__()
        self.front = front
        self.linear = LinearPart(front.num_dense)
        self.interactions = CompressedInteractions(len(front.fields), maps)
        self.mlp = Mlp(front.width, config.hidden, config.dropout)
        self.output = LogitKernel(sum(maps) + config.hidden[-1])

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.front(dense, sparse)
        interactions = self.interactions(x.rows[:, :, : self.front.embedding_dim])
        logits: Tensor = self.linear(x.wide, dense) + self.output(
            torch.cat([interactions, self.mlp(x.flat, x.padded)], dim=1)
        )
        return logits
