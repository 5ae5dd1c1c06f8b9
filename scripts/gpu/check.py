"""Measures cowrec on this machine's GPU, runs the tests that need one, and compares speeds with targets.

Needs the packages in ``PACKAGES`` (see machine.py) and a driver. Start it with `bash scripts/gpu_check.sh`, which makes
`import cowrec` work in a checkout.

The parts are, in this order: aims, the combinations with targets; kernels, those of EmbeddingAdam alone, which also run
where FBGEMM is built for CPU; tests, `pytest -m gpu`; rest, the other combinations.
results/HARDWARE/gpu_check.json is complete after each combination, and lists what was not reached in the time. The exit
status is 0 if every part passed; a speed below its target is reported but is not a failure.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .machine import PACKAGES, ROOT, TEST_PACKAGES, about, absent, how_to_install, reason_not_to_start
from .report import has_target, slug, speeds, summary, targets

PARTS = ("aims", "kernels", "tests", "rest")
SIZES = (128 * 1024, 1024, 8 * 1024, 64 * 1024)
REHEARSED_SIZES = (64, 32, 16, 8)
KERNELS_SECONDS, TESTS_SECONDS, COMBINATION_SECONDS, LEAST_SECONDS = 60.0, 150.0, 90.0, 10.0
"""Most time for kernels, tests, and one combination; time left below which nothing is started."""
TAIL_CHARACTERS = 4000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="folder with one folder per device (default: results)")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for everything (default: 7.5)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"parts to run (default: {','.join(PARTS)})")
    parser.add_argument("--rehearse", action="store_true", help="run on CPU with tiny tables, to try this script")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts must be some of {','.join(PARTS)}, got {arguments.parts}")
    problem = reason_not_to_start(arguments.rehearse)
    if problem:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 1
    results = arguments.results or ROOT / ("build" if arguments.rehearse else "results")
    check = Check(results, arguments.rehearse, 60 * arguments.minutes)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    check.run([part for part in PARTS if part in parts])
    print(f"{summary(check.result)}\n{check.output}")
    return 0 if check.result["passed"] else 1


class Check:
    """A run of the parts up to a deadline, and the file of its results.

    Args:
        results: folder with one folder per device.
        rehearse: run on CPU with tiny tables.
        seconds: time for everything.

    Attributes:
        output: the file of results.
        result: its contents.
    """

    def __init__(self, results: Path, rehearse: bool, seconds: float) -> None:
        self._rehearse, self._end = rehearse, time.monotonic() + seconds
        self._about = about(rehearse)
        self.output = results / slug(self._about["device"]) / "gpu_check.json"
        self._parts: dict[str, dict[str, Any]] = {}
        self._lines: list[dict[str, Any]] = []
        self._not_reached: list[dict[str, str]] = []
        self._tests: dict[str, int] | None = None
        self._kernels: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}

    def run(self, parts: Sequence[str]) -> None:
        """Runs the parts; those that cannot run, or are interrupted by Ctrl-C or SIGTERM, are recorded."""
        try:
            self._run(parts)
        except KeyboardInterrupt:
            for part in parts:
                if part not in self._parts:
                    self._parts[part] = {"passed": False, "why": "interrupted"}
                    self._not_reached.append({"what": part, "why": "interrupted, at least in part"})
            self._write()
        else:
            self._write(finished=True)

    def _run(self, parts: Sequence[str]) -> None:
        with ExitStack() as stack:
            runner = None
            for part in parts:
                started = time.monotonic()
                try:
                    if part in ("kernels", "tests"):
                        outcome = self._run_kernels() if part == "kernels" else self._run_tests()
                    else:
                        runner = runner or stack.enter_context(self._runner())
                        outcome = self._measure(runner, part == "aims")
                except ImportError as error:
                    outcome = {"passed": False, "why": f"not run: {error}"}
                self._parts[part] = {**outcome, "seconds": time.monotonic() - started}
                self._write()

    def _runner(self) -> Any:
        """Makes what measures the combinations.

        Raises:
            ImportError: packages are missing or do not match.
        """
        if missing := absent(PACKAGES):
            raise ImportError(f"{', '.join(missing.values())} missing; {how_to_install(missing)}")
        from cowrec.trainer.bench.measurement import case_runner
        from cowrec.trainer.bench.settings import Bench

        what: dict[str, Any] = {"modes": ("replay", "lazy"), "clips": ("on", "off")}
        if self._rehearse:
            return case_runner(Bench(batch_sizes=REHEARSED_SIZES, max_rows=50, epoch_share=1e-5, seconds=0.0, **what))
        return case_runner(Bench(batch_sizes=SIZES, seconds=2.0, precisions=("tf32",), device="cuda", **what))

    def _measure(self, runner: Any, with_targets: bool) -> dict[str, Any]:
        """Measures the combinations that have targets, or the others; writes the results after each."""
        passed = True
        for case in runner.cases:
            mode, size = case.config.optimizer.absent_rows, case.batch_size
            meant = SIZES[REHEARSED_SIZES.index(size)] if self._rehearse else size
            if has_target(mode, meant) != with_targets:
                continue
            clip = "off" if case.config.clip.rule == "none" else "on"
            name, left = f"{mode}, batch {size}, clip {clip}", self._end - time.monotonic()
            if left < LEAST_SECONDS:
                self._not_reached.append({"what": name, "why": f"{max(left, 0):.0f} s of the time were left"})
                passed = False
                continue
            print(f"gpu_check: {name}", flush=True)
            self._lines.append(runner.line(case, min(left, COMBINATION_SECONDS)))
            passed &= "error" not in self._lines[-1]
            self._write()
        return {"passed": passed}

    def _run_kernels(self) -> dict[str, Any]:
        """Times the kernels of EmbeddingAdam."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "kernels.jsonl"
            command = [sys.executable, "-m", "scripts.gpu.kernels", "--output", str(output)]
            if self._rehearse:
                tiny = ["--batch-sizes", "2", "--rows", "4", "--epoch-share", "1e-6", "--steps", "1"]
                command = ["env", "TRITON_INTERPRET=1", *command, "--device", "cpu", *tiny]
            outcome = self._run_command("kernels", PACKAGES, command, KERNELS_SECONDS)
            text = output.read_text(encoding="utf-8").splitlines(keepends=True) if output.exists() else []
            self._kernels = [json.loads(line) for line in text if line.endswith("\n")]
        return outcome

    def _run_tests(self) -> dict[str, Any]:
        """Runs the tests that need a GPU; with one, a skipped test is a failure."""
        files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "tests.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *map(str, files)]
            outcome = self._run_command("tests", PACKAGES | TEST_PACKAGES, command, TESTS_SECONDS)
            self._tests = test_counts(report)
        outcome["passed"] &= self._tests is not None and self._tests["skipped"] == 0
        return outcome

    def _run_command(self, part: str, packages: dict[str, str], command: list[str], seconds: float) -> dict[str, Any]:
        """Runs a command within the time that is left.

        Raises:
            ImportError: packages are missing.
        """
        if missing := absent(packages):
            raise ImportError(f"{', '.join(missing.values())} missing; {how_to_install(missing)}")
        left = self._end - time.monotonic()
        if left < LEAST_SECONDS:
            self._not_reached.append({"what": part, "why": f"{max(left, 0):.0f} s of the time were left"})
            return {"passed": False, "why": "not reached"}
        print(f"gpu_check: {part}", flush=True)
        return run_command(command, min(left, seconds))

    def _write(self, finished: bool = False) -> None:
        """Replaces the file of results, which is complete at every moment."""
        self.result = {
            "finished": finished,
            "passed": finished and all(part["passed"] for part in self._parts.values()),
            "aims": targets(self._lines),
            "speeds": speeds(self._lines),
            "tests": self._tests,
            "kernels": self._kernels,
            "parts": self._parts,
            "not_reached": self._not_reached,
            **self._about,
            "bench": self._lines,
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        partial = self.output.with_suffix(".partial")
        partial.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.output)


def run_command(command: Sequence[str], timeout: float) -> dict[str, Any]:
    """Runs a command, prints its output and keeps its end; then kills all its processes."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    print(text, flush=True)
    return {
        "passed": process.returncode == 0 and not timed_out,
        "exit_code": process.returncode,
        "timed_out": timed_out,
        "command": list(command),
        "output_end": text[-TAIL_CHARACTERS:],
    }


def test_counts(report: Path) -> dict[str, int] | None:
    """Counts tests, failures, errors and skipped in pytest's JUnit file; None if there is no file."""
    if not report.exists():
        return None
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = [{key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")} for suite in suites]
    return {key: sum(each[key] for each in counts) for key in counts[0]}


if __name__ == "__main__":
    sys.exit(main())
