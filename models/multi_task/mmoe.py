"""Multi-gate mixture of experts (Ma et al., KDD 2018): experts that all tasks share, and a gate and tower for each."""

from torch import Tensor, nn

from cowrec.models.config import ModelConfig
from cowrec.models.front import Front, Sparse
from cowrec.models.layers import Mlp
from cowrec.models.options import Size, Sizes

from .towers import Gate, Towers


class MMoE(nn.Module):
    """logit_k = tower_k(sum over e of softmax(G_k x)_e MLP_e(x)). Source: equations 5 to 7 of the paper.

    There is no linear part.

    Args:
        config: uses ``hidden``, of each expert, and ``dropout``.
        front: embeddings and dense features.
        num_tasks: T.
        experts: number of experts.
        tower: widths of the layers of each tower.
    """

    def __init__(
        self, config: ModelConfig, front: Front, num_tasks: int, *, experts: Size = 4, tower: Sizes = (64,)
    ) -> None:
        super().__init__()
        self.front = front
        self.experts = nn.ModuleList(Mlp(front.width, config.hidden, config.dropout) for _ in range(experts))
        self.gates = nn.ModuleList(Gate(front.width, experts) for _ in range(num_tasks))
        self.towers = Towers(num_tasks, config.hidden[-1], tower, config.dropout)

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        """Logits [B, T], or [B] of one task, of dense features [B, N] and the fields' ids."""
        x = self.front(dense, sparse).flat
        outputs = [expert(x) for expert in self.experts]
        return self.towers([gate(x, outputs) for gate in self.gates])
