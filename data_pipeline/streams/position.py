"""Position of a stream after a batch: the complete state to resume from, stored as JSON and Arrow files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.codec.codec import TIME_COLUMN
from cowrec.data_pipeline.files import durable_file, write_file

from .reorder import ReorderBuffer

POSITION_FILE, PENDING_FILE, RECENT_FILE = "position.json", "pending.arrow", "recent.arrow"
FORMAT = 3

LEFT_OUT = ("malformed", "duplicates", "late", "lost")
COUNTERS = ("samples", *LEFT_OUT, "early", "bounded", "forced", "flushes", "handed_out", "batches")


@dataclass(frozen=True)
class Position:
    """State of a stream between two batches. Immutable, and cheap enough to keep one for each batch.

    Attributes:
        partitions: position in each partition of the source.
        entry: number of the next entry of the journal.
        newest: the present, Unix seconds: the newest sample time that is no outlier; None before the first sample.
        latest: times of the last samples; see `stream_time.follow`.
        due: number of waiting samples, oldest first, to return regardless of the watermark.
        ended: no more samples will come.
        waiting: samples not yet returned in a batch.
        recent: ids of the latest samples; see `RecentIds`.
        counters: totals since the start of the stream. samples: received; of these malformed, duplicates and late
            (dropped or trained on, by the stream's `late`); lost: deleted before they were read (1 if the source
            cannot count them); early: with an outlier as their time, counted with the present; bounded: numbers beyond
            their bound, see `encoding.dense.bound`; forced: returned before the watermark because too many samples
            waited; flushes: waits longer than `max_wait_seconds`; handed_out: returned in batches; batches.
    """

    partitions: Mapping[str, Any] = field(default_factory=dict)
    entry: int = 0
    newest: int | None = None
    latest: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    due: int = 0
    ended: bool = False
    waiting: ReorderBuffer = field(default_factory=ReorderBuffer)
    recent: tuple[np.ndarray, ...] = (np.zeros(0, np.uint64),)
    counters: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    def counted(self, **counts: int) -> dict[str, int]:
        """Returns the counters after these additions."""
        return {name: self.counters.get(name, 0) + counts.get(name, 0) for name in COUNTERS}

    def save(self, folder: Path) -> None:
        """Writes the position into an existing folder; durable when this returns."""
        waiting = self.waiting.compact()
        content = {
            "format": FORMAT,
            "partitions": self.partitions,
            "entry": self.entry,
            "newest": self.newest,
            "latest": self.latest.tolist(),
            "due": self.due,
            "ended": self.ended,
            "arrived": waiting.arrived,
            "waiting": len(waiting),
            "counters": dict(self.counters),
        }
        if len(waiting):
            order = pa.array(np.argsort(waiting.arrival))
            _write_table(folder / PENDING_FILE, waiting.first(len(waiting)).take(order))
        _write_table(folder / RECENT_FILE, pa.table({"id": np.concatenate(self.recent)}))
        write_file(folder / POSITION_FILE, json.dumps(content, indent=1, allow_nan=False).encode())

    @staticmethod
    def load(folder: Path) -> "Position":
        """Reads a saved position. Raises ValueError if a file is missing or damaged."""
        try:
            content = json.loads((folder / POSITION_FILE).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}, this version of cowrec reads {FORMAT}")
            waiting = ReorderBuffer()
            if content["waiting"]:
                table = _read_table(folder / PENDING_FILE)
                first = content["arrived"] - content["waiting"]
                waiting = ReorderBuffer(arrived=first).add(table, table[TIME_COLUMN].to_numpy())
            return Position(
                content["partitions"],
                content["entry"],
                content["newest"],
                np.array(content["latest"], np.int64),
                content["due"],
                content["ended"],
                waiting if len(waiting) else ReorderBuffer(arrived=content["arrived"]),
                (_read_table(folder / RECENT_FILE)["id"].to_numpy(),),
                content["counters"],
            )
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise ValueError(f"the stream's position in {folder} cannot be read: {error}") from error


def _write_table(path: Path, table: pa.Table) -> None:
    with durable_file(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _read_table(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()
