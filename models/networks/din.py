"""DIN (arXiv 1706.06978): attention of the scored item to the history of items, then an MLP.

Sizes: B samples, F fields, D embedding width, N dense features, L positions of a sequence, H hidden units.
"""

import torch
from torch import Tensor, nn

from cowrec.models.config import ModelConfig
from cowrec.models.front import Features, Front, SequenceRows, Sparse
from cowrec.models.layers import LogitKernel, Mlp, glorot_normal
from cowrec.models.options import Size

from .histories import targets_of


class ActivationUnit(nn.Module):
    """Sum of a sequence's embeddings e_j with the weights a(e_j, v) for a target v, which are not normalised.

    a is an MLP of e_j, v and e_j * v with one hidden layer. Source: equation 3 and figure 2 of the paper; its "out
    product" is the element-wise one of the authors' code, whose further input e_j - v changes no linear layer.
    The hidden layer has PReLU: Dice would depend on which samples are on one process, and on the padding.

    Args:
        embedding_dim: D.
        hidden: H.
    """

    def __init__(self, embedding_dim: int, hidden: int) -> None:
        super().__init__()
        self._embedding_dim = embedding_dim
        self.kernel = glorot_normal(3 * embedding_dim, hidden)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.slope = nn.Parameter(torch.full((1,), 0.25))
        self.output, self.output_bias = glorot_normal(hidden, 1), nn.Parameter(torch.zeros(1))

    def forward(self, sequence: SequenceRows, target: Tensor) -> Tensor:
        """Rows [B, L, P] of the sequence, with their mask, and of the target [B, P] -> [B, D]."""
        dim = self._embedding_dim
        steps, target = sequence.rows[:, :, :dim], target[:, None, :dim]
        of_steps, of_target, of_products = self.kernel.split(dim)
        # That of the target once for each sample instead of each position.
        hidden = steps @ of_steps + (steps * target) @ of_products + (target @ of_target + self.bias)
        weights = torch.prelu(hidden, self.slope.to(hidden.dtype)) @ self.output + self.output_bias
        return (weights.masked_fill(~sequence.mask[:, :, None], 0) * steps).sum(1)


class _Attention(nn.Module):
    """The embeddings of all fields, those of sequences that share a field's table attended by that field.

    A module is one operation for TorchRec's pipeline, which traces the code that calls the tables.
    """

    def __init__(self, front: Front, hidden: int) -> None:
        super().__init__()
        fields, targets = front.fields, targets_of(front, "din")
        self._embedding_dim = front.embedding_dim
        self._places = {name: (fields.index(name), fields.index(target)) for name, target in targets.items()}
        self.units = nn.ModuleList(ActivationUnit(front.embedding_dim, hidden) for _ in targets)

    def forward(self, x: Features, dense: Tensor) -> Tensor:
        """[B, F * D + N], field-major, then the dense features [B, N]."""
        embeddings = list(x.rows[:, :, : self._embedding_dim].unbind(1))
        for (name, (place, target)), unit in zip(self._places.items(), self.units, strict=True):
            embeddings[place] = unit(x.sequences[name], embeddings[target])
        return torch.cat([*embeddings, dense], 1)


class DIN(nn.Module):
    """logit = MLP of all embeddings, in which each history is attended by the field whose table it shares.

    A sequence that shares no field's table is averaged. There is no linear part.

    Args:
        config: uses ``hidden`` and ``dropout``.
        attention: width H of the activation unit's hidden layer.
    """

    def __init__(self, config: ModelConfig, front: Front, *, attention: Size = 36) -> None:
        super().__init__()
        self.front = front
        self.attention = _Attention(front, attention)
        self.mlp = Mlp(front.width, config.hidden, config.dropout)
        self.output = LogitKernel(config.hidden[-1], bias=True)

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.front(dense, sparse)
        logits: Tensor = self.output(self.mlp(self.attention(x, dense)))
        return logits
