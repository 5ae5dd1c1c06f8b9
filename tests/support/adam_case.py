"""A small model under EmbeddingAdam that is trained at falling rates, and its state."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch.distributed as dist
from torch import nn

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam
from sharded_case import Case, gather_tables, moments_of, sharded_model, train_step

CASE = Case(rows=(60, 5), features=(("a",), ("b", "c")), batch=8, dim=4, steps=24)
RULE = CowClip(r=0.5, zeta=1e-3)
MODES = ("replay", "lazy", "dense")
ADAM = AdamConfig(lr=1e-2, l2=1e-3, eps=1e-6, absent_rows="replay")


def started(mode: str = "replay", case: Case = CASE) -> tuple[nn.Module, EmbeddingAdam]:
    model = sharded_model(case, case.draw()["tables"])
    return model, EmbeddingAdam(model, replace(ADAM, absent_rows=mode), RULE)


def schedule(step: int) -> float:
    return 1e-2 / (1 + 0.3 * step)


def take_step(model: nn.Module, step: int, case: Case = CASE) -> None:
    """Trains this rank's samples of a step."""
    rank, size = dist.get_rank(), case.batch // dist.get_world_size()
    train_step(case, model, *case.draw()["steps"][step], rank * size, (rank + 1) * size)


def train(model: nn.Module, optimizer: EmbeddingAdam, steps: Iterable[int], case: Case = CASE) -> None:
    for step in steps:
        optimizer.lr = schedule(step)
        take_step(model, step, case)


def current(model: nn.Module, optimizer: EmbeddingAdam, case: Case = CASE) -> dict[str, np.ndarray]:
    """Tables and moments on the first rank, after all steps."""
    optimizer.flush()
    return moments_of(optimizer) | {f"t{t}": table for t, table in enumerate(gather_tables(case, model))}


def assert_equal(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)
