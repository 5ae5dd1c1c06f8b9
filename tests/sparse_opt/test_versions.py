"""The check of versions, in a subprocess on package metadata in a temporary folder; and files that name versions."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import cowrec.sparse_opt.versions
from cowrec.sparse_opt.versions import IMPORTED_BY_TORCHREC, MATCHED_SETS
from cowrec.trainer.__main__ import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
CHECK = "import runpy, sys; runpy.run_path(sys.argv[1])['require_matched_set']()"


def write_metadata(folder: Path, versions: str) -> None:
    """Makes these distributions, "name version" each, the installed ones of a Python with the folder on its path."""
    for name, version in (part.split() for part in versions.split(", ")):
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")


def check_with(folder: Path, versions: str) -> str:
    """Runs the check with these distributions only; returns its last line, empty if it passes."""
    write_metadata(folder, versions)
    # -S: no site-packages, so that nothing but the folder on PYTHONPATH holds metadata.
    command = [sys.executable, "-S", "-c", CHECK, cowrec.sparse_opt.versions.__file__]
    child = subprocess.run(command, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False)
    return child.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    "versions",
    [
        "torch 2.13.0, fbgemm-gpu 1.8.0, torchrec 1.8.0",
        "torch 2.11.0+cu130, fbgemm-gpu 1.6.0, torchrec 1.6.1",
        # Not tested; whether they load is seen where they are imported.
        "torch 2.12.0, fbgemm-gpu-cpu 1.7.0, torchrec 1.7.0",
    ],
)
def test_matched_sets_pass(tmp_path: Path, versions: str) -> None:
    assert check_with(tmp_path, versions) == ""


NEWEST = MATCHED_SETS[0]
INSTALLS_NEWEST = f"pip install torch=={NEWEST.torch} fbgemm-gpu-cpu=={NEWEST.fbgemm}"
REFUSED: dict[str, list[str]] = {
    "torch 2.11.0+cu130, fbgemm-gpu 1.8.0, torchrec 1.6.1": [
        "UnmatchedVersions: cowrec needs torch, fbgemm and torchrec of one matched set, "
        "found torch 2.11.0+cu130, fbgemm-gpu 1.8.0, torchrec 1.6.1; install one with: "
        "pip install torch==2.11.0 fbgemm-gpu==1.6.0 && pip install --no-deps torchrec==1.6.1"
    ],
    "torch 2.13.0": [
        "fbgemm-gpu (not installed), torchrec (not installed)",
        "pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 tensordict pyre-extensions"
        " && pip install --no-deps torchrec==1.8.0",
        "(on an NVIDIA GPU fbgemm-gpu instead of fbgemm-gpu-cpu)",
    ],
    "torch 3.14.0, fbgemm-gpu-cpu 1.9.0, torchrec 1.9.0": [INSTALLS_NEWEST],
    "torch 2.13.0, fbgemm-gpu 1.8.0, fbgemm-gpu-cpu 1.8.0, torchrec 1.8.0": [
        "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && pip install torch==2.13.0"
    ],
    "torch 2.13.0+cpu, fbgemm-gpu 1.8.0, torchrec 1.8.0": ["pip uninstall -y", "fbgemm-gpu-cpu==1.8.0"],
}


@pytest.mark.parametrize(("versions", "fragments"), REFUSED.items())
def test_other_sets_are_refused_with_what_to_install(tmp_path: Path, versions: str, fragments: list[str]) -> None:
    message = check_with(tmp_path, versions)
    assert not [fragment for fragment in fragments if fragment not in message], message


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def series(version: str) -> str:
    return version.rpartition(".")[0]


PYTHONS = sorted({python for matched in MATCHED_SETS for python in matched.pythons.split()})


def test_each_matched_set_has_its_constraints_and_its_part_of_the_matrix() -> None:
    pins = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "scripts").glob("constraints_torch_*")}
    assert sorted(pins) == sorted(f"constraints_torch_{series(matched.torch)}.txt" for matched in MATCHED_SETS)
    for matched in MATCHED_SETS:
        packages = {"fbgemm-gpu-cpu": matched.fbgemm, "fbgemm-gpu": matched.fbgemm, "torch": matched.torch}
        expected = {f"{name}=={version}" for name, version in (packages | {"torchrec": matched.torchrec}).items()}
        assert expected <= set(pins[f"constraints_torch_{series(matched.torch)}.txt"].split("\n"))
    usage = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    matrix = [
        f"{python}-torch-{series(matched.torch)}" for matched in MATCHED_SETS for python in matched.pythons.split()
    ]
    assert re.findall(r"make test-python-(\S+)", usage) == matrix
    workflow = re.findall(r'{python: "([\d.]+)", torch: "([\d.]+)"}', text(".github/workflows/test.yml"))
    assert [f"{python}-torch-{torch}" for python, torch in workflow] == matrix


def test_files_name_the_matched_sets_and_pythons() -> None:
    """README's first commands install the newest set, and name the others; so does the Dockerfile."""
    newest, *others = MATCHED_SETS
    readme, project = text("README.md"), tomllib.loads(text("pyproject.toml"))["project"]
    first = readme[readme.index("    pip install") :].split("\n")
    assert first[0].split("  ")[2] == f"pip install torch=={newest.torch} fbgemm-gpu=={newest.fbgemm}"
    assert f"fbgemm-gpu-cpu=={newest.fbgemm}" in first[0]
    assert f"    pip install --no-deps torchrec=={newest.torchrec}" in first[:3]
    words = " ".join(readme.split())
    for other in others:
        assert f"torch {other.torch} with fbgemm {other.fbgemm} and torchrec {other.torchrec}" in words
    assert f"Python {', '.join(PYTHONS[:-1])} or {PYTHONS[-1]}" in words

    classifiers = [f"Programming Language :: Python :: {python}" for python in PYTHONS]
    assert [classifier for classifier in project["classifiers"] if "Language" in classifier] == classifiers
    assert project["requires-python"] == f">={PYTHONS[0]}"
    assert f"torch>={series(MATCHED_SETS[-1].torch)}" in project["dependencies"]
    assert set(IMPORTED_BY_TORCHREC.split()) <= {re.split("[>=]", package)[0] for package in PACKAGES}
    image = text("Dockerfile")
    assert f"ARG TORCH={series(newest.torch)}\n" in image
    assert re.findall(r"FROM python:([\d.]+)", image)[0] in newest.pythons.split()
