"""Bit-exact comparison of runs on disk, and waiting for a run's progress."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer_cases import checkpoint, tensors


def lines(run_dir: Path) -> int:
    """Number of lines of a run's metrics."""
    file = run_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def wait_for(happened: Callable[[], bool], seconds: float = 120.0) -> None:
    """Waits until a condition holds; fails after a time limit."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def assert_same(one: Path, other: Path) -> None:
    """Compares the newest checkpoints of two runs."""
    found, expected = tensors(checkpoint(one)), tensors(checkpoint(other))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def same(one: Any, other: Any) -> bool:
    """True if nested dictionaries of tensors are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other)
