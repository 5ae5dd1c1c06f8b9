"""Example of CowClip in a TorchRec job: runs in one process and in two, and learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).resolve().parents[2] / "scripts" / "torchrec_dlrm_example.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Use the loopback interface regardless of the host name; one thread per process suffices.
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("launcher", "options", "processes"), [([], [], 1), ([], ["--replay"], 1), (TORCHRUN, ["--replay"], 2)]
)
def test_learns_and_reports_the_clip(launcher: list[str], options: list[str], processes: int) -> None:
    """Runs both optimizers; 512 samples per step in total, each with 1 to 3 ids per field."""
    steps = ["--steps", "100", "--batch-size", str(512 // processes)]
    command = [sys.executable, *launcher, SCRIPT, *steps, *options]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            output, errors = run.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            run.terminate()  # torchrun then ends its ranks; if killed it would not
            raise
    assert run.returncode == 0, errors
    losses = {
        int(step): float(loss) for step, loss in re.findall(r"^step +(\d+) +loss ([\d.]+)$", output, re.MULTILINE)
    }
    assert losses[100] < 0.9 * losses[1]
    statistics = re.findall(r"^(field\d)  (\d+) rows updated, ([\d.]+)% of them clipped", output, re.MULTILINE)
    assert [table for table, _, _ in statistics] == [f"field{i}" for i in range(8)]
    for _, rows, clipped in statistics:
        assert 100 * 512 < int(rows) < 100 * 512 * 3
        assert 0 <= float(clipped) <= 100
