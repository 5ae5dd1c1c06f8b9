"""Ranges of torch's profiler that cost almost nothing while it is off."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

_OFF = nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range of that name in torch's profiler; none while it is off, where torch's own would take 5 us each."""
    return record_function(name) if torch.autograd._profiler_enabled() else _OFF
