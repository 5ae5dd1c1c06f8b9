"""Following what a trainer publishes: every version once, in order, from the newest full one on."""

import threading
from collections.abc import Iterator

from .blob import Blob, DamagedBlob, Kind, decode
from .target import Target

_PAUSE = 0.2
"""Seconds between two looks at a target that has nothing new."""


class Follower:
    """Reads versions from a target.

    A delta that is missing, damaged or of another lineage is never passed over: reading goes on with the newest full
    version that is ahead, and waits where there is none yet.

    Attributes:
        version, lineage: of the last blob that was read; 0 and "" before the first.
        gaps: how often the next delta was not the one that fits.
        damaged: blobs whose bytes are not what was published.
        unreachable: looks at a target that did not answer.
        reachable: False where the last one was such.
        waits_for_full: the newest version cannot be reached from what was read: blobs are damaged or missing.
    """

    def __init__(self, target: Target) -> None:
        self.version, self.lineage = 0, ""
        self.gaps = self.damaged = self.unreachable = 0
        self.reachable, self.waits_for_full = True, False
        self._target = target
        self._fruitless: list[tuple[int, Kind]] | None = None

    def blobs(self, stop: threading.Event) -> Iterator[Blob]:
        """The versions as they come, until ``stop`` is set.

        Raises:
            ValueError: a blob of another format than this cowrec's.
        """
        while not stop.is_set():
            blob = self._next()
            if blob is None:
                stop.wait(_PAUSE)
            else:
                self.version, self.lineage = blob.version, blob.lineage
                yield blob

    def _next(self) -> Blob | None:
        try:
            found = self._target.blobs()
            self.reachable = True
            if found == self._fruitless or not found:
                return None
            blob = self._next_of(found)
        except OSError:
            self.unreachable += 1
            self.reachable = False
            return None
        # The same blobs would be looked at in vain again.
        self._fruitless = found if blob is None else None
        self.waits_for_full = blob is None and found[-1][0] != self.version
        return blob

    def _next_of(self, found: list[tuple[int, Kind]]) -> Blob | None:
        newest = found[-1][0]
        if newest == self.version:
            return None
        if self.version:
            if (self.version + 1, "delta") in found:
                blob = self._read(self.version + 1, "delta")
                if blob and (blob.previous, blob.lineage) == (self.version, self.lineage):
                    return blob
            if (self.version + 1, "full") not in found:
                self.gaps += 1
        full = [version for version, kind in found if kind == "full"]
        for version in reversed(full):
            ahead = version > self.version
            # A target that has lost versions counts them anew, in another lineage; older ones are of the past.
            if ahead or version == full[-1]:
                blob = self._read(version, "full")
                if blob:
                    return blob if ahead or blob.lineage != self.lineage else None
        return None

    def _read(self, version: int, kind: Kind) -> Blob | None:
        try:
            blob = decode(self._target.read(version, kind))
        except FileNotFoundError:  # removed in the meantime
            return None
        except DamagedBlob:
            self.damaged += 1
            return None
        if (blob.version, blob.kind) != (version, kind):
            self.damaged += 1
            return None
        return blob
