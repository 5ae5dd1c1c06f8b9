"""AutoInt (arXiv 1810.11921): self-attention between the fields, with residual connections.

Sizes: B samples, M fields and dense features, K width of a layer's inputs, H heads, A width of a head.
"""

import torch
from torch import Tensor, nn

from ..config import ModelConfig, Size
from ..front import Front, Sparse
from ..layers import CrossLayers, FieldEmbeddings, LogitKernel, Mlp, glorot_normal


class Interacting(CrossLayers):
    """x_m <- relu(heads' sums over k of softmax_k(<Q x_m, K x_k>) V x_k, side by side, + R x_m).

    Source: equations 5 to 8 of the paper, whose scores are not scaled.
    """

    def __init__(self, width: int, heads: int, attention_dim: int) -> None:
        super().__init__()
        self._heads = heads
        self.query, self.key, self.value, self.residual = (
            glorot_normal(width, heads * attention_dim) for _ in range(4)
        )

    def l2_kernels(self) -> list[nn.Parameter]:
        return [self.query, self.key, self.value, self.residual]

    def forward(self, x: Tensor) -> Tensor:
        """[B, M, K] -> [B, M, H * A]."""
        query, key, value = (
            (x @ kernel).unflatten(2, (self._heads, -1)) for kernel in (self.query, self.key, self.value)
        )
        attention = torch.softmax(torch.einsum("bmha,bkha->bhmk", query, key), dim=3)
        return torch.relu(torch.einsum("bhmk,bkha->bmha", attention, value).flatten(2) + x @ self.residual)


class AutoInt(nn.Module):
    """logit = kernel . interacting layers(embeddings) + bias; with ``deep``, an MLP is added (AutoInt+).

    Source: equation 9 of the paper. There is no linear part. ``hidden`` and ``dropout`` are the MLP's.
    """

    def __init__(
        self,
        config: ModelConfig,
        front: Front,
        *,
        layers: Size = 3,
        heads: Size = 2,
        attention_dim: Size = 32,
        deep: bool = False,
    ) -> None:
        super().__init__()
        self.front = front
        self.embeddings = FieldEmbeddings(front.num_dense, front.embedding_dim)
        widths = [front.embedding_dim] + [heads * attention_dim] * layers
        self.interacting = nn.Sequential(*(Interacting(width, heads, attention_dim) for width in widths[:-1]))
        self.mlp = Mlp(front.width, config.hidden, config.dropout) if deep else None
        inputs = len(front.fields) + front.num_dense
        self.output = LogitKernel(inputs * widths[-1] + (config.hidden[-1] if deep else 0), bias=True)

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.front(dense, sparse)
        parts = [self.interacting(self.embeddings(x.rows, dense)).flatten(1)]
        if self.mlp is not None:
            parts.append(self.mlp(x.flat, x.padded))
        logits: Tensor = self.output(torch.cat(parts, dim=1))
        return logits
