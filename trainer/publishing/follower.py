"""Following of a publication target: every published version is read once, in order, and applied to a model."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator

from cowrec.urls import without_credentials

from .blob import Blob, DamagedBlob, Kind, OtherFormat, decode
from .target import DEADLINE, Target, open_target

logger = logging.getLogger(__name__)

_PAUSE, _MAX_PAUSE = 1.0, 60.0
"""Seconds after a version that cannot be applied, before it is tried again; doubled each time."""
_POLL_SECONDS = 0.2
"""Pause before a target that had nothing new is polled again."""


def decode_as(version: int, kind: Kind, content: bytes) -> Blob:
    """Decodes the bytes of a version as :func:`decode` does. Raises DamagedBlob too if they are those of another."""
    blob = decode(content)
    if (blob.version, blob.kind) != (version, kind):
        raise DamagedBlob(f"in place of {kind} {version} there is {blob.kind} {blob.version}")
    return blob


class VersionReader:
    """Reads versions from a target, starting from the newest full one.

    A delta that is missing, damaged or of another lineage is never skipped: reading continues with the newest full
    version that is ahead, and waits until there is one. ``after_poll`` is called after each look at the target.

    Attributes:
        version, lineage: of the last version that was read; 0 and "" before the first.
        damaged_because: why a blob was not readable, since a version was last read.
        is_empty: whether the target answered the last poll and had no version.
        caught_up: whether the last version that was read, and since dealt with, was the newest that the target listed.
        waits_for_full: whether the newest version cannot be reached, because blobs before it are damaged or missing.
    """

    def __init__(self, target: Target, after_poll: Callable[[], None] = lambda: None) -> None:
        self.damaged_because = self._error = ""
        self._asked = math.inf
        """When a poll of the target began that has not returned yet."""
        self.is_empty = self.caught_up = self.waits_for_full = self._is_newest = self._lost = False
        self._target, self._after_poll = target, after_poll
        self.version, self.lineage = self._before = 0, ""
        self._refused: tuple[int, str] | None = None
        self._useless: list[tuple[int, Kind]] | None = None

    @property
    def unreachable_because(self) -> str:
        """The target's error since it last answered, or that a poll does not return; empty if it answers."""
        waited = time.monotonic() - self._asked
        return f"a read has taken {waited:.0f} seconds so far" if waited > DEADLINE else self._error

    def refuse(self, *, was_read: bool) -> None:
        """Makes :meth:`versions` stay at the version before the last one, until a full one is ahead.

        If the last version was not even read, the one after it is refused.
        """
        self._refused = (self.version + (not was_read), self.lineage)
        if was_read:
            self.version, self.lineage = self._before
        self._useless, self.waits_for_full = None, False

    def versions(self, stop: threading.Event) -> Iterator[Blob]:
        """Yields versions as they are published, until ``stop`` is set.

        Raises:
            ValueError: a blob has another format than this cowrec's, and no full version before it can be read instead.
        """
        while not stop.is_set():
            blob = self._poll()
            self._after_poll()
            if blob is None:
                stop.wait(_POLL_SECONDS)
            else:
                self._before = self.version, self.lineage
                self.version, self.lineage, self.damaged_because = blob.version, blob.lineage, ""
                self._lost = False
                yield blob
                self.caught_up = self._is_newest  # even if the target does not answer the next poll

    def _poll(self) -> Blob | None:
        self._asked = time.monotonic()
        try:
            available = self._target.blobs()
            self._error, self.is_empty = "", not available
            if not self._lost and (not available or available[-1][0] < self.version):
                self._lost, self._useless = True, None
            if not available or available == self._useless:
                return None
            blob = self._next_of(available)
        except OSError as error:
            self._error = self._error or str(error)
            return None
        finally:
            self._asked = math.inf
        self.caught_up = blob is None and self.version > 0
        self._is_newest = blob is not None and blob.version == available[-1][0]
        # The same blobs need not be read again soon.
        self._useless = available if blob is None else None
        self.waits_for_full = blob is None and available[-1][0] != self.version
        return blob

    def _next_of(self, available: list[tuple[int, Kind]]) -> Blob | None:
        if available[-1][0] == self.version and not self._lost:
            return None
        if self.version and (self.version + 1, "delta") in available:
            if (self.version + 1, self.lineage) == self._refused and (full := self._full_ahead(available)):
                return full
            blob = self._read(self.version + 1, "delta")
            if blob and (blob.previous, blob.lineage) == (self.version, self.lineage):
                return blob
        return self._full_ahead(available)

    def _full_ahead(self, available: list[tuple[int, Kind]]) -> Blob | None:
        full = [version for version, kind in available if kind == "full"]
        other: OtherFormat | None = None
        for version in reversed(full):
            ahead = version > self.version
            # A target that lost its versions numbers new ones from 1 again, in another lineage.
            if ahead or version == full[-1]:
                try:
                    blob = self._read(version, "full")
                except OtherFormat as error:  # one before it may be readable, which a server that starts can serve
                    other = other or error
                    continue
                if blob:
                    return blob if ahead or blob.lineage != self.lineage else None
        if other:
            raise other
        return None

    def _read(self, version: int, kind: Kind) -> Blob | None:
        try:
            return decode_as(version, kind, self._target.read(version, kind))
        except FileNotFoundError:  # removed since it was listed
            return None
        except DamagedBlob as error:
            self.damaged_because = str(error)
            return None


class VersionFollower:
    """Applies versions in a thread as they are published; :class:`VersionReader` decides which ones.

    A target that fails, or a version that cannot be applied, makes the model older and has no other effect: it stays at
    the version before, until that one can be applied or there is a full version ahead.

    Args:
        apply: updates the model to a version. Raises ValueError if the version does not fit the model.
        on_refused: called for each version that was not applied.

    Raises ValueError: the URL is not that of a target.

    Attributes:
        url: of the target, without credentials.
        applied_time: Unix seconds at which a version was last applied; NaN before the first.
        created_time: Unix seconds at which that version was published, by the publisher's clock.
        caught_up: whether everything that was published was applied at some time since the start, except for a version
            that was refused and what follows it.
        problem: why the model may be behind what is published; empty if nothing is wrong.
    """

    def __init__(self, url: str, apply: Callable[[Blob], None], on_refused: Callable[[], None]) -> None:
        self.url = without_credentials(url)
        self.applied_time = self.created_time = math.nan
        self.caught_up = False
        self._target = open_target(url)
        self._reader = VersionReader(self._target, self._after_poll)
        self._apply, self._on_refused = apply, on_refused
        self._error = self._said = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cowrec-follow", daemon=True)

    @property
    def problem(self) -> str:
        if self._reader.unreachable_because:
            return f"{self.url} cannot be reached ({self._reader.unreachable_because}); its versions are applied later"
        if self._reader.waits_for_full:
            why = f" ({self._reader.damaged_because})" if self._reader.damaged_because else ""
            return f"versions of {self.url} are damaged or missing{why}; the next full version will be applied"
        if not self._error and self._reader.is_empty:
            if math.isnan(self.applied_time):
                return f"{self.url} has no version yet; check --follow, unless nothing was published so far"
            return f"{self.url} has lost its versions; check it, the next full version will be applied"
        return self._error

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops after the version that is being applied. A target that does not answer is abandoned."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(DEADLINE)
        if not self._thread.is_alive():
            self._target.close()

    def _run(self) -> None:
        pause, refused, applying = _PAUSE, (0, ""), False
        while not self._stop.is_set():
            try:
                for blob in self._reader.versions(self._stop):
                    applying = True
                    self._apply(blob)
                    applying = False
                    if blob.kind == "full" or math.isnan(self.applied_time):
                        about = (blob.version, blob.kind, blob.change.step, self.url)
                        logger.info("version %d (%s, step %d) of %s is served", *about)
                    self.applied_time, self.created_time = time.time(), blob.created
                    self._error = ""
                    if blob.version > refused[0] or blob.lineage != refused[1]:
                        pause = _PAUSE
                    del blob  # a full one is as large as the model, and the next may be days away
            except Exception as error:  # predictions continue whatever happens here, and /readyz reports it
                self._on_refused()
                self._error = f"a version of {self.url} was refused: {error}"
                self._log_problem(exc_info=not isinstance(error, ValueError))
                refused = self._reader.version, self._reader.lineage
                self._reader.refuse(was_read=applying)
                # The version before it is served; what is based on the refused one cannot be applied.
                self.caught_up, applying = self.caught_up or not math.isnan(self.applied_time), False
                self._stop.wait(pause)
                pause = min(2 * pause, _MAX_PAUSE)

    def _after_poll(self) -> None:
        self.caught_up = self.caught_up or self._reader.caught_up
        self._log_problem()

    def _log_problem(self, exc_info: bool = False) -> None:
        """Logs a problem once, and its end."""
        said, self._said = self._said, self.problem
        if self._said and self._said != said:
            logger.warning("%s", self._said, exc_info=exc_info)
        elif said and not self._said and not math.isnan(self.applied_time):
            logger.info("%s is followed again", self.url)
