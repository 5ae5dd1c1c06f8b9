"""Matched-set check, run in a subprocess on package metadata in a temporary folder."""

import subprocess
import sys
from pathlib import Path

import pytest

import cowrec.sparse_opt.versions

CHECK = "import runpy, sys; runpy.run_path(sys.argv[1])['require_matched_set']()"


def check_with(folder: Path, versions: str) -> str:
    """Runs the check with these distributions only, "name version" each; returns its last line, empty if it passes."""
    for name, version in (each.split() for each in versions.split(", ")):
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    # -S: no site-packages, so that nothing but the folder on PYTHONPATH holds metadata.
    command = [sys.executable, "-S", "-c", CHECK, cowrec.sparse_opt.versions.__file__]
    child = subprocess.run(command, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False)
    return child.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    "versions",
    [
        "torch 2.13.0, fbgemm-gpu 1.8.0, torchrec 1.8.0",
        "torch 2.13.0+cpu, fbgemm-gpu-cpu 1.8.0, torchrec 1.8.0",
        "torch 2.13.0+cu130, fbgemm-gpu-cpu 1.8.0, torchrec 1.8.0",
        "torch 2.11.0+cu130, fbgemm-gpu 1.6.0, torchrec 1.6.1",
        "torch 2.11.0+cpu, fbgemm-gpu-cpu 1.6.0, torchrec 1.6.0",
    ],
)
def test_matched_sets_pass(tmp_path: Path, versions: str) -> None:
    assert check_with(tmp_path, versions) == ""


REFUSED: dict[str, list[str]] = {
    "torch 2.11.0+cu130, fbgemm-gpu 1.8.0, torchrec 1.6.1": [
        "ImportError: cowrec needs torch, fbgemm and torchrec of one matched set, "
        "found torch 2.11.0+cu130, fbgemm-gpu 1.8.0, torchrec 1.6.1; install one with: "
        "pip install torch==2.11.0 fbgemm-gpu==1.6.0 && pip install --no-deps torchrec==1.6.1"
    ],
    "torch 2.13.0": [
        "fbgemm-gpu (not installed), torchrec (not installed)",
        "pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 tensordict pyre-extensions tqdm"
        " && pip install --no-deps torchrec==1.8.0",
        "(on an NVIDIA GPU fbgemm-gpu instead of fbgemm-gpu-cpu)",
    ],
    "torch 2.12.0, fbgemm-gpu-cpu 1.7.0, torchrec 1.7.0": [
        "found torch 2.12.0, fbgemm-gpu-cpu 1.7.0, torchrec 1.7.0",
        "pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0",
    ],
    "torch 2.13.0, fbgemm-gpu 1.8.0, fbgemm-gpu-cpu 1.8.0, torchrec 1.8.0": [
        "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && pip install torch==2.13.0"
    ],
    "torch 2.13.0+cpu, fbgemm-gpu 1.8.0, torchrec 1.8.0": ["pip uninstall -y", "fbgemm-gpu-cpu==1.8.0"],
}


@pytest.mark.parametrize(("versions", "fragments"), REFUSED.items())
def test_other_sets_are_refused_with_what_to_install(tmp_path: Path, versions: str, fragments: list[str]) -> None:
    message = check_with(tmp_path, versions)
    assert not [each for each in fragments if each not in message], message
