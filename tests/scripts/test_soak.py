"""The soak of an hour, for seconds: real processes, a few faults, and the comparison with an undisturbed run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_cases import ENVIRONMENT


@pytest.mark.thorough
def test_kills_lose_nothing_and_every_fault_has_a_line(tmp_path: Path) -> None:
    faults = ["kill_redis", "kill_trainer", "wrong_samples", "duplicate_samples"]
    output, seconds = tmp_path / "soak.jsonl", ("--minutes", "0.08", "--fault-seconds", "1.2", "--quiet-seconds", "5")
    command = [sys.executable, "-m", "scripts.soak", "--output", str(output), *seconds, "--rate", "200"]
    command += ["--faults", ",".join(faults)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, summary = map(json.loads, output.read_text().splitlines())
    assert sorted(line["fault"] for line in lines) == sorted(faults)
    assert summary["passed"]
    assert summary["expected"]["malformed"] > 10
    assert summary["expected"]["duplicates"] >= 500
    assert summary["counters"]["handed_out"] == summary["expected"]["handed_out"] > 1000
