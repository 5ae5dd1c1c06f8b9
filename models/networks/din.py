"""DIN (arXiv 1706.06978): attention of the scored item to the history of items, then an MLP.

Sizes: B samples, F fields, D embedding width, N dense features, L positions of a sequence, S sequences of a history, of
which T share a field's table, H hidden units.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..front import Features, Front, Sparse
from ..layers import LogitKernel, Mlp, glorot_normal
from ..options import Size
from .histories import histories_of


class ActivationUnit(nn.Module):
    """Sum of a history's steps e_j with the weights a(e_j, v) for a target v, which are not normalised.

    a is an MLP of e_j, v, e_j * v and e_j - v with one hidden layer; e_j is the concatenation of the embeddings of S
    sequences, v that of the T fields that the first of them share, and product and difference are with their part of
    e_j. Source: equation 3 and figure 2 of the paper; its "out product" is the element-wise one of the authors' code,
    which has the difference too. The difference adds no function, but kernels of its own: Adam moves a(e_j, v) faster
    along it. The hidden layer has PReLU: Dice would depend on which samples are on one process, and on the padding.

    Args:
        steps: S * D.
        target: T * D.
        hidden: H.
    """

    def __init__(self, steps: int, target: int, hidden: int) -> None:
        super().__init__()
        self._inputs = (steps, target, target, target)
        self.kernel = glorot_normal(sum(self._inputs), hidden)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.slope = nn.Parameter(torch.full((1,), 0.25))
        self.output, self.output_bias = glorot_normal(hidden, 1), nn.Parameter(torch.zeros(1))

    def forward(self, steps: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """Steps [B, L, S * D], where there are any, bool [B, L], and the target [B, T * D] -> [B, S * D]."""
        of_steps, of_target, of_products, of_differences = self.kernel.split(self._inputs)
        products = steps[:, :, : target.shape[1]] * target[:, None]
        # The differences' kernel joins the steps' and, negative, the target's, which multiplies once for each sample
        # instead of each position.
        further = of_steps.shape[0] - of_differences.shape[0]
        of_steps, of_target = of_steps + F.pad(of_differences, (0, 0, 0, further)), of_target - of_differences
        hidden = steps @ of_steps
        hidden += products @ of_products
        hidden += (target @ of_target + self.bias)[:, None]
        # PReLU is (1 - slope) ReLU(x) + slope x; with the product behind it, this takes a third of torch.prelu's time.
        slope = self.slope.to(hidden.dtype)
        weights = (1 - slope) * (torch.relu(hidden) @ self.output) + slope * (hidden @ self.output) + self.output_bias
        logits: Tensor = (weights.masked_fill(~mask[:, :, None], 0) * steps).sum(1)
        return logits


class _Attention(nn.Module):
    """The embeddings of all fields, those of histories attended by the fields whose tables they share.

    A module is one operation for TorchRec's pipeline, which traces the code that calls the tables.
    """

    def __init__(self, front: Front, hidden: int) -> None:
        super().__init__()
        self._dim, self._histories = front.embedding_dim, histories_of(front, "din")
        self.units = nn.ModuleList(
            ActivationUnit(len(each.places) * self._dim, len(each.targets) * self._dim, hidden)
            for each in self._histories
        )

    def forward(self, x: Features, dense: Tensor) -> Tensor:
        """[B, F * D + N], field-major, then the dense features [B, N]."""
        embeddings = list(x.rows[:, :, : self._dim].unbind(1))
        for history, unit in zip(self._histories, self.units, strict=True):
            steps = torch.cat([x.sequences[part].rows[:, :, : self._dim] for part in history.parts], 2)
            target = torch.cat([embeddings[each] for each in history.targets], 1)
            interests = unit(steps, x.sequences[history.parts[0]].mask, target).split(self._dim, 1)
            for place, interest in zip(history.places, interests, strict=True):
                embeddings[place] = interest
        return torch.cat([*embeddings, dense], 1)


class DIN(nn.Module):
    """logit = MLP of all embeddings, in which each history is attended by the fields whose tables it shares.

    The sequences along a history are weighted with it. Others that share no field's table are averaged.
    There is no linear part.

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
