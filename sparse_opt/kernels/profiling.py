"""Ranges of a step in torch's profiler, which cost almost nothing while it is off."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast

EMBEDDING_UPDATE = "embedding_update"
"""Backward of a lookup under EmbeddingAdam."""
ROW_GRADIENTS = "row_gradients"
"""First part of the work on rows, within the update of the embeddings."""
_OFF = nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """Makes a range in torch's profiler; no range while the profiler is off, because torch's own takes 5 us.

    The range is recorded as an operator, because the profiler ascribes kernels to operators: kernels of Triton in a
    range of `record_function` would belong to nothing.
    """
    return _RecordFunctionFast(name) if torch.autograd._profiler_enabled() else _OFF
