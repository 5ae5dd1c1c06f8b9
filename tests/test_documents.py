"""Documents against the code: paths and names that they mention exist, and versions that files repeat agree."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("trainer", "models", "sparse_opt", "data_pipeline", "tests", "scripts", "docs", "results")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "results").rglob("*.md")], key=lambda file: file.name
)
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]+)`")
# A step of a walk in docs/architecture.md: `trainer/training/trainer.py` `train`, `Trainer.train_epoch`
STEP = re.compile(r"^\| `([\w/]+\.py)` \| ((?:`[\w.]+`(?:, )?)+) \|", re.MULTILINE)
# The heading of a walk: ## A batch: from Parquet to the loss (12 files)
WALK = re.compile(r"^## .* \((\d+) files\)\n((?:(?!## ).*\n)*)", re.MULTILINE)


def names_in(file: Path) -> set[str]:
    """Classes and functions of a file at any depth, as ``name`` and, within a class, as ``Class.name``."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | FUNCTION):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, FUNCTION)}
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_paths_in_documents_exist(document: Path) -> None:
    mentioned = PATH.findall(document.read_text(encoding="utf-8"))
    assert not [path for path in mentioned if not any(ROOT.glob(path.rstrip("/")))]


def test_the_walks_name_what_exists() -> None:
    steps = STEP.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert len(steps) >= 20
    wrong = [
        f"{path}: {name}"
        for path, names in steps
        for name in re.findall(r"`([\w.]+)`", names)
        if not (ROOT / path).is_file() or name not in names_in(ROOT / path)
    ]
    assert not wrong


def test_the_walks_count_their_files() -> None:
    walks = WALK.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert len(walks) == 9
    assert [int(count) for count, _ in walks] == [len({path for path, _ in STEP.findall(rows)}) for _, rows in walks]


def test_the_citation_has_the_project_s_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_workflows_run_what_make_runs() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)) | {"lint"}
    commands = [
        command
        for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for command in re.findall(r"- run: (.+)", file.read_text(encoding="utf-8"))
    ]
    assert commands
    for command in commands:
        program, *words = command.split()
        assert program == "make"
        assert {word for word in words if "=" not in word and word[0] not in "$}{"} - {"matrix.torch", "}}"} <= targets
