"""A worker's job: its batches, and the clock around its training steps. Needs numpy alone, as every peer has it.

B samples, N dense features, F fields.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, Protocol

import numpy as np

EMBEDDING_DIM = 10
HIDDEN = (400, 400, 400)
EMBEDDING_LR, EMBEDDING_STD, L2 = 1e-4, 1e-2, 1e-5
"""As published for Criteo at batch size 1024; no step's time depends on them."""


@dataclass(frozen=True)
class Job:
    """What a worker measures; as JSON it is the one argument of its command line.

    Attributes:
        folder: of dense.npy float32 [S, N], ids.npy int32 [F, S] and label.npy float32 [S]: the samples of all steps.
        table_rows: rows of each field's table.
        batch_size: B.
        warmup_steps: taken before the clock starts.
        least_steps: on the clock; after them it stops as soon as `seconds` are over.
        seconds: see there.
        result: file to write: {"step_seconds": of each step, "versions": by package}.
    """

    folder: str
    table_rows: list[int]
    batch_size: int
    warmup_steps: int
    least_steps: int
    seconds: float
    result: str

    @property
    def num_dense(self) -> int:
        return int(np.load(Path(self.folder) / "dense.npy", mmap_mode="r").shape[1])

    def batches(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Dense features float32 [B, N], ids int64 [F, B] and labels float32 [B] of each step."""
        dense, ids, label = (np.load(Path(self.folder) / f"{name}.npy") for name in ("dense", "ids", "label"))
        parts = [slice(first, first + self.batch_size) for first in range(0, len(label), self.batch_size)]
        return [(dense[part], ids[:, part].astype(np.int64), label[part]) for part in parts]


class Peer(Protocol):
    """A model with its optimizers, built from a job."""

    def batch(self, dense: np.ndarray, ids: np.ndarray, label: np.ndarray) -> tuple[Any, ...]:
        """A batch of `Job.batches` in the peer's own form; made before the clock starts."""

    @property
    def step(self) -> Callable[..., Any]:
        """Takes a training step on such a batch, and returns when its work is done."""


def work(peer: Callable[[Job], Peer], packages: Sequence[str]) -> None:
    """Measures the job that the command line names, and writes what it found.

    Args:
        peer: what is measured.
        packages: whose versions belong to the numbers.
    """
    job = Job(**json.loads(sys.argv[1]))
    built = peer(job)
    step_seconds = time_steps(built.step, [built.batch(*each) for each in job.batches()], job)
    versions = {"python": python_version()} | {name: version(name) for name in packages}
    Path(job.result).write_text(json.dumps({"step_seconds": step_seconds, "versions": versions}), encoding="utf-8")


def time_steps(step: Callable[..., Any], batches: Sequence[tuple[Any, ...]], job: Job) -> list[float]:
    """Seconds of each step on the clock, after the warm-up."""
    taken: list[float] = []
    stop = 0.0
    for index, batch in enumerate(batches):
        started = time.perf_counter()
        step(*batch)
        now = time.perf_counter()
        if index < job.warmup_steps:
            stop = now + job.seconds
            continue
        taken.append(now - started)
        if now > stop and len(taken) >= job.least_steps:
            break
    return taken
