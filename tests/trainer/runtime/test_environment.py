"""Environment of entry points and of calls in subprocesses: how these fail, and that a process takes several calls."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import cowrec.trainer
from cowrec.trainer.runtime.environment import PROCESS_SETTINGS
from cowrec.trainer.runtime.errors import ProcessFailed
from cowrec.trainer.runtime.subprocess_call import Subprocess

ROOT = Path(__file__).resolve().parents[3]
CLEAN = {key: value for key, value in os.environ.items() if key not in PROCESS_SETTINGS}

# Prints the settings at the moment when torch is first looked for, and ends there.
WATCH = f"""
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print([os.environ.get(key) for key in {list(PROCESS_SETTINGS)}])
            sys.stdout.flush()
            os._exit(0)

sys.meta_path.insert(0, Watch())
"""
ENTRY_POINTS = {
    "cowrec": "from cowrec.trainer.__main__ import main; main()",
    "python -m cowrec.trainer": "import runpy; runpy.run_module('cowrec.trainer', run_name='__main__')",
}
for script in ("online_demo.py",):
    ENTRY_POINTS[script] = f"import runpy; runpy.run_path('{ROOT}/scripts/{script}', run_name='__main__')"


def python(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program], env=CLEAN, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_importing_the_package_changes_no_environment_and_loads_nothing_until_a_name_is_used() -> None:
    loaded = "[name in sys.modules for name in ('torch', 'pyarrow', 'typer')]"
    program = "import os, sys; before = dict(os.environ); import cowrec.trainer as trainer;"
    program += f"print({loaded}, trainer.__version__); import cowrec.trainer.cli.main;"
    printed = python(f"{program} print(dict(os.environ) == before, 'torch' in sys.modules)")
    assert printed == f"[False, False, False] {version('cowrec')}\nTrue False\n"
    with pytest.raises(AttributeError, match="has no attribute 'trains'"):
        _ = cowrec.trainer.trains


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_points_prepare_the_process_before_torch_is_loaded(name: str) -> None:
    given = [name] if name.endswith(".py") else ["x", "train", "x"]
    assert python(f"{WATCH}sys.argv = {given}; {ENTRY_POINTS[name]}") == f"{list(PROCESS_SETTINGS.values())}\n"


def look_up(key: str) -> int:
    return {"a": 1}[key]


def yield_and_abort() -> Iterator[int]:
    yield 1
    os.abort()


def test_a_process_takes_calls_until_one_fails_and_what_a_generator_yields_is_there_at_once() -> None:
    found = []
    with Subprocess() as process:
        first = process.call(os.getpid)
        assert first not in (os.getpid(), process.call(os.getppid))
        assert process.call(os.getpid) == first
        with pytest.raises(ProcessFailed, match="KeyError"):
            process.call(look_up, "b")
        second = process.call(os.getpid)
        assert second != first
        with pytest.raises(ProcessFailed, match="ended by signal 6"):
            found.extend(process.each(yield_and_abort))
        assert found == [1]
        third = process.call(os.getpid)
        assert third not in (first, second)
    with pytest.raises(ProcessLookupError):
        os.kill(third, 0)
