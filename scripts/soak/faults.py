"""The faults of the soak. Each method causes one and returns what it saw; its name is that in the list of faults."""

import http.client
import json
import random
import signal
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from cowrec.trainer.runs.checkpoint_folder import list_checkpoints
from cowrec.trainer.runs.run_dir import CHECKPOINTS

from .clients import is_right
from .processes import SERVERS, Cluster, metrics, wait_for
from .samples import LATE, YEARS_AHEAD, Message, Producer, malformed

FREEZE_SECONDS = 10.0
HOLD_SECONDS = 15.0
"""Time for which connections stay open: longer than the server's limit for a request."""
CONNECTIONS = 300
HOSTILE_HOST = "127.0.0.2"
"""Address that attacks come from, so that the server can tell them from its clients."""

Seen = dict[str, Any]


class Faults:
    """Causes faults.

    Args:
        cluster: of processes.
        producer: sends the wrong samples.
        random_numbers: choose which bit is flipped.
        full_disk: whether the run's folder is a disk of its own that may be filled.

    Attributes:
        wrong: answers of the server to hostile requests that should not be: a 500, a null, no answer.
    """

    def __init__(self, cluster: Cluster, producer: Producer, random_numbers: random.Random, full_disk: bool) -> None:
        self._cluster, self._producer, self._random = cluster, producer, random_numbers
        self._may_fill = full_disk
        self.wrong: list[str] = []
        self._most = 0.0

    def cause(self, name: str) -> Seen:
        """Causes a fault, waits until everything works again; returns what it saw and the seconds that took.

        What has ended is started again, as a supervisor would; ``restarted`` names it.
        """
        self._restarted: list[str] = []
        self._most = max(self._most, trained(self._cluster))
        seen: Seen = getattr(self, name)()
        waited = wait_for(self._recovered, "everything")
        return {**seen, "restarted": self._restarted, "seconds_to_recover": round(waited, 1)}

    def _recovered(self) -> bool:
        """Whether new samples are trained on and both servers are ready; starts what has ended."""
        cluster = self._cluster
        for process in (cluster.trainer, *cluster.servers.values()):
            if process.exit_code is not None:
                self._restarted.append(process.name)
                process.start()
        return trained(cluster) > self._most and all(map(cluster.ready, SERVERS))

    def kill_trainer(self) -> Seen:
        return {"exit_code": self._cluster.trainer.end(signal.SIGKILL)}

    def stop_trainer(self) -> Seen:
        return {"exit_code": self._cluster.trainer.end(signal.SIGTERM)}

    def kill_redis(self) -> Seen:
        self._cluster.redis.end(signal.SIGKILL)
        time.sleep(2.0)
        self._cluster.start_redis()
        return {}

    def freeze_redis(self) -> Seen:
        self._cluster.redis.send(signal.SIGSTOP)
        time.sleep(FREEZE_SECONDS)
        self._cluster.redis.send(signal.SIGCONT)
        return {}

    def kill_server(self) -> Seen:
        return {"exit_code": self._cluster.servers[SERVERS[1]].end(signal.SIGKILL)}

    def malformed_samples(self) -> Seen:
        contents = malformed(self._producer.sample())
        self._producer.add([Message("malformed", "", content) for content in contents])
        return {"samples": len(contents)}

    def huge_samples(self) -> Seen:
        """Ids of a million characters, numbers at the end of the range, and a megabyte of rubbish."""
        sample, huge = self._producer.sample(), "x" * 1_000_000
        messages = [self._producer.message(sample | {"C1": huge}), Message("malformed", "", huge.encode())]
        for number in (1e39, -1e39, 1e300, -1e308):
            messages.append(self._producer.message(sample | {"I1": number, "I4": -number}))
        self._producer.add(messages)
        return {"samples": len(messages)}

    def far_future_samples(self) -> Seen:
        sample = self._producer.sample()
        later = sample | {"time": sample["time"] + YEARS_AHEAD}
        self._producer.add([self._producer.message(later, "malformed") for _ in range(100)])
        return {"samples": 100}

    def late_samples(self) -> Seen:
        sample = self._producer.sample()
        earlier = sample | {"time": sample["time"] - LATE}
        self._producer.add([self._producer.message(earlier, "late") for _ in range(50)])
        return {"samples": 50}

    def clock_ahead(self) -> Seen:
        """For a while a fifth of the samples has a time 23 hours ahead; a day ahead would be malformed."""
        self._producer.clock_ahead = True
        time.sleep(HOLD_SECONDS)
        self._producer.clock_ahead = False
        return {}

    def duplicate_samples(self) -> Seen:
        repeated = [replace(each, kind="duplicate") for each in self._producer.newest]
        self._producer.add(repeated)
        return {"samples": len(repeated)}

    def damaged_checkpoint(self) -> Seen:
        """One bit of the newest checkpoint differs when the killed trainer starts again."""
        folder = self._cluster.run_dir / CHECKPOINTS
        wait_for(lambda: len(list_checkpoints(folder)) > 1, "an earlier checkpoint, to continue from")
        self._cluster.trainer.end(signal.SIGKILL)
        newest = list_checkpoints(folder)[-1]
        file = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
        content = bytearray(file.read_bytes())
        bit = self._random.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        return {"file": str(file.relative_to(self._cluster.run_dir)), "bit": bit}

    def full_disk(self) -> Seen:
        """The disk of the run is full until the trainer has ended, or for a while."""
        if not self._may_fill:
            return {"skipped": "the run's folder has no disk of its own, which only root can give it"}
        trainer, filler = self._cluster.trainer, self._cluster.run_dir / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass
        end = time.monotonic() + HOLD_SECONDS
        while trainer.exit_code is None and time.monotonic() < end:
            time.sleep(0.2)
        code = trainer.exit_code
        filler.unlink()
        return {"exit_code": code}

    def idle_connections(self) -> Seen:
        with ExitStack() as opened:
            connections = [connection for _ in range(CONNECTIONS) if (connection := self._connect(opened))]
            time.sleep(HOLD_SECONDS)
            return {"connections": len(connections)}

    def slow_requests(self) -> Seen:
        """A hundred requests of which a byte arrives each second."""
        request = b"POST /predict HTTP/1.1\r\nHost: soak\r\nContent-Length: 1000\r\n\r\n"
        with ExitStack() as opened:
            connections = [connection for _ in range(100) if (connection := self._connect(opened))]
            for at in range(round(HOLD_SECONDS)):
                for connection in connections:
                    with suppress(OSError):
                        connection.send(request[at : at + 1])
                time.sleep(1.0)
            ended = sum(is_closed(connection) for connection in connections)
        if ended < len(connections):
            self.wrong.append(f"slow_requests: {len(connections) - ended} connections were not ended")
        return {"connections": len(connections), "ended": ended}

    def huge_requests(self) -> Seen:
        bodies = {"body": b" " * (3 << 20), "samples": json.dumps([self._producer.sample()] * 5000).encode()}
        statuses = {name: self._ask(body) for name, body in bodies.items()}
        statuses["headers"] = self._ask(b"[]", {"X-Long": "x" * 100_000})
        return {"statuses": statuses}

    def large_numbers(self) -> Seen:
        sample, found = self._producer.sample(), {}
        for text in ("1e39", "-1e39", "1e308", "1e400", "-1e999", f"1{'0' * 400}", "NaN", "Infinity"):
            body = json.dumps(sample | {"I1": 0.125}).replace("0.125", text)
            found[text[:10]] = self._ask(body.encode())
        return {"statuses": found}

    def malformed_requests(self) -> Seen:
        bodies = [*malformed(self._producer.sample()), b"[null]", b"[]", b"[" * 500_000, b'{"I1": ' * 10_000]
        statuses = [self._ask(body) for body in bodies]
        return {"statuses": {str(status): statuses.count(status) for status in sorted(set(statuses))}}

    def _connect(self, opened: ExitStack) -> socket.socket | None:
        """A connection from the hostile address to the untouched server."""
        with suppress(OSError):
            address = ("127.0.0.1", self._cluster.ports[SERVERS[0]])
            return opened.enter_context(socket.create_connection(address, 5.0, (HOSTILE_HOST, 0)))
        return None

    def _ask(self, body: bytes, headers: dict[str, str] | None = None) -> int:
        """Status of a hostile request; a connection that is ended before an answer counts as 0."""
        port = self._cluster.ports[SERVERS[0]]
        connection = http.client.HTTPConnection("127.0.0.1", port, 20.0, (HOSTILE_HOST, 0))
        try:
            connection.request("POST", "/predict", body, headers or {})
            answer = connection.getresponse()
            content = answer.read()
        except TimeoutError:
            self.wrong.append(f"no answer in time to {body[:60]!r}")
            return 0
        except (OSError, http.client.HTTPException):
            return 0  # the server ends the connection of a request that is too large
        finally:
            connection.close()
        nulls = answer.status == 200 and body[:1] == b"{" and not is_right(content, 1)
        if nulls or (answer.status >= 500 and answer.status != 503):
            self.wrong.append(f"{answer.status} {content[:100]!r} to {body[:60]!r}")
        return answer.status


FAULTS = (
    "kill_trainer",
    "stop_trainer",
    "kill_redis",
    "freeze_redis",
    "kill_server",
    "malformed_samples",
    "huge_samples",
    "far_future_samples",
    "late_samples",
    "clock_ahead",
    "duplicate_samples",
    "damaged_checkpoint",
    "full_disk",
    "idle_connections",
    "slow_requests",
    "huge_requests",
    "large_numbers",
    "malformed_requests",
)

ENDING = ("kill_trainer", "stop_trainer", "kill_server", "damaged_checkpoint", "full_disk")
"""Faults that end a process."""


def planned(seed: int, count: int, among: tuple[str, ...] = FAULTS) -> list[str]:
    """Faults in a random order, each once before any comes again."""
    numbers, plan = random.Random(seed), list[str]()
    while len(plan) < count:
        plan += numbers.sample(among, len(among))
    return plan[:count]


def trained(cluster: Cluster) -> float:
    """Samples that the trainer has put into batches; 0 while it does not answer."""
    return metrics(cluster.metrics_port).get("handed_out", 0.0)


def is_closed(connection: socket.socket) -> bool:
    """True if the other side has ended the connection; reads what it sent before."""
    connection.settimeout(2.0)
    with suppress(TimeoutError):
        try:
            while connection.recv(4096):
                pass
        except ConnectionError:
            return True
        return True
    return False
