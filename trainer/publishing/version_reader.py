"""Reading of published versions: each once, in order, starting from the newest full one."""

import threading
from collections.abc import Callable, Iterator

from .blob import Blob, DamagedBlob, Kind, decode
from .target import Target

_POLL_SECONDS = 0.2
"""Pause before a target that had nothing new is polled again."""


class VersionReader:
    """Reads versions from a target.

    Args:
        target: to read from.
        after_poll: called after each look at the target.

    A delta that is missing, damaged or of another lineage is never skipped: reading continues with the newest full
    version that is ahead, and waits until there is one.

    Attributes:
        version, lineage: of the last version that was read; 0 and "" before the first.
        gaps: times that the next delta was missing or did not fit.
        damaged: blobs whose bytes differ from what was published.
        unreachable: polls that the target did not answer.
        unreachable_because: its error since it last answered; empty if it answered the last poll.
        is_empty: whether it answered the last poll and had no version.
        caught_up: whether the last poll found nothing to read after the last version that was read.
        waits_for_full: whether the newest version cannot be reached, because blobs before it are damaged or missing.
    """

    def __init__(self, target: Target, after_poll: Callable[[], None] = lambda: None) -> None:
        self.version, self.lineage = 0, ""
        self.gaps = self.damaged = self.unreachable = 0
        self.unreachable_because = ""
        self.is_empty = self.caught_up = self.waits_for_full = False
        self._target, self._after_poll = target, after_poll
        self._useless: list[tuple[int, Kind]] | None = None

    def versions(self, stop: threading.Event) -> Iterator[Blob]:
        """Yields versions as they are published, until ``stop`` is set.

        Raises:
            ValueError: a blob has another format than this cowrec's.
        """
        while not stop.is_set():
            blob = self._poll()
            self._after_poll()
            if blob is None:
                stop.wait(_POLL_SECONDS)
            else:
                self.version, self.lineage = blob.version, blob.lineage
                yield blob

    def _poll(self) -> Blob | None:
        try:
            available = self._target.blobs()
            self.unreachable_because, self.is_empty = "", not available
            if available == self._useless or not available:
                return None
            blob = self._next_of(available)
        except OSError as error:
            self.unreachable += 1
            self.unreachable_because = self.unreachable_because or str(error)
            return None
        self.caught_up = blob is None and self.version > 0
        # The same blobs need not be read again.
        self._useless = available if blob is None else None
        self.waits_for_full = blob is None and available[-1][0] != self.version
        return blob

    def _next_of(self, available: list[tuple[int, Kind]]) -> Blob | None:
        if available[-1][0] == self.version:
            return None
        if self.version:
            if (self.version + 1, "delta") in available:
                blob = self._read(self.version + 1, "delta")
                if blob and (blob.previous, blob.lineage) == (self.version, self.lineage):
                    return blob
            if (self.version + 1, "full") not in available:
                self.gaps += 1
        full = [version for version, kind in available if kind == "full"]
        for version in reversed(full):
            ahead = version > self.version
            # A target that lost its versions numbers new ones from 1 again, in another lineage.
            if ahead or version == full[-1]:
                blob = self._read(version, "full")
                if blob:
                    return blob if ahead or blob.lineage != self.lineage else None
        return None

    def _read(self, version: int, kind: Kind) -> Blob | None:
        try:
            blob = decode(self._target.read(version, kind))
        except FileNotFoundError:  # removed since it was listed
            return None
        except DamagedBlob:
            self.damaged += 1
            return None
        if (blob.version, blob.kind) != (version, kind):
            self.damaged += 1
            return None
        return blob
