"""Where a run's numbers come from: versions, hardware and source revision, and the user's own network and loss.

The record `code.json` in the folder of a run lists the files of own code with their checksums.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from cowrec.files import checksum, replace_file
from cowrec.models.own_code import file_of, search_also

from ..config.run import RunConfig
from ..runtime.environment import launched_rank


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


RECORD = "code.json"


@dataclass(frozen=True)
class OwnCode:
    """A network or loss of the user's own.

    Attributes:
        key: of the configuration that names it.
        name: "module:name".
        folder: in which Python found the module.
        files: SHA-256 of the module's file, and of those beside it that are imported, by their paths in the folder: of
            a package those of the package, of a module those in its folder.
    """

    key: str
    name: str
    folder: str
    files: dict[str, str]


def own_code(key: str, name: str) -> OwnCode:
    """Describes the code that a key of a configuration names, which has been imported."""
    folder, top = _folder(name), _folder(name) / name.partition(":")[0].partition(".")[0]
    modules = [module for name, module in list(sys.modules.items()) if name not in ("__main__", "__mp_main__")]
    files = {file for module in modules if (file := file_of(module)) and file.is_file()}
    own = sorted(file for file in files if (top in file.parents if top.is_dir() else file.parent == folder))
    return OwnCode(key, name, str(folder), {str(file.relative_to(folder)): checksum(file) for file in own})


def _folder(name: str) -> Path:
    """The folder in which Python finds the module of "module:name", once imported."""
    module = name.partition(":")[0]
    file = file_of(sys.modules[module])
    return Path.cwd() if file is None else file.parents[module.count(".") + (file.name == "__init__.py")]


def save_code(run_dir: Path, config: RunConfig) -> None:
    """Writes the record of a run's own code; nothing without such code."""
    record = [asdict(own_code(key, name)) for key, name in config.own_code.items()]
    if record:
        replace_file(run_dir / RECORD, (json.dumps(record, indent=1) + "\n").encode())


def load_code(run_dir: Path) -> list[OwnCode]:
    """Reads the record of a run's own code, empty without such code, and lets Python find it where it was."""
    file = run_dir / RECORD
    record = [OwnCode(**each) for each in json.loads(file.read_text(encoding="utf-8"))] if file.is_file() else []
    search_also(*(Path(each.folder) for each in record))
    return record


def changes(record: Iterable[OwnCode], where: Path) -> list[str]:
    """Says of each file of recorded code, which has been imported now, that differs from that in the record of a run.

    Args:
        where: folder of the run.
    """
    files = {_folder(each.name) / name: (each, name) for each in record for name in each.files}
    return [
        f'{file} is not as {where} was trained with it ({each.key} = "{each.name}")'
        for file, (each, name) in files.items()
        if not file.is_file() or checksum(file) != each.files[name]
    ]


def warn_if_changed(record: Iterable[OwnCode], where: Path) -> None:
    """Warns once of each change of recorded code; see :func:`changes`."""
    for change in changes(record, where) if launched_rank() == 0 else ():
        print(f"warning: {change}", file=sys.stderr)
