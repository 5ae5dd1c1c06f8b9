"""Ahead-of-time compilation of Triton kernels through the functions that launch them, without a GPU or its driver."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_HAS_GPU = torch.cuda.is_available()
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Launch:
    """A launch that compiled its kernel and did not run it.

    Attributes:
        name: of the kernel.
        arguments: as launched, without the compile-time constants.
        constants: compile-time constants and options.
        kernel: Triton's compiled kernel; equal specialisations share one.
    """

    name: str
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    kernel: Any

    @property
    def ptx(self) -> str:
        return str(self.kernel.asm["ptx"])

    def __str__(self) -> str:
        return f"{self.name} {self.constants}"


@dataclass(frozen=True)
class Resources:
    """What a thread of a compiled kernel occupies.

    Attributes:
        registers: 32-bit registers.
        stack, local: bytes of local memory; registers that did not fit are spilled there.
    """

    registers: int
    stack: int
    local: int


class _Driver:
    """The part of a CUDA driver that a compilation asks for.

    The number of a device stands for its architecture, because Triton caches compiled kernels by device.
    """

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_device(self) -> int:
        return self._architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)


@contextmanager
def recorded_launches(architecture: int = 90) -> Iterator[list[Launch]]:
    """Compiles every kernel launched within the context for an architecture, and appends each launch to the list."""
    launches: list[Launch] = []
    compile_or_run = JITFunction.run

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        kernel = compile_or_run(self, *arguments, grid=grid, warmup=True, **constants)
        launches.append(Launch(self.fn.__name__, arguments, constants, kernel))
        return kernel

    driver.set_active(_Driver(architecture))
    try:
        with patch.object(JITFunction, "run", record):
            yield launches
    finally:
        if _HAS_GPU:
            driver.reset_active()


def resources(kernel: Any) -> Resources:
    """Registers and local memory of a compiled kernel, as CUDA's cuobjdump reads them from its binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = _RESOURCES.search(listed)
    assert found, f"cuobjdump lists no resources: {listed}"
    registers, stack, _, local = map(int, found.groups())
    return Resources(registers, stack, local)
