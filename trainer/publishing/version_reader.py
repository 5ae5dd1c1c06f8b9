"""Reading of published versions: each once, in order, starting from the newest full one; or the pinned one alone."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from .blob import Blob, DamagedBlob, Kind
from .pin import Pin, decode_pin
from .target import Target
from .version_chain import chains, composed, read_blob

_POLL_SECONDS = 0.2
"""Pause before a target that had nothing new is polled again."""
_REREAD_SECONDS, _MAX_REREAD_SECONDS = 30.0, 600.0
"""Time after which blobs that were damaged are read again, as they may have been restored; doubled each time."""


class VersionReader:
    """Reads versions from a target.

    Args:
        target: to read from.
        after_poll: called after each look at the target.
        obeys_pin: whether to stay at the version that the target is pinned to.

    A delta that is missing, damaged or of another lineage is never skipped: reading continues with the newest full
    version that is ahead, and waits until there is one.

    While the target is pinned, the pinned version is read, composed into a full one, and nothing else. After the pin's
    release, the newest version is read likewise: those between the two may be what the pin was set for.

    Attributes:
        version, lineage: of the last version that was read; 0 and "" before the first.
        gaps: times that the next delta was missing or did not fit.
        damaged: blobs whose bytes differ from what was published.
        damaged_because: the problem of the last one, since a version was read.
        unreachable: polls that the target did not answer.
        unreachable_because: its error since it last answered; empty if it answered the last poll.
        is_empty: whether it answered the last poll and had no version.
        caught_up: whether the last version that was read, and since dealt with, was the newest that the target listed
            when it last answered, or the pinned one.
        waits_for_full: whether the newest version cannot be reached, because blobs before it are damaged or missing.
        pin: the pin that is obeyed, if any; it is remembered if the target loses it.
    """

    def __init__(
        self,
        target: Target,
        after_poll: Callable[[], None] = lambda: None,
        *,
        obeys_pin: bool = True,
    ) -> None:
        self.gaps = self.damaged = self.unreachable = 0
        self.unreachable_because = self.damaged_because = self._bad_record = self._unreachable_pin = ""
        self.is_empty = self.caught_up = self.waits_for_full = self._is_newest = False
        self.pin: Pin | None = None
        self._target, self._after_poll, self._obeys_pin = target, after_poll, obeys_pin
        self._record: bytes | None = None  # of the pin
        self._released = False  # since the last version was read
        self.restart()

    @property
    def pin_problem(self) -> str:
        """Why the pin cannot be obeyed, in which case nothing is read; empty if it can, or there is none."""
        return self._bad_record or self._unreachable_pin

    def restart(self) -> None:
        """Forgets the versions that were read, so that the next one is a full one."""
        self.version, self.lineage = 0, ""
        self._useless: tuple[Pin | None, list[tuple[int, Kind]]] | None = None
        self._reread_at = self._reread_pause = math.inf

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
                self.version, self.lineage, self._released = blob.version, blob.lineage, False
                self.damaged_because = ""
                yield blob
                self.caught_up = self._is_newest  # even if the target does not answer the next poll

    def pause(self, stop: threading.Event, seconds: float) -> None:
        """Waits until the pin changes or ``stop`` is set, at most for ``seconds``."""
        pin, until = self.pin, time.monotonic() + seconds
        while self.pin == pin and time.monotonic() < until and not stop.wait(_POLL_SECONDS):
            with suppress(OSError):
                self._look_at_pin()

    def _poll(self) -> Blob | None:
        try:
            self._look_at_pin()
            available = self._target.blobs()
            self.unreachable_because, self.is_empty = "", not available
            seen = self.pin, [each for each in available if self.pin is None or self.pin.needs(*each)]
            is_known = seen == self._useless
            if not available or self._bad_record or (is_known and time.monotonic() < self._reread_at):
                return None
            blob = self._pinned(available, self.pin) if self.pin else self._next_of(available)
        except OSError as error:
            self.unreachable += 1
            self.unreachable_because = self.unreachable_because or str(error)
            return None
        at_end = blob is None and self.version > 0
        self.caught_up = at_end and (self.pin is None or self._is_at(self.pin))
        self._is_newest = blob is not None and (self.pin is not None or blob.version == available[-1][0])
        # The same blobs need not be read again soon.
        self._useless = seen if blob is None else None
        self._reread_pause = min(2 * self._reread_pause, _MAX_REREAD_SECONDS) if is_known else _REREAD_SECONDS
        self._reread_at = time.monotonic() + (self._reread_pause if self.damaged_because else math.inf)
        self.waits_for_full = blob is None and self.pin is None and available[-1][0] != self.version
        return blob

    def _look_at_pin(self) -> None:
        record = self._target.pin() if self._obeys_pin else None
        if record == self._record:
            self._bad_record = ""
        if record is None or record == self._record:
            return
        try:
            pin = decode_pin(record)
        except DamagedBlob as error:
            self._bad_record = str(error)
            return
        self._released = self._released or (self.pin is not None and not pin.version)
        self._record, self.pin = record, pin if pin.version else None
        self._bad_record = self._unreachable_pin = ""

    def _is_at(self, pin: Pin) -> bool:
        return (self.version, self.lineage) == (pin.version, pin.lineage)

    def _next_of(self, available: list[tuple[int, Kind]]) -> Blob | None:
        if self._released:
            newest = next(chains(available, available[-1][0], self._read), None)
            if newest and (newest[-1].version > self.version or newest[-1].lineage != self.lineage):
                return composed(newest)
        if available[-1][0] == self.version:
            self._released = False
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

    def _pinned(self, available: list[tuple[int, Kind]], pin: Pin) -> Blob | None:
        self._unreachable_pin = ""
        if self._is_at(pin):
            return None
        for chain in chains(available, pin.version, self._read):
            if (chain[-1].version, chain[-1].lineage) == (pin.version, pin.lineage):
                return composed(chain)
        self._unreachable_pin = f"version {pin.version}, to which it is pinned, is damaged or missing"
        return None

    def _read(self, version: int, kind: Kind) -> Blob | None:
        try:
            return read_blob(self._target, version, kind)
        except FileNotFoundError:  # removed since it was listed
            return None
        except DamagedBlob as error:
            self.damaged += 1
            self.damaged_because = str(error)
            return None
