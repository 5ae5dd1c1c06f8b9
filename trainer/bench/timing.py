"""Time and memory of steps, on CPU and CUDA."""

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import torch

from cowrec.trainer.training.pipeline import CapturedSteps, Pipeline

WARMUP_STEPS = {"cpu": 3, "cuda": 10}
"""Steps before those that are timed. On CUDA the first ones compile kernels and capture a graph."""
LEAST_STEPS = 5
"""Least steps that are timed."""


def step_times(
    step: Callable[[int], object], warmup_steps: int, max_steps: int, seconds: float, device: torch.device
) -> tuple[list[float], float]:
    """Takes steps, at least :data:`LEAST_STEPS` after the warm-up.

    On CUDA the host enqueues steps ahead; the device's time from the end of one step to the end of the next counts.

    Args:
        step: takes the step of a number, from 0.
        warmup_steps: steps before those that are timed.
        max_steps: most steps to time.
        seconds: time after which no further step is timed.

    Returns:
        Seconds of each step; processor seconds per step of this process, of all its threads together.
    """
    marks: list[Any] = []
    stop, host = inf, 0.0
    for index in range(warmup_steps + max_steps):
        step(index)
        if index + 1 == warmup_steps:
            synchronize(device)
            marks, stop, host = [], time.perf_counter() + seconds, time.process_time()
        if index + 1 >= warmup_steps:
            marks.append(_mark(device))
        if time.perf_counter() > stop and len(marks) > LEAST_STEPS:
            break
    host = (time.process_time() - host) / (len(marks) - 1)
    synchronize(device)
    if device.type == "cuda":
        return [one.elapsed_time(other) / 1e3 for one, other in pairwise(marks)], host
    return [other - one for one, other in pairwise(marks)], host


def _mark(device: torch.device) -> Any:
    """The present time: a number on CPU, an event on CUDA."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def memory(key: str, device: torch.device) -> int:
    """Bytes of this process: VmRSS at present, VmHWM at peak. (getrusage's peak includes that of the parent.)"""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) if key == "VmRSS" else torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def reset_peak_memory(device: torch.device) -> None:
    """Frees what an earlier measurement of this process left on a GPU, and counts the peak from here on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graph_captured(pipeline: Pipeline, device: torch.device) -> bool | None:
    """Whether the steps replay a CUDA graph; None on CPU."""
    return isinstance(pipeline, CapturedSteps) and pipeline.captured if device.type == "cuda" else None
