"""Networks with a logit for each of several tasks, which share embeddings and layers.

Shared bottom (Caruana 1997) has one MLP, and a tower for each task. Multi-gate mixture of experts (Ma et al., KDD 2018)
has experts that all tasks share, and a gate and a tower for each task. Progressive layered extraction (Tang et al.,
RecSys 2020) has levels of experts, some of one task and some shared. Sizes: B samples, T tasks.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..config import ModelConfig, Size, Sizes
from ..front import Front, Sparse
from ..layers import LogitKernel, Mlp


class Towers(nn.Module):
    """An MLP with an output kernel and a bias for each task."""

    def __init__(self, num_tasks: int, width: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(Mlp(width, hidden, dropout) for _ in range(num_tasks))
        self.outputs = nn.ModuleList(LogitKernel(hidden[-1], bias=True) for _ in range(num_tasks))

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Returns logits [B, T] of T inputs [B, width]; [B] of one task, the shape of one label."""
        logits = [output(mlp(x)) for mlp, output, x in zip(self.mlps, self.outputs, inputs, strict=True)]
        return logits[0] if len(logits) == 1 else torch.stack(logits, dim=1)


class Gate(nn.Module):
    """Mixture of experts' outputs by a softmax of a linear function of the inputs."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(nn.init.xavier_uniform_(torch.empty(width, experts)))

    def forward(self, x: Tensor, outputs: Sequence[Tensor]) -> Tensor:
        """Returns [B, H] of inputs [B, K] and E outputs [B, H]."""
        return torch.einsum("be,beh->bh", torch.softmax(x @ self.kernel, dim=1), torch.stack(list(outputs), dim=1))


class SharedBottom(nn.Module):
    """logit_k = tower_k(MLP(x)). Source: MMoE (Ma et al., KDD 2018), equation 1. There is no linear part.

    ``hidden`` are the widths of the shared MLP, and ``tower`` those of each tower.
    """

    def __init__(self, config: ModelConfig, front: Front, num_tasks: int, *, tower: Sizes = (64,)) -> None:
        super().__init__()
        self.front = front
        self.mlp = Mlp(front.width, config.hidden, config.dropout)
        self.towers = Towers(num_tasks, config.hidden[-1], tower, config.dropout)
        self._num_tasks = num_tasks

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.front(dense, sparse)
        logits: Tensor = self.towers([self.mlp(x.flat, x.padded)] * self._num_tasks)
        return logits


class MMoE(nn.Module):
    """logit_k = tower_k(sum over e of softmax(G_k x)_e MLP_e(x)). Source: equations 5 to 7 of the paper.

    There is no linear part. ``hidden`` are the widths of each expert, and ``tower`` those of each tower.
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
        x = self.front(dense, sparse)
        outputs = [expert(x.flat, x.padded) for expert in self.experts]
        logits: Tensor = self.towers([gate(x.flat, outputs) for gate in self.gates])
        return logits


class ExtractionLevel(nn.Module):
    """Experts of each task and shared ones. A task's gate mixes the task's experts and the shared ones.

    A shared gate mixes all experts, unless the level is the last. ``width`` is the width of the inputs, and
    ``task_experts`` the number of experts of each task. Source: section 4.2 of the paper.
    """

    def __init__(
        self,
        config: ModelConfig,
        width: int,
        num_tasks: int,
        task_experts: int,
        shared_experts: int,
        is_last: bool,
    ) -> None:
        super().__init__()

        def experts(count: int) -> nn.ModuleList:
            return nn.ModuleList(Mlp(width, config.hidden, config.dropout) for _ in range(count))

        self.tasks = nn.ModuleList(experts(task_experts) for _ in range(num_tasks))
        self.shared = experts(shared_experts)
        self.gates = nn.ModuleList(Gate(width, task_experts + shared_experts) for _ in range(num_tasks))
        self.shared_gate = None if is_last else Gate(width, num_tasks * task_experts + shared_experts)

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tasks' outputs [B, H], and the shared one unless the level is the last, of T + 1 inputs."""
        *of_tasks, of_all = inputs
        shared = _outputs(self.shared, of_all)
        own = [_outputs(cast(nn.ModuleList, experts), x) for experts, x in zip(self.tasks, of_tasks, strict=True)]
        mixed = [gate(x, [*outputs, *shared]) for gate, x, outputs in zip(self.gates, of_tasks, own, strict=True)]
        if self.shared_gate is not None:
            mixed.append(self.shared_gate(of_all, [*(output for outputs in own for output in outputs), *shared]))
        return mixed


def _outputs(experts: Iterable[nn.Module], x: Tensor) -> list[Tensor]:
    return [expert(x) for expert in experts]


class PLE(nn.Module):
    """logit_k = tower_k(last level's output for task k). With one level this is CGC. There is no linear part.

    ``hidden`` are the widths of each expert, and ``tower`` those of each tower. Each level has ``task_experts`` experts
    of each task, and ``shared_experts`` shared ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        front: Front,
        num_tasks: int,
        *,
        levels: Size = 2,
        task_experts: Size = 2,
        shared_experts: Size = 2,
        tower: Sizes = (64,),
    ) -> None:
        super().__init__()
        self.front = front
        widths = [front.width] + [config.hidden[-1]] * (levels - 1)
        self.levels = nn.ModuleList(
            ExtractionLevel(config, width, num_tasks, task_experts, shared_experts, level == levels - 1)
            for level, width in enumerate(widths)
        )
        self.towers = Towers(num_tasks, config.hidden[-1], tower, config.dropout)
        self._num_tasks = num_tasks

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        inputs = [self.front(dense, sparse).flat] * (self._num_tasks + 1)
        for level in self.levels:
            inputs = level(inputs)
        logits: Tensor = self.towers(inputs)
        return logits
