"""DLRM (arXiv 1906.00091): dot products of the embeddings and of the dense features' MLP, and an MLP over them."""

import torch
from torch import Tensor, nn

from cowrec.errors import UserError

from ..config import ModelConfig, Sizes
from ..front import Front, Sparse
from ..layers import LogitKernel, Mlp


class DLRM(nn.Module):
    """logit = MLP([z, <v_i, v_j> for all pairs i < j of z and the embeddings]), where z = bottom MLP(dense).

    Source: section 2.2 of the paper. There is no linear part, and without dense features no z. ``bottom`` are the
    widths of the bottom MLP's layers before the last layer, whose width is D. ``hidden`` and ``dropout`` are those of
    the other MLP.
    """

    def __init__(self, config: ModelConfig, front: Front, *, bottom: Sizes = (512, 256)) -> None:
        super().__init__()
        self.front = front
        dim, has_dense = front.embedding_dim, front.num_dense > 0
        self.bottom = Mlp(front.num_dense, (*bottom, dim), config.dropout) if has_dense else None
        vectors = (front.width - front.num_dense) // dim + has_dense
        first, second = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)
        width = len(first) + (dim if has_dense else 0)
        if not width:
            raise UserError('model.name = "dlrm" needs two fields, or dense features, to multiply; the data have one')
        self.mlp = Mlp(width, config.hidden, config.dropout)
        self.output = LogitKernel(config.hidden[-1], bias=True)

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.front(dense, sparse)
        vectors, parts = x.rows[:, :, : self.front.embedding_dim], []
        if self.bottom is not None:
            bottom = self.bottom(dense)
            vectors = torch.cat([bottom[:, None], vectors.to(bottom.dtype)], dim=1)
            parts.append(bottom)
        products = vectors @ vectors.transpose(1, 2)
        parts.append(products[:, self.first, self.second])
        return self.output.of(self.mlp, torch.cat(parts, dim=1))
