"""The last layers of networks of several tasks: an MLP and an output for each.

B samples, T tasks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cowrec.models.layers import LogitKernel, Mlp


class Towers(nn.Module):
    """An MLP with an output kernel and a bias for each task.

    Args:
        num_tasks: T.
        width: of each task's inputs.
        hidden: widths of each MLP's layers.
        dropout: see :class:`Mlp`.
    """

    def __init__(self, num_tasks: int, width: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(Mlp(width, hidden, dropout) for _ in range(num_tasks))
        self.outputs = nn.ModuleList(LogitKernel(hidden[-1], bias=True) for _ in range(num_tasks))

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Logits [B, T] of T inputs [B, width]; [B] for one task, as labels have it."""
        logits = [output(mlp(x)) for mlp, output, x in zip(self.mlps, self.outputs, inputs, strict=True)]
        return logits[0] if len(logits) == 1 else torch.stack(logits, dim=1)


class Gate(nn.Module):
    """A mixture of experts' outputs, by a softmax of a linear function of the inputs.

    Args:
        width: K of the inputs.
        experts: number E of experts.
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(nn.init.xavier_uniform_(torch.empty(width, experts)))

    def forward(self, x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """[B, H] of inputs [B, K] and E outputs [B, H]."""
        return torch.einsum("be,beh->bh", torch.softmax(x @ self.kernel, dim=1), torch.stack(list(outputs), dim=1))
