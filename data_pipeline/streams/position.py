"""Where a stream stands after a batch: all that is needed to go on, as files of plain JSON and Arrow."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.codec.codec import TIME_COLUMN
from cowrec.data_pipeline.files import durable_file, write_file

from .reorder import Waiting

POSITION_FILE, PENDING_FILE, RECENT_FILE = "position.json", "pending.arrow", "recent.arrow"
FORMAT = 1
ARRIVAL_COLUMN = "#arrival"

COUNTERS = ("samples", "malformed", "duplicates", "late", "lost", "forced", "flushes", "handed_out", "batches")


@dataclass(frozen=True)
class Position:
    """The state of a stream between two batches. Nothing in it is changed later, so that one for each batch is cheap.

    Attributes:
        places: of the source, by partition: where each goes on.
        entry: number of the next entry of the journal.
        newest: the newest time seen, Unix seconds; None before the first sample.
        due: samples, the first ones that wait, that are handed out whatever the watermark is.
        ended: nothing more will come.
        waiting: samples that were not handed out yet.
        recent: ids of the latest samples; see `RecentIds`.
        counters: since the stream's beginning. samples: that came; of these malformed, duplicates, late (left out or
            handed out, as the stream is set up); lost: that the source knew to be gone (one where it could not count
            them); forced: handed out before their time because too many waited; flushes: waits that were too long;
            handed_out; batches.
    """

    places: Mapping[str, Any] = field(default_factory=dict)
    entry: int = 0
    newest: int | None = None
    due: int = 0
    ended: bool = False
    waiting: Waiting = field(default_factory=Waiting)
    recent: tuple[np.ndarray, ...] = (np.zeros(0, np.uint64),)
    counters: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    def save(self, folder: Path) -> None:
        """Writes the position's files into a folder that is there, and to disk."""
        waiting = self.waiting.compact()
        content = {
            "format": FORMAT,
            "places": self.places,
            "entry": self.entry,
            "newest": self.newest,
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
        """Reads what `save` wrote. Raises ValueError where a file is missing or damaged."""
        try:
            content = json.loads((folder / POSITION_FILE).read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']!r}, this cowrec reads {FORMAT}")
            waiting = Waiting()
            if content["waiting"]:
                table = _read_table(folder / PENDING_FILE)
                first = content["arrived"] - content["waiting"]
                waiting = Waiting(arrived=first).add(table, table[TIME_COLUMN].to_numpy())
            return Position(
                content["places"],
                content["entry"],
                content["newest"],
                content["due"],
                content["ended"],
                waiting if len(waiting) else Waiting(arrived=content["arrived"]),
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
