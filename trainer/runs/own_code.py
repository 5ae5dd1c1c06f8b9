"""The record of a user's own network and loss, in the folder of a run: where their files were, checksums, and copies.

code.json  code/my_module.py
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from cowrec.errors import UserError
from cowrec.files import checksum, replace_file
from cowrec.models.own_code import file_of, search_also

from ..config.run import RunConfig
from ..runtime.environment import launched_rank

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
    """Writes the record of a run's own code, and copies of its files; nothing without such code."""
    record = [own_code(key, name) for key, name in config.own_code.items()]
    for each in record:
        for file in each.files:
            target = run_dir / COPIES / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((Path(each.folder) / file).read_bytes())  # a resumed run may have imported the copy
    if record:
        replace_file(run_dir / RECORD, (json.dumps([asdict(each) for each in record], indent=1) + "\n").encode())


def load_code(run_dir: Path) -> list[OwnCode]:
    """Reads the record of a run's own code, empty without such code, and lets Python find it.

    Python's path has the folders where the code was, then the copies in the run's folder.
    """
    file = run_dir / RECORD
    record = [OwnCode(**each) for each in json.loads(file.read_text(encoding="utf-8"))] if file.is_file() else []
    search_also(*(Path(each.folder) for each in record), *[run_dir / COPIES] * bool(record))
    return record


def require_not_imported(record: Iterable[OwnCode], where: Path) -> None:
    """Raises ValueError if a module of recorded code has been imported already, from another file of other contents.

    Python imports a module of one name once: another run's, or another experiment's, would be used in its place.
    """
    for each in record:
        module = each.name.partition(":")[0]
        file, name = file_of(sys.modules[module]) if module in sys.modules else None, _module_file(each, module)
        if file is None or name is None or (file.is_file() and checksum(file) == each.files[name]):
            continue
        places = [folder / name for folder in (Path(each.folder), where / COPIES)]
        there = [place for place in places if place.is_file()]
        if there and not any(file.exists() and place.samefile(file) for place in there):
            raise UserError(
                f'{each.key} = "{each.name}": {file} is imported, but {where} was trained with {there[0]}; use another'
                " Python process for it, or give the modules different names"
            )


def _module_file(code: OwnCode, module: str) -> str | None:
    """The file of a module among those that were recorded."""
    stem = module.replace(".", "/")
    return next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if name in code.files), None)


def changes(record: Iterable[OwnCode], where: Path) -> list[str]:
    """Says of each file of recorded code, which has been imported now, that differs from that in the record of a run.

    Args:
        where: folder of the run.
    """
    files = {_folder(each.name) / name: (each, name) for each in record for name in each.files}
    found = []
    for file, (each, name) in files.items():
        if not file.is_file() or checksum(file) != each.files[name]:
            copy = where / COPIES / name
            kept = f"; its copy is {copy}" if copy.is_file() else ""
            found.append(f'{file} is not as {where} was trained with it ({each.key} = "{each.name}"){kept}')
    return found


def warn_if_changed(record: Iterable[OwnCode], where: Path) -> None:
    """Warns once of each change of recorded code; see :func:`changes`."""
    for change in changes(record, where) if launched_rank() == 0 else ():
        print(f"warning: {change}", file=sys.stderr)
