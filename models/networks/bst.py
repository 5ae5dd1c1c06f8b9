"""BST (arXiv 1905.06874): a transformer over the history of items and the scored one, then an MLP.

Sizes: B samples, F fields, D embedding width, N dense features, L positions of a sequence, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..front import Features, Front, Sparse
from ..layers import LogitKernel, Mlp, glorot_normal
from ..options import Size
from .histories import histories_of, require_heads


class TransformerLayer(nn.Module):
    """s = norm(x + heads(x)), y = norm(s + W2 leaky_relu(W1 s)). Source: equations 4 to 7 of the paper.

    Args:
        width: D, a multiple of the heads.
        heads: H.
        dropout: of both branches.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self._heads, self._dropout = heads, dropout
        self.query, self.key, self.value, self.output = (glorot_normal(width, width) for _ in range(4))
        self.inner, self.inner_bias = glorot_normal(width, 4 * width), nn.Parameter(torch.zeros(4 * width))
        self.outer, self.outer_bias = glorot_normal(4 * width, width), nn.Parameter(torch.zeros(width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, L, D], and bool [B, L] of the positions that others see, of which each sample has one -> [B, L, D]."""
        kernels = (self.query, self.key, self.value)
        query, key, value = ((x @ each).unflatten(2, (self._heads, -1)).transpose(1, 2) for each in kernels)
        heads = F.scaled_dot_product_attention(query, key, value, mask[:, None, None])
        x = self.norms[0](x + self._dropped(heads.transpose(1, 2).flatten(2) @ self.output))
        inner = F.leaky_relu(x @ self.inner + self.inner_bias)
        normed: Tensor = self.norms[1](x + self._dropped(inner @ self.outer + self.outer_bias))
        return normed

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self._dropout, self.training)


class _Transformers(nn.Module):
    """The embeddings of all fields, those of a history replaced by the transformer's of its items and the scored one.

    A module is one operation for TorchRec's pipeline, which traces the code that calls the tables.
    """

    def __init__(self, front: Front, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        width, self._histories = front.embedding_dim, histories_of(front, "bst")
        self._width, attended = width, {each.places[0] for each in self._histories}
        self._others = [number for number in range(len(front.fields)) if number not in attended]
        lengths = [each.length + 1 for each in self._histories]
        self.positions = nn.ParameterList(glorot_normal(length, width) for length in lengths)
        self.layers = nn.ModuleList(TransformerLayer(width, heads, dropout) for _ in range(layers * len(lengths)))
        self._layers = layers
        self.out_features = (len(self._others) + sum(lengths)) * width + front.num_dense

    def forward(self, x: Features, dense: Tensor) -> Tensor:
        """Field-major, then each history's L + 1 outputs, zeros where it is shorter, and dense features [B, N]."""
        parts = [x.rows[:, number, : self._width] for number in self._others]
        for index, (history, position) in enumerate(zip(self._histories, self.positions, strict=True)):
            steps, mask = history.with_target(x, self._width)
            steps = steps + position
            for layer in range(index * self._layers, (index + 1) * self._layers):
                steps = self.layers[layer](steps, mask)
            parts.append((steps * mask[:, :, None]).flatten(1))
        return torch.cat([*parts, dense], 1)


class BST(nn.Module):
    """logit = MLP of all embeddings and, for each history, of a transformer's outputs for it and the scored item.

    The embeddings of the sequences along a history are added to its own. All sequences but histories are averaged.
    Positions are learned, counted from the scored item. There is no linear part.

    Args:
        config: uses ``hidden`` and ``dropout``.
        layers: number of transformer layers.
        heads: H, a divisor of ``embedding_dim``.
    """

    def __init__(self, config: ModelConfig, front: Front, *, layers: Size = 1, heads: Size = 2) -> None:
        super().__init__()
        require_heads(front, heads)
        self.front = front
        self.transformers = _Transformers(front, layers, heads, config.dropout)
        self.mlp = Mlp(self.transformers.out_features, config.hidden, config.dropout)
        self.output = LogitKernel(config.hidden[-1], bias=True)

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.front(dense, sparse)
        logits: Tensor = self.output(self.mlp(self.transformers(x, dense)))
        return logits
