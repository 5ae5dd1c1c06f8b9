"""Networks that read histories of items: DIN (arXiv 1706.06978), BST (arXiv 1905.06874) and HSTU (arXiv 2402.17152).

Sizes: B samples, F fields, D embedding width, N dense features, L positions of a sequence, S sequences of a history, of
which T share a field's table, n = L + 1, H heads or hidden units.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cowrec.errors import UserError

from ..config import ModelConfig, Size
from ..front import Features, Front, Sparse, compiles
from ..layers import LogitKernel, Mlp, glorot_normal
from ..linear_relu import affine


class History(NamedTuple):
    """A sequence that shares a field's table, and the sequences along it."""

    parts: list[str]  # names of these sequences; those that share a field's table come first
    places: list[int]  # numbers of the parts among the front's fields
    targets: list[int]  # numbers of the fields whose tables the first parts share
    length: int  # L

    def with_target(self, x: Features, dim: int) -> tuple[Tensor, Tensor]:
        """Adds up the parts' embeddings at each position, and the targets' embeddings at one more position.

        Returns the sums, [B, L + 1, D], and whether a position has ids, bool [B, L + 1]; the last one always has.
        """
        steps = sum(x.sequences[part].rows[:, :, :dim] for part in self.parts)
        target = sum(x.rows[:, field, None, :dim] for field in self.targets)
        assert isinstance(steps, Tensor)
        assert isinstance(target, Tensor)
        return torch.cat([steps, target], 1), F.pad(x.sequences[self.parts[0]].mask, (0, 1), value=True)


def histories_of(front: Front, name: str) -> list[History]:
    """Finds the histories of a front. Raises ValueError, with the network's name, if there is none."""
    sequences, found = front.sequences, list[History]()
    for main, sequence in sequences.items():
        if sequence.shares and not sequence.along:
            parts = [main, *(part for part, sequence in sequences.items() if sequence.along == main)]
            parts.sort(key=lambda part: not sequences[part].shares)
            targets = [front.fields.index(sequences[part].shares) for part in parts if sequences[part].shares]
            places = [front.fields.index(part) for part in parts]
            found.append(History(parts, places, targets, len(sequence.keys)))
    if not found:
        raise UserError(
            f'model.name = "{name}" needs a field of kind sequence that shares the table of a categorical field; add'
            " one to the schema file, with shares, or choose a network for fields without order"
        )
    return found


def require_heads(front: Front, heads: int) -> None:
    """Raises ValueError unless the embeddings can be split into so many heads."""
    if front.embedding_dim % heads:
        raise UserError(
            f"model.options.heads = {heads} must divide model.embedding_dim = {front.embedding_dim}; change one"
        )


class ActivationUnit(nn.Module):
    """Sum of a history's steps e_j with weights a(e_j, v) for a target v; the weights are not normalised.

    a is an MLP of e_j, v, e_j * v and e_j - v with one hidden layer of H units. e_j, [S * D], is the concatenation of
    the embeddings of S sequences. v, [T * D], is the concatenation of the embeddings of the T fields that the first
    sequences share. The product and the difference use the first T * D columns of e_j. Source: equation 3 and figure 2
    of the paper. The paper's "out product" is the element-wise product of the authors' code, which has the difference
    too. The hidden layer has PReLU, because Dice would depend on the other samples of a process and on the padding.
    """

    def __init__(self, steps: int, target: int, hidden: int) -> None:
        super().__init__()
        self._inputs = (steps, target, target, target)
        self.kernel = glorot_normal(sum(self._inputs), hidden)
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.slope = nn.Parameter(torch.full((1,), 0.25))
        self.output, self.output_bias = glorot_normal(hidden, 1), nn.Parameter(torch.zeros(1))

    def forward(self, steps: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """Steps [B, L, S * D], the mask of real steps, bool [B, L], and the target [B, T * D] -> [B, S * D]."""
        of_steps, of_target, of_products, of_differences = self.kernel.split(self._inputs)
        products = steps[:, :, : target.shape[1]] * target[:, None]
        # The kernel of the differences is added to that of the steps and subtracted from that of the target: the target
        # is multiplied once for a sample instead of once for a position.
        further = of_steps.shape[0] - of_differences.shape[0]
        of_steps, of_target = of_steps + F.pad(of_differences, (0, 0, 0, further)), of_target - of_differences
        hidden = affine(torch.cat([steps, products], 2), torch.cat([of_steps, of_products]))
        shift = target @ of_target + self.bias
        if compiles(hidden):
            weights = _PreluProduct.apply(hidden, shift, self.slope, self.output)[:, :, None]
        else:
            hidden = hidden + shift[:, None]
            # (1 - slope) ReLU(x) + slope x, with the product behind it, takes a third of torch.prelu's time.
            slope = self.slope.to(hidden.dtype)
            weights = (1 - slope) * (torch.relu(hidden) @ self.output) + slope * (hidden @ self.output)
        logits: Tensor = ((weights + self.output_bias).masked_fill(~mask[:, :, None], 0) * steps).sum(1)
        return logits


class _PreluProduct(torch.autograd.Function):
    """``prelu(hidden + shift[:, None]) @ kernel`` on CPU, with one pass over the hidden units in each direction."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shift: Tensor, slope: Tensor, kernel: Tensor) -> Tensor:
        from ..numba_layers import prelu_product_on_cpu

        ctx.save_for_backward(hidden, shift, slope, kernel)
        return prelu_product_on_cpu(hidden, shift, slope, kernel)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        from ..numba_layers import prelu_product_backward_on_cpu

        hidden, shift, slope, kernel = ctx.saved_tensors
        return prelu_product_backward_on_cpu(hidden, shift, slope, kernel, grads[0])


class _Attention(nn.Module):
    """Embeddings of all fields; a history's embedding is the attention of the fields whose tables the history shares.

    A module is one operation for TorchRec's pipeline, which traces the code that calls the tables.
    """

    def __init__(self, front: Front, hidden: int) -> None:
        super().__init__()
        self._dim, self._histories = front.embedding_dim, histories_of(front, "din")
        self.units = nn.ModuleList(
            ActivationUnit(len(history.places) * self._dim, len(history.targets) * self._dim, hidden)
            for history in self._histories
        )

    def forward(self, x: Features, dense: Tensor) -> Tensor:
        """Returns [B, F * D + N]: the embeddings, field-major, then the dense features."""
        embeddings = list(x.rows[:, :, : self._dim].unbind(1))
        for history, unit in zip(self._histories, self.units, strict=True):
            steps = torch.cat([x.sequences[part].rows[:, :, : self._dim] for part in history.parts], 2)
            target = torch.cat([embeddings[field] for field in history.targets], 1)
            interests = unit(steps, x.sequences[history.parts[0]].mask, target).split(self._dim, 1)
            for place, interest in zip(history.places, interests, strict=True):
                embeddings[place] = interest
        return torch.cat([*embeddings, dense], 1)


class DIN(nn.Module):
    """logit = MLP of all embeddings, in which the fields whose tables a history shares attend to the history.

    The sequences along a history have the history's weights. Other sequences are averaged. There is no linear part.
    ``attention`` is the width H of the activation unit's hidden layer.
    """

    def __init__(self, config: ModelConfig, front: Front, *, attention: Size = 36) -> None:
        super().__init__()
        self.front = front
        self.attention = _Attention(front, attention)
        self.mlp = Mlp(front.width, config.hidden, config.dropout)
        self.output = LogitKernel(config.hidden[-1], bias=True)

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.front(dense, sparse)
        logits: Tensor = self.output.of(self.mlp, self.attention(x, dense))
        return logits


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, heads: int, distance_bias: Tensor | None = None
) -> Tensor:
    """Attention of the last m of n positions over the positions that a mask shows, in each head by itself.

    The weights are softmax(q k' / sqrt(D / H)). With a bias for each distance between positions, [n], they are
    silu(q k' + bias) / n, and no position sees a later one.

    Queries [B, m, D], keys and values [B, n, D], mask bool [B, n], true once or more for a sample -> [B, m, D].
    """
    if compiles(query) and query.shape[2] <= _NARROW_HEAD * heads:
        output: Tensor = _NarrowAttention.apply(query, key, value, mask, heads, distance_bias)
        return output
    length, last = key.shape[1], query.shape[1]
    query, key, value = (each.unflatten(2, (heads, -1)).transpose(1, 2) for each in (query, key, value))
    if distance_bias is None:
        attended = F.scaled_dot_product_attention(query, key, value, mask[:, None, None])
    else:
        position = torch.arange(length, device=query.device)
        distance = position[-last:, None] - position
        scores = query @ key.transpose(2, 3) + distance_bias[distance.clamp(min=0)]
        seen = mask[:, None, None] & (distance >= 0)
        attended = (F.silu(scores).masked_fill(~seen, 0) / length) @ value
    return attended.transpose(1, 2).flatten(2)


_NARROW_HEAD = 8
"""Largest width of a head for which numba's kernel is faster than torch's products of small matrices."""


class _NarrowAttention(torch.autograd.Function):
    """:func:`attention` on CPU, with one pass over the pairs of positions in each direction."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, heads: int, bias: Tensor | None
    ) -> Tensor:
        from ..numba_layers import attention_on_cpu

        ctx.save_for_backward(query, key, value, mask, bias)
        ctx.heads = heads
        return attention_on_cpu(query, key, value, mask, heads, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from ..numba_layers import attention_backward_on_cpu

        query, key, value, mask, bias = ctx.saved_tensors
        *found, of_bias = attention_backward_on_cpu(query, key, value, mask, ctx.heads, bias, grads[0])
        return *found, None, None, of_bias


class TransformerLayer(nn.Module):
    """s = norm(x + heads(x)), y = norm(s + W2 leaky_relu(W1 s)). Source: equations 4 to 7 of the paper."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self._heads, self._dropout = heads, dropout
        self.query, self.key, self.value, self.output = (glorot_normal(width, width) for _ in range(4))
        self.inner, self.inner_bias = glorot_normal(width, 4 * width), nn.Parameter(torch.zeros(4 * width))
        self.outer, self.outer_bias = glorot_normal(4 * width, width), nn.Parameter(torch.zeros(width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, L, D], and whether others see a position, bool [B, L], true once or more for a sample -> [B, L, D]."""
        query, key, value = affine(x, torch.cat([self.query, self.key, self.value], 1)).chunk(3, 2)
        attended = attention(query, key, value, mask, self._heads)
        x = self.norms[0](x + self._dropped(affine(attended, self.output)))
        inner = F.leaky_relu(affine(x, self.inner, self.inner_bias))
        normed: Tensor = self.norms[1](x + self._dropped(affine(inner, self.outer, self.outer_bias)))
        return normed

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self._dropout, self.training)


class _Transformers(nn.Module):
    """Embeddings of all fields; a transformer's outputs for its items and the scored one replace a history's."""

    def __init__(self, front: Front, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        width, self._histories = front.embedding_dim, histories_of(front, "bst")
        self._width, attended = width, {history.places[0] for history in self._histories}
        self._others = [number for number in range(len(front.fields)) if number not in attended]
        lengths = [history.length + 1 for history in self._histories]
        self.positions = nn.ParameterList(glorot_normal(length, width) for length in lengths)
        self.layers = nn.ModuleList(TransformerLayer(width, heads, dropout) for _ in range(layers * len(lengths)))
        self._layers = layers
        self.out_features = (len(self._others) + sum(lengths)) * width + front.num_dense

    def forward(self, x: Features, dense: Tensor) -> Tensor:
        """Returns other embeddings, each history's L + 1 outputs, zeros where no id is, and dense features."""
        parts = [x.rows[:, number, : self._width] for number in self._others]
        for index, (history, position) in enumerate(zip(self._histories, self.positions, strict=True)):
            steps, mask = history.with_target(x, self._width)
            steps = steps + position
            for layer in range(index * self._layers, (index + 1) * self._layers):
                steps = self.layers[layer](steps, mask)
            parts.append((steps * mask[:, :, None]).flatten(1))
        return torch.cat([*parts, dense], 1)


class BST(nn.Module):
    """logit = MLP of all embeddings and of a transformer's outputs for each history and the scored item.

    The embeddings of the sequences along a history are added to the history's. All sequences but histories are
    averaged. Positions are learned, counted from the scored item. There is no linear part. ``heads`` divides
    ``embedding_dim``.
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
        logits: Tensor = self.output.of(self.mlp, self.transformers(x, dense))
        return logits


class HstuLayer(nn.Module):
    """y = x + W2 (norm(A V) * U) + b2 with [U V Q K] = silu(W1 norm(x) + b1) and A = silu(Q K' + rab) / n, causal.

    The bias rab is learned for each distance between positions; ``dropout`` comes before W2. Source: equations 1 to 3
    of the paper, with the norm, the sum around them and the initial W1, of standard deviation 0.02, as in the authors'
    code.
    """

    def __init__(self, width: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self._heads, self._dropout = heads, dropout
        # A layer whose gates and values are small changes little of the scored item's embedding at first.
        self.inner = nn.Parameter(torch.randn(width, 4 * width) * 0.02)
        self.inner_bias = nn.Parameter(torch.zeros(4 * width))
        self.outer, self.outer_bias = glorot_normal(width, width), nn.Parameter(torch.zeros(width))
        self.distance_bias = nn.Parameter(torch.zeros(length))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor, last: int) -> Tensor:
        """[B, n, D], and whether later positions see a position, bool [B, n] -> y of the last ones, [B, last, D]."""
        normed = self.norms[0](x)
        gate, query = self._projected(normed[:, -last:], 0).chunk(2, 2)
        value, key = self._projected(normed, 1).chunk(2, 2)
        gated = self.norms[1](attention(query, key, value, mask, self._heads, self.distance_bias)) * gate
        dropped = F.dropout(gated, self._dropout, self.training)
        y: Tensor = x[:, -last:] + affine(dropped, self.outer, self.outer_bias)
        return y

    def _projected(self, x: Tensor, first: int) -> Tensor:
        """U and Q of positions for 0, or V and K for 1: [B, L, D] -> [B, L, 2 * D]."""
        kernel = self.inner.unflatten(1, (4, -1))[:, first::2].flatten(1)
        return F.silu(affine(x, kernel, self.inner_bias.unflatten(0, (4, -1))[first::2].flatten()))


class _Interests(nn.Module):
    """Embeddings of all fields; the last layer's output for the scored item replaces a history's."""

    def __init__(self, front: Front, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self._width, self._histories = front.embedding_dim, histories_of(front, "hstu")
        self.stacks = nn.ModuleList(
            nn.ModuleList(HstuLayer(self._width, heads, history.length + 1, dropout) for _ in range(layers))
            for history in self._histories
        )

    def forward(self, x: Features, dense: Tensor) -> Tensor:
        """Returns [B, F * D + N]: the embeddings, field-major, then the dense features."""
        embeddings = list(x.rows[:, :, : self._width].unbind(1))
        for history, layers in zip(self._histories, self.stacks, strict=True):
            steps, mask = history.with_target(x, self._width)
            *others, last = cast(nn.ModuleList, layers)
            for layer in others:
                steps = layer(steps, mask, history.length + 1)
            embeddings[history.places[0]] = last(steps, mask, 1)[:, 0]
        return torch.cat([*embeddings, dense], 1)


class HSTU(nn.Module):
    """logit = MLP of all embeddings and of an HSTU's output for the scored item behind each history.

    The embeddings of the sequences along a history are added to the history's. All sequences but histories are
    averaged. There is no linear part. ``heads`` divides ``embedding_dim``.
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
        logits: Tensor = self.output.of(self.mlp, self.interests(x, dense))
        return logits
