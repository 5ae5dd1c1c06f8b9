"""Load test of `cowrec serve`: increasing request rates while new versions are published; JSON lines.

    python -m scripts.load_test --output serve.jsonl

Requests are sent at a constant rate regardless of earlier answers; their latency starts at the scheduled time, so that
a stalled server cannot hide it by delaying clients (coordinated omission). Ids are those of drifting samples; weights
are random, since they cost the same as trained ones. Client and publisher share the machine with the server, but not
its core, where there are more. The knee is the highest rate that the server sustains with at most one request in a
hundred above KNEE_SECONDS. A last step sends OVERLOAD times as many, from more connections, by clients that give a
request up after PATIENCE seconds, while a probe asks for the server's health.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.dataset.schema import RESERVED_ROWS
from cowrec.data_pipeline.encoding.vocabulary import raw_ids
from cowrec.data_pipeline.parallel import available_cores
from cowrec.data_pipeline.synthetic.drifting import (
    DriftConfig,
    DriftingModel,
    drifting_tables,
    id_text,
    synthesize_drifting,
)
from cowrec.models import ModelConfig, build_network, physical_dim
from cowrec.trainer.cli.flags import parse_list
from cowrec.trainer.export.export import TrainedTable, write_export
from cowrec.trainer.export.manifest import Manifest, fingerprint
from cowrec.trainer.publishing.blob import Change, TableChange
from cowrec.trainer.publishing.publisher import Publisher
from cowrec.trainer.publishing.target import open_target
from cowrec.trainer.runs.run_dir import to_json
from cowrec.trainer.runtime.environment import environment

CONFIG = DriftConfig(rows=4_000_000, days=60.0)
MODEL = ModelConfig(name="deepfm", embedding_dim=10, hidden=(400, 400, 400))

PORT, HEALTH_PORT = 8123, 8124
KNEE_SECONDS = 0.05
CONNECTIONS = 128
OVERLOAD, OVERLOAD_CONNECTIONS, PATIENCE = 4.0, 900, 1.0
DRAIN_SECONDS = 5.0
"""Maximum wait for answers after the scheduled time of the last request."""
Line = dict[str, Any]


@dataclass
class Outcome:
    """Outcome of the requests at one rate.

    Attributes:
        latencies: seconds of requests answered with status 200, in order of the answers.
        statuses: counts of other statuses; -1 for a lost connection, -2 for a request that waited too long for one.
        scheduled: scheduled requests.
        seconds: time from the first request to the last answer.
        client_cpu: share of a core that the client used; near 1 it, and not the server, is what is measured.
    """

    latencies: list[float] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    scheduled: int = 0
    seconds: float = 0.0
    client_cpu: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--samples", default="1,32", help="samples per request")
    parser.add_argument("--rates", default="100,250,500,1000,2000,3000,4000,5000,6000", help="requests per second")
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each rate")
    parser.add_argument("--rows", type=int, default=CONFIG.rows, help="samples whose ids have a row in the model")
    parser.add_argument("--delta-rows", type=int, default=30_000, help="maximum rows per published delta")
    parser.add_argument("--delta-seconds", type=float, default=2.0, help="interval between deltas")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, arguments.output.open("w", encoding="utf-8", buffering=1) as file:
        folder, config = Path(name), dataclasses.replace(CONFIG, rows=arguments.rows)
        ids = make_export(config, folder)
        about = {
            "config": {
                "model": dataclasses.asdict(MODEL),
                "resident_ids": ids,
                "fields": config.fields,
                "delta_rows": arguments.delta_rows,
                "delta_seconds": arguments.delta_seconds,
                "connections": CONNECTIONS,
            },
            **environment(torch.device("cpu")),
            "cores": available_cores(),
        }
        rates = [float(rate) for rate in parse_list(arguments.rates)]
        for samples in map(int, parse_list(arguments.samples)):
            with (
                on_other_cores(1) as cores,
                served(folder, cores),
                publishing(config, folder, arguments.delta_rows, arguments.delta_seconds),
            ):
                wait_until(PORT, lambda health: health["status"] == "ok" and health["version"] > 1)
                for line in steps(config, samples, rates, arguments.seconds):
                    print(summary(line), flush=True)
                    file.write(to_json({**line, **about}) + "\n")


def steps(config: DriftConfig, samples: int, rates: list[float], seconds: float) -> Iterator[Line]:
    """Yields a line per rate, up to the first that the server does not sustain, and one of overload."""
    requests = [request_bytes("/predict", body) for body in bodies(config, 20_000 // samples, samples)]
    run_open_loop(requests, rates[0], 3.0, CONNECTIONS)  # warms up both sides
    knee = rates[0]
    for rate in rates:
        before = metrics()
        outcome = run_open_loop(requests, rate, seconds, CONNECTIONS)
        after = metrics()
        line = measured(outcome, samples, rate)
        applied = after["cowrec_deltas_applied_total"] - before["cowrec_deltas_applied_total"]
        apply_seconds = after["cowrec_delta_apply_seconds_sum"] - before["cowrec_delta_apply_seconds_sum"]
        line |= {
            "deltas": applied,
            "delta_rows": after["cowrec_applied_rows_total"] - before["cowrec_applied_rows_total"],
            "delta_apply_ms": 1000 * apply_seconds / applied if applied else None,
        }
        yield line
        if not line["kept_up"]:
            break
        knee = rate if line["within"] else knee
        time.sleep(1.0)
    time.sleep(3.0)
    rate = OVERLOAD * knee
    with probe() as health:
        outcome = run_open_loop(requests, rate, seconds, OVERLOAD_CONNECTIONS, PATIENCE)
    refused, lost = outcome.statuses.get(503, 0), outcome.scheduled - len(outcome.latencies)
    yield measured(outcome, samples, rate) | {
        "overload": OVERLOAD,
        "shed": refused / outcome.scheduled,
        "given_up": (lost - refused) / outcome.scheduled,
        "health_max_ms": 1000 * max(health),
    }


@contextmanager
def probe() -> Iterator[list[float]]:
    """Asks for the server's health again and again in a thread; collects the seconds that it took."""
    seconds: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.1):
            start = time.perf_counter()
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{HEALTH_PORT}/readyz", timeout=30) as answer,
            ):
                answer.read()
            seconds.append(time.perf_counter() - start)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield seconds
    finally:
        stop.set()
        thread.join()


def measured(outcome: Outcome, samples: int, rate: float) -> Line:
    """Returns rates in requests and predictions per second, latencies in milliseconds."""
    answered = len(outcome.latencies)
    quantiles = np.quantile(outcome.latencies or [np.inf], [0.5, 0.9, 0.99, 0.999, 1.0]) * 1000
    named = {
        f"{name}_ms": float(value) for name, value in zip(("p50", "p90", "p99", "p999", "max"), quantiles, strict=True)
    }
    kept_up = answered >= 0.999 * outcome.scheduled and named["p99_ms"] < 1000
    return {
        "samples": samples,
        "rate": rate,
        "answered_per_second": answered / outcome.seconds,
        "predictions_per_second": samples * answered / outcome.seconds,
        **named,
        "not_answered": outcome.scheduled - answered,
        "statuses": outcome.statuses,
        "client_cpu": outcome.client_cpu,
        "kept_up": kept_up,
        "within": kept_up and named["p99_ms"] <= 1000 * KNEE_SECONDS,
    }


@contextmanager
def served(folder: Path, cores: set[int]) -> Iterator[None]:
    """Runs `cowrec serve` on the export, following publications, on some cores."""
    command = [sys.executable, "-m", "cowrec.trainer", "serve", f"{folder}/export", "--port", str(PORT)]
    command += ["--follow", f"{folder}/published", "--health-port", str(HEALTH_PORT)]
    process = subprocess.Popen(command)
    os.sched_setaffinity(process.pid, cores)
    try:
        wait_until(PORT, lambda health: health["status"] != "loading")
        yield
    finally:
        process.terminate()
        process.wait()


def metrics() -> dict[str, float]:
    """Returns the server's metrics without labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {each.name: each.value for family in families for each in family.samples if not each.labels}


def summary(line: Line) -> str:
    about = f"{line['samples']} samples per request, {line['rate']:,.0f} requests/s"
    found = (
        f"{line['predictions_per_second']:,.0f} predictions/s, p50 {line['p50_ms']:.1f}, p99 {line['p99_ms']:.1f} ms"
    )
    client = f"client {line['client_cpu']:.0%} of a core"
    if "overload" in line:
        return (
            f"{about}, {line['overload']:g} times the knee: {found}, {line['shed']:.0%} refused,"
            f" {line['given_up']:.0%} given up, health within {line['health_max_ms']:.0f} ms, {client}"
        )
    return (
        f"{about}: {found}, max {line['max_ms']:.0f} ms, {line['not_answered']} not answered,"
        f" {line['deltas']:.0f} deltas applied, {client}"
    )


def make_export(config: DriftConfig, folder: Path) -> int:
    """Exports a model with the ids of `folder/data` to `folder/export`; returns the number of ids with a row."""
    synthesize_drifting(folder / "data", config, test_rows=1)
    schema = Schema.load(folder / "data")
    draw = DriftingModel.of(config).draw(0, config.rows)
    tables = [_table(field.name, ids) for field, ids in zip(schema.sparse, draw.ids, strict=True)]
    network = build_network(MODEL, [field.name for field in schema.sparse], len(schema.dense))
    dense = {name: each.detach() for name, each in network.state_dict().items()}
    write_export(
        folder / "export", MODEL, schema, folder / "data" / "vocabulary", dense, tables, step=0, sample_time=_now()
    )
    return sum(len(table.rows) for table in tables)


def bodies(config: DriftConfig, count: int, samples: int) -> list[bytes]:
    """Returns JSON bodies of requests for the samples after those of the export: one sample, or a list of several."""
    wanted = range(config.rows, config.rows + count * samples)
    rows: list[dict[str, object]] = []
    for table in drifting_tables(config, wanted.start, len(wanted)):
        rows += table.drop_columns(["label", "time", "sample_id"]).to_pylist()
    if samples == 1:
        return [json.dumps(row).encode() for row in rows]
    return [json.dumps(rows[start : start + samples]).encode() for start in range(0, len(rows), samples)]


@contextmanager
def publishing(config: DriftConfig, folder: Path, rows: int, seconds: float) -> Iterator[None]:
    """Runs a process that publishes the export and then deltas, as in training, to `folder/published`.

    Args:
        config: settings of the samples.
        folder: folder of `make_export`.
        rows: maximum rows per delta.
        seconds: interval between deltas.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=_publish, args=(config, folder, rows, seconds, stop))
    process.start()
    try:
        yield
    finally:
        stop.set()
        process.join()


def wait_until(port: int, condition: Callable[[Any], bool], seconds: float = 120.0) -> None:
    """Waits until a server's health satisfies the condition."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            try:
                answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5)
            except urllib.error.HTTPError as error:  # 503, with the status of the server
                answer = error
            with answer:
                if condition(json.load(answer)):
                    return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server on port {port} was not ready within {seconds:g} s")
        time.sleep(0.1)


@contextmanager
def on_other_cores(taken: int) -> Iterator[set[int]]:
    """Yields the first ``taken`` cores, for a server, while this process runs on the others.

    All are shared if there are not more.
    """
    cores = sorted(os.sched_getaffinity(0))
    others = cores[taken:] or cores
    os.sched_setaffinity(0, others)
    try:
        yield set(cores[:taken]) if others != cores else set(cores)
    finally:
        os.sched_setaffinity(0, cores)


def _table(name: str, ids: np.ndarray) -> TrainedTable:
    raw = np.r_[range(RESERVED_ROWS), raw_ids(id_text(np.unique(ids)))]
    rows = torch.randn(len(raw), physical_dim(MODEL.embedding_dim)) * 0.01
    return TrainedTable(name, (name,), rows, torch.from_numpy(raw))


def _now() -> int:
    return int(time.time())


def _publish(config: DriftConfig, folder: Path, rows: int, seconds: float, stop: Event) -> None:
    model, rng = DriftingModel.of(config), np.random.default_rng(0)
    each, first = rows // config.fields, config.rows
    last_ids = [np.empty(0, np.int64)] * config.fields
    target = open_target(str(folder / "published"), publishing=True)
    of_data = fingerprint(folder / "export", MODEL, Manifest.load(folder / "export").tables)
    with closing(Publisher(target, of_data, compact_after=1 << 40, compact_bytes=1 << 60)) as publisher:
        export = _exported(folder / "export")
        publisher.publish(export, export)
        del export
        publisher.finish(60)
        due = time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            draw, tables = model.draw(first, 4 * each), {}
            first += 4 * each
            for field, ids in enumerate(draw.ids):
                written = raw_ids(id_text(np.unique(ids)[:each]))
                weights = rng.standard_normal((len(written), physical_dim(MODEL.embedding_dim)), np.float32)
                # Ids of the last delta that are absent from this one are deleted.
                deleted = np.setdiff1d(last_ids[field], written)
                tables[f"C{field + 1}"] = TableChange(written, weights * np.float32(0.01), deleted)
                last_ids[field] = written
            publisher.publish(Change(first, _now(), tables))
            due += seconds


def _exported(export: Path) -> Change:
    stored = {file.stem: load_file(file) for file in sorted((export / "tables").iterdir())}
    tables = {name: TableChange(each["ids"].numpy(), each["rows"].numpy()) for name, each in stored.items()}
    dense = {name: each.numpy() for name, each in load_file(export / "dense.safetensors").items()}
    return Change(0, _now(), tables, dense)


def request_bytes(path: str, body: bytes) -> bytes:
    """Builds a POST request with a JSON body, for a keep-alive connection."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def run_open_loop(
    requests: Sequence[bytes], rate: float, seconds: float, connections: int, patience: float = math.inf
) -> Outcome:
    """Runs `open_loop` with a server at PORT."""
    start, cpu = time.perf_counter(), time.process_time()
    outcome = uvloop.run(open_loop(PORT, requests, rate, seconds, connections, patience))
    outcome.client_cpu = (time.process_time() - cpu) / (time.perf_counter() - start)
    return outcome


async def open_loop(
    port: int,
    requests: Sequence[bytes],
    rate: float,
    seconds: float,
    connections: int,
    patience: float = math.inf,
) -> Outcome:
    """Sends requests round-robin at a constant rate.

    Args:
        port: of the server, on this machine.
        requests: complete HTTP requests.
        rate: requests per second.
        seconds: duration.
        connections: maximum open connections; a request waits for a free one, which counts as latency.
        patience: seconds that it waits before it is given up.
    """
    pool = await _connected(port, connections, patience)
    start = time.perf_counter() + 0.05
    total = round(rate * seconds)
    sent = 0
    while sent < total:
        due = min(total, int((time.perf_counter() - start) * rate) + 1)
        while sent < due:
            pool.send(start + sent / rate, requests[sent % len(requests)])
            sent += 1
        await asyncio.sleep(max(0.0, start + sent / rate - time.perf_counter()))
    await pool.finished(start, total)
    return pool.outcome


async def _connected(port: int, connections: int, patience: float) -> "_Pool":
    pool = _Pool(patience)
    for _ in range(connections):
        await asyncio.get_running_loop().create_connection(lambda: _Connection(pool), "127.0.0.1", port)
    return pool


class _Pool:
    """Pool of connections and queue of requests that wait for one."""

    def __init__(self, patience: float) -> None:
        self.outcome, self._patience = Outcome(), patience
        self.last_answer = time.perf_counter()
        self.unanswered = 0
        self._free: list[_Connection] = []
        self._all: list[_Connection] = []
        self._waiting: deque[tuple[float, bytes]] = deque()

    def send(self, due: float, request: bytes) -> None:
        self.unanswered += 1
        if self._free:
            self._free.pop().send(due, request)
        else:
            self._waiting.append((due, request))

    def add(self, connection: "_Connection") -> None:
        self._all.append(connection)
        self._free.append(connection)

    def lost(self, connection: "_Connection") -> None:
        """Removes an idle connection that the server closed."""
        if connection in self._free:
            self._free.remove(connection)

    def answered(self, connection: "_Connection", due: float, status: int) -> None:
        self.last_answer = time.perf_counter()
        self.unanswered -= 1
        if status == 200:
            self.outcome.latencies.append(self.last_answer - due)
        else:
            self.outcome.statuses[status] = self.outcome.statuses.get(status, 0) + 1
        if status < 0:
            return
        while self._waiting and self.last_answer - self._waiting[0][0] > self._patience:
            self._waiting.popleft()
            self.unanswered -= 1
            self.outcome.statuses[-2] = self.outcome.statuses.get(-2, 0) + 1
        if self._waiting:
            connection.send(*self._waiting.popleft())
        else:
            self._free.append(connection)

    async def finished(self, start: float, total: int) -> None:
        """Waits for the answers and closes the connections."""
        deadline = time.perf_counter() + DRAIN_SECONDS
        while self.unanswered and time.perf_counter() < deadline:
            await asyncio.sleep(0.01)
        self.outcome.scheduled, self.outcome.seconds = total, self.last_answer - start
        for connection in self._all:
            connection.transport.abort()


class _Connection(asyncio.Protocol):
    """Connection with one request in flight."""

    transport: asyncio.Transport

    def __init__(self, pool: _Pool) -> None:
        self._pool, self._received, self._due = pool, b"", -1.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._pool.add(self)

    def send(self, due: float, request: bytes) -> None:
        self._due = due
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            due, self._due, self._received = self._due, -1.0, b""
            self._pool.answered(self, due, int(head[9:12]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._due >= 0:
            self._pool.answered(self, self._due, -1)
        else:
            self._pool.lost(self)


if __name__ == "__main__":
    main()
