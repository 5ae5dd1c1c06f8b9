"""`cowrec serve --workers`: several processes answer as one does, with one copy of the tables."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from cowrec.trainer.config.run import load_config
from cowrec.trainer.export.export import export_run
from cowrec.trainer.publishing.blob import Blob, Change, Kind, TableChange, encode
from cowrec.trainer.publishing.target import Target, open_target
from cowrec.trainer.serving.workers.shared_arrays import Messages, allocate
from cowrec.trainer.training.loop import train
from serving import DEADLINE, GOOD, Serving, predictions, raw_samples, serving, trained_and_exported

VERSIONS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run and its export, and a run of one more epoch and its export."""
    folder = tmp_path_factory.mktemp("workers")
    trained_and_exported(folder)
    train(load_config(folder / "run.toml", ["train.epochs=2"]), folder / "data", folder / "longer")
    export_run(folder / "longer", folder / "longer-export")
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    target = open_target(str(folder / "published"), publishing=True)
    publish(target, folder, 1, "full")
    return target


@pytest.fixture(scope="module")
def server(folder: Path, target: Target) -> Iterator[Serving]:
    follow = ("--follow", str(folder / "published"), "--health-port", "0")
    with serving(folder / "export", *follow, "--workers", "2") as server:
        yield server


def publish(target: Target, folder: Path, version: int, kind: Kind) -> None:
    """The longer run as odd versions, the shorter one as even versions."""
    export = folder / ("longer-export" if version % 2 else "export")
    rows = {file.stem: load_file(file)["rows"].numpy() for file in (export / "tables").iterdir()}
    tables = {name: TableChange(np.arange(len(each)), each) for name, each in rows.items()}
    dense = {name: each.numpy() for name, each in load_file(export / "dense.safetensors").items()}
    change = Change(version, None, tables, dense)
    target.write(version, kind, encode(Blob(version, version - 1, kind, "lineage", time.time(), change)))


def workers_of(server: Serving) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    return [int(each) for each in children.split() if "workers.worker" in Path(f"/proc/{each}/cmdline").read_text()]


def is_running(process: int) -> bool:
    """Whether a process has not ended; one whose end nobody has asked for has no command any more."""
    command = Path(f"/proc/{process}/cmdline")
    return command.exists() and bool(command.read_bytes())


def kilobytes(process: int, key: str) -> int:
    """Memory of a process by the kernel's name for it."""
    rollup = Path(f"/proc/{process}/smaps").read_text()
    parts = [
        part for part in re.split(r"(?m)^(?=[0-9a-f]+-)", rollup) if "memfd:cowrec-rows" in part.partition("\n")[0]
    ]
    return sum(int(each) for part in parts for each in re.findall(rf"(?m)^{key}: +(\d+) kB", part))


class Clients:
    """Threads that ask without pause, each on connections of its own; used as a context.

    Attributes:
        versions: of the answers.
        wrong: answers that are not those of their version.
        lost: requests without an answer.
    """

    def __init__(self, server: Serving, folder: Path, count: int = 4) -> None:
        self.server, self.samples = server, raw_samples(folder)
        self.body = json.dumps(self.samples).encode()
        self.expected = [predictions(folder, run) for run in ("run", "longer")]
        self.versions, self.wrong, self.lost = set[int](), list[str](), 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]

    def __enter__(self) -> "Clients":
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _ask(self) -> None:
        while not self._stop.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=DEADLINE)
            with contextlib.closing(connection):
                try:
                    for _ in range(8):
                        connection.request("POST", "/predict", self.body)
                        self._check(json.loads(connection.getresponse().read()))
                except OSError:
                    self.lost += 1
                except http.client.HTTPException:
                    self.lost += 1

    def _check(self, answer: dict) -> None:
        if "probabilities" not in answer:
            self.wrong.append(str(answer))
            return
        self.versions.add(answer["version"])
        off = np.abs(np.array(answer["probabilities"]) - self.expected[answer["version"] % 2])
        if off.max() > 1e-6:
            self.wrong.append(f"{(off > 1e-6).mean():.0%} differ from version {answer['version']}")


def test_every_answer_of_every_worker_is_of_one_version(folder: Path, target: Target, server: Serving) -> None:
    """Also when a worker is killed: only the requests that it had are lost, and another one takes its place."""
    before = workers_of(server)
    assert len(before) == 2
    counted = server.metrics()
    with Clients(server, folder) as clients:
        for version in range(2, VERSIONS + 1):
            publish(target, folder, version, "full" if version % 7 == 0 else "delta")
            server.wait_for("version", version)
        assert not clients.lost
        os.kill(before[0], signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE
        while len(workers_of(server)) < 2 or before[0] in workers_of(server):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        publish(target, folder, VERSIONS + 1, "delta")
        server.wait_for("version", VERSIONS + 1)
    assert not clients.wrong, clients.wrong[:3]
    assert clients.lost <= 4
    assert len(clients.versions) > 2
    after = server.metrics()
    assert after["cowrec_deltas_applied_total"] - counted["cowrec_deltas_applied_total"] == VERSIONS
    assert after["cowrec_model_version"] == VERSIONS + 1


def test_tables_are_in_memory_once(server: Serving) -> None:
    """All map the same files, and their proportional shares add up to no more than the size of these."""
    processes = [server.process.pid, *workers_of(server)]
    deadline, sizes = time.monotonic() + DEADLINE, [0]
    while not all(sizes):  # until a worker that was started again has them too
        assert time.monotonic() < deadline, sizes
        sizes = [kilobytes(each, "Size") for each in processes]
    assert len(sizes) == 3
    assert set(sizes) == {sizes[0]}
    assert 0 < sum(kilobytes(each, "Pss") for each in processes) <= sizes[0]


def test_connections_that_are_made_together_are_shared(server: Serving) -> None:
    """Each worker gets some, of the first hundred or, where the other was faster, of later ones."""

    def sockets(process: int) -> int:
        count = 0
        for each in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                count += "socket" in str(each.readlink())
        return count

    workers, added = workers_of(server), [0]
    before = [sockets(each) for each in workers]
    deadline = time.monotonic() + DEADLINE
    while min(added) <= 0:
        assert time.monotonic() < deadline, added
        with contextlib.ExitStack() as stack:
            added = [0]
            for _ in range(100):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            while sum(added) < 90:  # connections of earlier tests may end meanwhile
                assert time.monotonic() < deadline, added
                added = [sockets(each) - old for each, old in zip(workers, before, strict=True)]


def test_metrics_are_sums_over_the_workers(folder: Path, server: Serving) -> None:
    before, results = server.metrics(), [server.predict(GOOD) for _ in range(20)]
    assert [status for status, _ in results] == [200] * 20
    assert server.predict({})[0] == 400
    after = server.metrics()
    for name, count in {
        "cowrec_predictions_total": 20,
        "cowrec_request_seconds_count{route=/predict,status=200}": 20,
        "cowrec_request_seconds_count{route=/predict,status=400}": 1,
    }.items():
        assert after[name] - before.get(name, 0) == count, name
    assert after["cowrec_ready"] == after["cowrec_following"] == 1


def test_workers_end_with_the_process_that_started_them(folder: Path, server: Serving) -> None:
    """After SIGTERM with code 0, when all have finished; after its death too, also that by `kill -9`."""
    with serving(folder / "export", "--workers", "2", "--health-port", "0") as other:
        for ended, number, code in ((other, signal.SIGTERM, 0), (server, signal.SIGKILL, -signal.SIGKILL)):
            workers = workers_of(ended)
            assert ended.predict(GOOD)[0] == 200
            found, printed = ended.send(number)  # waits until nobody can print any more, workers included
            assert found == code, printed
            assert not [each for each in workers if is_running(each)]
            port = re.findall(r"listening on http://127.0.0.1:(\d+): GET", printed)[0]
            for each in (ended.port, int(port)):
                with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", each)):
                    pass


def test_an_export_that_cannot_be_loaded_ends_the_server(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    printed = []
    for workers in ("1", "2"):
        server = Serving(tmp_path, "--workers", workers)
        printed.append((server.process.wait(DEADLINE), server.process.communicate()[1].splitlines()[-1]))
    assert printed[0] == printed[1]
    assert printed[0][0] != 0


def test_arrays_are_shared_and_freed() -> None:
    """A second message with the same array maps it no second time; its memory is freed with the last user."""
    ends = [Messages(each) for each in socket.socketpair()]
    array = allocate((1 << 20,), np.float32)
    array[:] = 1
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ends[0].send({"rows": array, "none": allocate((0, 4), np.int8), "own": np.arange(3)})
    received = [ends[1].receive() for _ in range(3)]
    array[5] = 2
    assert [each["rows"][5] for each in received] == [2, 2, 2]
    assert (received[0]["none"].shape, received[0]["own"].tolist()) == ((0, 4), [0, 1, 2])
    maps = Path("/proc/self/maps").read_text().count("memfd:cowrec-rows")
    assert maps == 2
    del received
    assert Path("/proc/self/maps").read_text().count("memfd:cowrec-rows") == 1
    del array
    assert "memfd:cowrec-rows" not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) < open_files
    ends[0].connection.close()
    with pytest.raises(EOFError):
        ends[1].receive()
