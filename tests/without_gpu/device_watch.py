"""A record of the operators that a piece of code runs on CUDA tensors, real or fake, and of what they would cost."""

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PACKAGES = ("cowrec.", "torchrec.")
# Operators that return memory without writing to its elements and whose schema does not mark them as views.
_NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "set_"}
_NO_KERNEL |= {"is_pinned", "device"}
# Operators that read the value of a CPU scalar on the host and pass it to their kernel.
_TAKES_CPU_SCALARS = {"fill_"}


@dataclass(frozen=True)
class Call:
    """One operator."""

    operator: str  # its name, without the overload's
    site: str  # innermost function of cowrec or TorchRec that led to it, as ``module.function``
    devices: tuple[str, ...]  # kinds of devices of its tensors, arguments and results
    numbers: tuple[float, ...]  # its arguments that are numbers; the host passes them at every call
    shapes: tuple[tuple[int, ...], ...]  # of its tensors
    launches: bool  # whether it starts work on the device

    @property
    def place(self) -> str:
        return f"{self.operator} in {self.site}"


class ReadWatch(TorchDispatchMode):
    """Records which memory operators read that was there before, as long as it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[str, StorageWeakRef]] = []  # places of operators, and the storages that they read
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.add(f"{func.overloadpacket.__name__} in {site()}", (args, kwargs))
        result = func(*args, **(kwargs or {}))
        given = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self._made |= {_storage(leaf)._cdata for leaf in tree_leaves(result) if isinstance(leaf, Tensor)} - given
        return result

    def add(self, place: str, arguments: Any) -> None:
        """Records that an operator or kernel reads its arguments."""
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, Tensor) and leaf.is_cuda and (storage := _storage(leaf))._cdata not in self._made:
                self.read.append((place, StorageWeakRef(storage)))


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


class DeviceWatch(TorchDispatchMode):
    """Records every operator below autograd while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []  # in order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = tree_leaves((args, kwargs))
        tensors = [tensor for tensor in (*arguments, *tree_leaves(result)) if isinstance(tensor, Tensor)]
        name = func.overloadpacket.__name__
        met = [tensor for tensor in tensors if tensor.dim() or tensor.is_cuda or name not in _TAKES_CPU_SCALARS]
        devices = tuple(sorted({tensor.device.type for tensor in met}))
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        launches = "cuda" in devices and name not in _NO_KERNEL and not _is_view(func)
        self.calls.append(Call(name, site(), devices, numbers(arguments), shapes, launches))
        return result


def numbers(arguments: Any) -> tuple[float, ...]:
    """The numbers among arguments, nested ones too; flags are not numbers."""
    leaves = tree_leaves(arguments)
    return tuple(leaf for leaf in leaves if isinstance(leaf, int | float) and not isinstance(leaf, bool))


def site(outside: str = "") -> str:
    """Innermost function of cowrec or TorchRec that is running, as ``module.function``, outside of some package."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_PACKAGES) and not (outside and module.startswith(outside)):
            return f"{module}.{frame.f_code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
    return "elsewhere"


def _is_view(func: Any) -> bool:
    """True if an operator's results share its arguments' memory without writing to it."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
