"""HSTU (arXiv 2402.17152): pointwise attention over the history of items and the scored one, then an MLP.

Sizes: B samples, F fields, D embedding width, N dense features, L positions of a sequence, n = L + 1, H heads.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..front import Features, Front, Sparse
from ..layers import LogitKernel, Mlp, glorot_normal
from ..options import Size
from .histories import histories_of, require_heads


class HstuLayer(nn.Module):
    """y = x + W2 (norm(A V) * U) + b2 with [U V Q K] = silu(W1 norm(x) + b1) and A = silu(Q K' + rab) / n, causal.

    The bias rab is learned for each distance between positions. Source: equations 1 to 3 of the paper, with the norm
    and the sum around them of its authors' code.

    Args:
        width: D, a multiple of the heads.
        heads: H.
        length: n.
        dropout: before W2.
    """

    def __init__(self, width: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self._heads, self._length, self._dropout = heads, length, dropout
        self.inner, self.inner_bias = glorot_normal(width, 4 * width), nn.Parameter(torch.zeros(4 * width))
        self.outer, self.outer_bias = glorot_normal(width, width), nn.Parameter(torch.zeros(width))
        self.distance_bias = nn.Parameter(torch.zeros(length))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, n, D], and bool [B, n] of the positions that later ones see -> [B, n, D]."""
        gate, *others = F.silu(self.norms[0](x) @ self.inner + self.inner_bias).chunk(4, 2)
        value, query, key = (each.unflatten(2, (self._heads, -1)).transpose(1, 2) for each in others)
        position = torch.arange(self._length, device=x.device)
        distance = position[:, None] - position
        scores = query @ key.transpose(2, 3) + self.distance_bias[distance.clamp(min=0)]
        seen = mask[:, None, None] & (distance >= 0)
        weights = F.silu(scores).masked_fill(~seen, 0) / self._length
        gated = self.norms[1]((weights @ value).transpose(1, 2).flatten(2)) * gate
        y: Tensor = x + F.dropout(gated, self._dropout, self.training) @ self.outer + self.outer_bias
        return y


class _Interests(nn.Module):
    """The embeddings of all fields, that of a history replaced by the last layer's output for the scored item.

    A module is one operation for TorchRec's pipeline, which traces the code that calls the tables.
    """

    def __init__(self, front: Front, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self._width, self._histories = front.embedding_dim, histories_of(front, "hstu")
        self.stacks = nn.ModuleList(
            nn.ModuleList(HstuLayer(self._width, heads, each.length + 1, dropout) for _ in range(layers))
            for each in self._histories
        )

    def forward(self, x: Features, dense: Tensor) -> Tensor:
        """[B, F * D + N], field-major, then the dense features [B, N]."""
        embeddings = list(x.rows[:, :, : self._width].unbind(1))
        for history, layers in zip(self._histories, self.stacks, strict=True):
            steps, mask = history.with_target(x, self._width)
            for layer in cast(nn.ModuleList, layers):
                steps = layer(steps, mask)
            embeddings[history.places[0]] = steps[:, -1]
        return torch.cat([*embeddings, dense], 1)


class HSTU(nn.Module):
    """logit = MLP of all embeddings and, for each history, of an HSTU's output for the scored item behind it.

    The embeddings of the sequences along a history are added to its own. All sequences but histories are averaged.
    There is no linear part.

    Args:
        config: uses ``hidden`` and ``dropout``.
        layers: number of HSTU layers.
        heads: H, a divisor of ``embedding_dim``.
    """

    def __init__(self, config: ModelConfig, front: Front, *, layers: Size = 2, heads: Size = 2) -> None:
        super().__init__()
        require_heads(front, heads)
        self.front = front
        self.interests = _Interests(front, layers, heads, config.dropout)
        self.mlp = Mlp(front.width, config.hidden, config.dropout)
        self.output = LogitKernel(config.hidden[-1], bias=True)

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.front(dense, sparse)
        logits: Tensor = self.output(self.mlp(self.interests(x, dense)))
        return logits
