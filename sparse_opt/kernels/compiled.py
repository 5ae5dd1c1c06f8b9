"""Compilation of kernels by numba, kept on disk while the sources of all kernels stay the same."""

import hashlib
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core import event

_logger = logging.getLogger(__name__)


def compiled(**options: Any) -> Callable[[Any], Any]:
    """``numba.njit`` without the GIL, whose result is kept on disk.

    numba compiles a kernel again when its own file has changed, but not when another file with functions or constants
    of the kernel has: after ``git pull`` in an editable installation, rows would be updated by the old rule. Results
    for other sources are therefore removed first.
    """

    def decorate(function: Any) -> Any:
        _announce_compilation()
        kernel = numba.njit(nogil=True, cache=True, **options)(function)
        if kernel is not function:  # which it is under NUMBA_DISABLE_JIT
            _remove_stale(Path(kernel.stats.cache_path))
        return kernel

    return decorate


class _Announcement(event.Listener):
    """Says once that kernels are being compiled, because the process would seem to hang."""

    def __init__(self) -> None:
        self._is_made = False

    def on_start(self, started: event.Event) -> None:
        if not self._is_made and started.data["dispatcher"].py_func.__module__.startswith("cowrec."):
            self._is_made = True
            _logger.warning("compiling kernels for this machine's CPU: about half a minute, once for each installation")

    def on_end(self, _: event.Event) -> None:
        pass


@cache
def _announce_compilation() -> None:
    event.register("numba:compile", _Announcement())  # not of kernels that are on disk


@cache
def _remove_stale(folder: Path) -> None:
    stamp, sources = folder / "sources.sha256", _sources()
    if not stamp.exists() or stamp.read_text() != sources:
        for kept in folder.glob("*.nb[ic]"):
            kept.unlink(missing_ok=True)  # another process may remove it too
        stamp.write_text(sources)


@cache
def _sources() -> str:
    """Digest of the files from which kernels take functions, constants and layouts."""
    root = Path(__file__).resolve().parents[1]
    folders = root / "algorithm", root / "kernels", root / "id_tables" / "kernels"
    return hashlib.sha256(
        b"".join(file.read_bytes() for folder in folders for file in sorted(folder.glob("*.py")))
    ).hexdigest()
