"""Following of a publication target in a thread, which applies every published version to a model."""

import logging
import math
import threading
import time
from collections.abc import Callable

from cowrec.data_pipeline.urls import without_credentials

from .blob import Blob
from .target import open_target
from .version_reader import VersionReader

logger = logging.getLogger(__name__)

_PAUSE, _MAX_PAUSE = 1.0, 60.0
"""Seconds after a version that cannot be applied, before reading restarts from a full one; doubled each time."""


class VersionFollower:
    """Applies versions as they are published; :class:`VersionReader` decides which ones.

    A target that fails, or a version that cannot be applied, makes the model older and has no other effect.

    Args:
        url: of the publication target.
        apply: updates the model to a version. Raises ValueError if the version does not fit the model.
        on_refused: called for each version that was not applied.
        obeys_pin: see :class:`VersionReader`.

    Raises:
        ValueError: the URL is not that of a target.

    Attributes:
        url: of the target, without credentials.
        applied_time: Unix seconds at which a version was last applied; NaN before the first.
        created_time: Unix seconds at which that version was published, by the publisher's clock.
        caught_up: whether everything that was published was applied at some time since the start.
        problem: why the model may be behind what is published; empty if nothing is wrong.
    """

    def __init__(
        self,
        url: str,
        apply: Callable[[Blob], None],
        on_refused: Callable[[], None],
        *,
        obeys_pin: bool = True,
    ) -> None:
        self.url = without_credentials(url)
        self.applied_time = self.created_time = math.nan
        self.caught_up = False
        self._target = open_target(url)
        self._reader = VersionReader(self._target, self._after_poll, obeys_pin=obeys_pin)
        self._said, self._said_pin = "", 0
        self._apply, self._on_refused = apply, on_refused
        self._error = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cowrec-follow", daemon=True)

    @property
    def pinned(self) -> int:
        """Version that the target is pinned to, and which is obeyed; 0 if there is none."""
        return self._reader.pin.version if self._reader.pin else 0

    @property
    def problem(self) -> str:
        if self._reader.unreachable_because:
            return f"{self.url} cannot be reached ({self._reader.unreachable_because}); its versions are applied later"
        if self._reader.pin_problem:
            return f"{self.url}: {self._reader.pin_problem}; pin it again or release it with cowrec versions"
        if self._reader.waits_for_full:
            why = f" ({self._reader.damaged_because})" if self._reader.damaged_because else ""
            return f"versions of {self.url} are damaged or missing{why}; the next full version will be applied"
        if not self._error and self._reader.is_empty and math.isnan(self.applied_time):
            return f"{self.url} has no version yet; check --follow, unless nothing was published so far"
        return self._error

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops after the version that is being applied."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._target.close()

    def _run(self) -> None:
        pause = _PAUSE
        while not self._stop.is_set():
            try:
                for blob in self._reader.versions(self._stop):
                    self._apply(blob)
                    if blob.kind == "full" or math.isnan(self.applied_time):
                        logger.info("version %d (%s, step %d) of %s is served", *_about(blob), self.url)
                    self.applied_time, self.created_time = time.time(), blob.created
                    self._error, pause = "", _PAUSE
                    del blob  # a full one is as large as the model, and the next may be days away
            except Exception as error:  # predictions continue whatever happens here, and /health reports it
                self._on_refused()
                self._error = f"a version of {self.url} was refused: {error}"
                self._log_problem(exc_info=not isinstance(error, ValueError))
                self._reader.pause(self._stop, pause)
                pause = min(2 * pause, _MAX_PAUSE)
                # Later deltas are based on the refused version; a full one is not.
                self._reader.restart()

    def _after_poll(self) -> None:
        self.caught_up = self.caught_up or self._reader.caught_up
        self._log_problem()
        if self.pinned != self._said_pin:
            self._said_pin = self.pinned
            if self.pinned:
                logger.warning("%s is pinned to version %d", self.url, self.pinned)
            else:
                logger.info("%s is no longer pinned", self.url)

    def _log_problem(self, exc_info: bool = False) -> None:
        """Logs a problem once, and its end."""
        said, self._said = self._said, self.problem
        if self._said and self._said != said:
            logger.warning("%s", self._said, exc_info=exc_info)
        elif said and not self._said and not math.isnan(self.applied_time):
            logger.info("%s is followed again", self.url)


def _about(blob: Blob) -> tuple[int, str, int]:
    return blob.version, blob.kind, blob.change.step
