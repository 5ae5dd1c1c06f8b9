"""Times, memory and parts of training steps, and this machine's least time for a step. B samples, U distinct rows."""

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from cowrec.models.linear_relu import linear_relu
from cowrec.sparse_opt.kernels.profiling import EMBEDDING_UPDATE, ROW_GRADIENTS

from ..sharded_model.step import CapturedSteps, Pipeline

UNTIMED_STEPS = {"cpu": 3, "cuda": 10}
"""Number of steps before those that are timed. On CUDA the first ones compile kernels and capture a graph."""
LEAST_STEPS = 5
PARTS = ("input", "lookup", "dense", "row_gradients", "clip_and_embedding_update", "dense_update", "other")
"""Parts of a step: loading and distributing the next batch; looking up rows, catch-up of missed steps included; the
dense network forward and backward, and everything not named here; sums of gradients over a row's ids; L2, clip and
embedding optimizer; the dense optimizer; other work of the host (0 on CUDA, where only the device's time counts)."""
_STEP = "cowrec_step"
# As SequentialSteps and TorchRec's sharded lookups name them; the latter add table names.
_INPUT, _EXCHANGE = ("## load batch",), ("[splits_dist]",)
_DENSE_UPDATE, _PASSES, _LOOKUP = ("## optimizer", "## zero_grad"), ("## forward", "## backward"), ("[lookup]",)
PROFILED_STEPS = 5
_WIDTH, _SAMPLES, _COPIED, _REPEATS, _LAUNCHED = 400, 8192, 1 << 26, 7, 50
_logger = logging.getLogger(__name__)


def speed(batch_size: int, step_seconds: list[float]) -> dict[str, Any]:
    """Computes samples per second and milliseconds per step: medians and quartiles over the steps."""
    low, median, high = np.quantile(step_seconds, (0.25, 0.5, 0.75)).tolist()
    return {
        "samples_per_second": batch_size / median,
        "samples_per_second_quartiles": [batch_size / high, batch_size / low],
        "step_ms": 1e3 * median,
        "steps": len(step_seconds),
    }


def step_values(
    step_ms: float,
    batch_size: int,
    step: Callable[[], object],
    dense: Mapping[str, nn.Parameter],
    traffic: float,
    precision: str,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Yields the roofline and the parts of timed steps, each as soon as it is known.

    Args:
        step_ms: median time of a step.
        batch_size: number of samples of this process in a step, B.
        step: takes a further step, not as a captured graph.
        traffic: number of bytes per sample that the embeddings must move.
    """
    rates, flops = measure_rates(device, precision, batch_size), flops_per_sample(dense)
    # Products and traffic can overlap.
    floor = max(flops / rates["flops_per_second"], traffic / rates["bytes_per_second"])
    roofline = {"flops_per_sample": flops, "bytes_per_sample": traffic, **rates, "step_ms": 1e3 * batch_size * floor}
    yield {"roofline": roofline}
    shares: Mapping[str, float | None] = dict.fromkeys(PARTS, None)
    kernels = None
    try:
        shares, kernels = profile_steps(step, PROFILED_STEPS, device)
    except Exception as error:  # whatever it is, the times are known by now
        _logger.warning("the parts of a step are not known: profiling failed: %s", error)
    parts = {part: share and step_ms * share for part, share in shares.items()}
    yield {"kernels": kernels, "step_parts_ms": parts}


def step_times(
    step: Callable[[int], object], batch_size: int, max_steps: int, seconds: float, device: torch.device
) -> dict[str, Any]:
    """Measures steps after the warm-up, at least :data:`LEAST_STEPS`, until ``max_steps`` or ``seconds`` have passed.

    On CUDA the host enqueues steps ahead, so the device's time from the end of one step to the end of the next counts.
    ``step`` takes the step of a number, from 0; ``batch_size`` counts the samples of all processes.

    Returns the values of :func:`speed`; step_seconds of each step; host_ms, processor time of all threads of this
    process per step; and peak_memory_bytes.
    """
    marks: list[Any] = []
    stop, host, warmup_steps = inf, 0.0, UNTIMED_STEPS[device.type]
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
    times = [_seconds(begin, end) for begin, end in pairwise(marks)]
    of_process = {"host_ms": 1e3 * host, "peak_memory_bytes": memory("VmHWM", device)}
    return {**speed(batch_size, times), "step_seconds": times, **of_process}


def _mark(device: torch.device) -> Any:
    """Takes the time: seconds on CPU, an event on CUDA."""
    on_cuda = device.type == "cuda"
    return torch.cuda.current_stream().record_event(torch.cuda.Event(True)) if on_cuda else time.perf_counter()


def _seconds(begin: Any, end: Any) -> float:
    return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)


def memory(key: str, device: torch.device) -> int:
    """Reads the bytes of this process: VmRSS now, VmHWM at peak. The peak of getrusage would include the parent's."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) if key == "VmRSS" else torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def reset_peak_memory(device: torch.device) -> None:
    """Frees the memory that an earlier measurement left on a GPU, and counts the peak from here on."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def graph_captured(pipeline: Pipeline, device: torch.device) -> bool | None:
    """Tells whether the steps replay a CUDA graph; None on CPU."""
    return isinstance(pipeline, CapturedSteps) and pipeline.captured if device.type == "cuda" else None


def profile_steps(
    step: Callable[[], object], steps: int, device: torch.device
) -> tuple[dict[str, float], float | None]:
    """Profiles ``steps`` further steps, none of which is a captured graph.

    Returns the share of each of :data:`PARTS`, of device time on CUDA and of wall time on CPU; and the kernels and
    copies that a step runs on the device, None on CPU.
    """
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, acc_events=True) as profiled:
        for _ in range(steps):
            with record_function(_STEP):
                step()
        if on_cuda:
            torch.cuda.synchronize(device)
    events = profiled.key_averages()
    # On CUDA TorchRec's ranges are listed twice; the host's entry has the time of the kernels that it launched.
    ranges = [event for event in events if event.device_type == DeviceType.CPU]

    def total(*prefixes: str) -> float:
        found = [event for event in ranges if event.key.startswith(prefixes)]
        return float(sum(event.device_time_total if on_cuda else event.cpu_time_total for event in found))

    parts, launches = dict.fromkeys(PARTS, 0.0), None
    parts["input"] = total(*_INPUT) + total(*_EXCHANGE)
    parts["lookup"], parts["dense_update"] = total(*_LOOKUP), total(*_DENSE_UPDATE)
    parts["row_gradients"] = total(ROW_GRADIENTS)
    # Under a fused optimizer, whose update is part of the backward, there is no range of the update.
    parts["clip_and_embedding_update"] = max(total(EMBEDDING_UPDATE) - parts["row_gradients"], 0.0)
    if on_cuda:  # the backward runs in its own thread, outside the range that waits for it
        kernels = [event for event in events if event.device_type != DeviceType.CPU and not event.is_user_annotation]
        step_time = sum(kernel.self_device_time_total for kernel in kernels)
        if not step_time:
            raise RuntimeError("the profile has no kernels; the driver may keep users from its counters")
        parts["dense"] = step_time - sum(parts.values())
        launches = sum(kernel.count for kernel in kernels) / steps
    else:
        step_time = total(_STEP)
        rows = total(*_EXCHANGE) + parts["lookup"] + parts["row_gradients"] + parts["clip_and_embedding_update"]
        parts["dense"] = total(*_PASSES) - rows
        parts["other"] = step_time - sum(parts.values())
    return {part: time / step_time for part, time in parts.items()}, launches


def measure_rates(device: torch.device, precision: str, batch_size: int) -> dict[str, float]:
    """Measures the rates that this machine reaches, each the best of several times.

    ``precision`` is "float32", "tf32" or "bfloat16". Products have ``batch_size`` samples on CUDA, where small ones do
    not fill the device, and 8,192 on CPU. Source: the roofline model (Williams, Waterman and Patterson 2009).

    Returns:
        flops_per_second of matrix products of the MLP's size; bytes_per_second, read plus written by a copy of 256 MiB.
    """
    samples = batch_size if device.type == "cuda" else _SAMPLES
    x = torch.randn(samples, _WIDTH, device=device)
    weight, bias = torch.randn(_WIDTH, _WIDTH, device=device), torch.zeros(_WIDTH, device=device)
    if precision == "bfloat16":
        x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    source, target = torch.ones(_COPIED, device=device), torch.empty(_COPIED, device=device)
    with torch.no_grad():
        product = _least_seconds(lambda: linear_relu(x, weight, bias), device)
    copying = _least_seconds(lambda: target.copy_(source), device)
    return {
        "flops_per_second": 2 * samples * _WIDTH**2 / product,
        "bytes_per_second": 2 * source.nbytes / copying,
    }


def flops_per_sample(dense: Mapping[str, nn.Parameter]) -> float:
    """Counts operations of the dense kernels: 2 per element forward, 4 for the gradients of inputs and kernels."""
    return 6.0 * sum(kernel.numel() for kernel in dense.values() if kernel.dim() >= 2)


def bytes_per_sample(fields: int, stored_width: int, distinct_rows: float) -> float:
    """Counts the bytes that the embeddings must move, with float32 values and int64 ids.

    Ids are read once; looked-up values and their gradients are written and read; weights and both moments of the
    ``distinct_rows`` (U / B) are read and written.
    """
    return 8.0 * fields + 4 * 4.0 * fields * stored_width + 2 * 3 * 4.0 * stored_width * distinct_rows


def _least_seconds(action: Callable[[], Tensor], device: torch.device) -> float:
    """Times an action; on CUDA many, which the host launches faster than the device runs them."""
    least, times = inf, _LAUNCHED if device.type == "cuda" else 1
    for _ in range(_REPEATS):
        begin = _mark(device)
        for _ in range(times):
            action()
        end = _mark(device)
        synchronize(device)
        least = min(least, _seconds(begin, end) / times)
    return least
