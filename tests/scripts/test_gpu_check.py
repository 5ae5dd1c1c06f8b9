"""`scripts/gpu_check.py`: its message without a GPU, failing parts, and its calculations."""

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SPEC = importlib.util.spec_from_file_location("gpu_check", SCRIPTS / "gpu_check.py")
assert SPEC
assert SPEC.loader
gpu_check: Any = importlib.util.module_from_spec(SPEC)
sys.modules["gpu_check"] = gpu_check  # its dataclass resolves annotations here
SPEC.loader.exec_module(gpu_check)


def line(batch_size: int, step_ms: float, clip: str, mode: str = "replay") -> dict[str, Any]:
    rate = 1000 * batch_size / step_ms
    return {
        "mode": mode,
        "clip": clip,
        "precision": "tf32",
        "batch_size": batch_size,
        "step_ms": step_ms,
        "samples_per_second": rate,
        "minutes_of_10_epochs": 412_565_550 / rate / 60,
    }


def test_a_machine_without_a_gpu_is_an_error(tmp_path: Path) -> None:
    """Hides the GPU if there is one."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    script = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--results", str(tmp_path / "results")]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "sees no CUDA device" in done.stderr
    assert not (tmp_path / "results").exists()


def test_the_shell_script_is_executable_and_parses() -> None:
    script = SCRIPTS / "gpu_check.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_parts_take_less_than_eight_minutes() -> None:
    parts = gpu_check.parts_to_run(Path("tests.xml"), Path("bench.jsonl"))
    assert [part.name for part in parts] == ["tests", "bench"]
    assert sum(part.timeout for part in parts) < 8 * 60


def test_the_benchmark_is_a_valid_command() -> None:
    """Fails only at the device, which is hidden."""
    benchmark = next(part for part in gpu_check.parts_to_run(Path("t"), Path("b")) if part.name == "bench")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [*benchmark.command, "--epoch-share", "1e-9"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stderr


def test_a_failing_part_does_not_affect_others() -> None:
    failed = gpu_check.run_part(gpu_check.Part("bad", [sys.executable, "-c", "print('why'); raise SystemExit(3)"], 60))
    assert (failed["passed"], failed["exit_code"], failed["timed_out"]) == (False, 3, False)
    assert failed["output_end"] == "why\n"
    passed = gpu_check.run_part(gpu_check.Part("good", [sys.executable, "-c", ""], 60))
    assert (passed["passed"], passed["exit_code"]) == (True, 0)


def test_a_timeout_kills_all_processes_of_a_part(tmp_path: Path) -> None:
    """The part's child holds a lock while it runs, and would write to the file at its end."""
    file = tmp_path / "lock"
    child = (
        f"import fcntl, time; file = open({str(file)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX);"
        " time.sleep(60); file.write('end')"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    ended = gpu_check.run_part(gpu_check.Part("slow", [sys.executable, "-c", parent], 3))
    assert (ended["passed"], ended["timed_out"]) == (False, True)
    with file.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        assert opened.read() == ""


def test_counts_of_pytest(tmp_path: Path) -> None:
    file = tmp_path / "test_three.py"
    file.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    report = tmp_path / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={tmp_path}", f"--junitxml={report}", str(file)]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=120)
    assert gpu_check.test_counts(report) == {"tests": 3, "failures": 1, "errors": 0, "skipped": 1}
    assert gpu_check.test_counts(tmp_path / "none.xml") is None


def test_an_incomplete_line_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    assert gpu_check.bench_lines(file) == []
    file.write_text(json.dumps({"mode": "lazy"}) + '\n{"mode": "rep')
    assert gpu_check.bench_lines(file) == [{"mode": "lazy"}]


def test_speeds_and_targets() -> None:
    """Calculated: 412,565,550 samples take 29.9 s at 9.5 ms per 131,072 and 16.79 minutes at 2.5 ms per 1,024."""
    lines = [
        line(131072, 9.5, "on"),
        line(131072, 9.0, "off"),
        line(131072, 8.0, "on", "lazy"),
        line(1024, 2.5, "on"),
    ]
    found = gpu_check.speeds(lines)
    assert [each["clip"] for each in found] == ["on", "off", "on", "on"]
    minutes = [each["minutes_of_10_epochs"] for each in found]
    assert minutes == pytest.approx([0.49838, 0.47215, 0.41969, 16.7874], rel=1e-4)
    assert [each["step_over_unclipped"] for each in found] == [pytest.approx(9.5 / 9), 1.0, None, None]
    assert [(each["batch_size"], each["met"]) for each in gpu_check.targets(lines)] == [
        (131072, True),
        (1024, False),
        (131072, False),
    ]
    assert not any(each["met"] or each["measured"] for each in gpu_check.targets([]))


@pytest.mark.parametrize(
    ("device", "folder"),
    [("NVIDIA H100 80GB HBM3", "nvidia_h100_80gb_hbm3"), ("NVIDIA GeForce RTX 4090 (D)", "nvidia_geforce_rtx_4090_d")],
)
def test_folder_of_a_device(device: str, folder: str) -> None:
    assert gpu_check.slug(device) == folder
