"""The Dockerfile against the project: its Python, matched set, extras, sources and entry point exist."""

import re
import tomllib
from pathlib import Path
from typing import Any

from cowrec.sparse_opt.versions import CPU_BUILD, CUDA_BUILD, MATCHED_SETS

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def argument(name: str) -> str:
    (value,) = re.findall(rf"^ARG {name}=(.+)$", TEXT, re.MULTILINE)
    return str(value)


def test_its_versions_and_extras_are_the_project_s() -> None:
    settings = project()["project"]
    (python,) = re.findall(r"^FROM python:(3\.\d+)-", TEXT, re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in settings["classifiers"]
    assert MATCHED_SETS[0].torch.startswith(argument("TORCH") + ".")
    assert set(argument("EXTRAS").split(",")) <= settings["optional-dependencies"].keys()
    (entry,) = re.findall(r'^ENTRYPOINT \["(\w+)"\]$', TEXT, re.MULTILINE)
    assert entry in settings["scripts"]


def test_each_device_has_its_build_of_fbgemm() -> None:
    stages = dict(re.findall(r"^FROM base AS (\w+)\n(.*?)\n\n", TEXT, re.MULTILINE | re.DOTALL))
    builds = {name: re.findall(r"--no-deps ([\w-]+) torchrec$", stage, re.MULTILINE) for name, stage in stages.items()}
    assert builds == {"cpu": [CPU_BUILD], "cuda": [CUDA_BUILD]}
    assert argument("DEVICE") in builds


def test_it_installs_all_packages_from_what_docker_is_sent() -> None:
    setup = project()
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert lines[0] == "*"  # nothing but what is named
    sent = {file for line in lines if line.startswith("!") for file in ROOT.glob(line[1:])}
    needed = [*setup["tool"]["setuptools"]["package-dir"].values(), setup["project"]["readme"], "pyproject.toml"]
    assert sent >= {ROOT / name for name in [*needed, *setup["project"]["license-files"]]}
    (pins,) = re.findall(r"^COPY (\S+) /pins/$", TEXT, re.MULTILINE)
    assert sent >= {*ROOT.glob(pins)}
    named = {
        ROOT / "scripts" / name.replace("${TORCH}", argument("TORCH")) for name in re.findall(r"/pins/(\S+\.txt)", TEXT)
    }
    assert len(named) == 2
    assert sent >= named


def test_it_runs_without_rights() -> None:
    assert int(re.findall(r"^USER (\d+)$", TEXT, re.MULTILINE)[-1]) > 0
