"""FinalMLP (arXiv 2304.00902): two MLPs on differently gated features, fused by a bilinear form.

Sizes: B samples, K = F * D + N width of the features, H heads.
"""

import torch
from torch import Tensor, nn

from cowrec.errors import UserError

from ..config import ModelConfig, Size, Sizes
from ..front import Front, Sparse
from ..layers import LogitKernel, Mlp, glorot_normal


class FeatureGate(nn.Module):
    """x * 2 sigmoid(MLP(c)) with a learned context c, because no features are marked as the context of a stream.

    Source: section "Stream-Specific Feature Selection" of the paper.
    """

    def __init__(self, context_dim: int, hidden: Sizes, width: int) -> None:
        super().__init__()
        self.context = glorot_normal(1, context_dim)
        self.mlp = Mlp(context_dim, hidden, 0.0)
        self.kernel, self.bias = glorot_normal(hidden[-1], width), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, K] -> [B, K]."""
        return x * (2 * torch.sigmoid(self.mlp(self.context) @ self.kernel + self.bias))


class BilinearFusion(nn.Module):
    """b + u . x + v . y + sum over heads h of x_h' W_h y_h, where x_h and y_h are parts of x and y.

    Source: section "Stream-Level Interaction Aggregation" of the paper.
    """

    def __init__(self, first: int, second: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.first, self.second = LogitKernel(first, bias=True), LogitKernel(second)
        self.kernel = nn.Parameter(
            torch.stack([glorot_normal(first // heads, second // heads).detach() for _ in range(heads)])
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x [B, first] and y [B, second] -> logits [B], float32 under autocast too."""
        split = x.unflatten(1, (self._heads, -1))
        products = (split.transpose(0, 1) @ self.kernel).transpose(0, 1).flatten(1) * y
        logits: Tensor = self.first(x) + self.second(y) + products.to(self.kernel.dtype).sum(1)
        return logits


class FinalMlp(nn.Module):
    """logit = fusion(MLP(gate(x)), other MLP(other gate(x))). There is no linear part.

    ``hidden`` has the widths of the first MLP. ``second`` has the widths of the second MLP, by default the same widths.
    ``gate`` has the widths of the gates' hidden layers. ``heads`` divides the last width of each MLP.
    """

    def __init__(
        self,
        config: ModelConfig,
        front: Front,
        *,
        second: Sizes | None = None,
        heads: Size = 1,
        gate: Sizes = (64,),
    ) -> None:
        super().__init__()
        hidden = (config.hidden, second or config.hidden)
        for key, widths in zip(("model.hidden", "model.options.second"), hidden, strict=True):
            if widths[-1] % heads:
                raise UserError(
                    f"model.options.heads = {heads} must divide the last width of {key} = {list(widths)}; change one"
                )
        self.front = front
        self.gates = nn.ModuleList(FeatureGate(front.embedding_dim, gate, front.width) for _ in hidden)
        self.streams = nn.ModuleList(Mlp(front.width, widths, config.dropout) for widths in hidden)
        self.fusion = BilinearFusion(hidden[0][-1], hidden[1][-1], heads)

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.front(dense, sparse).flat
        first, second = (mlp(gate(x)) for gate, mlp in zip(self.gates, self.streams, strict=True))
        logits: Tensor = self.fusion(first, second)
        return logits
