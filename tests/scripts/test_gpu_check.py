"""`scripts/gpu_check.sh`: messages, rehearsal, failing parts, calculations; `scripts/gpu/kernels.py`, interpreted."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from scripts.gpu import check as gpu_check
from scripts.gpu import report as gpu_report

ROOT = Path(__file__).resolve().parents[2]


def line(batch_size: int, step_ms: float, clip: str, mode: str = "replay") -> dict[str, Any]:
    rate = 1000 * batch_size / step_ms
    speed = {"step_ms": step_ms, "samples_per_second": rate, "minutes_of_10_epochs": 412_565_550 / rate / 60}
    case = {"mode": mode, "clip": clip, "precision": "tf32", "batch_size": batch_size}
    return {**case, **speed, "roofline": {"step_ms": 4.0}, "host_ms": 0.1, "kernels": 70.0, "captured": True}


def start(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *map(str, arguments)]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=3600)


def test_a_machine_without_a_gpu_is_an_error(tmp_path: Path) -> None:
    """Hides the GPU if there is one."""
    done = start("--results", tmp_path / "results")
    assert done.returncode == 1
    assert "sees no CUDA device" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_a_rehearsal_measures_what_it_can_in_its_time(tmp_path: Path) -> None:
    """The combinations with targets come first; those that are not reached are listed. All GPU tests are skipped."""
    done = start("--rehearse", "--minutes", "0.45", "--results", tmp_path)
    assert done.returncode == 1
    result = json.loads((tmp_path / "rehearsal" / "gpu_check.json").read_text())
    assert (result["finished"], result["passed"]) == (True, False)
    measured = [(line["mode"], line["batch_size"], line["clip"]) for line in result["bench"]]
    first = [("replay", 64, "on"), ("replay", 64, "off"), ("replay", 32, "on"), ("replay", 32, "off")]
    assert measured[:4] == first[: len(measured)]
    assert len(measured) + sum("batch" in each["what"] for each in result["not_reached"]) == 16
    assert result["not_reached"][-1]["what"] == "lazy, batch 8, clip off"
    assert "s of the time were left" in result["not_reached"][-1]["why"]
    assert result["versions"]["torch"]
    assert not list(tmp_path.rglob("*.partial"))
    assert "not reached: lazy, batch 8, clip off" in done.stdout


def test_a_timeout_kills_all_processes_of_a_part(tmp_path: Path) -> None:
    """The part's child holds a lock while it runs, and would write to the file at its end."""
    file = tmp_path / "lock"
    child = (
        f"import fcntl, time; file = open({str(file)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX);"
        " time.sleep(60); file.write('end')"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    ended = gpu_check.run_command([sys.executable, "-c", parent], 3)
    assert (ended["passed"], ended["timed_out"]) == (False, True)
    failed = gpu_check.run_command([sys.executable, "-c", "print('why'); raise SystemExit(3)"], 60)
    assert (failed["passed"], failed["exit_code"], failed["output_end"]) == (False, 3, "why\n")
    with file.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        assert opened.read() == ""


def test_speeds_and_targets() -> None:
    """Calculated: 412,565,550 samples take 29.9 s at 9.5 ms per 131,072 and 16.79 minutes at 2.5 ms per 1,024."""
    lines = [
        line(131072, 9.5, "on"),
        line(131072, 9.0, "off"),
        line(131072, 8.0, "on", "lazy"),
        line(1024, 2.5, "on"),
        {"mode": "replay", "clip": "off", "precision": "tf32", "batch_size": 1024, "error": "no memory"},
    ]
    found = gpu_report.speeds(lines)
    assert [each["clip"] for each in found] == ["on", "off", "on", "on"]
    minutes = [each["minutes_of_10_epochs"] for each in found]
    assert minutes == pytest.approx([0.49838, 0.47215, 0.41969, 16.7874], rel=1e-4)
    assert [each["step_over_unclipped"] for each in found] == [pytest.approx(9.5 / 9), 1.0, None, None]
    targets = gpu_report.targets(lines)
    assert [each["batch_size"] for each in targets] == [131072, 1024, 131072, 131072]
    assert [each["met"] for each in targets] == [True, False, False, False]
    assert targets[3]["measured"] == pytest.approx(4 / 9.5)
    assert not any(each["met"] or each["measured"] for each in gpu_report.targets([]))


def test_each_line_has_the_times_of_the_kernels_on_the_rows_of_the_stream(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    output = tmp_path / "kernels.jsonl"
    tiny = ["--batch-sizes", "2", "--rows", "4", "--epoch-share", "1e-6", "--steps", "1", "--device", "cpu"]
    command = [sys.executable, "-m", "scripts.gpu.kernels", *tiny, "--output", str(output)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    on, off = (json.loads(line) for line in output.read_text().splitlines())
    assert (on["clip"], off["clip"], on["batch_size"]) == ("on", "off", 2)
    before = round(1e-6 * 41_256_555 / 2)
    # The second batch, after one that is not timed.
    rows = CriteoIds(max_rows=4).rows(2 * (before + 1), 2)
    assert on["distinct_rows"] == off["distinct_rows"] == sum(len(np.unique(each)) for each in rows)
    for each in (on, off):
        assert list(each["ms"]) == ["find", "replay", "update"]
        assert min(each["ms"].values()) > 0
