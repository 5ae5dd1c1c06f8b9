"""The bytes that a process sends to others."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {"alltoall": "all_to_all", "allreduce": "all_reduce", "allgather": "all_gather"}


class Traffic(TorchDispatchMode):
    """Counts the bytes that this process sends in each kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = func.__name__.partition(".")[0].strip("_").removesuffix("_base")
            inputs = args[0] if "allreduce" in kind else args[1]
            tensors = [each for each in (inputs if isinstance(inputs, list) else [inputs]) if torch.is_tensor(each)]
            self.sent[NAMES.get(kind, kind)] += sum(each.numel() * each.element_size() for each in tensors)
        return func(*args, **(kwargs or {}))
