"""Checks and measures cowrec on this machine's GPU, in parts of falling value, and compares speeds with targets.

Start it with `bash scripts/gpu_check.sh`, which makes `import cowrec` work in a checkout. The parts, in this order:

replay      the replay kernel alone: what a turn of its loop costs, and what may slow it
smoke       kernels, layers, a full step and a captured graph compute what they should
kernels     a table of the kernels of one step at batch 128K and 1K, and the turns of replay
graph       captured steps at batch 128K, 1K, 8K, 16K and 64K
bfloat16    captured steps with products in bfloat16, at 128K and 1K
clip_off    captured steps without CowClip
memcheck, racecheck   compute-sanitizer on the small kernels of smoke
tests       `pytest -m gpu -v`, graph and kernels first
resume      a run goes on from its checkpoint with the same bits; needs numba and pyarrow
fused       FBGEMM's fused optimizer under attach_cowclip; needs FBGEMM's CUDA build
eager       steps without a CUDA graph

`--call 1` runs the parts up to clip_off and `--call 2` those from memcheck to fused, in 9.5 minutes each, for a machine
that ends commands after ten. The first call needs neither numba nor pyarrow, nor FBGEMM's CUDA build; without that,
tests runs fewer files. All need a C compiler. Each part is a process with its own time; after it, SIGINT and then
SIGKILL end the part, and the next one begins. Lines are added to results/HARDWARE/gpu_check.jsonl as they become known:
figures, and how each part ended. Several runs add to one file. The exit status is 0 if all chosen parts passed; a speed
below its target is reported but is not a failure.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .machine import (
    CUDA_BUILD,
    MLPERF_PACKAGES,
    PACKAGES,
    ROOT,
    RUN_PACKAGES,
    TEST_PACKAGES,
    about,
    append,
    gpu,
    lines_of,
    missing,
    missing_compiler,
    versions,
)
from .report import outcomes, slug, summary

TAIL_CHARACTERS = 4000
GRACE_SECONDS = 20.0
"""Time that a part has to end after SIGINT."""
TESTS_OF_CPU_BUILD = ("test_captured_steps.py", "test_triton.py", "test_linear_relu.py", "test_reader.py")
"""Files of GPU tests that need no CUDA build of FBGEMM; those of the others run its operators."""
LEAST_SECONDS = 10.0
"""Time left below which no part is started."""
CALLS = {
    1: "replay,smoke,kernels,graph,bfloat16,clip_off",
    2: "memcheck,racecheck,tests,resume,fused",
}
MINUTES, MINUTES_OF_CALL = 20.0, 9.5


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        command: what to run.
        seconds: most time that it may take, its imports included.
        packages: what it imports.
        program: what it needs on the PATH.
        compiles: whether it compiles kernels, for which Triton needs a C compiler.
        fused: whether it needs FBGEMM's CUDA build.
        variables: environment variables.
        tests: pytest's report, if it runs tests; with a GPU a skipped one is a failure.
    """

    command: Sequence[str]
    seconds: float
    packages: Mapping[str, str] = field(default_factory=lambda: PACKAGES)
    program: str = ""
    compiles: bool = False
    fused: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    tests: Path | None = None

    def why_not(self) -> str:
        """Returns what keeps the part from running and how to mend it; empty if nothing does."""
        if absent := missing(self.packages):
            remedy = "install with make setup, or unpack their wheels into a folder on PYTHONPATH"
            return f"{', '.join(absent)} missing in {sys.executable}; {remedy}"
        if self.program and shutil.which(self.program) is None:
            return f"{self.program} is not on the PATH; it comes with the CUDA toolkit"
        if self.compiles and (lacks := missing_compiler()):
            return lacks
        if self.fused and not versions([CUDA_BUILD]):
            return "fbgemm-gpu, the CUDA build of FBGEMM, is missing; install it in the place of fbgemm-gpu-cpu"
        return ""


def parts(output: Path, folder: Path, rehearse: bool) -> dict[str, Part]:
    """Returns the parts in their order; ``folder`` is for files that are of no use later.

    A rehearsal interprets the kernels, which takes minutes where the machine does other work.
    """

    def module(name: str, part: str, *flags: str) -> list[str]:
        return [sys.executable, "-m", f"scripts.gpu.{name}", "--part", part, "--output", str(output), *flags]

    interpreted = {"TRITON_INTERPRET": "1"} if rehearse else {}
    tiny = ("--rehearse", "--precision", "float32", "--batch-sizes", "4", "--seconds", "0") if rehearse else ()
    small = ("--device", "cpu", "--batch-size", "4", "--rows", "4") if rehearse else ()

    def speed(part: str, seconds: float, *flags: str, **needs: Any) -> Part:
        seconds = 900 if rehearse else seconds
        return Part(module("speed", part, *flags, *tiny), seconds, variables=interpreted, **needs)

    def sanitizer(tool: str) -> Part:
        check = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
        # torch asks CUDA for what it may lack, and handles the error; torch's own kernels are not what is looked at.
        check += ["--report-api-errors", "no"] if tool == "memcheck" else []
        flags = module("smoke", tool, "--checks", "bits")
        # Without the cache of torch's allocator an access beyond a tensor is one beyond an allocation.
        variables = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        return Part([*check, *flags], 150, program=check[0], variables=variables)

    report = folder / "tests.xml"
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    files.sort(key=lambda path: not path.name.startswith(("test_captured", "test_triton")))
    pytest = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "--junitxml", str(report)]
    if not versions([CUDA_BUILD]):
        pytest += ["-p", "scripts.gpu.cpu_build"]
        files = [path for path in files if path.name in TESTS_OF_CPU_BUILD]
    pytest += ["-o", "faulthandler_timeout=60", *(str(path.relative_to(ROOT)) for path in files)]
    known = {
        "replay": Part(module("replay", "replay", *tiny[:1]), 900 if rehearse else 90, variables=interpreted),
        "smoke": Part(module("smoke", "smoke", *small), 900 if rehearse else 180, variables=interpreted),
        "kernels": speed("kernels", 90, "--kernels"),
        "graph": speed("graph", 180, "--batch-sizes", "131072,1024,8192,16384,65536"),
        "bfloat16": speed("bfloat16", 90, *(() if rehearse else ("--precision", "bfloat16"))),
        "clip_off": speed("clip_off", 90, "--clip", "off"),
        "memcheck": sanitizer("memcheck"),
        "racecheck": sanitizer("racecheck"),
        "tests": Part(pytest, 240, packages=PACKAGES | TEST_PACKAGES, tests=report),
        "resume": Part(
            module("smoke", "resume", "--checks", "checkpoint", *small),
            900 if rehearse else 90,
            packages=PACKAGES | RUN_PACKAGES,
            variables=interpreted,
        ),
        "fused": speed("fused", 120, "--mlperf", packages=PACKAGES | MLPERF_PACKAGES, fused=True),
        "eager": speed("eager", 120, "--uncaptured"),
    }
    return {name: replace(part, compiles=not rehearse) for name, part in known.items()}


def main() -> int:
    names = list(parts(Path(), Path(), False))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to add to (default: results/HARDWARE/gpu_check.jsonl)")
    parser.add_argument("--minutes", type=float, help="time for everything (default: 20; 9.5 with --call)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--parts", help="parts to run (default: all, in their order)")
    which.add_argument("--call", type=int, choices=CALLS, help="run the first parts or the second")
    parser.add_argument("--rehearse", action="store_true", help="run on CPU with tiny tables, to try this script")
    arguments = parser.parse_args()
    chosen = (arguments.parts or CALLS.get(arguments.call, ",".join(names))).split(",")
    minutes = arguments.minutes or (MINUTES_OF_CALL if arguments.call else MINUTES)
    if not set(chosen) <= set(names):
        parser.error(f"--parts must be some of {','.join(names)}, got {arguments.parts}")
    device = "rehearsal" if arguments.rehearse else gpu()
    if not device:
        print(
            "gpu_check: nvidia-smi shows no CUDA device; run it on a machine with a GPU and a driver", file=sys.stderr
        )
        return 1
    results = ROOT / ("build" if arguments.rehearse else "results") / slug(device)
    output = (arguments.output or results / "gpu_check.jsonl").absolute()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        known = parts(output, Path(folder), arguments.rehearse)
        run({name: known[name] for name in names if name in chosen}, output, device, 60 * minutes)
    lines = list(lines_of(output))
    print(f"{summary(lines)}\n{output}")
    ended = outcomes(lines)
    return 0 if all(name in ended and ended[name]["outcome"] == "passed" for name in chosen) else 1


def run(chosen: Mapping[str, Part], output: Path, device: str, seconds: float) -> None:
    """Runs parts one after the other, and adds a line on how each ended; Ctrl-C and SIGTERM end them all."""
    provenance, end = about(device), time.monotonic() + seconds
    for name, part in chosen.items():
        started = time.monotonic()
        try:
            ended = run_part(name, part, end - started)
        except KeyboardInterrupt:
            ended = {"outcome": "interrupted", "why": "by Ctrl-C or SIGTERM"}
        append(output, {"part": name, **ended, "seconds": time.monotonic() - started} | provenance)
        print(f"gpu_check: {name}: {ended['outcome']} {ended['why']}", flush=True)
        if ended["outcome"] == "interrupted":
            break


def run_part(name: str, part: Part, left: float) -> dict[str, Any]:
    """Runs a part in at most ``left`` seconds. Returns its outcome and why, and how its process ended."""
    if why := part.why_not():
        return {"outcome": "not run", "why": why}
    if left < LEAST_SECONDS:
        return {"outcome": "not reached", "why": f"{max(left, 0):.0f} s of the time were left"}
    print(f"gpu_check: {name}", flush=True)
    seconds = min(left, part.seconds)
    ended = run_command(part.command, seconds, part.variables)
    why = f"killed after {seconds:.0f} s" if ended["timed_out"] else ""
    why = why or (f"exit status {ended['exit_code']}" if ended["exit_code"] else "")
    if part.tests:
        ended["tests"] = test_counts(part.tests)
        if not why and ended["tests"] and ended["tests"]["skipped"]:
            why = f"{ended['tests']['skipped']} tests were skipped"
    return {"outcome": "failed" if why else "passed", "why": why, **ended}


def run_command(command: Sequence[str], timeout: float, variables: Mapping[str, str]) -> dict[str, Any]:
    """Runs a command, shows its output and keeps its end.

    After the timeout, or Ctrl-C, its processes get SIGINT, with which tests write their report, and then SIGKILL.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(variables)
    # A shell starts what is in the background with SIGINT ignored, and children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    tail = bytearray()
    reader = threading.Thread(target=_show, args=(process, tail), daemon=True)
    reader.start()
    timed_out = False
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                process.wait(GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    reader.join()
    return {
        "exit_code": process.returncode,
        "timed_out": timed_out,
        "command": [Path(each).name if Path(each).is_absolute() else each for each in command],
        "output_end": tail[-TAIL_CHARACTERS:].decode(errors="replace"),
    }


def _show(process: "subprocess.Popen[bytes]", tail: bytearray) -> None:
    """Prints what a process prints as it comes, and keeps its end."""
    assert process.stdout
    while chunk := os.read(process.stdout.fileno(), 1 << 16):
        sys.stdout.write(chunk.decode(errors="replace"))
        sys.stdout.flush()
        tail += chunk
        del tail[:-TAIL_CHARACTERS]


def test_counts(report: Path) -> dict[str, int] | None:
    """Counts tests, failures, errors and skipped in pytest's JUnit file; None if there is no file."""
    if not report.exists():
        return None
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = [{key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")} for suite in suites]
    return {key: sum(each[key] for each in counts) for key in counts[0]}


if __name__ == "__main__":
    sys.exit(main())
