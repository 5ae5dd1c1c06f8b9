"""`scripts/bench_peers.py`: its lines and its table, peers that fail, and plain PyTorch's CowClip as claimed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from cowrec.data_pipeline.synthetic import CRITEO_SIZES

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "scripts" / "bench_peers.py")
NEED_NO_VENV = ["cowrec-fp32", "torch-sparse-adam", "torch-dense-adam-cowclip"]
TINY = ["--rows", "1K", "--batch-sizes", "32", "--epoch-share", "1e-4", "--rounds", "2", "--seconds", "0"]


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """The script's end, and the lines of its output."""
    output = folder / "peers.jsonl"
    command = [sys.executable, SCRIPT, "--output", str(output), "--venvs", str(folder / "venvs"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended, [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def test_a_tiny_run(tmp_path):
    ended, lines = run(tmp_path, "--only", ",".join(NEED_NO_VENV), *TINY)
    assert ended.returncode == 0, ended.stderr
    assert [line["implementation"] for line in lines] == NEED_NO_VENV
    for line in lines:
        assert (line["batch_size"], line["model"], line["max_rows"], line["error"]) == (32, "deepfm", 1000, None)
        # Five steps of each process are timed at least, and no more where there are no seconds for it.
        assert line["steps"] == 10
        assert line["samples_per_second"] == pytest.approx(32_000 / line["step_ms"])
        low, high = line["samples_per_second_quartiles"]
        assert 0 < low <= line["samples_per_second"] <= high
        assert line["versions"]["torch"] == torch.__version__
        assert {"device", "threads", "git_commit"} <= line.keys()
    whole = [{line[part] for part in ("l2_on_every_row", "cowclip", "absent_rows_move")} for line in lines]
    assert whole == [{True}, {False}, {True}]
    ratio = lines[0]["samples_per_second"] / lines[1]["samples_per_second"]
    assert re.search(rf"^cowrec-fp32 +{ratio:.2f}$", ended.stdout, re.MULTILINE)
    assert re.search(r"^cowrec-fp32( +yes){4}$", ended.stdout, re.MULTILINE)
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "venvs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "torch-sparse-adm"], "--only 'torch-sparse-adm' is not known; did you mean 'torch-sparse-adam'?"),
        (["--only", "cowrec-fp32,"], "--only '' is not known; known: cowrec-fp32"),
        (["--batch-sizes", "0"], "--batch-sizes must be at least 1, got 0"),
        (["--rows", "many"], "--rows is full or a number"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_measured(tmp_path, arguments, message):
    ended, lines = run(tmp_path, *arguments)
    assert (ended.returncode, lines) == (2, [])
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
