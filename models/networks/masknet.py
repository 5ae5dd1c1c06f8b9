"""MaskNet (arXiv 2102.07619): blocks that multiply their inputs by a mask computed from the sample's embeddings.

Sizes: B samples, M fields and dense features, D embedding width, K = M * D.
"""

from itertools import pairwise
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from ..config import ModelConfig, Size
from ..front import Front, Sparse
from ..layers import FieldEmbeddings, LogitKernel, Mlp, glorot_normal

Ratio = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class NormalisedFields(nn.Module):
    """Layer normalisation of each field's embedding by itself. Source: section 3.1 of the paper."""

    def __init__(self, fields: int, embedding_dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(fields, embedding_dim))
        self.bias = nn.Parameter(torch.zeros(fields, embedding_dim))

    def forward(self, embeddings: Tensor) -> Tensor:
        """[B, M, D] -> [B, K]."""
        normalised = nn.functional.layer_norm(embeddings, embeddings.shape[2:])
        return (normalised * self.scale + self.bias).flatten(1)


class MaskBlock(nn.Module):
    """y = relu(layer norm(W (mask * x))), where mask = W2 relu(W1 e + b1) + b2 of the embeddings e.

    ``embeddings``, ``width`` and ``output`` are the widths of e, x and y. ``reduction`` is the width of the mask's
    hidden layer, divided by the width of the mask. Source: sections 3.2 and 3.3 of the paper.
    """

    def __init__(self, embeddings: int, width: int, output: int, reduction: float) -> None:
        super().__init__()
        hidden = max(1, round(reduction * width))
        self.hidden = Mlp(embeddings, (hidden,), 0.0)
        self.mask, self.mask_bias = glorot_normal(hidden, width), nn.Parameter(torch.zeros(width))
        self.kernel, self.norm = glorot_normal(width, output), nn.LayerNorm(output)

    def forward(self, e: Tensor, x: Tensor) -> Tensor:
        """e [B, K] and x [B, width] -> [B, output]."""
        mask = self.hidden(e) @ self.mask + self.mask_bias
        return torch.relu(self.norm((mask * x) @ self.kernel))


class _MaskNet(nn.Module):
    """The embeddings e of both forms, and the normalised embeddings."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self.front = front
        self.embeddings = FieldEmbeddings(front.num_dense, front.embedding_dim)
        fields = len(front.fields) + front.num_dense
        self.normalised = NormalisedFields(fields, front.embedding_dim)
        self.width = fields * front.embedding_dim

    def inputs(self, dense: Tensor, sparse: Sparse) -> tuple[Tensor, Tensor]:
        embeddings = self.embeddings(self.front(dense, sparse).rows, dense)
        return embeddings.flatten(1), self.normalised(embeddings)


class SerialMaskNet(_MaskNet):
    """logit = kernel . last mask block of a chain + bias. There is no linear part.

    ``hidden`` are the widths of the blocks; ``dropout`` is not used.
    """

    def __init__(self, config: ModelConfig, front: Front, *, reduction: Ratio = 2.0) -> None:
        super().__init__(front)
        widths = pairwise([self.width, *config.hidden])
        self.blocks = nn.ModuleList(MaskBlock(self.width, width, output, reduction) for width, output in widths)
        self.output = LogitKernel(config.hidden[-1], bias=True)

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        e, x = self.inputs(dense, sparse)
        for block in self.blocks:
            x = block(e, x)
        logits: Tensor = self.output(x)
        return logits


class ParallelMaskNet(_MaskNet):
    """logit = MLP(mask blocks side by side). There is no linear part.

    ``block_width`` is the width of each block's output. ``hidden`` and ``dropout`` are the values of the MLP.
    """

    def __init__(
        self,
        config: ModelConfig,
        front: Front,
        *,
        blocks: Size = 3,
        block_width: Size = 64,
        reduction: Ratio = 2.0,
    ) -> None:
        super().__init__(front)
        self.blocks = nn.ModuleList(MaskBlock(self.width, self.width, block_width, reduction) for _ in range(blocks))
        self.mlp = Mlp(blocks * block_width, config.hidden, config.dropout)
        self.output = LogitKernel(config.hidden[-1], bias=True)

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        e, x = self.inputs(dense, sparse)
        return self.output.of(self.mlp, torch.cat([block(e, x) for block in self.blocks], dim=1))
