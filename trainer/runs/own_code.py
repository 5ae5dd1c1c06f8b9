"""The record of a user's own network and loss, in the folder of a run: where their files were, checksums, and copies.

code.json  code/my_module.py
"""

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from cowrec.data_pipeline.files import checksum, replace_file
from cowrec.models.import_path import own_files, search_also
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
        files: SHA-256 of the module's file, and of those that it uses, by their paths in the folder.
    """

    key: str
    name: str
    folder: str
    files: dict[str, str]


def own_code(key: str, name: str) -> OwnCode:
    """Describes the code that a key of a configuration names, which has been imported."""
    folder, files = own_files(name)
    return OwnCode(key, name, str(folder), {str(each.relative_to(folder)): checksum(each) for each in files})


def save_code(run_dir: Path, config: RunConfig) -> None:
    """Writes the record of a run's own code, and copies of its files; nothing without such code."""
    record = [own_code(key, name) for key, name in config.own_code.items()]
    if not record:
        return
    for each in record:
        for file in each.files:
            target = run_dir / COPIES / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(each.folder) / file, target)
    content = json.dumps([dataclasses.asdict(each) for each in record], indent=1) + "\n"
    replace_file(run_dir / RECORD, content.encode())


def load_record(run_dir: Path) -> list[OwnCode]:
    """Reads the record of a run's own code; empty without such code."""
    file = run_dir / RECORD
    return [OwnCode(**each) for each in json.loads(file.read_text(encoding="utf-8"))] if file.is_file() else []


def find_code(record: Iterable[OwnCode], where: Path, *, trusted: bool = True) -> None:
    """Lets recorded code be imported from its folder, where it still is there, or from the current one.

    Args:
        record: of the code.
        where: folder of the run or export that has the record.
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
    for each in record:
        now = own_code(each.key, each.name)
        for file in sorted(each.files.keys() | now.files.keys()):
            if each.files.get(file) != now.files.get(file) and launched_rank() == 0:
                copies = f"; its copy is {where / COPIES / file}" if (where / COPIES / file).is_file() else ""
                print(
                    f"warning: {Path(now.folder) / file} is not as {where} was trained with it ({each.key} ="
                    f' "{each.name}"){copies}',
                    file=sys.stderr,
                )
