"""Networks and losses that a configuration names: built-in ones, and "module:name" of the user's own code."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from cowrec.errors import UserError
from cowrec.names import nearest_name


def is_import_path(name: str) -> bool:
    """True for "module:name", false for the name of something built in."""
    return ":" in name


def search_also(*folders: Path) -> None:
    sys.path += [path for path in dict.fromkeys(str(folder.absolute()) for folder in folders) if path not in sys.path]


def chosen(key: str, name: str, known: Mapping[str, Any], own: str) -> Any:
    """Finds the object that ``key = "name"`` of a configuration names: one of ``known``, or :func:`imported` code.

    Raises ValueError for an unknown name; ``own`` is the message's hint how code of the user's own is named.
    """
    if is_import_path(name):
        return imported(key, name)
    if name not in known:
        nearest = nearest_name(name, known)
        hint = f'did you mean "{nearest}"? ' if nearest else ""
        raise UserError(f'{key} is "{name}"; {hint}known: {", ".join(known)}; {own}')
    return known[name]


def imported(key: str, name: str) -> Any:
    """Imports the object that ``key = "module:name"`` of a configuration names.

    Raises ValueError: the name has another form, the module or the name in it does not exist, the import fails, or the
    module's file has changed since this process imported it.
    """
    module_name, _, attribute = name.partition(":")
    given = f'{key} = "{name}"'
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)) or module_name.endswith(".py"):
        raise UserError(
            f'{given} must be "MODULE:NAME" with the dotted name of a Python module, without .py, and a name in it, for'
            ' example "my_module:Net"; a folder is given by PYTHONPATH'
        )
    if module_name == "__main__":
        raise UserError(f"{given}: later commands cannot import __main__; put {attribute} into a file")
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{given}: there is no module {error.name} in Python's path, the folder of the TOML file or the current"
                f" folder {Path.cwd()}; add the folder that has {module_name.replace('.', '/')}.py to PYTHONPATH"
            ) from None
        raise UserError(f"{given}: importing it failed{_place(error)}: {type(error).__name__}: {error}") from error
    file = file_of(module)
    if file and file.is_file() and _SOURCES.setdefault(module, file.read_bytes()) != file.read_bytes():
        raise UserError(f"{given}: {file} has changed since this process imported it; restart Python")
    if not hasattr(module, attribute):
        nearest = nearest_name(attribute, (name for name in vars(module) if not name.startswith("_")))
        hint = f"did you mean {nearest}?" if nearest else f"add {attribute} to it, or name another module"
        raise UserError(f"{given}: {file or module_name} has no {attribute}; {hint}")
    return getattr(module, attribute)


_SOURCES: dict[ModuleType, bytes] = {}
"""Contents of each module's file when the module was first used."""


def file_of(module: ModuleType) -> Path | None:
    """File of a module; None for a module that is built into Python or made in memory."""
    file = getattr(module, "__file__", None)
    return Path(file).absolute() if file else None


def require_beside(key: str, name: str, folder: Path) -> None:
    """Raises ValueError if ``folder`` has a file of the imported ``module:name`` and another file was imported."""
    module = name.partition(":")[0]
    beside, file = folder.absolute() / f"{module.replace('.', '/')}.py", file_of(sys.modules[module])
    if file and beside.is_file() and not beside.samefile(file):
        raise UserError(
            f'{key} = "{name}": {file} is imported, but {beside} exists too; rename one of them, or, if both are'
            " used by one Python process, use two"
        )


def tried(given: str, what: str, function: Callable[[], Any], hint: str) -> Any:
    """Calls a function of the user. Raises ValueError, with the line of the user's file, if the function fails."""
    try:
        return function()
    except Exception as error:
        raise UserError(f"{given}: {what} failed{_place(error)}: {type(error).__name__}: {error}; {hint}") from error


def _place(error: Exception) -> str:
    """`` (FILE:LINE)`` of the innermost frame of an error that is in the user's code; empty if none is."""
    others = (str(Path(__file__).parent), inspect.getfile(importlib), "<frozen", "/torch/")
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not any(map(frame.filename.count, others))
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
