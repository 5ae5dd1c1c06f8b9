"""Publishing a model while it trains: numbered versions, each a change of the one before, written beside the training.

What is due is handed over and written by a thread of its own. A version that cannot be written, or a target that hangs,
costs nothing but time: what was due stays due and is part of the next version. Versions count up from what the target
has. The first one of every publisher is a full one of a lineage of its own: a trainer that has started again may have
gone back to an older snapshot, and its readers have seen rows of a future that is undone. The same is done where the
target's newest version is not the one that was written last, as after a Redis that has lost its last second.
"""

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .blob import Blob, Change, Kind, decode, encode, merged
from .target import DEADLINE, Target

logger = logging.getLogger(__name__)

_PAUSE = 1.0
"""Seconds after which a failed publication is tried again."""


@dataclass(frozen=True)
class PublicationConfig:
    """When the versions so far are put together in a full one, from which a new reader starts.

    Attributes:
        compact_after: deltas since the last full version,
        compact_bytes: or their size.
    """

    compact_after: int = 100
    compact_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for key in ("compact_after", "compact_bytes"):
            if getattr(self, key) < 1:
                raise ValueError(f"publication.{key} must be at least 1, got {getattr(self, key)}")


class Publisher:
    """Publishes to a target in the background; use it as a context.

    What lies before the last full version but one is removed: a reader at work has as long as one generation takes.
    """

    def __init__(self, target: Target, config: PublicationConfig | None = None) -> None:
        self._target, self._config = target, config or PublicationConfig()
        self._state = threading.Condition()
        self._due: Change | None = None
        self._everything: Change | None = None  # never older than what is due
        self._busy_since: float | None = None
        self._closed = False
        self._wants_full, self._breaks = True, True
        self._version, self._lineage = 0, uuid.uuid4().hex
        self._deltas = self._bytes = self._failures = 0
        self._error: str | None = None
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def wants_full(self) -> bool:
        """The next call of :meth:`publish` is to bring everything."""
        return self._wants_full

    def publish(self, change: Change, everything: Change | None = None) -> None:
        """Hands over the next version, and returns at once. The caller leaves the arrays alone from now on.

        Args:
            change: rows written and gone since the last call.
            everything: the whole model as it is now, where :attr:`wants_full`; without it nothing that needs it goes
                out, and the change stays due.
        """
        with self._state:
            assert not self._closed
            self._due = change if self._due is None else merged(self._due, change)
            self._everything = everything
            self._state.notify_all()

    def finish(self, seconds: float = DEADLINE) -> bool:
        """Waits until all that is due is out, so long at most; False where something is left."""
        with self._state:
            return self._state.wait_for(self._is_idle, seconds)

    def _is_idle(self) -> bool:
        return self._due is None and self._everything is None and self._busy_since is None

    def close(self, seconds: float = DEADLINE) -> None:
        """As :meth:`finish`, and ends. A target that still hangs then is left to itself."""
        left = not self.finish(seconds)
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join(0 if left else seconds)
        if left:
            logger.warning("the last changes were not published: %s", self._error or "the target hangs")
        if not self._thread.is_alive():
            self._target.close()

    def counters(self) -> Mapping[str, Any]:
        """version written last, rows due, failures so far, seconds that the target has kept a call, the last error."""
        with self._state:
            waits = 0.0 if self._busy_since is None else time.monotonic() - self._busy_since
            due = 0 if self._due is None else self._due.num_rows
            return {
                "version": self._version,
                "due_rows": due,
                "failures": self._failures,
                "waits": waits,
                "error": self._error,
            }

    def _work(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._closed or self._can_write())
                if self._closed:
                    return
                due, everything = self._due, self._everything if self._wants_full else None
                self._due = self._everything = None
                self._busy_since = time.monotonic()
            try:
                self._look_at_target()
                if due is not None and not self._breaks:
                    self._write("delta", due)
                    due = None
                if everything is not None:
                    self._write("full", everything)
                    due = everything = None
                    self._remove_old()
                failure = None
            except Exception as error:  # whatever it was, what was due must stay due
                failure = error
            with self._state:
                self._settle(due, everything, failure)
                if failure:
                    self._state.wait_for(lambda: self._closed, _PAUSE)

    def _can_write(self) -> bool:
        return self._everything is not None or (self._due is not None and not self._breaks)

    def _settle(self, due: Change | None, everything: Change | None, failure: Exception | None) -> None:
        """Puts back what was not written, below what has been handed over since."""
        if everything is not None and self._due is None:
            self._everything = everything
        if due is not None:
            self._due = due if self._due is None else merged(due, self._due)
        if failure:
            self._failures += 1
            if self._error is None:
                logger.warning("version %d is not published (%s); it is tried again", self._version + 1, failure)
        self._error = f"{type(failure).__name__}: {failure}" if failure else None
        self._busy_since = None
        self._state.notify_all()

    def _look_at_target(self) -> None:
        """Takes a version for written that only seemed to fail; breaks with one that is not ours."""
        blobs = self._target.blobs()
        newest, kind = blobs[-1] if blobs else (0, "full")
        if newest == self._version + 1 and self._is_ours(newest, kind):
            self._note_written(newest, kind, 0)
        elif newest != self._version:
            self._break_after(newest)

    def _write(self, kind: Kind, change: Change) -> None:
        # A full one that breaks with what is there is a version of its own; another is the last delta's once more.
        version = self._version + (kind == "delta" or self._breaks)
        blob = encode(Blob(version, version - 1, kind, self._lineage, time.time(), change))
        try:
            self._target.write(version, kind, blob)
        except FileExistsError:
            if not self._is_ours(version, kind):
                self._break_after(version)
                raise
        self._note_written(version, kind, len(blob))

    def _is_ours(self, version: int, kind: Kind) -> bool:
        try:
            return decode(self._target.read(version, kind)).lineage == self._lineage
        except ValueError:
            return False

    def _note_written(self, version: int, kind: Kind, size: int) -> None:
        with self._state:
            self._version = version
            if kind == "full":
                self._deltas = self._bytes = 0
                self._breaks = self._wants_full = False
            else:
                self._deltas, self._bytes = self._deltas + 1, self._bytes + size
                many = self._deltas >= self._config.compact_after or self._bytes >= self._config.compact_bytes
                self._wants_full = self._wants_full or many

    def _break_after(self, version: int) -> None:
        with self._state:
            if not self._breaks:
                self._lineage = uuid.uuid4().hex
            self._breaks = self._wants_full = True
            self._version = max(self._version, version)

    def _remove_old(self) -> None:
        """Everything before the last full version but one; the oldest first, so that no chain is left with a hole."""
        blobs = self._target.blobs()
        full = [version for version, kind in blobs if kind == "full"]
        for version, kind in blobs:
            if len(full) > 1 and (version, kind) < (full[-2], "full"):
                self._target.remove(version, kind)
