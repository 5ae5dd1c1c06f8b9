"""Checks of the architecture: imports between folders, what needs no TorchRec, and names of files."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from cowrec.trainer.__main__ import PACKAGES as TRAINER_PACKAGES

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = ("trainer", "models", "sparse_opt", "data_pipeline")
LEAVES = PACKAGES[1:]
# Files of the folder cowrec/, which all packages may import.
GROUND = ("errors", "files", "names", "urls")
# Libraries that each leaf may import, beside the standard library.
LIBRARIES = {
    "data_pipeline": "torch torchrec numpy pyarrow numba pydantic distributed redis confluent_kafka",
    "models": "torch torchrec fbgemm_gpu numpy numba pydantic triton",
    "sparse_opt": "torch torchrec fbgemm_gpu numpy numba llvmlite triton",
}
NEVER_IMPORTED = {"tests", "scripts"}

# What each folder imports of its own package, imports inside functions included; a file beside the folders counts as
# one. The table is exact, and each entry imports only from entries above it.
FOLDERS: dict[str, dict[str, str]] = {
    "sparse_opt": {
        "versions": "",
        "algorithm": "",
        "kernels": "algorithm",
        "tbe": "versions kernels",
        "lookups": "algorithm kernels tbe",
        "clipping": "algorithm kernels tbe lookups",
        "id_tables": "kernels",
        "optim": "algorithm kernels tbe lookups id_tables",
    },
    "data_pipeline": {
        "redis_client": "",
        "remote": "",
        "splitmix": "",
        "hashing": "splitmix",
        "parallel": "",
        "dataset": "parallel remote",
        "reading": "parallel dataset",
        "raw": "remote dataset",
        "encoding": "hashing dataset raw",
        "preparation": "hashing parallel remote dataset raw encoding",
        "inference": "dataset raw",
        "codec": "dataset raw encoding",
        "streams": "redis_client remote hashing dataset codec encoding raw",
        "synthetic": "splitmix hashing parallel dataset raw encoding",
    },
    "models": {
        "config": "",
        "triton_layers": "",
        "linear_relu": "triton_layers",
        "layers": "linear_relu",
        "numba_layers": "",
        "front": "triton_layers numba_layers linear_relu layers",
        "own_code": "",
        "losses": "config own_code",
        "networks": "config numba_layers linear_relu layers front",
        "registry": "config front own_code networks",
    },
    "trainer": {
        "config": "",
        "runtime": "",
        "reports": "",
        "sharded_model": "config runtime",
        "runs": "config runtime",
        "measures": "runtime",
        "training": "config runtime sharded_model runs measures",
        "export": "runtime sharded_model runs training",
        "publishing": "",
        "online": "config runtime sharded_model runs measures training export publishing",
        "serving": "runtime runs export publishing",
        "bench": "config runtime reports sharded_model runs",
        "sweep": "config runtime reports sharded_model runs measures training",
        "cli": ("config runtime reports runs training export publishing online serving bench sweep"),
        "__main__": "cli",
    },
}

# Public names of cowrec.sparse_opt that work without TorchRec and FBGEMM.
NEEDS_TORCH_ALONE = (
    "CLIP_RULES, CowClip, IdTables, PRESETS, SCALING_RULES, clip_rows, clip_scales, clip_tables, cowclip_limits,"
    " scale_clip, scale_hyperparameters"
)

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
PACKAGE_INDEX = re.compile(
    r"pypi\.|pythonhosted\.|download\.pytorch\.|index[-_]url|find[-_]links|https?://\S*/simple\b", re.IGNORECASE
)


def absolute(name: str, package: str) -> str:
    """Resolves a relative name: ``..clip`` in ``cowrec.models`` is ``cowrec.clip``."""
    module = name.lstrip(".")
    level = len(name) - len(module)
    parts = package.split(".")
    return ".".join([*parts[: len(parts) + 1 - level], *filter(None, [module])]) if level else name


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Absolute names of everything that a file of ``package`` imports anywhere in it, as ``module.name`` too."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                origin = absolute("." * level + (module or ""), package)
                yield origin
                yield from (f"{origin}.{alias.name}" for alias in names)
            # import_module("cowrec.models") and __import__("cowrec.models")
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield absolute(name, package)


def forbidden_imports(source: str, folder: str, inner: tuple[str, ...] = ()) -> set[str]:
    """Imports that a file of ``folder``, or of its sub-folder ``inner``, may not have."""
    wrong = set()
    for name in imported_modules(source, ".".join(["cowrec", folder, *inner])):
        top, _, inside = name.partition(".")
        if top == "cowrec":
            package = inside.partition(".")[0]
            if folder in LEAVES and package not in ("", folder, *GROUND):
                wrong.add(name)
        elif top in NEVER_IMPORTED or top in PACKAGES:
            # Without "cowrec." a folder is imported a second time, with a second copy of every class.
            wrong.add(name)
        elif folder in LIBRARIES and top not in sys.stdlib_module_names and top not in LIBRARIES[folder].split():
            wrong.add(name)
    return wrong


@cache
def modules() -> dict[str, Path]:
    """File of each module of the packages, by its dotted name; a package's own name is its ``__init__``."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    parts = {file: file.relative_to(ROOT).with_suffix("").parts for file in files}
    return {".".join(["cowrec", *(p for p in parts[file] if p != "__init__")]): file for file in files}


@cache
def imports_of_modules() -> dict[str, set[str]]:
    """Modules of the packages that each of them imports, lazy imports included."""
    files = modules()
    found: dict[str, set[str]] = {}
    for name, file in files.items():
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        named = set(imported_modules(file.read_text(encoding="utf-8"), package))
        # Of ``from cowrec.models import config, ModelConfig`` the first names a module, the second does not.
        found[name] = {name for name in named if name in files} - {name}
    return found


def folder_of(module: str) -> tuple[str, str]:
    """Package and folder of a module; a file beside the folders counts as one."""
    parts = module.split(".")[1:]
    return parts[0], parts[1] if len(parts) > 1 else "__init__"


def imports_of_folders() -> dict[str, dict[str, set[str]]]:
    found: dict[str, dict[str, set[str]]] = {package: {} for package in PACKAGES}
    for module, imported in imports_of_modules().items():
        package, folder = folder_of(module)
        targets = found[package].setdefault(folder, set())
        # Importing a package's exported names is importing the folders that hold them; the leaves do not do it.
        targets |= {
            inner for top, inner in map(folder_of, imported) if top == package and inner not in (folder, "__init__")
        }
    return found


def tracked_files() -> list[Path]:
    """Files of the project, new ones included, ignored ones not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout, so which files are the project's is unknown")
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


@pytest.mark.parametrize("folder", PACKAGES)
def test_packages_import_only_what_they_may(folder: str) -> None:
    for file in sorted((ROOT / folder).rglob("*.py")):
        inner = file.parent.relative_to(ROOT / folder).parts
        wrong = forbidden_imports(file.read_text(encoding="utf-8"), folder, inner)
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_ground_floor_imports_the_standard_library_alone() -> None:
    files = {file.stem: file for file in (ROOT / "cowrec").glob("*.py") if file.stem != "__init__"}
    assert files.keys() == set(GROUND)
    for name, file in files.items():
        imported = set(imported_modules(file.read_text(encoding="utf-8"), "cowrec"))
        assert {name.partition(".")[0] for name in imported} <= {"cowrec", *sys.stdlib_module_names}, name
        assert {name for name in imported if name in PACKAGES} == set(), name


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_import_what_the_table_lists(package: str) -> None:
    found = {name: set(imported) for name, imported in imports_of_folders()[package].items() if name != "__init__"}
    assert found == {name: set(imported.split()) for name, imported in FOLDERS[package].items()}


def test_the_table_runs_in_one_direction() -> None:
    for folders in FOLDERS.values():
        above: set[str] = set()
        for name, imported in folders.items():
            assert set(imported.split()) <= above, name
            above.add(name)


def test_no_modules_import_each_other() -> None:
    """Lazy imports included. A package's ``__init__`` only passes names on, so it is no module of its own here."""
    graph = {
        name: {name for name in imported if modules()[name].name != "__init__.py"}
        for name, imported in imports_of_modules().items()
        if modules()[name].name != "__init__.py"
    }
    TopologicalSorter(graph).prepare()  # a cycle raises an error that names it


@pytest.mark.parametrize(
    "source",
    [
        "from cowrec import trainer",
        "from ..sparse_opt.algorithm.clip import CowClip",
        "def late():\n    from ..data_pipeline import Batch",
        "from importlib import import_module\nimport_module('..trainer')",
        "import models",
        "import pandas",
    ],
)
def test_forbidden_imports_are_found(source: str) -> None:
    assert forbidden_imports(source, "models")


@pytest.mark.thorough
def test_the_plug_in_needs_no_package_of_the_trainer() -> None:
    """Clipping and scaling need torch alone, the rest of cowrec.sparse_opt TorchRec and what that imports."""
    of_trainer = set(TRAINER_PACKAGES.values()) - {"tensordict", "pyre_extensions", "tqdm"}
    program = f"""
import sys
sys.modules.update(dict.fromkeys({of_trainer | {"torchrec", "fbgemm_gpu"}}))
from cowrec.sparse_opt import {NEEDS_TORCH_ALONE}
del sys.modules["torchrec"], sys.modules["fbgemm_gpu"]
from cowrec.sparse_opt import *
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


@pytest.mark.thorough
def test_steps_on_a_gpu_need_neither_numba_nor_pyarrow() -> None:
    """Triton's kernels, the bench and its stream of ids; ``numba`` compiles for CPU, pyarrow reads data sets."""
    program = """
import sys
sys.modules.update(dict.fromkeys(["numba", "llvmlite", "pyarrow", "tomli_w", "safetensors", "typer"]))
from cowrec.sparse_opt.kernels import layout, torch_rows
from cowrec.trainer.bench.criteo import CriteoIds, measure_criteo
assert CriteoIds(max_rows=9).last_samples(5).sum() > 0
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


def test_imports_inside_a_package_are_relative() -> None:
    for package in PACKAGES:
        of_itself = re.compile(rf"^ *(from|import) cowrec\.{package}\b", re.MULTILINE)
        absolute = [
            file for file in (ROOT / package).rglob("*.py") if of_itself.search(file.read_text(encoding="utf-8"))
        ]
        assert not absolute


def test_only_tbe_uses_private_attributes_of_torchrec_and_fbgemm() -> None:
    """Of torch, and of named tuples, others use these."""
    used = set()
    for file in (ROOT / "sparse_opt").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file.parent.name != "tbe" else ():
            if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr) and ast.unparse(node.value) != "self":
                used.add(node.attr)
    of_tuples = {"_make", "_replace", "_fields"}
    of_torch = {"_C", "_assert_async", "_current_graph_task_id", "_is_view", "_profiler_enabled", "_scale", "_version"}
    assert used <= of_tuples | of_torch | {"_init_from_local_shards_and_global_metadata"}


def test_every_folder_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = [name for name, file in modules().items() if file.name == "__init__.py"]
    assert settings["packages"] == sorted(["cowrec", *found])


def test_every_folder_opens_with_a_sentence_and_has_tests() -> None:
    for name, file in modules().items():
        assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), name
        if file.name == "__init__.py" and name.count(".") == 2:
            assert any((ROOT / "tests").joinpath(*name.split(".")[1:]).glob("test_*.py")), f"{name} has no tests"


def test_files_are_named_for_what_they_hold() -> None:
    vague = [str(file.relative_to(ROOT)) for file in tracked_files() if file.stem.lower() in VAGUE_NAMES]
    assert not vague


def test_no_package_file_is_in_the_root_or_in_tests() -> None:
    unwanted = [ROOT / folder / name for folder in (".", "tests") for name in ("__init__.py", "conftest.py")]
    assert not [path for path in unwanted if path.exists()]


def test_no_package_index_is_named() -> None:
    """pip's own settings decide where packages come from; only a document may link to an index."""
    found = []
    for file in tracked_files():
        if file.suffix == ".md" or file == Path(__file__).resolve():
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{file.relative_to(ROOT)}: {match[0]}" for match in PACKAGE_INDEX.finditer(text)]
    assert not found
