"""Provenance of a run's numbers: versions of libraries, hardware and source revision."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def environment(device: torch.device) -> dict[str, Any]:
    """Collects versions, hardware and source revision, which are stored with every measurement."""
    return {
        "versions": {"python": platform.python_version(), **library_versions()},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "git_commit": _git_commit(),
    }


def library_versions() -> dict[str, str]:
    """Versions of cowrec and of what its results depend on, as far as they are installed."""
    found = {}
    for name in ("cowrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "pyarrow", "numba"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """Commit of the running source, with "+" if files differ from it; None outside a checkout of it.

    An environment inside a user's own repository is no checkout: its commit says nothing about this source.
    """

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", *arguments]  # whose lock would outlast a kill
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
