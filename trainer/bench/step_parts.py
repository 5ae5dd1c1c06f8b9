"""Time of the parts of a training step, measured by torch's profiler in the ranges that cowrec and TorchRec name."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from cowrec.sparse_opt.clipping.compiled_rows import ROW_GRADIENTS
from cowrec.sparse_opt.optim.update_in_backward import EMBEDDING_UPDATE

PARTS = ("input", "lookup", "dense", "row_gradients", "clip_and_embedding_update", "dense_update", "other")
"""Parts of a step: loading and distributing the next batch; looking up rows, catch-up of missed steps included; the
dense network forward and backward, and everything not named here; sums of gradients over a row's ids; L2, clip and
embedding optimizer, which are one pass; the dense optimizer; other work of the host (0 on CUDA, where only the device's
time counts)."""
_STEP = "cowrec_step"
# As SequentialSteps and TorchRec's sharded lookups name them; the latter add table names.
_INPUT, _EXCHANGE = ("## load batch",), ("[splits_dist]",)
_DENSE_UPDATE, _PASSES, _LOOKUP = ("## optimizer", "## zero_grad"), ("## forward", "## backward"), ("[lookup]",)


@dataclass(frozen=True)
class Profile:
    """Parts of a step.

    Attributes:
        shares: share of each of :data:`PARTS`, sum 1; of device time on CUDA, of wall time on CPU.
        kernels: kernels and copies that a step runs on the device; None on CPU.
    """

    shares: dict[str, float]
    kernels: float | None


def profile_steps(step: Callable[[], object], steps: int, device: torch.device) -> Profile:
    """Profiles ``steps`` further steps, none of which is a captured graph."""
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, acc_events=True) as profiled:
        for _ in range(steps):
            with record_function(_STEP):
                step()
        if on_cuda:
            torch.cuda.synchronize(device)
    events = profiled.key_averages()
    # On CUDA each range is listed twice; the host's entry has the time of the kernels that it launched.
    ranges = [each for each in events if each.device_type == DeviceType.CPU]

    def total(*prefixes: str) -> float:
        found = [each for each in ranges if each.key.startswith(prefixes)]
        return sum(each.device_time_total if on_cuda else each.cpu_time_total for each in found)

    parts, launches = dict.fromkeys(PARTS, 0.0), None
    parts["input"] = total(*_INPUT) + total(*_EXCHANGE)
    parts["lookup"], parts["dense_update"] = total(*_LOOKUP), total(*_DENSE_UPDATE)
    parts["row_gradients"] = total(ROW_GRADIENTS)
    # Under a fused optimizer, whose update is part of the backward, there is no range of the update.
    parts["clip_and_embedding_update"] = max(total(EMBEDDING_UPDATE) - parts["row_gradients"], 0.0)
    if on_cuda:  # the backward runs in its own thread, outside the range that waits for it
        kernels = [each for each in events if each.device_type != DeviceType.CPU and not each.is_user_annotation]
        step_time = sum(each.self_device_time_total for each in kernels)
        parts["dense"] = step_time - sum(parts.values())
        launches = sum(each.count for each in kernels) / steps
    else:
        step_time = total(_STEP)
        rows = total(*_EXCHANGE) + parts["lookup"] + parts["row_gradients"] + parts["clip_and_embedding_update"]
        parts["dense"] = total(*_PASSES) - rows
        parts["other"] = step_time - sum(parts.values())
    return Profile({part: time / step_time for part, time in parts.items()}, launches)
