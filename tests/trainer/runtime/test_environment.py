"""Environment of entry points and of calls in subprocesses: how these fail, and that a process takes several calls."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import cowrec.trainer
from cowrec.models import ModelConfig, require_model
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
for script in ("demo.py", "online_demo.py", "bench_peers.py"):
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


LOGGING = """
import logging, os
from cowrec.trainer.runtime.environment import prepare_process
prepare_process()
from cowrec.trainer.sweep.runs import say
terminal, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 2)
logging.getLogger("cowrec.trainer").info("of a run")
say("of a sweep")
os.dup2(terminal, 2)
print("goes on")
"""


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", LOGGING], env=CLEAN, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "goes on\n"), ended.stderr


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
from cowrec.trainer.runtime.subprocess_call import Subprocess
from test_environment import started_with
if __name__ == "__main__":
    with Subprocess() as process:
        print(json.dumps(process.call(started_with)))
"""
    assert json.loads(python(program)) == PROCESS_SETTINGS | {"GOMP_SPINCOUNT": "7"}


def look_up(key: str) -> int:
    return {"a": 1}[key]


def test_errors_and_ends_of_a_subprocess_are_errors() -> None:
    with Subprocess() as process:
        assert process.call(look_up, "a") == 1
        with pytest.raises(ProcessFailed, match=r"^KeyError: 'b'$"):
            process.call(look_up, "b")
        with pytest.raises(ProcessFailed, match=r"^UserError: .*did you mean \"deepfm\""):
            process.call(require_model, ModelConfig("deepfn"))
        with pytest.raises(ProcessFailed, match="ended by signal 6"):
            process.call(os.abort)


@pytest.mark.thorough
def test_with_a_gpu_subprocesses_are_not_forked_and_bugs_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process forked from the server would write where the server was started, perhaps in an earlier test."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with Subprocess() as process, pytest.raises(ProcessFailed, match=r"^KeyError: 'b'$"):
        process.call(look_up, "b")
    printed = capfd.readouterr().err
    assert "Traceback" in printed
    assert 'return {"a": 1}[key]' in printed
    message = r"^UserError: .*did you mean \"deepfm\""
    with Subprocess() as process, pytest.raises(ProcessFailed, match=message):
        process.call(require_model, ModelConfig("deepfn"))
    assert "Traceback" not in capfd.readouterr().err  # fbgemm 1.6 may print a warning


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
