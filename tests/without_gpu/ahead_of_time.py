"""Ahead-of-time compilation of Triton kernels through the functions that launch them, without a GPU or its driver."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_HAS_GPU = torch.cuda.is_available()


@dataclass(frozen=True)
class Launch:
    """A launch that compiled its kernel and did not run it."""

    name: str  # of the kernel
    arguments: tuple[Any, ...]  # as launched, without the compile-time constants
    constants: dict[str, Any]  # compile-time constants and options
    kernel: Any  # Triton's compiled kernel; equal specialisations share one

    @property
    def ptx(self) -> str:
        return str(self.kernel.asm["ptx"])

    def __str__(self) -> str:
        return f"{self.name} {self.constants}"


def _driver(architecture: int) -> SimpleNamespace:
    """The part of a CUDA driver that a compilation asks for.

    The number of a device stands for its architecture, because Triton caches compiled kernels by device.
    """
    return SimpleNamespace(
        get_current_device=lambda: architecture,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
    )


@contextmanager
def recorded_launches(architecture: int = 90) -> Iterator[list[Launch]]:
    """Compiles every kernel launched within the context for an architecture, and appends each launch to the list."""
    launches: list[Launch] = []
    compile_or_run = JITFunction.run

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
        kernel = compile_or_run(self, *arguments, grid=grid, warmup=True, **constants)
        launches.append(Launch(self.fn.__name__, arguments, constants, kernel))
        return kernel

    driver.set_active(_driver(architecture))
    try:
        with patch.object(JITFunction, "run", record):
            yield launches
    finally:
        if _HAS_GPU:
            driver.reset_active()
