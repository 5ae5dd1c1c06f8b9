"""`scripts/gpu_check.sh`: rehearsal, parts that fail, hang or miss a package, and what its checks rest on."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.gpu import check as gpu_check
from scripts.gpu import machine
from scripts.gpu import report as gpu_report
from scripts.gpu.check import Part
from scripts.gpu.rows import small_problem, steps

ROOT = Path(__file__).resolve().parents[2]
CASE = {"mode": "replay", "precision": "tf32", "captured": True, "host_ms": 0.1}


def figures(part: str, batch_size: int, step_ms: float, clip: str = "on") -> list[dict[str, Any]]:
    """The lines of a combination, as they become known."""
    rate = 1000 * batch_size / step_ms
    speed = {"step_ms": step_ms, "samples_per_second": rate, "minutes_of_10_epochs": 412_565_550 / rate / 60}
    identity = {**CASE, "part": part, "batch_size": batch_size, "clip": clip}
    return [{**identity, **speed}, {**identity, "roofline": {"step_ms": 4.0}}, {**identity, "kernels": 70.0}]


def lines_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_a_machine_without_a_gpu_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "gpu", lambda: "")
    monkeypatch.setattr(sys, "argv", ["check", "--output", str(tmp_path / "gpu_check.jsonl")])
    assert gpu_check.main() == 1
    assert "shows no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_rehearsal_runs_the_parts_and_names_what_one_of_them_misses(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    output = tmp_path / "gpu_check.jsonl"
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "--rehearse", "--output", str(output)]
    environment = {**os.environ, machine.COMMIT: "c0ffee"}
    command += ["--parts", "fused,smoke,resume,kernels,replay"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = lines_of(output)
    assert all((line["device"], line["git_commit"]) == ("rehearsal", "c0ffee") for line in lines)
    assert all(line["versions"]["torch"] for line in lines)
    assert [line["equal"] for line in lines if "check" in line] == [True] * 5
    (table,) = (line["kernels_of_a_step"] for line in lines if "kernels_of_a_step" in line)
    assert table[0]["us"] >= table[-1]["us"] > 0
    (replay,) = (line["replay"] for line in lines if "replay" in line)
    assert replay["turns"] >= replay["longest"] > 0
    # One of the two rows of a warp decays in step 32, and the other has missed the last four of 64 steps.
    cases = {line["case"]: (line["turns"], line["decayed"]) for line in lines if "case" in line}
    assert cases["one row"] == (64, 0)
    assert cases["two rows"] == (32, 1)
    ended = gpu_report.outcomes(lines)
    assert [*ended] == ["replay", "smoke", "kernels", "resume", "fused"]
    assert [check["outcome"] for check in ended.values()] == ["passed"] * 4 + ["not run"]
    assert ended["fused"]["why"].startswith("fbgemm-gpu, the CUDA build of FBGEMM, is missing")
    assert "smoke, graph: equal" in done.stdout
    assert "replay, two rows: not timed, 32 turns, 32 in the longest program" in done.stdout


def test_two_calls_run_all_parts_but_one_in_their_order(tmp_path: Path) -> None:
    parts = gpu_check.parts(tmp_path, tmp_path, rehearse=False)
    called = ",".join(gpu_check.CALLS.values()).split(",")
    assert [*called, "eager"] == [*parts]


def test_a_part_that_misses_a_package_or_fails_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, output = [sys.executable, "-c"], tmp_path / "gpu_check.jsonl"
    chosen = {
        "one": Part([*python, ""], 60, packages={"no_such_module": "no-such-package"}),
        "two": Part([*python, "print('why'); raise SystemExit(3)"], 60),
        "three": Part([*python, "import os; print(os.environ['GIVEN'])"], 60, variables={"GIVEN": "here"}),
        "four": Part([*python, "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"], 60),
        "five": Part([*python, ""], 60),
    }
    gpu_check.run(chosen, output, "device", 600)
    one, two, three, four = lines_of(output)
    assert (one["outcome"], one["why"].partition(" in ")[0]) == ("not run", "no-such-package missing")
    assert (two["outcome"], two["why"], two["output_end"]) == ("failed", "exit status 3", "why\n")
    assert (three["outcome"], three["output_end"]) == ("passed", "here\n")
    assert four["outcome"] == "interrupted"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "'no-such-compiler' is not on the PATH" in Part([*python, ""], 60, compiles=True).why_not()
    gpu_check.run({"five": chosen["five"]}, output, "device", 1)
    assert gpu_report.outcomes(lines_of(output))["five"]["outcome"] == "not reached"


def test_speeds_and_targets() -> None:
    """Calculated: 412,565,550 samples take 29.9 s at 9.5 ms per 131,072 and 16.79 minutes at 2.5 ms per 1,024."""
    lines = [
        *figures("graph", 131072, 12.0),  # an earlier run
        *figures("graph", 131072, 9.5),
        *figures("clip_off", 131072, 9.0, "off"),
        figures("graph", 1024, 2.5)[0],
        {**CASE, "part": "clip_off", "batch_size": 1024, "clip": "off", "error": "no memory"},
    ]
    found = gpu_report.speeds(lines)
    assert [row["minutes_of_10_epochs"] for row in found] == pytest.approx([0.49838, 0.47215, 16.7874], rel=1e-4)
    assert [row["step_over_unclipped"] for row in found] == [pytest.approx(9.5 / 9), 1.0, None]
    targets = gpu_report.targets(found)
    assert [target["batch_size"] for target in targets] == [131072, 1024, 131072, 131072]
    assert [target["met"] for target in targets] == [True, False, False, False]
    assert targets[3]["measured"] == pytest.approx(4 / 9.5)
    assert not any(target["met"] or target["measured"] for target in gpu_report.targets([]))
    assert "clip_off, batch 1024, clip off: no memory" in gpu_report.summary(lines)


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_the_recorded_bits_are_those_of_the_cpu(backend: str) -> None:
    problem = small_problem(torch.device("cpu"))
    bits = json.loads((ROOT / "scripts" / "gpu" / "cpu_bits.json").read_text())
    assert [problem.digest() for _ in steps(problem, backend)] == bits
