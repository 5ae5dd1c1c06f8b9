"""Dense layers that the networks share, initialised as in the CowClip reference.

Sizes: B samples, N dense features, K input width of a layer.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, Protocol, cast, runtime_checkable

import torch
import torch.fx
from torch import Tensor, nn

from .linear_relu import LinearRelu, linear_relu, logits_of, logits_of_layers

# One operation each for TorchRec's pipeline, which traces modules inside a ModuleList.
torch.fx.wrap("linear_relu")
torch.fx.wrap("logits_of")
torch.fx.wrap("logits_of_layers")


@runtime_checkable
class Regularized(Protocol):
    """A layer with kernels that the training loss regularises; biases are not regularised."""

    l2_group: Literal["linear", "cross"]

    def l2_kernels(self) -> list[nn.Parameter]: ...


def l2_kernels(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Finds the dense kernels that the CowClip reference regularises.

    Returns parameters of the model. ``"linear"`` has the linear kernel on the dense features (the reference's
    ``l2_reg_linear``), ``"cross"`` the kernels of the cross layers (the reference's ``l2_reg_cross``, 1e-5). MLPs and
    biases are not regularised.
    """
    groups: dict[str, list[nn.Parameter]] = {"linear": [], "cross": []}
    for module in model.modules():
        if isinstance(module, Regularized):
            groups[module.l2_group] += module.l2_kernels()
    return groups


def glorot_normal(*shape: int) -> nn.Parameter:
    """A kernel from Keras' Glorot normal: variance 2 / (fan_in + fan_out), truncated at two standard deviations.

    The fans are the last two sizes, in either order; as in Keras, leading sizes multiply both.
    """
    leading = math.prod(shape[:-2])
    # A unit normal truncated at +-2 has a standard deviation of 0.8796.
    std = math.sqrt(2 / (leading * (shape[-2] + shape[-1]))) / 0.87962566103423978
    return nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=std, a=-2 * std, b=2 * std))


class CrossLayers(nn.Module):
    """Layers whose kernels are regularised as those of the CowClip reference's cross layers."""

    l2_group: Literal["linear", "cross"] = "cross"
    kernels: nn.ParameterList

    def l2_kernels(self) -> list[nn.Parameter]:
        return list(self.kernels)


class LinearPart(nn.Module):
    """Wide weights plus a kernel on the N dense features, if there are any, plus the global bias."""

    l2_group: Literal["linear", "cross"] = "linear"

    def __init__(self, num_dense: int) -> None:
        super().__init__()
        self.kernel = glorot_normal(num_dense, 1) if num_dense else None
        self.bias = nn.Parameter(torch.zeros(1))

    def l2_kernels(self) -> list[nn.Parameter]:
        return [] if self.kernel is None else [self.kernel]

    def forward(self, wide: Tensor, dense: Tensor) -> Tensor:
        """Returns logits [B] of summed wide weights [B] and dense features [B, N]."""
        logits = wide + self.bias
        return logits if self.kernel is None else logits + logits_of(dense, self.kernel)


class Mlp(nn.Module):
    """ReLU layers."""

    def __init__(self, width: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.layers, self._drops = nn.Sequential(), dropout > 0
        for number, (fan_in, fan_out) in enumerate(pairwise([width, *hidden])):
            layer = LinearRelu(fan_in, fan_out)
            layer.weight = glorot_normal(fan_out, fan_in)
            nn.init.zeros_(layer.bias)
            self.layers.add_module(str(number), layer)  # under one name, with dropout or without
            if self._drops:
                self.layers.add_module(f"dropout{number}", nn.Dropout(dropout))

    def forward(self, x: Tensor, padded: Tensor | None = None) -> Tensor:
        """[B, K] -> [B, hidden[-1]]; ``padded`` as in :func:`linear_relu`."""
        return self.layers(x) if self._drops else linear_relu(x, *self._parameters_in_order, padded=padded)

    def logits(self, x: Tensor, padded: Tensor | None, kernel: Tensor) -> Tensor:
        """``self(x) @ kernel``, [B]."""
        if self._drops:
            return logits_of(self.layers(x), kernel)
        return logits_of_layers(x, kernel, *self._parameters_in_order, padded=padded)

    @property
    def _parameters_in_order(self) -> list[Tensor]:
        layers = cast(Iterable[LinearRelu], self.layers)
        return [parameter for layer in layers for parameter in (layer.kernel, layer.bias)]


class LogitKernel(nn.Module):
    """The output layer: a kernel, without bias where the global bias is in the linear part."""

    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.kernel = glorot_normal(width, 1)
        self.bias = nn.Parameter(torch.zeros(1)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, K] -> logits [B]."""
        return self._shifted(logits_of(x, self.kernel))

    def of(self, mlp: Mlp, x: Tensor, padded: Tensor | None = None) -> Tensor:
        """Returns logits [B] of the outputs of an MLP, by one operation where that is faster."""
        return self._shifted(mlp.logits(x, padded, self.kernel))

    def _shifted(self, logits: Tensor) -> Tensor:
        return logits if self.bias is None else logits + self.bias


class FieldEmbeddings(nn.Module):
    """Embeddings of all fields and dense features; the embedding of a dense feature is a vector times the feature.

    Source: AutoInt (arXiv 1810.11921), equation 4.
    """

    def __init__(self, num_dense: int, embedding_dim: int) -> None:
        super().__init__()
        self._embedding_dim = embedding_dim
        self.dense = glorot_normal(num_dense, embedding_dim) if num_dense else None

    def forward(self, rows: Tensor, dense: Tensor) -> Tensor:
        """Returns [B, F + N, D] of rows [B, F, P], whose first D columns are embeddings, and dense features [B, N]."""
        embeddings = rows[:, :, : self._embedding_dim]
        return embeddings if self.dense is None else torch.cat([embeddings, dense[:, :, None] * self.dense], dim=1)
