"""The producer of the soak: sends samples at a constant rate, and what faults add; and what must become of them."""

import itertools
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis

from cowrec.data_pipeline.synthetic.drifting import DriftConfig, drifting_tables

from .processes import STREAM

DRIFT = DriftConfig(
    rows=60_000,
    days=6.0,
    core_ids=(20, 100, 500, 1_000),
    new_ids_per_day=(0, 10, 100, 400),
    lifetime_days=1.0,
    num_dense=4,
)
PAUSE = 0.25
"""Seconds between two writes."""
CLOCK_AHEAD = 23 * 3600
LATE = 2 * 3600
YEARS_AHEAD = 100 * 365 * 86400

Sample = dict[str, Any]


@dataclass(frozen=True)
class Message:
    """An entry of the stream.

    Attributes:
        kind: "valid", trained on once; "late", "malformed" and "duplicate", left out.
        id: its `sample_id`.
        content: the JSON text.
    """

    kind: str
    id: str
    content: bytes


class Producer(threading.Thread):
    """Sends samples until it is stopped; a write that Redis does not acknowledge is repeated.

    Args:
        client: of Redis.
        rate: samples per second.

    Attributes:
        sent: acknowledged messages by kind, each counted once.
        repeated: writes that were repeated.
        clock_ahead: whether a fifth of the samples comes from a clock that is 23 hours ahead.
        newest: the last samples sent.
    """

    def __init__(self, client: Any, rate: float) -> None:
        super().__init__(name="producer", daemon=True)
        self._client, self._rate = client, rate
        self._ended, self._extra = threading.Event(), queue.SimpleQueue[list[Message]]()
        self._numbers = itertools.count()
        self.sent, self.repeated, self.clock_ahead = Counter[str](), 0, False
        self.newest: list[Message] = []

    def run(self) -> None:
        samples = self._samples()
        while not self._ended.wait(PAUSE):
            messages = [self.message(next(samples)) for _ in range(round(self._rate * PAUSE))]
            if self.clock_ahead:
                ahead = [json.loads(each.content) for each in messages[::5]]
                messages[::5] = [self.message(each | {"time": each["time"] + CLOCK_AHEAD}) for each in ahead]
            self.newest = (self.newest + messages)[-500:]
            while not self._extra.empty():
                messages += self._extra.get()
            self._write(messages)

    def add(self, messages: list[Message]) -> None:
        """Sends messages with the next write."""
        self._extra.put(messages)

    def stop(self) -> None:
        """Returns once everything has been sent."""
        self._ended.set()
        self.join()

    def message(self, sample: Sample, kind: str = "valid", sample_id: str | None = None) -> Message:
        """A sample with an id of its own, or the one that is given."""
        sample_id = sample_id or f"s{next(self._numbers)}"
        return Message(kind, sample_id, json.dumps(sample | {"sample_id": sample_id}).encode())

    def sample(self) -> Sample:
        """A sample of the present, as others are."""
        content: Sample = json.loads(self.newest[-1].content)
        return content | {"time": int(time.time())}

    def _samples(self) -> Iterator[Sample]:
        for first in itertools.count(0, 10_000):
            for table in drifting_tables(DRIFT, first, 10_000, 1000):
                for sample in table.to_pylist():
                    yield sample | {"time": int(time.time())}

    def _write(self, messages: list[Message]) -> None:
        while True:
            try:
                with self._client.pipeline(transaction=False) as pipeline:
                    for each in messages:
                        pipeline.xadd(STREAM, {"sample": each.content, "kind": each.kind, "id": each.id})
                    pipeline.execute()
                self.sent.update(each.kind for each in messages)
                return
            except redis.RedisError:
                self.repeated += 1
                time.sleep(0.5)


def malformed(sample: Sample) -> list[bytes]:
    """Contents that are no sample."""
    text = json.dumps(sample).encode()

    def changed(**values: Any) -> bytes:
        return json.dumps(sample | values).encode()

    return [
        b"",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        text[: len(text) // 2],
        json.dumps({key: value for key, value in sample.items() if key != "label"}).encode(),
        json.dumps({key: value for key, value in sample.items() if key != "time"}).encode(),
        changed(label=2),
        changed(time="yesterday"),
        changed(time=10**30),
        changed(I1="many"),
        changed(I1=True),
        changed(I1=10**400),
        changed(I2=float("nan")),
        changed(C1={"id": 1}),
        changed(C2="\ud800"),
        changed(sample_id={}),
    ]


@dataclass(frozen=True)
class Expected:
    """What the trainer's counters must be, from the entries of the stream."""

    entries: int
    valid: int
    late: int
    malformed: int
    duplicates: int

    @staticmethod
    def of_stream(client: Any) -> "Expected":
        """Counts the entries, of which unacknowledged writes and the duplicates fault have repeated some."""
        kinds, ids, last = Counter[str](), set[bytes](), b"-"
        while entries := client.xrange(STREAM, last, count=5000):
            for _, fields in entries:
                kind = fields[b"kind"].decode()
                if kind != "malformed":
                    kind = "duplicate" if fields[b"id"] in ids else kind
                    ids.add(fields[b"id"])
                kinds[kind] += 1
            last = b"(" + entries[-1][0]
        return Expected(kinds.total(), kinds["valid"], kinds["late"], kinds["malformed"], kinds["duplicate"])
