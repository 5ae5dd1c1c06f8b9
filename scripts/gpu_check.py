"""Runs what needs a GPU, tests and benchmarks, and writes one file that holds it against what is aimed at.

No part stops another, and none takes longer than its timeout; a benchmark that is cut short leaves the combinations
measured until then. The exit status is 0 where every part passed; a speed below its aim is told, and is no failure.
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

from cowrec.trainer.runs.run_dir import environment, to_json

ROOT = Path(__file__).resolve().parents[1]
MOST_MINUTES = {128 * 1024: 0.5, 1024: 15.0}
"""Aim for the 10 published epochs with exact replay and CowClip on, by batch size; the paper's V100 took 9 and 768."""
MOST_CLIP_RATIO = {128 * 1024: 1.05}
"""Aim for the time of a step with CowClip on over that of one without, with exact replay, by batch size."""
TAIL_CHARACTERS = 4000


@dataclass(frozen=True)
class Part:
    """A command, and the seconds after which it is ended."""

    name: str
    command: Sequence[str]
    timeout: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the hardware's folders")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device, so there is nothing to check here", file=sys.stderr)
        return 1
    about = environment(torch.device("cuda", 0))
    with tempfile.TemporaryDirectory() as folder:
        report, bench = Path(folder) / "tests.xml", Path(folder) / "bench.jsonl"
        parts = {part.name: run_part(part) for part in parts_to_run(report, bench)}
        tests, lines = test_counts(report), bench_lines(bench)
    # Here is a GPU: a test that skips has not been run.
    parts["tests"]["passed"] &= tests is not None and tests["skipped"] == 0
    result = {
        "passed": all(part["passed"] for part in parts.values()),
        "aims": aims(lines),
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
    """The parts, together less than 8 minutes; the benchmark's first batch sizes are those that have aims."""
    tests = ["-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", str(ROOT / "tests")]
    cases = ["--batch-sizes", "128K,1K,8K,64K", "--clip", "on,off", "--absent-rows", "replay,lazy"]
    benchmark = [
        "-m",
        "cowrec.trainer",
        "bench",
        "--device",
        "cuda",
        "--precision",
        "tf32",
        "--seconds",
        "2",
        *cases,
        "--output",
        str(bench),
    ]
    return [
        Part("tests", [sys.executable, *tests], 170),
        Part("bench", [sys.executable, *benchmark], 290),
    ]


def run_part(part: Part) -> dict[str, Any]:
    """Runs a command, its output shown and its end kept; all of its processes end with it."""
    print(f"gpu_check: {part.name}, at most {part.timeout:g} s", flush=True)
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
    """Tests, failures, errors and skipped of pytest's JUnit file; None where there is none."""
    if not report.exists():
        return None
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = [{key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")} for suite in suites]
    return {key: sum(each[key] for each in counts) for key in counts[0]}


def bench_lines(path: Path) -> list[dict[str, Any]]:
    """What the benchmark has measured; its last line may have been cut short with it."""
    whole = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in whole if line.endswith("\n")]


def speeds(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The speed of each line, and the time of its step over that of the same without the clip."""
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


def aims(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is aimed at, what was measured (None: was not), and whether that meets it."""
    of_replay = {each["batch_size"]: each for each in speeds(lines) if (each["mode"], each["clip"]) == ("replay", "on")}
    wanted = (("minutes_of_10_epochs", MOST_MINUTES), ("step_over_unclipped", MOST_CLIP_RATIO))
    found = []
    for what, by_batch_size in wanted:
        for batch_size, most in by_batch_size.items():
            measured = of_replay.get(batch_size, {}).get(what)
            met = measured is not None and measured <= most
            found.append({"what": what, "batch_size": batch_size, "most": most, "measured": measured, "met": met})
    return found


def slug(device: str) -> str:
    """A device's name as a folder's: ``NVIDIA H100 80GB HBM3`` is ``nvidia_h100_80gb_hbm3``."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def summary(result: dict[str, Any]) -> str:
    lines = [f"{name}: {'passed' if part['passed'] else 'FAILED'}" for name, part in result["parts"].items()]
    for aim in result["aims"]:
        measured = "not measured" if aim["measured"] is None else f"{aim['measured']:.3g}"
        outcome = "met" if aim["met"] else "NOT met"
        lines.append(f"{aim['what']} at batch {aim['batch_size']}: {measured}, aim {aim['most']:g}: {outcome}")
    return "\n".join(lines)


def _combination(line: dict[str, Any]) -> tuple[Any, ...]:
    """What is equal in two lines that differ in the clip alone."""
    return line["mode"], line["batch_size"], line["precision"]


def _end_group(process: subprocess.Popen) -> None:
    """Ends a command with all that it has started; nothing where they have ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
