"""Runs the tests and benchmarks that need a GPU, and writes one file that compares results with targets.

Each part runs regardless of the others, up to its timeout; a benchmark that is cut short keeps its completed
combinations. The exit status is 0 if every part passed; a speed below its target is reported but is not a failure.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from cowrec.trainer.runs.provenance import environment
from cowrec.trainer.runs.run_dir import to_json

ROOT = Path(__file__).resolve().parents[1]
MAX_MINUTES = {128 * 1024: 0.5, 1024: 15.0}
"""Target for 10 epochs with exact replay and CowClip, by batch size; the paper's V100 took 9 and 768 minutes."""
MAX_CLIP_RATIO = {128 * 1024: 1.05}
"""Target for the ratio of step times with and without CowClip, with exact replay, by batch size."""
TAIL_CHARACTERS = 4000


@dataclass(frozen=True)
class Part:
    """Command and its timeout in seconds."""

    name: str
    command: Sequence[str]
    timeout: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder with one folder per device")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; run it on a machine with a GPU", file=sys.stderr)
        return 1
    about = environment(torch.device("cuda", 0))
    with tempfile.TemporaryDirectory() as folder:
        report, bench = Path(folder) / "tests.xml", Path(folder) / "bench.jsonl"
        parts = {part.name: run_part(part) for part in parts_to_run(report, bench)}
        tests, lines = test_counts(report), bench_lines(bench)
    # With a GPU, a skipped test is a failure.
    parts["tests"]["passed"] &= tests is not None and tests["skipped"] == 0
    result = {
        "passed": all(part["passed"] for part in parts.values()),
        "aims": targets(lines),
        "speeds": speeds(lines),
        "tests": tests,
        "parts": parts,
        **about,
        "bench": lines,
    }
    output: Path = arguments.results / slug(about["device"]) / "gpu_check.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(json.loads(to_json(result)), indent=1) + "\n", encoding="utf-8")
    print(f"{summary(result)}\n{output}")
    return 0 if result["passed"] else 1


def parts_to_run(report: Path, bench: Path) -> list[Part]:
    """Returns the parts, less than 8 minutes in total; the benchmark starts with the batch sizes that have targets."""
    tests = ["-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", str(ROOT / "tests")]
    cases = ["--batch-sizes", "128K,1K,8K,64K", "--clip", "on,off", "--absent-rows", "replay,lazy"]
    bench_on_gpu = ["-m", "cowrec.trainer", "bench", "--device", "cuda", "--precision", "tf32", "--seconds", "2"]
    benchmark = [*bench_on_gpu, *cases, "--output", str(bench)]
    return [Part("tests", [sys.executable, *tests], 170), Part("bench", [sys.executable, *benchmark], 290)]


def run_part(part: Part) -> dict[str, Any]:
    """Runs a command, prints its output and keeps its end; then kills all its processes."""
    print(f"gpu_check: {part.name}, timeout {part.timeout:g} s", flush=True)
    started = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            part.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        timed_out = False
        try:
            process.wait(part.timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end_group(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
    print(text, flush=True)
    return {
        "passed": process.returncode == 0 and not timed_out,
        "exit_code": process.returncode,
        "timed_out": timed_out,
        "seconds": time.perf_counter() - started,
        "command": list(part.command),
        "output_end": text[-TAIL_CHARACTERS:],
    }


def test_counts(report: Path) -> dict[str, int] | None:
    """Counts tests, failures, errors and skipped in pytest's JUnit file; None if there is no file."""
    if not report.exists():
        return None
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = [{key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")} for suite in suites]
    return {key: sum(each[key] for each in counts) for key in counts[0]}


def bench_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the benchmark's complete lines; the last one may have been cut short."""
    text = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in text if line.endswith("\n")]


def speeds(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the speed of each line and its ratio of step times with and without the clip."""
    unclipped = {_combination(line): line["step_ms"] for line in lines if line["clip"] == "off"}
    found = []
    for line in lines:
        without = unclipped.get(_combination(line))
        found.append(
            {
                "mode": line["mode"],
                "batch_size": line["batch_size"],
                "clip": line["clip"],
                "precision": line["precision"],
                "samples_per_second": line["samples_per_second"],
                "minutes_of_10_epochs": line["minutes_of_10_epochs"],
                "step_over_unclipped": line["step_ms"] / without if without else None,
            }
        )
    return found


def targets(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compares each target with its measurement (None: not measured)."""
    replay = {each["batch_size"]: each for each in speeds(lines) if (each["mode"], each["clip"]) == ("replay", "on")}
    wanted = (("minutes_of_10_epochs", MAX_MINUTES), ("step_over_unclipped", MAX_CLIP_RATIO))
    found = []
    for what, by_batch_size in wanted:
        for batch_size, most in by_batch_size.items():
            measured = replay.get(batch_size, {}).get(what)
            met = measured is not None and measured <= most
            found.append({"what": what, "batch_size": batch_size, "most": most, "measured": measured, "met": met})
    return found


def slug(device: str) -> str:
    """Converts a device's name to a folder name: ``NVIDIA H100 80GB HBM3`` is ``nvidia_h100_80gb_hbm3``."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def summary(result: dict[str, Any]) -> str:
    lines = [f"{name}: {'passed' if part['passed'] else 'FAILED'}" for name, part in result["parts"].items()]
    for target in result["aims"]:
        measured = "not measured" if target["measured"] is None else f"{target['measured']:.3g}"
        outcome = "met" if target["met"] else "NOT met"
        lines.append(
            f"{target['what']} at batch {target['batch_size']}: {measured}, target {target['most']:g}: {outcome}"
        )
    return "\n".join(lines)


def _combination(line: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the settings that two lines share if they differ only in the clip."""
    return line["mode"], line["batch_size"], line["precision"]


def _end_group(process: subprocess.Popen) -> None:
    """Kills a command and all its processes, if they still run."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
