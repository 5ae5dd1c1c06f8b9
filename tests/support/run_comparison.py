"""Comparison of runs on disk, bit by bit, and waiting for what a run does."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer_cases import checkpoint, tensors


def lines(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def wait_for(happened: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def assert_same(one: Path, other: Path) -> None:
    mine, expected = tensors(checkpoint(one)), tensors(checkpoint(other))
    assert mine.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(mine[key], value), key


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other)
