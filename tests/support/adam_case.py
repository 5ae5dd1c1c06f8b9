"""A small model under EmbeddingAdam that is trained at falling rates, and its state."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam
from random_problems.drawing import Problem, small_problem
from random_problems.training import batches_of, sharded_model

SMALL: dict[str, Any] = {"rows": (60, 5), "features": (("a",), ("b", "c")), "batch": 8, "dim": 4}
CASE = small_problem(**SMALL, steps=24)
RULE = CowClip(r=0.5, zeta=1e-3)
MODES = ("replay", "lazy", "dense")
ADAM = AdamConfig(lr=1e-2, l2=1e-3, eps=1e-6, absent_rows="replay")


def started(mode: str = "replay", problem: Problem = CASE) -> tuple[nn.Module, EmbeddingAdam]:
    model = sharded_model(problem)
    return model, EmbeddingAdam(model, replace(ADAM, absent_rows=mode), RULE)


def schedule(step: int) -> float:
    return 1e-2 / (1 + 0.3 * step)


def train(model: nn.Module, optimizer: EmbeddingAdam, steps: Iterable[int], problem: Problem = CASE) -> None:
    batches = batches_of(problem)
    for step in steps:
        optimizer.lr = schedule(step)
        model(batches[step][0])[0].backward()
