"""Tests marked gpu can be run: each gets as far as its first call of CUDA, where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run where there is a GPU")
def test_tests_marked_gpu_reach_cuda() -> None:
    files = [
        str(file)
        for file in sorted(TESTS.rglob("test_*.py"))
        if "mark.gpu" in file.read_text() and file != Path(__file__)
    ]
    options = "-q -s -m gpu -p first_cuda_call -p no:cacheprovider"
    command = [sys.executable, "-m", "pytest", *options.split()]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [*command, *files], env=environment, cwd=TESTS.parent, check=False, capture_output=True, text=True
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended: ")]
    assert len(ends) >= len(files), done.stdout + done.stderr
    assert not [each for each in ends if not each.endswith(": at CUDA")]
    assert " passed" not in done.stdout.splitlines()[-1], "a test ended without CUDA"
