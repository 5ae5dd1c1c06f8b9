"""Publishing of a model while it trains: numbered versions, each a change of the one before, written in the background.

A thread writes the pending changes. If a version cannot be written, or the target hangs, its changes stay pending and
become part of the next version. The first version of every publisher is a full one with a new lineage: a restarted
trainer may have resumed from an older snapshot, and its readers have seen rows that it has not. The same happens if the
target's newest version is not the one that was written last, for example after a Redis lost its last second.
"""

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from cowrec.files import NO_SPACE

from .blob import Blob, Change, Kind, decode, encode, joined, merged
from .target import DEADLINE, Target

logger = logging.getLogger(__name__)

_PAUSE, _MOST_PAUSES = 1.0, 4
"""Seconds before a failed publication is retried, doubled after each further failure; and the largest factor."""


class Publisher:
    """Publishes to a target in the background.

    Args:
        fingerprint: of the network and the data; readers refuse versions of others.
        compact_after: largest number of deltas since the last full version, from which new readers start.
        compact_bytes: largest total size of these deltas, or the size of the full version where this is larger.
        keep_full: full versions that are kept, with the deltas after the oldest of them; at least 2, so that a reader
            has until the next full version to catch up.
    """

    def __init__(
        self,
        target: Target,
        fingerprint: str,
        *,
        compact_after: int = 100,
        compact_bytes: int = 256 << 20,
        keep_full: int = 2,
    ) -> None:
        self._target, self._fingerprint, self._keep_full = target, fingerprint, keep_full
        self._compact_after, self._compact_bytes = compact_after, compact_bytes
        self._state = threading.Condition()
        self._pending: Change | None = None
        self._everything: Change | None = None  # the complete model for the next full version, until it is written
        self._since: Change | None = None  # changes since then
        self._busy = False
        self._closed = False
        self._wants_full, self._starts_lineage = True, True
        self._version, self._lineage, self._written_at = 0, uuid.uuid4().hex, time.monotonic()
        self._deltas = self._bytes = self._full_bytes = self._failures = 0
        self._lacks_delta = False  # the last attempt could not write the changes
        self._error: str | None = None
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    @property
    def wants_full(self) -> bool:
        """Whether the next call of :meth:`publish` must have ``everything``; once for a full version."""
        return self._wants_full and self._everything is None

    @property
    def is_behind(self) -> bool:
        """Whether earlier changes still wait to be written, so that further ones would only be merged into them."""
        return not self.wants_full and (self._lacks_delta or self._pending is not None)

    def publish(self, change: Change, everything: Change | None = None) -> None:
        """Queues the next version and returns at once. The caller must not modify the arrays afterwards.

        ``change`` has the rows written and ids deleted since the last call, and ``everything``, if :attr:`wants_full`,
        the complete model as it is now.
        """
        with self._state:
            assert not self._closed
            self._pending = joined(self._pending, change)
            if everything is not None and self._wants_full:
                self._everything, self._since = everything, None
            elif self._everything is not None:
                self._since = joined(self._since, change)
            self._state.notify_all()

    def finish(self, seconds: float = DEADLINE) -> bool:
        """Waits until all pending changes are written, at most ``seconds``; returns False if some are left."""
        with self._state:
            return self._state.wait_for(lambda: not (self._pending or self._everything or self._busy), seconds)

    def close(self, seconds: float = DEADLINE) -> None:
        """Waits as :meth:`finish` does and stops the thread; a target that still hangs is abandoned."""
        left = not self.finish(seconds)
        with self._state:
            self._closed = True
            self._state.notify_all()
        self._thread.join(0 if left else seconds)
        if left:
            logger.warning("the last changes were not published: %s", self._error or "the target does not answer")
        if not self._thread.is_alive():
            self._target.close()

    def counters(self) -> Mapping[str, Any]:
        """Version written last, seconds since then or since the start, pending rows, failures, and the last error."""
        with self._state:
            pending = 0 if self._pending is None else self._pending.num_rows
            return {
                "version": self._version,
                "seconds": time.monotonic() - self._written_at,
                "pending_rows": pending,
                "failures": self._failures,
                "error": self._error,
            }

    def _work(self) -> None:
        failed = 0
        while True:
            with self._state:
                self._state.wait_for(lambda: self._closed or self._can_write())
                if self._closed:
                    return
                pending, everything, since = self._pending, self._everything, self._since
                self._pending = self._since = None
                taken = everything
                self._busy = True
            try:
                if everything is not None and since is not None:
                    everything, since = merged(everything, since).without_deleted(), None
                self._check_target()
                if pending is not None and not self._starts_lineage:
                    self._write("delta", pending)
                    pending = None
                if everything is not None:
                    self._write("full", everything)
                    pending = everything = None
                    self._remove_old(self._keep_full)
                self._error, failed = None, 0
            except Exception as error:  # whatever it was, the changes must stay pending
                if self._error is None:
                    remedy = "; make that folder again" if isinstance(error, FileNotFoundError) else ""
                    logger.warning("publishing fails (%s)%s; changes are kept and published later", error, remedy)
                self._error, failed = f"{type(error).__name__}: {error}", failed + 1
                self._failures += 1
            with self._state:
                self._restore(pending, taken, everything, since)
                if failed:
                    pause = _PAUSE * min(2 ** (failed - 1), _MOST_PAUSES)
                    self._state.wait_for(lambda: self._closed, pause)

    def _can_write(self) -> bool:
        return self._everything is not None or (self._pending is not None and not self._starts_lineage)

    def _restore(self, pending: Change | None, taken: Change | None, left: Change | None, since: Change | None) -> None:
        """Makes changes that were not written pending again, before those that were queued since.

        ``taken`` is the complete model that was to be written, and ``left`` what is left of it.
        """
        if self._everything is taken:  # no other one has come
            self._everything, self._since = left, left and joined(since, self._since)
        self._lacks_delta = pending is not None
        self._pending = joined(pending, self._pending)
        self._busy = False
        self._state.notify_all()

    def _check_target(self) -> None:
        """Recognizes a version that was written although the call failed; starts a new lineage after a foreign one."""
        blobs = self._target.blobs()
        newest, kind = blobs[-1] if blobs else (0, "full")
        if newest == self._version + 1 and self._is_own(newest, kind):
            self._note_written(newest, kind, 0)
        elif newest != self._version:
            self._start_lineage_after(newest)

    def _write(self, kind: Kind, change: Change) -> None:
        # A full version that starts a lineage has a number of its own, any other the number of the last delta.
        version = self._version + (kind == "delta" or self._starts_lineage)
        blob = encode(Blob(version, version - 1, kind, self._lineage, time.time(), change, self._fingerprint))
        try:
            self._target.write(version, kind, blob)
        except FileExistsError:
            if not self._is_own(version, kind):
                self._start_lineage_after(version)
                raise
        except OSError as error:
            # Of a full target, all that the last full version has made obsolete goes.
            if error.errno not in NO_SPACE or not self._remove_old(1):
                raise
            self._target.write(version, kind, blob)
        self._note_written(version, kind, len(blob))

    def _is_own(self, version: int, kind: Kind) -> bool:
        try:
            return decode(self._target.read(version, kind)).lineage == self._lineage
        except ValueError:
            return False

    def _note_written(self, version: int, kind: Kind, size: int) -> None:
        with self._state:
            self._version, self._written_at = version, time.monotonic()
            if kind == "full":
                self._deltas, self._bytes, self._full_bytes = 0, 0, size
                self._starts_lineage = self._wants_full = False
            else:
                self._deltas, self._bytes = self._deltas + 1, self._bytes + size
                most = max(self._compact_bytes, self._full_bytes)
                many = self._deltas >= self._compact_after or self._bytes >= most
                self._wants_full = self._wants_full or many

    def _start_lineage_after(self, version: int) -> None:
        with self._state:
            if not self._starts_lineage:
                self._lineage = uuid.uuid4().hex
            self._starts_lineage = self._wants_full = True
            self._version = max(self._version, version)

    def _remove_old(self, keep: int) -> int:
        """Removes all blobs before the last ``keep`` full versions, the oldest first, so that no chain has a gap."""
        blobs = self._target.blobs()
        full = [version for version, kind in blobs if kind == "full"]
        old = [blob for blob in blobs if len(full) >= keep and blob < (full[-keep], "full")]
        for version, kind in old:
            self._target.remove(version, kind)
        return len(old)
