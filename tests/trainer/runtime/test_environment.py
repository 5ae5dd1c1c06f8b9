"""Importing cowrec changes no environment; entry points do, before torch is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cowrec.trainer.runtime.environment import PROCESS_SETTINGS

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
    "cowrec": "from cowrec.trainer.__main__ import main; sys.argv = ['cowrec', 'train', 'x']; main()",
    "python -m cowrec.trainer": (
        "import runpy; sys.argv = ['x', 'train', 'x']; runpy.run_module('cowrec.trainer', run_name='__main__')"
    ),
    **{
        name: f"import runpy; sys.argv = ['{name}']; runpy.run_path('{ROOT}/scripts/{name}', run_name='__main__')"
        for name in ("demo.py", "online_demo.py")
    },
}


def python(program: str) -> str:
    ended = subprocess.run([sys.executable, "-c", program], env=CLEAN, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_importing_the_package_changes_no_environment_and_loads_no_torch() -> None:
    program = """
import os, sys
before = dict(os.environ)
import cowrec.trainer
import cowrec.trainer.cli.main
assert dict(os.environ) == before
assert "torch" not in sys.modules
"""
    python(program)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_points_prepare_the_process_before_torch_is_loaded(name: str) -> None:
    assert python(WATCH + ENTRY_POINTS[name]) == f"{list(PROCESS_SETTINGS.values())}\n"


def started_with() -> dict[str, str]:
    """The settings in the environment with which this process's program was started."""
    pairs = (pair.partition("=") for pair in Path("/proc/self/environ").read_text().split("\0"))
    return {key: value for key, _, value in pairs if key in PROCESS_SETTINGS}


def test_subprocesses_start_with_the_settings_and_one_of_the_user_is_kept() -> None:
    program = f"""
import json, os, sys
os.environ["GOMP_SPINCOUNT"] = "7"
sys.path.insert(0, {str(Path(__file__).parent)!r})
from cowrec.trainer.runtime.environment import prepare_process
prepare_process()
from cowrec.trainer.runtime.subprocess_call import run_in_subprocess
from test_environment import started_with
if __name__ == "__main__":
    print(json.dumps(run_in_subprocess(started_with)))
"""
    assert json.loads(python(program)) == PROCESS_SETTINGS | {"GOMP_SPINCOUNT": "7"}
