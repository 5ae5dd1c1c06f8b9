"""The rules of the house: who may import whom, what needs no torchrec, and how files are named and sized."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LEAVES = ("data_pipeline", "models", "sparse_opt")
# What each package may import of the others, and from outside beside the standard library.
MAY_IMPORT = {
    "data_pipeline": {
        "torch",
        "torchrec",
        "numpy",
        "pyarrow",
        "numba",
        "pydantic",
        "distributed",
        "redis",
        "confluent_kafka",
    },
    "models": {"torch", "torchrec", "fbgemm_gpu"},
    "sparse_opt": {"torch", "torchrec", "fbgemm_gpu", "numpy", "numba", "llvmlite", "triton"},
}
NEVER_IMPORTED = {"tests", "scripts"}

# Public names of cowrec.sparse_opt that work without TorchRec and FBGEMM.
NEEDS_TORCH_ALONE = (
    "CLIP_RULES",
    "CowClip",
    "IdTables",
    "PRESETS",
    "SCALING_RULES",
    "clip_rows",
    "clip_scales",
    "clip_tables",
    "cowclip_limits",
    "reference_cowclip_limits",
    "scale_clip",
    "scale_hyperparameters",
)

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
MAX_LINES = 400
PACKAGE_INDEX = re.compile(
    r"pypi\.|pythonhosted\.|download\.pytorch\.|index[-_]url|find[-_]links|https?://\S*/simple\b", re.IGNORECASE
)


def absolute(name: str, package: str) -> str:
    """``..clip`` seen from ``cowrec.models`` is ``cowrec.clip``."""
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
    """What the file may not import, of ``folder`` or of its subpackage ``inner``."""
    wrong = set()
    for name in imported_modules(source, ".".join(["cowrec", folder, *inner])):
        top, _, rest = name.partition(".")
        if top == "cowrec":
            room = rest.partition(".")[0]
            if folder in LEAVES and room not in ("", folder):
                wrong.add(name)
        elif top in NEVER_IMPORTED or top in ("trainer", *LEAVES):
            # Without "cowrec." a folder is imported a second time, with a second copy of every class.
            wrong.add(name)
        elif folder in MAY_IMPORT and top not in sys.stdlib_module_names and top not in MAY_IMPORT[folder]:
            wrong.add(name)
    return wrong


def tracked_files() -> list[Path]:
    """Files of the project, new ones included, ignored ones not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout, so which files are the project's is unknown")
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


@pytest.mark.parametrize("folder", ["trainer", *LEAVES])
def test_who_may_import_whom(folder: str) -> None:
    for file in sorted((ROOT / folder).rglob("*.py")):
        inner = file.parent.relative_to(ROOT / folder).parts
        wrong = forbidden_imports(file.read_text(encoding="utf-8"), folder, inner)
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize(
    "source",
    [
        "import cowrec.trainer",
        "from cowrec import trainer",
        "from cowrec.sparse_opt import CowClip",
        "from .. import sparse_opt",
        "from ..sparse_opt.clip import CowClip",
        "def late():\n    from ..data_pipeline import Batch",
        "import importlib\nimportlib.import_module('cowrec.trainer')",
        "from importlib import import_module\nimport_module('..trainer')",
        "import models",
        "import scripts.demo",
        "import pandas",
    ],
)
def test_the_import_rule_sees(source: str) -> None:
    assert forbidden_imports(source, "models")


def test_the_import_rule_lets_pass() -> None:
    source = "import math\nimport torch.nn\nfrom . import front\nfrom .front import F\nfrom cowrec.models import wdl"
    assert not forbidden_imports(source, "models")


def test_clipping_and_scaling_need_torch_alone() -> None:
    program = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torchrec", "fbgemm_gpu"):
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Blocker())
from cowrec.sparse_opt import {", ".join(NEEDS_TORCH_ALONE)}
assert "torch" in sys.modules
assert not {{"torchrec", "fbgemm_gpu"}} & sys.modules.keys()
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


def test_files_are_named_for_what_they_hold() -> None:
    vague = [str(file.relative_to(ROOT)) for file in tracked_files() if file.stem.lower() in VAGUE_NAMES]
    assert not vague


def test_no_package_file_lies_in_the_root_or_in_tests() -> None:
    unwanted = [ROOT / folder / name for folder in (".", "tests") for name in ("__init__.py", "conftest.py")]
    assert not [path for path in unwanted if path.exists()]


def test_files_are_short() -> None:
    lines = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines())
        for file in tracked_files()
        if file.suffix == ".py"
    }
    assert not {name: count for name, count in lines.items() if count > MAX_LINES}


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
