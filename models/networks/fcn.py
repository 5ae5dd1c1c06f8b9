"""FCN (arXiv 2407.13349): two cross networks without an MLP, whose degrees grow exponentially and linearly.

Sizes: B samples, F fields and dense features, D embedding width, of which A = ceil(D / 2) columns come first, L layers.
"""

import torch
from torch import Tensor, nn

from ..config import ModelConfig, Size
from ..front import Front, Sparse
from ..layers import CrossLayers, FieldEmbeddings, LogitKernel, glorot_normal


class MaskedCross(CrossLayers):
    """x <- y * ([c || c * relu(norm(c))] + b) + x with c = W x, where y is x itself or the first layer's.

    The degree of x doubles with each layer in the exponential cross network, y = x, and grows by one in the linear one.
    The masked half of a field's embedding has A columns, and A - 1 where D is odd. Source: the recursions of the two
    networks and the self-mask of the paper, with the bias of the authors' code, which is 0 at first here. ``dropout``
    is the share of each layer's outputs that is dropped.
    """

    def __init__(self, fields: int, embedding_dim: int, layers: int, exponential: bool, dropout: float) -> None:
        super().__init__()
        half = (embedding_dim + 1) // 2
        self._shape, self._masked, self._exponential = (fields, half), embedding_dim - half, exponential
        self.kernels = nn.ParameterList(glorot_normal(fields * embedding_dim, fields * half) for _ in range(layers))
        self.biases = nn.ParameterList(torch.zeros(fields, embedding_dim) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(fields * half) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, F, D] -> [B, F * D]."""
        first = x
        for kernel, bias, norm in zip(self.kernels, self.biases, self.norms, strict=True):
            cross = x.flatten(1) @ kernel
            masked = (cross * torch.relu(norm(cross))).unflatten(1, self._shape)[:, :, : self._masked]
            cross = torch.cat([cross.unflatten(1, self._shape), masked], 2) + bias
            x = self.dropout((x if self._exponential else first) * cross + x)
        return x.flatten(1)


class FCN(nn.Module):
    """logit = mean of the logits of an exponential and a linear cross network. There is no linear part.

    ``exponential_layers`` and ``linear_layers`` are L of each network; ``hidden`` is not used. The paper's loss
    (Tri-BCE), which needs the logits of both networks, is left out.
    """

    def __init__(
        self, config: ModelConfig, front: Front, *, exponential_layers: Size = 3, linear_layers: Size = 3
    ) -> None:
        super().__init__()
        self.front, dim, fields = front, front.embedding_dim, len(front.fields) + front.num_dense
        self.embeddings = FieldEmbeddings(front.num_dense, dim)
        depths = ((exponential_layers, True), (linear_layers, False))
        self.crosses = nn.ModuleList(MaskedCross(fields, dim, *depth, config.dropout) for depth in depths)
        self.outputs = nn.ModuleList(LogitKernel(fields * dim, bias=True) for _ in depths)

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.embeddings(self.front(dense, sparse).rows, dense)
        first, second = (output(cross(x)) for cross, output in zip(self.crosses, self.outputs, strict=True))
        logits: Tensor = (first + second) / 2
        return logits
