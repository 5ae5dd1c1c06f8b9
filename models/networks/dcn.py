"""Deep & Cross networks: a linear model, and cross layers beside an MLP under one output kernel.

Cross layers are explicit feature crosses of growing order, x <- x0 * f(x) + x, in three forms of f.
Sizes: B samples, K input width, L layers, E experts, R rank.
"""

import torch
from torch import Tensor, nn

from ..config import ModelConfig, Size
from ..front import Front, Sparse
from ..layers import CrossLayers, LinearPart, LogitKernel, Mlp, glorot_normal


class _KernelCross(CrossLayers):
    """Layers that have one kernel, [K, W], and one bias."""

    def __init__(self, width: int, layers: int, kernel_width: int) -> None:
        super().__init__()
        self.kernels = nn.ParameterList(glorot_normal(width, kernel_width) for _ in range(layers))
        self.biases = nn.ParameterList(torch.zeros(width) for _ in range(layers))


class VectorCross(_KernelCross):
    """x <- x0 * (x . w) + b + x. Source: Deep & Cross Network (arXiv 1708.05123), equation 3."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__(width, layers, 1)

    def forward(self, x0: Tensor) -> Tensor:
        """[B, K] -> [B, K]."""
        x = x0
        for kernel, bias in zip(self.kernels, self.biases, strict=True):
            x = x0 * (x @ kernel) + bias + x
        return x


class MatrixCross(_KernelCross):
    """x <- x0 * (W x + b) + x. Source: DCN V2 (arXiv 2008.13535), equation 1."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__(width, layers, width)

    def forward(self, x0: Tensor) -> Tensor:
        """[B, K] -> [B, K]."""
        x = x0
        for kernel, bias in zip(self.kernels, self.biases, strict=True):
            x = x0 * nn.functional.linear(x, kernel, bias) + x
        return x


class MixtureCross(CrossLayers):
    """x <- x0 * (sum_e g_e(x) U_e tanh(C_e tanh(V_e' x)) + b) + x, with softmax gates g that all layers share.

    Source: DCN V2 (arXiv 2008.13535), section 3.3, as in the CowClip reference, which calls it DCNv2.
    """

    def __init__(self, width: int, layers: int, experts: int, rank: int) -> None:
        super().__init__()
        self.down = nn.ParameterList(glorot_normal(experts, width, rank) for _ in range(layers))  # V
        self.core = nn.ParameterList(glorot_normal(experts, rank, rank) for _ in range(layers))  # C
        self.up = nn.ParameterList(glorot_normal(experts, width, rank) for _ in range(layers))  # U
        self.biases = nn.ParameterList(torch.zeros(width) for _ in range(layers))
        # Each gate is a layer with one output, so its fans are (K, 1); the reference initialises it uniformly.
        self.gate = nn.Parameter(
            torch.stack([nn.init.xavier_uniform_(torch.empty(1, width))[0] for _ in range(experts)])
        )

    def l2_kernels(self) -> list[nn.Parameter]:
        """Returns the kernels without the gate, as in the reference."""
        return [*self.down, *self.core, *self.up]

    def forward(self, x0: Tensor) -> Tensor:
        """[B, K] -> [B, K]."""
        x = x0
        for down, core, up, bias in zip(self.down, self.core, self.up, self.biases, strict=True):
            gate = torch.softmax(x @ self.gate.T, dim=1)  # [B, E]
            inner = torch.tanh(torch.einsum("bk,ekr->ber", x, down))
            inner = torch.tanh(torch.einsum("ber,esr->bes", inner, core))
            # The gates sum to 1, so weighting the R-wide part first equals mixing the experts' K-wide outputs, but
            # needs no tensor [B, E, K].
            mixed = torch.einsum("ber,ekr->bk", inner * gate.unsqueeze(2), up)
            x = x0 * (mixed + bias) + x
        return x


class CrossAndDeep(nn.Module):
    """logit = linear + kernel . [cross(x), MLP(x)], where ``cross`` maps [B, K] to [B, K], K = ``front.width``."""

    def __init__(self, config: ModelConfig, front: Front, cross: nn.Module) -> None:
        super().__init__()
        self.front = front
        self.linear = LinearPart(front.num_dense)
        self.cross = cross
        self.mlp = Mlp(front.width, config.hidden, config.dropout)
        self.output = LogitKernel(front.width + config.hidden[-1])

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.front(dense, sparse)
        both = torch.cat([self.cross(x.flat), self.mlp(x.flat, x.padded)], dim=1)
        logits: Tensor = self.linear(x.wide, dense) + self.output(both)
        return logits


class DCN(CrossAndDeep):
    """Cross layers with a vector each (arXiv 1708.05123)."""

    def __init__(self, config: ModelConfig, front: Front, *, layers: Size = 3) -> None:
        super().__init__(config, front, VectorCross(front.width, layers))


class DCNMix(CrossAndDeep):
    """Cross layers of low-rank experts, called DCNv2 in the CowClip paper and its reference."""

    def __init__(
        self, config: ModelConfig, front: Front, *, layers: Size = 3, experts: Size = 4, rank: Size = 32
    ) -> None:
        super().__init__(config, front, MixtureCross(front.width, layers, experts, rank))


class DCNv2(CrossAndDeep):
    """Cross layers with a full matrix each (arXiv 2008.13535)."""

    def __init__(self, config: ModelConfig, front: Front, *, layers: Size = 3) -> None:
        super().__init__(config, front, MatrixCross(front.width, layers))
