"""Code of the user's own, which a configuration names as "module:name": finding it, and the files it consists of."""

import hashlib
import importlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any


def is_import_path(name: str) -> bool:
    """True for "module:name", false for the name of something built in."""
    return ":" in name


def search_also(*folders: Path) -> None:
    """Appends folders to Python's path, of this process and later subprocesses."""
    for folder in map(str, (each.absolute() for each in folders)):
        if folder not in sys.path:
            sys.path.append(folder)


def chosen(key: str, name: str, known: Mapping[str, Any], own: str) -> Any:
    """What ``key = "name"`` of a configuration means: one of ``known``, or the user's own; see :func:`imported`.

    Args:
        key: of the configuration.
        name: its value.
        known: what is built in, by name.
        own: how one's own is written, for the message.

    Raises:
        ValueError: neither is called so.
    """
    if is_import_path(name):
        return imported(key, name)
    if name not in known:
        nearest = get_close_matches(name, known, n=1)
        hint = f'did you mean "{nearest[0]}"? ' if nearest else ""
        raise ValueError(f'{key} is "{name}"; {hint}known: {", ".join(known)}; {own}')
    return known[name]


def imported(key: str, name: str) -> Any:
    """Imports the object that ``key = "module:name"`` of a configuration means.

    Raises:
        ValueError: not of this form, no such module or name in it, an error while it is imported, or a file that has
            changed since then.
    """
    module_name, attribute = _parts(key, name)
    given = f'{key} = "{name}"'
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"{given}: {_where(error, module_name)}imports {error.name}, which is missing") from error
        raise ValueError(
            f"{given}: there is no module {error.name} in Python's path, the folder of the TOML file or the current"
            f" folder {Path.cwd()}; add the folder that has {error.name.replace('.', '/')}.py to PYTHONPATH"
        ) from None
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{given}: importing it failed: {_where(error, module_name)}{problem}") from error
    _require_unchanged(given, module)
    if not hasattr(module, attribute):
        known = [each for each in vars(module) if not each.startswith("_")]
        nearest = get_close_matches(attribute, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"add {attribute} to it, or name another module"
        raise ValueError(f"{given}: {_file(module) or module_name} has no {attribute}; {hint}")
    return getattr(module, attribute)


def require_beside(key: str, name: str, folder: Path) -> None:
    """Raises ValueError if ``module:name``, once imported, is another file than the one in ``folder``."""
    module_name, _ = _parts(key, name)
    inside = folder.absolute().joinpath(*module_name.split("."))
    file = _file(sys.modules[module_name])
    for beside in (inside.with_suffix(".py"), inside / "__init__.py"):
        if beside.is_file() and file is not None and not beside.samefile(file):
            raise ValueError(
                f'{key} = "{name}": {file} is imported, but {beside} exists too; rename one of them, or, if both are'
                " used by one Python process, use two"
            )


def own_files(name: str) -> tuple[Path, list[Path]]:
    """Files of the code that "module:name", once imported, consists of.

    Returns:
        The folder in which Python finds the module, and the files below it of the module and of those modules whose
        names, classes or functions it uses directly or indirectly. Installed packages count as a whole: of other
        packages in their folder nothing is listed.
    """
    module_name = name.partition(":")[0]
    module = sys.modules[module_name]
    file = _file(module)
    if file is None:  # built into Python, or made in memory
        return Path.cwd(), []
    depth = module_name.count(".") + (file.name == "__init__.py")
    root = file.parents[depth]
    installed = root in {Path(path) for path in sysconfig.get_paths().values()}
    top = module_name.partition(".")[0]
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        each = waiting.pop()
        path = _file(each)
        own = path is not None and path.is_relative_to(root) and not each.__name__.startswith("cowrec.")
        if path is None or not own or each.__name__ in found:
            continue
        if installed and each.__name__.partition(".")[0] != top:
            continue
        found[each.__name__] = path
        waiting += _modules_used(each)
    return root, sorted(set(found.values()))


def _require_unchanged(given: str, module: ModuleType) -> None:
    """Raises ValueError if a module's file is not as it was when it was first used here."""
    file = _file(module)
    if file is None or not file.is_file():
        return
    now = hashlib.sha256(file.read_bytes()).hexdigest()
    spec, first = _FIRST_USED.get(str(file), (None, ""))
    if spec is not module.__spec__:  # never used, or imported anew since
        _FIRST_USED[str(file)] = (module.__spec__, now)
    elif first != now:
        raise ValueError(f"{given}: {file} has changed since this process imported it; restart Python")


_FIRST_USED: dict[str, tuple[Any, str]] = {}
"""Specification of each module when it was first used, and the checksum of its file then, by the file's path."""


def _modules_used(module: ModuleType) -> Iterator[ModuleType]:
    for value in list(vars(module).values()):
        used = value if inspect.ismodule(value) else sys.modules.get(getattr(value, "__module__", None) or "")
        if used is not None:
            yield used
    package = module.__name__.rpartition(".")[0]
    if package in sys.modules:
        yield sys.modules[package]


def _parts(key: str, name: str) -> tuple[str, str]:
    module, _, attribute = name.partition(":")
    if module.endswith(".py") and "/" not in module:
        raise ValueError(f'{key} = "{name}" names a file; write "{module.removesuffix(".py")}:{attribute}"')
    if not all(part.isidentifier() for part in module.split(".")) or not attribute.isidentifier():
        raise ValueError(
            f'{key} = "{name}" must be "MODULE:NAME" with the dotted name of a Python module and a name in it, for'
            ' example "my_module:Net"; a folder is given by PYTHONPATH'
        )
    if module == "__main__":
        raise ValueError(f'{key} = "{name}": later commands cannot import __main__; put {attribute} into a file')
    return module, attribute


def _where(error: Exception, module_name: str) -> str:
    """``FILE:LINE: `` of the innermost frame of an error that is not Python's own import machinery."""
    innermost, found = error.__traceback__, ""
    while innermost:
        file = innermost.tb_frame.f_code.co_filename
        if not file.startswith("<frozen") and file not in (__file__, importlib.__file__):
            found = f"{file}:{innermost.tb_lineno}: "
        innermost = innermost.tb_next
    return found


def _file(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).absolute() if file else None
