"""pytest plugin: this suite's options, and the folder of the numbers recorded from the reference implementation."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS.parent))  # for the package scripts, which is not installed
THIRD_TIER = {("scripts",), ("docs",), ("test_documents.py",), ("test_dockerfile.py",)}
"""Folders and files of tests whose subject changes seldom."""

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; tensors are small, and workers share the cores
gc.disable()  # until all modules are imported

DEFAULT_DIR = TESTS.parents[1] / "shared" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        type=Path,
        default=DEFAULT_DIR,
        help="folder of the .npz files recorded from the reference implementation (default: ../shared/golden)",
    )
    parser.addoption(
        "--kills", type=int, default=2, help="how often test_faults.py kills a run's processes (default: 2)"
    )
    parser.addoption(
        "--fuzz",
        type=int,
        metavar="N",
        help="train N problems, drawn anew, in each of test_random_problems.py's tests (default: the same few)",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="also run the third tier (kills, faults, scripts, documents, long grids) and more cases of properties",
    )


def pytest_configure(config: pytest.Config) -> None:
    """No test has a deadline. The first two tiers draw fewer cases, and the same ones each time, so that no test fails
    by chance."""
    thorough = config.getoption("--thorough")
    hypothesis.settings.register_profile(
        "cowrec", deadline=None, derandomize=not thorough, max_examples=100 if thorough else 25
    )
    hypothesis.settings.load_profile("cowrec")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the third tier (make test-all), unless the command line names its files or tests."""
    if is_thorough(config):
        return

    def is_third(path: Path) -> bool:
        return path.is_relative_to(TESTS) and path.relative_to(TESTS).parts[:1] in THIRD_TIER

    asked_for = [path for path in (Path(argument).resolve() for argument in config.args) if is_third(path)]
    left_out = [
        item
        for item in items
        if item.get_closest_marker("thorough")
        or (is_third(item.path) and not any(item.path.is_relative_to(path) for path in asked_for))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Spares the garbage collector the million objects of imported modules: a search takes longer than most tests."""
    gc.freeze()
    gc.enable()


def is_thorough(config: pytest.Config) -> bool:
    """Whether the third tier runs too: --thorough asks for it, or the command line names tests."""
    return config.getoption("--thorough") or any("::" in argument for argument in config.args)


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    """Whether the third tier runs too, for fixtures that do the work of several tests."""
    return is_thorough(pytestconfig)


@pytest.fixture
def cowrec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs ``cowrec ARGUMENTS`` in this process; returns its exit code, its output and its errors."""
    from commands.command_line import exit_code

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = exit_code(monkeypatch, *arguments)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts ``cowrec ARGUMENTS`` as a `Forked`; it and its children are killed at the end of the test."""
    from commands.forked_commands import Forked

    started: list[Forked] = []

    def begin(*arguments: object, **options: int) -> Forked:
        started.append(Forked(*arguments, **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill_all()


@pytest.fixture(scope="session")
def golden_dir(pytestconfig: pytest.Config) -> Path:
    """The folder of golden files; skips the test where there is none."""
    folder: Path = pytestconfig.getoption("--golden-dir").resolve()
    if not any(folder.glob("*.npz")):
        pytest.skip(f"no golden .npz files in {folder}; name their folder with --golden-dir")
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what tests measured and recorded as the property "measured"."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "measured":
                    terminalreporter.write_line(value)
