"""Timing of a peer's training steps: the job of a worker process, its batches and its clock. Requires numpy only.

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
"""Published values for Criteo at batch size 1024; they do not affect step times."""


@dataclass(frozen=True)
class Job:
    """Job of a worker, given as JSON in its only command-line argument.

    Attributes:
        folder: folder of dense.npy float32 [S, N], ids.npy int32 [F, S] and label.npy float32 [S].
        table_rows: rows of each field's table.
        batch_size: B.
        warmup_steps: steps before timing starts.
        least_steps: minimum timed steps.
        seconds: duration of timing.
        result: file to write: {"step_seconds": [...], "versions": {package: version}}.
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
        """Returns dense features float32 [B, N], ids int64 [F, B] and labels float32 [B] of each step."""
        dense, ids, label = (np.load(Path(self.folder) / f"{name}.npy") for name in ("dense", "ids", "label"))
        parts = [slice(first, first + self.batch_size) for first in range(0, len(label), self.batch_size)]
        return [(dense[part], ids[:, part].astype(np.int64), label[part]) for part in parts]


class Peer(Protocol):
    """Model with its optimizers, built from a job."""

    def batch(self, dense: np.ndarray, ids: np.ndarray, label: np.ndarray) -> tuple[Any, ...]:
        """Converts a batch of `Job.batches` to the peer's own form, before timing starts."""

    @property
    def step(self) -> Callable[..., Any]:
        """Function that takes a training step on such a batch and returns when it is complete."""


def work(peer: Callable[[Job], Peer], packages: Sequence[str]) -> None:
    """Measures the job of the command line and writes its result.

    Args:
        peer: builds the model to measure.
        packages: packages whose versions are recorded.
    """
    job = Job(**json.loads(sys.argv[1]))
    built = peer(job)
    step_seconds = time_steps(built.step, [built.batch(*each) for each in job.batches()], job)
    versions = {"python": python_version()} | {name: version(name) for name in packages}
    Path(job.result).write_text(json.dumps({"step_seconds": step_seconds, "versions": versions}), encoding="utf-8")


def time_steps(step: Callable[..., Any], batches: Sequence[tuple[Any, ...]], job: Job) -> list[float]:
    """Returns the seconds of each timed step, after the warm-up."""
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
