"""A thread that brings a served model to every version that is published."""

import logging
import threading
import time
from collections.abc import Callable

from cowrec.trainer.publishing.blob import Blob
from cowrec.trainer.publishing.follower import Follower
from cowrec.trainer.publishing.target import open_target

logger = logging.getLogger(__name__)

_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds after a version that cannot be applied, before reading starts anew from a full one; doubled each time."""


class Following:
    """Applies versions as they come; a source that does not answer, or that makes no sense, costs freshness only.

    Args:
        url: of the publication target.
        apply: brings the model to a version. Raises ValueError where the version does not fit the model.
        refused: called for each version that was not applied.

    Raises:
        ValueError: the URL is not one of a target.

    Attributes:
        applied_time: Unix seconds at which a version was applied last; NaN before the first.
        problem: why the model may be behind what is published; empty where nothing is wrong.
    """

    def __init__(self, url: str, apply: Callable[[Blob], None], refused: Callable[[], None]) -> None:
        self.url = url
        self.applied_time = float("nan")
        self._target = open_target(url)
        self._follower = Follower(self._target)
        self._apply, self._count_refused = apply, refused
        self._error = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cowrec-follow", daemon=True)

    @property
    def problem(self) -> str:
        if not self._follower.reachable:
            return f"{self.url} cannot be reached; the last version that was applied goes on answering"
        if self._follower.waits_for_full:
            return f"versions of {self.url} are damaged or missing; the next full one will be applied"
        return self._error

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends after the version that is being applied."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._target.close()

    def _run(self) -> None:
        pause = _PAUSE
        while not self._stop.is_set():
            try:
                for blob in self._follower.blobs(self._stop):
                    self._apply(blob)
                    self.applied_time, self._error, pause = time.time(), "", _PAUSE
            except Exception as error:  # whatever it is, the service goes on answering, and says that it is behind
                self._count_refused()
                self._error = f"a version of {self.url} was refused: {error}"
                logger.warning("%s", self._error, exc_info=not isinstance(error, ValueError))
                self._stop.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                # The deltas that follow go on from the refused version; a full one does not.
                self._follower = Follower(self._target)
