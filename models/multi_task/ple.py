"""Progressive layered extraction (Tang et al., RecSys 2020): levels of experts of each task and of shared ones.

T tasks.
"""

from collections.abc import Iterable, Sequence
from typing import cast

from torch import Tensor, nn

from cowrec.models.config import ModelConfig
from cowrec.models.front import Front, Sparse
from cowrec.models.layers import Mlp
from cowrec.models.options import Size, Sizes

from .towers import Gate, Towers


class ExtractionLevel(nn.Module):
    """Each task's gate mixes its own and the shared experts; a shared gate, if it is not the last level, all of them.

    Source: section 4.2 of the paper.

    Args:
        config: uses ``hidden``, of each expert, and ``dropout``.
        width: of the inputs.
        num_tasks: T.
        task_experts: number of experts of each task.
        shared_experts: number of experts that all tasks share.
        is_last: no later level needs a shared output.
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
        """Outputs [B, H] of the tasks, then the shared one unless it is the last level, of T + 1 inputs [B, width]."""
        *of_tasks, of_all = inputs
        shared = _outputs(self.shared, of_all)
        own = [_outputs(cast(nn.ModuleList, experts), x) for experts, x in zip(self.tasks, of_tasks, strict=True)]
        mixed = [gate(x, [*each, *shared]) for gate, x, each in zip(self.gates, of_tasks, own, strict=True)]
        if self.shared_gate is not None:
            mixed.append(self.shared_gate(of_all, [*(output for each in own for output in each), *shared]))
        return mixed


def _outputs(experts: Iterable[nn.Module], x: Tensor) -> list[Tensor]:
    return [expert(x) for expert in experts]


class PLE(nn.Module):
    """logit_k = tower_k(what the last level extracts for task k). With one level it is CGC. There is no linear part.

    Args:
        config: uses ``hidden``, of each expert, and ``dropout``.
        front: embeddings and dense features.
        num_tasks: T.
        levels: number of levels.
        task_experts: number of experts of each task in each level.
        shared_experts: number of shared experts in each level.
        tower: widths of the layers of each tower.
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
        """Logits [B, T], or [B] of one task, of dense features [B, N] and the fields' ids."""
        inputs = [self.front(dense, sparse).flat] * (self._num_tasks + 1)
        for level in self.levels:
            inputs = level(inputs)
        return self.towers(inputs)
