"""With a GPU no process is forked whose parent has asked for it: the driver does not work in such a process.

FBGEMM asks when it is imported. Children are therefore spawned where there is a GPU. Elsewhere they may be forked from
a server that has done the imports.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# Modules with functions that run in subprocesses.
MODULES = ("cowrec.trainer.bench.criteo", "cowrec.trainer.sweep.sweep")

PROBE = """
import contextlib, json, multiprocessing.process, sys
import torch

methods, asked = [], []
torch.cuda.is_available = lambda: bool(asked.append(sys._getframe(1).f_globals["__name__"])) or True

def start(process):
    methods.append(process._start_method)
    raise InterruptedError

multiprocessing.process.BaseProcess.start = start
sys.addaudithook(lambda event, _: methods.append(event) if event in ("os.fork", "os.forkpty") else None)

from cowrec.trainer.runtime.subprocess_call import Subprocess

for name in sys.argv[1:]:
    module = __import__(name, fromlist=["*"])
    function = next(found for found in vars(module).values() if getattr(found, "__module__", "") == name)
    with contextlib.suppress(InterruptedError, AssertionError), Subprocess() as process:
        process.call(function)  # what has not started cannot be joined
print(json.dumps([methods, asked]))
"""


@pytest.mark.thorough
def test_children_are_spawned_where_there_is_a_gpu() -> None:
    command = [sys.executable, "-c", PROBE, *MODULES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stderr
    methods, asked = json.loads(done.stdout.splitlines()[-1])
    assert methods == ["spawn"] * len(MODULES), f"{sorted(set(asked))} have asked for CUDA"


def test_no_other_code_forks() -> None:
    """Elsewhere processes start by a new Python; the load test's are spawned."""
    starts = r"ProcessPoolExecutor|\bos\.fork|get_context\((?!\"spawn\")|multiprocessing\.(?:Process|Pool)\("
    folders = ("trainer", "models", "sparse_opt", "data_pipeline", "scripts")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    found = [file for file in files if re.search(starts, file.read_text(encoding="utf-8"))]
    assert found == [ROOT / "trainer/runtime/subprocess_call.py"]


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run where there is a GPU")
def test_tests_marked_gpu_reach_cuda() -> None:
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    files = [str(file) for file in tests if "mark.gpu" in file.read_text() and file != Path(__file__)]
    options = "-q -s -m gpu -p first_cuda_call -p no:cacheprovider"
    command = [sys.executable, "-m", "pytest", *options.split()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([*command, *files], env=environment, cwd=ROOT, check=False, capture_output=True, text=True)
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended: ")]
    assert len(ends) >= len(files), done.stdout + done.stderr
    assert not [end for end in ends if not end.endswith(": at CUDA")]
    assert " passed" not in done.stdout.splitlines()[-1], "a test ended without CUDA"
