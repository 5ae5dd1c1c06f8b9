"""Soak of online training and serving: an hour of faults, one a minute, then a comparison with an undisturbed run.

    python -m scripts.soak --minutes 60 --output soak.jsonl

Redis, `cowrec online`, two `cowrec serve`, a producer and a client run as they would in production, on this machine.
Faults come in a random order, each once before any comes again: kills, a frozen Redis, a flipped bit in a checkpoint, a
full disk, wrong samples, wrong clocks, hostile connections and requests. At the end every valid sample must have been
trained on once, the model must have the same bits as that of a run over the same stream without a fault, the readers of
its publications must equal it, and no answer may have been wrong. The summary has the trend of memory with its noise.

The samples that wait for later ones are trained on once the stream is silent for QUIET seconds; it is never silent that
long before the end, so that batches do not depend on timing. It exits with 1 if a check fails.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cowrec.trainer.runtime.environment import prepare_process

prepare_process()  # before torch is loaded

import torch

from cowrec.data_pipeline import synthesize_drifting
from cowrec.trainer.cli.flag_values import parse_list
from cowrec.trainer.runs.provenance import environment

from .checks import final_checks
from .clients import Clients
from .faults import ENDING, FAULTS, Faults, planned
from .processes import CONFIG, SERVERS, Cluster
from .report import Line, memory_trends, minute_line, now_line, plot
from .samples import DRIFT, Producer

DISK_BYTES = 256 << 20
FINAL_SECONDS = 1200.0
"""Limit for the trainer, and for the undisturbed run, to train on everything."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write; a plot is added")
    parser.add_argument("--minutes", type=float, default=60.0, help="duration of the faults")
    parser.add_argument("--fault-seconds", type=float, default=60.0, help="time from one fault to the next")
    parser.add_argument("--faults", default=",".join(FAULTS), help="names of the faults to cause")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the faults")
    parser.add_argument("--rate", type=float, default=50.0, help="samples per second")
    parser.add_argument("--quiet-seconds", type=float, default=60.0, help="QUIET, see above")
    parser.add_argument("--folder", type=Path, help="new folder for data, logs and runs, which is kept")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what was started
    arguments.output.unlink(missing_ok=True)
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cowrec_soak_")))
        folder.mkdir(exist_ok=True)
        passed = Soak(arguments, folder, stack).run()
    sys.exit(0 if passed else 1)


class Soak:
    """The soak.

    Args:
        arguments: of the command line.
        folder: for everything but the results.
        stack: ends what was started.
    """

    def __init__(self, arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        self.arguments, self.stack = arguments, stack
        self.lines: list[Line] = []
        self.about = {
            "config": {key: str(value) for key, value in vars(arguments).items() if key not in ("output", "folder")},
            "run": CONFIG,
            **environment(torch.device("cpu")),
        }
        synthesize_drifting(folder / "data", DRIFT, test_rows=100)
        self.cluster = Cluster(folder, arguments.quiet_seconds)
        own_disk = stack.enter_context(disk(self.cluster.run_dir))
        stack.callback(self.cluster.close)
        self.cluster.start_redis()
        self.producer = Producer(self.cluster.client(), arguments.rate)
        self.clients = Clients(self.cluster, self.producer)
        self.faults = Faults(self.cluster, self.producer, random.Random(arguments.seed), own_disk)

    def run(self) -> bool:
        """Runs everything and writes the lines; returns whether every check passed."""
        self.producer.start()
        self.cluster.start()
        self.clients.start()
        self.begun = time.time()
        unexpected = self.cause_faults()
        self.producer.stop()
        self.clients.stop()
        checks, counts = final_checks(self.cluster, self.producer, FINAL_SECONDS)
        answers = {name: dict(found) for name, found in self.clients.answers.items()}
        wrong = [f"{name}: {each}" for name, found in answers.items() for each in found if each.startswith("wrong")]
        checks["no_wrong_answer"] = not (wrong or self.faults.wrong)
        untouched = "unreachable" not in answers[SERVERS[0]] and not self.clients.unhealthy
        checks["the_untouched_server_always_answered"] = untouched
        checks["nothing_ended_by_itself"] = not unexpected
        self.write(
            now_line(
                "summary",
                self.minute,
                passed=all(checks.values()),
                checks=checks,
                **counts,
                answers=answers,
                wrong=wrong + self.faults.wrong,
                ended_by_itself=unexpected,
                memory=memory_trends(self.lines),
                repeated_writes=self.producer.repeated,
                **self.about,
            )
        )
        plot(self.lines, self.arguments.output.with_suffix(".png"))
        return all(checks.values())

    @property
    def minute(self) -> float:
        return (time.time() - self.begun) / 60

    def cause_faults(self) -> list[str]:
        """Causes one fault after the other; returns what ended by itself."""
        unexpected, given = list[str](), self.arguments
        count = max(1, round(60 * given.minutes / given.fault_seconds))
        for number, name in enumerate(planned(given.seed, count, tuple(parse_list(given.faults))), 1):
            since, before = time.time(), {name: Counter(found) for name, found in self.clients.answers.items()}
            began = self.minute
            for process in self.cluster.processes:
                if process.exit_code is not None:
                    unexpected.append(f"{process.name} with {process.exit_code}")
            seen: dict[str, Any] = {}
            try:
                seen = self.faults.cause(name)
                if name not in ENDING:
                    unexpected += [f"{each} at {name}" for each in seen["restarted"]]
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                unexpected.append(f"{name}: {error}")
                seen = {"failed": str(error)}
            self.write(now_line("fault", began, fault=name, **seen))
            due = self.begun + number * given.fault_seconds
            time.sleep(max(0.0, due - time.time()))
            answers = {name: dict(found - before[name]) for name, found in self.clients.answers.items()}
            self.write(minute_line(self.minute, since, self.cluster, self.producer, self.clients, answers))
        return unexpected

    def write(self, line: Line) -> None:
        self.lines.append(line)
        with self.arguments.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        shown = {key: value for key, value in line.items() if key not in self.about}
        print(json.dumps(shown), flush=True)


@contextmanager
def disk(folder: Path) -> Iterator[bool]:
    """Gives a folder a small disk of its own, in memory, which only root can do; yields whether it has one."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


if __name__ == "__main__":
    main()
