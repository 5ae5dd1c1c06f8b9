"""What the parts of the GPU check share: packages, the machine's provenance, and the file of results.

Imports neither torch nor numpy, so that a machine without them can be told what is missing.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from sysconfig import get_path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "fbgemm_gpu": "fbgemm-gpu",
    "torchrec": "torchrec",
    # What torchrec imports; tensordict needs pyvers and cloudpickle, pyre_extensions needs typing_inspect.
    "tensordict": "tensordict",
    "torchmetrics": "torchmetrics",
    "pyvers": "pyvers",
    "cloudpickle": "cloudpickle",
    "pyre_extensions": "pyre-extensions",
    "typing_inspect": "typing-inspect",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "tqdm": "tqdm",
}
"""What steps of EmbeddingAdam import, and the packages that have it; a CPU build of fbgemm-gpu will do."""
MLPERF_PACKAGES = {"iopath": "iopath", "portalocker": "portalocker"}
"""What TorchRec's networks import in addition."""
RUN_PACKAGES = {"numba": "numba", "pyarrow": "pyarrow"}
"""What complete runs import in addition."""
TEST_PACKAGES = {
    "pytest": "pytest",
    "hypothesis": "hypothesis",
    **RUN_PACKAGES,
    "safetensors": "safetensors",
    "tomli_w": "tomli-w",
}
"""What the tests import in addition."""
CUDA_BUILD, CPU_BUILD = "fbgemm-gpu", "fbgemm-gpu-cpu"
COMMIT = "COWREC_COMMIT"
"""Environment variable with the commit of the source, for a copy without its repository."""


def missing(packages: Mapping[str, str]) -> list[str]:
    """Returns the packages whose modules cannot be imported."""
    return [package for module, package in packages.items() if find_spec(module) is None]


def missing_compiler() -> str:
    """Returns what Triton lacks to compile the launchers of its kernels, in C, and how to mend it; empty if nothing."""
    chosen = os.environ.get("CC")
    if chosen and which(chosen) is None:
        return f"CC = {chosen!r} is not on the PATH, and Triton compiles with it; set CC to a C compiler"
    if not (chosen or which("gcc") or which("clang")):
        return "there is no C compiler, and Triton needs one; install gcc or clang, or set CC"
    headers = Path(get_path("include"))
    if not (headers / "Python.h").exists():
        return f"Python.h is not in {headers}, and Triton needs it; install the headers of this Python (python3-dev)"
    return ""


def gpu() -> str:
    """Returns the name of the first GPU, as its driver gives it; empty if there is none."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return (output_of(query) or "").partition("\n")[0].strip()


def about(device: str) -> dict[str, Any]:
    """Returns what every line of the results has: the device, its driver, the commit, and versions."""
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,power.limit", "--format=csv"]
    changed = output_of(["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"])
    commit = output_of(["git", "rev-parse", "HEAD"])
    return {
        "device": device,
        "nvidia_smi": output_of(query),
        "git_commit": os.environ.get(COMMIT) or (f"{commit}{'+' if changed else ''}" if commit else None),
        "versions": {"python": sys.version.split()[0], **versions([*PACKAGES.values(), CPU_BUILD, "numba"])},
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def output_of(command: Sequence[str]) -> str | None:
    """Returns what a command prints; None if it is not there, fails, or hangs."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def append(output: Path, line: dict[str, Any]) -> None:
    """Adds a line to the results by a single write, so that no process that is killed leaves a part of one."""
    output.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def lines_of(output: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of the results."""
    if output.exists():
        yield from map(json.loads, output.read_text(encoding="utf-8").splitlines())
