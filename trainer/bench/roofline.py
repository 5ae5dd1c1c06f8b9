"""The least time of a step on this machine, from its arithmetic and traffic and the machine's measured rates.

Source: the roofline model (Williams, Waterman and Patterson 2009). B samples, U distinct rows of a batch.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cowrec.models.linear_relu import linear_relu

_WIDTH, _SAMPLES, _COPIED = 400, 8192, 1 << 26
_REPEATS = 7


@dataclass(frozen=True)
class Rates:
    """Rates that this machine reached, each the best of several measurements.

    Attributes:
        flops_per_second: of matrix products of the MLP's size in the run's precision.
        bytes_per_second: bytes read plus bytes written while 256 MiB are copied.
    """

    flops_per_second: float
    bytes_per_second: float


def measure_rates(device: torch.device, precision: str) -> Rates:
    """Rates of ``device`` for products in ``precision`` ("float32", "tf32" or "bfloat16"), with torch's threads."""
    x = torch.randn(_SAMPLES, _WIDTH, device=device)
    weight, bias = torch.randn(_WIDTH, _WIDTH, device=device), torch.zeros(_WIDTH, device=device)
    if precision == "bfloat16":
        x, weight, bias = x.bfloat16(), weight.bfloat16(), bias.bfloat16()
    source, target = torch.ones(_COPIED, device=device), torch.empty(_COPIED, device=device)
    with torch.no_grad():
        product = _least_seconds(lambda: linear_relu(x, weight, bias), device)
    copying = _least_seconds(lambda: target.copy_(source), device)
    return Rates(2 * _SAMPLES * _WIDTH**2 / product, 2 * source.nbytes / copying)


def flops_per_sample(dense: Mapping[str, nn.Parameter]) -> float:
    """Operations of the dense kernels: 2 per element forward, 2 for the inputs' and 2 for the kernels' gradients."""
    return 6.0 * sum(each.numel() for each in dense.values() if each.dim() >= 2)


def bytes_per_sample(fields: int, stored_width: int, distinct_rows: float) -> float:
    """Bytes that the embeddings must move, with float32 values and int64 ids.

    Ids are read once; looked-up values and their gradients are written and read; weights and both moments of the
    ``distinct_rows`` (U / B) are read and written.
    """
    return 8.0 * fields + 4 * 4.0 * fields * stored_width + 2 * 3 * 4.0 * stored_width * distinct_rows


def floor_seconds(rates: Rates, flops: float, traffic: float) -> float:
    """The longer of the times for ``flops`` operations and ``traffic`` bytes, since the two can overlap."""
    return max(flops / rates.flops_per_second, traffic / rates.bytes_per_second)


def _least_seconds(action: Callable[[], Tensor], device: torch.device) -> float:
    least = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        least = min(least, time.perf_counter() - started)
    return least
