"""The record `code.json` of a user's own network and loss, in the folder of a run: the files and their checksums."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from cowrec.files import checksum, replace_file
from cowrec.models.own_code import file_of, search_also

from ..config.run import RunConfig
from ..runtime.environment import launched_rank

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
