"""`scripts/bench_peers.py`: its lines and table, failing peers, and CowClip in plain PyTorch against a loop."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

NEED_NO_VENV = ["cowrec-fp32", "cowrec-bf16", "torch-sparse-adam", "torch-dense-adam-cowclip"]
PARTS = ("l2_on_every_row", "cowclip", "absent_rows_move")


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> tuple[int, list[dict]]:
    """Runs the script; returns its exit code and output lines."""
    from scripts import bench_peers

    output = folder / "peers.jsonl"
    fixed = ["--output", str(output), "--venvs", str(folder / "venvs")]
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", *fixed, *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_peers.main()
    lines = output.read_text().splitlines() if output.exists() else []
    return int(ended.value.code or 0), [json.loads(line) for line in lines]


def test_lines_and_table_of_a_tiny_run(tmp_path, monkeypatch, capsys):
    """Also of a peer that cannot be installed and of one that cannot run, which do not affect others."""
    from scripts import bench_peers

    (tmp_path / "venvs").touch()
    monkeypatch.setitem(bench_peers.PEERS, "deepctr", bench_peers.Peer("no_such_worker"))
    what = ["--rows", "1000", "--batch-sizes", "32", "--epoch-share", "1e-4", "--rounds", "2", "--seconds", "0"]
    code, lines = run(monkeypatch, tmp_path, "--only", ",".join(["fuxictr", "deepctr", *NEED_NO_VENV]), *what)
    assert code == 1
    not_installed, not_run, *lines = lines
    assert not_installed["error"].startswith("cannot be installed: ")
    assert "No module named scripts.peers.no_such_worker" in not_run["error"]
    assert [line["implementation"] for line in lines] == NEED_NO_VENV
    for line in lines:
        assert (line["batch_size"], line["model"], line["max_rows"], line["error"]) == (32, "deepfm", 1000, None)
        # Without time for more, five steps of each of the two processes are timed.
        assert line["steps"] == 10
        assert line["samples_per_second"] == pytest.approx(32_000 / line["step_ms"])
        low, high = line["samples_per_second_quartiles"]
        assert 0 < low <= line["samples_per_second"] <= high
        assert torch.__version__.startswith(line["versions"]["torch"])  # whose metadata may lack "+cu130"
        assert {"device", "threads", "git_commit"} <= line.keys()
    assert [[line[part] for part in PARTS] for line in lines] == [[True] * 3, [True] * 3, [False] * 3, [True] * 3]
    printed = capsys.readouterr().out
    assert re.search(r"^fuxictr +failed$", printed, re.MULTILINE)
    ratio = lines[0]["samples_per_second"] / lines[2]["samples_per_second"]
    assert re.search(rf"^cowrec-fp32 +{ratio:.2f}$", printed, re.MULTILINE)
    assert re.search(r"^cowrec-fp32( +yes){4}$", printed, re.MULTILINE)
    assert re.search(r"^torch-sparse-adam( +-){4}$", printed, re.MULTILINE)
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_the_clip_of_plain_pytorch_equals_cowclip():
    """Compares with a loop in float64; float32 rounds norms and their ratio to a few units in 1e7."""
    from scripts.peers import torch_dense_adam_cowclip as peer

    random = np.random.default_rng(0)
    weights, gradients = random.normal(size=(7, 10)), random.normal(size=(7, 10))
    weights[1] = 0.0  # limited by the floor
    gradients[2] = 0.0  # stays zero
    gradients[3] *= 1e-3  # not clipped
    ids = np.array([0, 0, 0, 1, 2, 3])  # the other rows are absent and count once
    table = torch.nn.Parameter(torch.tensor(weights, dtype=torch.float32))
    table.grad = torch.tensor(gradients, dtype=torch.float32)
    peer.clip(table, torch.from_numpy(ids))
    for row in range(7):
        count = max((ids == row).sum(), 1)
        limit = peer.R * count * max(np.linalg.norm(weights[row]), peer.R * np.sqrt(10) * peer.BOUND)
        norm = np.linalg.norm(gradients[row])
        expected = gradients[row] * min(1, limit / norm if norm else 1)
        np.testing.assert_allclose(table.grad[row].numpy(), expected, rtol=1e-5, atol=0)
