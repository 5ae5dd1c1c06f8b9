"""The record of a user's own network and loss, in the folder of a run: where their files were, checksums, and copies.

code.json  code/my_module.py
"""

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from cowrec.data_pipeline.files import checksum, replace_file
from cowrec.models.own_code import file_of, search_also
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runtime.environment import launched_rank

RECORD, COPIES = "code.json", "code"


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
    folder = _folder(name)
    top = name.partition(":")[0].partition(".")[0]
    root = folder / top if (folder / top).is_dir() else folder
    files = {file for module in list(sys.modules.values()) if (file := file_of(module)) and file.is_file()}
    own = sorted(file for file in files if (root in file.parents if root != folder else file.parent == folder))
    return OwnCode(key, name, str(folder), {str(file.relative_to(folder)): checksum(file) for file in own})


def _folder(name: str) -> Path:
    """The folder in which Python finds the module of "module:name", once imported."""
    module = name.partition(":")[0]
    file = file_of(sys.modules[module])
    return Path.cwd() if file is None else file.parents[module.count(".") + (file.name == "__init__.py")]


def save_code(run_dir: Path, config: RunConfig) -> None:
    """Writes the record of a run's own code, and copies of its files; nothing without such code."""
    record = [own_code(key, name) for key, name in config.own_code.items()]
    for each in record:
        for file in each.files:
            target = run_dir / COPIES / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(each.folder) / file, target)
    if record:
        replace_file(run_dir / RECORD, (json.dumps([asdict(each) for each in record], indent=1) + "\n").encode())


def load_record(run_dir: Path) -> list[OwnCode]:
    """Reads the record of a run's own code; empty without such code."""
    file = run_dir / RECORD
    return [OwnCode(**each) for each in json.loads(file.read_text(encoding="utf-8"))] if file.is_file() else []


def find_code(record: Iterable[OwnCode], where: Path, *, trusted: bool = True) -> None:
    """Lets recorded code be imported from its folder, where it still is there, or from the current one.

    Args:
        trusted: False if the record may come from others, so that its folder must not be searched.

    Raises:
        ValueError: a module is in neither, nor on Python's path.
    """
    for each in record:
        search_also(*([Path(each.folder)] if trusted else []), Path.cwd())
        module = each.name.partition(":")[0]
        if find_spec(module.partition(".")[0]) is None:
            copies, there = where / COPIES, f"{each.folder}, where it was, in " if trusted else ""
            remedy = f"set PYTHONPATH={copies}, which has a copy" if copies.is_dir() else "add its folder to PYTHONPATH"
            raise ValueError(
                f'{where} was trained with {each.key} = "{each.name}", but there is no module {module} in {there}the'
                f" current folder or on Python's path; put it there, or {remedy}"
            )


def warn_if_changed(record: Iterable[OwnCode], where: Path) -> None:
    """Warns of each file of recorded code, which has been imported now, that differs from the one in the record."""
    for each in record if launched_rank() == 0 else ():
        for name, recorded in each.files.items():
            file, copy = _folder(each.name) / name, where / COPIES / name
            if not file.is_file() or checksum(file) != recorded:
                print(
                    f"warning: {file} is not as {where} was trained with it ({each.key} ="
                    f' "{each.name}"){f"; its copy is {copy}" if copy.is_file() else ""}',
                    file=sys.stderr,
                )
