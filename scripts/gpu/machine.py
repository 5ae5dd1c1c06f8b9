"""What this machine has for the GPU check: packages, GPU, driver and versions."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "torch": "torch",
    "fbgemm_gpu": "fbgemm-gpu",
    "torchrec": "torchrec",
    # What torchrec imports; tensordict needs pyvers and cloudpickle, pyre_extensions needs typing_inspect.
    "tensordict": "tensordict",
    "pyvers": "pyvers",
    "cloudpickle": "cloudpickle",
    "pyre_extensions": "pyre-extensions",
    "typing_inspect": "typing-inspect",
    "numpy": "numpy",
    "numba": "numba",
    "pyarrow": "pyarrow",
    "pydantic": "pydantic",
    "safetensors": "safetensors",
    "tomli_w": "tomli-w",
    "tqdm": "tqdm",
}
"""What the benchmark imports, and the packages that have it."""
TEST_PACKAGES = {"pytest": "pytest", "hypothesis": "hypothesis"}
"""What the tests import in addition."""


def reason_not_to_start(rehearse: bool) -> str:
    """Returns what keeps every part from running and how to mend it; empty if nothing does."""
    if find_spec("torch") is None:
        return f"torch is missing in {sys.executable}; {how_to_install(PACKAGES)}"
    import torch

    if not rehearse and torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPU and sees no CUDA device; {how_to_install(PACKAGES)}"
    if not rehearse and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device; run it on a machine with a GPU and a driver"
    return ""


def absent(packages: dict[str, str]) -> dict[str, str]:
    """Returns the packages whose modules cannot be imported."""
    return {module: package for module, package in packages.items() if find_spec(module) is None}


def how_to_install(packages: dict[str, str]) -> str:
    """Returns the commands that install packages; with its dependencies torchrec would replace fbgemm-gpu."""
    pip = f"{sys.executable} -m pip install -c scripts/constraints.txt -c scripts/constraints_torch_2.13.txt"
    others = [name for name in packages.values() if name != "torchrec"]
    commands = [f"{pip} {' '.join(others)}"] if others else []
    commands += [f"{pip} --no-deps torchrec"] if "torchrec" in packages else []
    return f"install with: make setup, or: {' && '.join(commands)}"


def about(rehearse: bool) -> dict[str, Any]:
    """Returns the device, its driver, versions and the commit."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv"]
    return {
        "device": "rehearsal" if rehearse else torch.cuda.get_device_name(0),
        "compute_capability": None if rehearse else torch.cuda.get_device_capability(0),
        "nvidia_smi": output_of(query),
        "cuda": torch.version.cuda,
        "versions": {"python": sys.version.split()[0], **versions([*PACKAGES.values(), "fbgemm-gpu-cpu"])},
        "git_commit": output_of(["git", "rev-parse", "HEAD"]),
        "git_changes": output_of(["git", "status", "--porcelain", "--untracked-files=no"]),
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
