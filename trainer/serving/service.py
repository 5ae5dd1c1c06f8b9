"""A prediction service: a model that answers requests while newer versions of it are applied."""

import gc
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cowrec.data_pipeline import SampleCodec
from cowrec.trainer.publishing.blob import Blob
from cowrec.trainer.publishing.version_follower import VersionFollower

from .limits import Limits
from .metrics import ServiceMetrics
from .micro_batcher import Done, MicroBatcher
from .request_samples import RequestSample, encode_samples
from .served_model import ServedModel

logger = logging.getLogger(__name__)

BATCH = 1024
"""Samples computed together at most, unless a single request may have more."""

_MANY_SAMPLES = 256
_NOT_FINITE = "the prediction is not a finite number; correct the numbers of the sample, some are too large"

Result = float | dict[str, float] | str
"""The click probability of a sample, or that of each of several tasks by its label; or an error message."""

Answer = tuple[Result, int]
"""A result and the version that made it."""


class Service:
    """Answers prediction requests; routes.py is its HTTP interface, and server.py runs both.

    Args:
        export_dir: folder of an exported model.
        follow: URL of a publication target whose versions are applied as they are published; None for none.
        limits: see :class:`Limits`.
        max_age: seconds since the publication of the served version, after which the service is not ready, unless the
            target is pinned; None for any age.
        obeys_pin: whether to stay at the version that the target is pinned to.

    Raises:
        ValueError: ``follow`` is not the URL of a publication target, or ``max_age`` is not above 0 or without it.

    Attributes:
        loaded: whether the model is loaded and compiled.
        failure: exception raised while it was loaded, if any.
    """

    def __init__(
        self,
        export_dir: Path,
        follow: str | None = None,
        limits: Limits | None = None,
        max_age: float | None = None,
        *,
        obeys_pin: bool = True,
    ) -> None:
        if max_age is not None and not (follow and max_age > 0):
            raise ValueError(f"--max-age must be above 0 seconds and needs --follow, got {max_age}")
        self.limits, self._max_age = limits or Limits(), max_age
        self.metrics, self._unknown_ids = ServiceMetrics(self._values), 0
        self.loaded = False
        self.failure: Exception | None = None
        self._export_dir = export_dir
        self._model: ServedModel
        self._batcher: MicroBatcher[RequestSample, Answer] = MicroBatcher(self.compute, max(BATCH, self.limits.samples))
        refused = self.metrics.deltas_refused.inc
        self._follower = VersionFollower(follow, self._apply, refused, obeys_pin=obeys_pin) if follow else None

    def load(self) -> None:
        """Loads the model and predicts, so that everything is compiled before the service is ready.

        Does nothing if it is loaded.
        """
        if self.loaded:
            return
        try:
            self._model = ServedModel.load(self._export_dir)
            self._codec = SampleCodec.load(self._export_dir)
            for samples in (1, 1, _MANY_SAMPLES):  # few are encoded and computed in another way than many
                self._computed([RequestSample(dict.fromkeys(self._codec.columns))] * samples)
            self._unknown_ids = self._model.unknown_ids
            # What is loaded is never garbage; looking through it again and again would stop requests for 0.3 s each.
            gc.collect()
            gc.freeze()
        except Exception as error:  # raised by `serve`, in another thread
            self.failure = error
            return
        self.loaded = True
        following = f", follows {self._follower.url}" if self._follower else ""
        logger.info("%s is served: step %d%s", self._export_dir, self._model.step, following)
        if self._follower:
            self._follower.start()

    def close(self) -> None:
        """Stops following."""
        if self._follower:
            self._follower.close()
        gc.unfreeze()  # libraries report what is not freed when the process ends

    def predict(
        self, samples: Sequence[RequestSample], done: Done[Answer], due: float = math.inf, since: float = 0.0
    ) -> None:
        """Calls ``done`` with an answer for each sample, all of one version; see `MicroBatcher.submit`."""
        self._batcher.submit(samples, done, due, since)

    @property
    def expected_wait(self) -> float:
        """Seconds that the samples which wait now will take."""
        return self._batcher.expected_wait

    @property
    def version(self) -> int:
        """Published version of the served model; 0 for the export itself."""
        return self._model.version if self.loaded else 0

    def cannot_predict(self) -> str:
        """Why requests cannot be answered yet; empty if they can."""
        if not self.loaded:
            return "the model is still loading"
        if self._follower and not self._follower.caught_up:
            return f"the published versions have not been applied yet. {self._follower.problem}".rstrip()
        return ""

    def not_ready(self) -> str:
        """Why no requests should be sent here; empty if they should."""
        return self.cannot_predict() or self._too_old()

    def health(self) -> dict[str, Any]:
        """Status of the service and of its model; times in seconds."""
        if not self.loaded:
            return {"status": "loading", "ready": False}
        not_ready = self.not_ready()
        problem = not_ready or (self._follower.problem if self._follower else "")
        return {
            "status": "waiting" if self.cannot_predict() else "degraded" if problem else "ok",
            "ready": not not_ready,
            "problem": shown_text(problem),
            "version": self.version,
            "pinned": (self._follower.pinned or None) if self._follower else None,
            "step": self._model.step,
            "sample_time": self._model.sample_time,
            "age_seconds": _seconds_since(self._model.sample_time),
        }

    def _too_old(self) -> str:
        if self._max_age is None or self._follower is None or self._follower.pinned:
            return ""
        age = _seconds_since(self._follower.created_time)
        if age <= self._max_age:
            return ""
        return f"the newest version was published {age:.0f} seconds ago, --max-age is {self._max_age:g}"

    def _values(self) -> dict[str, float]:
        """Values of metrics.py's GAUGES and COUNTERS."""
        follower = self._follower
        ages = {
            "ready": float(not self.not_ready()),
            "model_age_seconds": _seconds_since(self._model.sample_time if self.loaded else None),
            "last_delta_age_seconds": _seconds_since(follower.applied_time if follower else None),
            "following": float(follower is not None and not follower.problem),
            "pinned_version": follower.pinned if follower else 0,
        }
        if not self.loaded:
            return ages
        return {**ages, "model_version": self.version, "model_step": self._model.step, **self._model.counters()}

    def compute(self, samples: Sequence[RequestSample]) -> Sequence[Answer]:
        """The result of each sample, computed in the caller's thread, and the version, which is the same for all."""
        answers = self._computed(samples)
        predicted = sum(not isinstance(result, str) for result, _ in answers)
        if predicted:
            self.metrics.predictions.inc(predicted)
            self.metrics.batch_samples.observe(predicted)
            unknown, self._unknown_ids = self._unknown_ids, self._model.unknown_ids
            self.metrics.unknown_ids.inc(self._unknown_ids - unknown)
        return answers

    def _computed(self, samples: Sequence[RequestSample]) -> Sequence[Answer]:
        version = self._model.version
        block, problems = encode_samples(self._codec, samples)
        results: list[Result] = [*problems]
        good = [index for index, problem in enumerate(problems) if not problem]
        if block is not None and good:
            labels = self._model.schema.labels
            predicted, version = self._model.predict_with_version(block)
            finite: Any = np.isfinite(predicted.reshape(len(good), -1)).all(axis=1)
            for index, found, is_finite in zip(good, predicted.tolist(), finite, strict=True):
                if not is_finite:
                    results[index] = _NOT_FINITE
                else:
                    results[index] = found if len(labels) == 1 else dict(zip(labels, found, strict=True))
        return [(result, version) for result in results]

    def _apply(self, blob: Blob) -> None:
        with self.metrics.delta_seconds.time():
            self._model.apply(blob)
        self.metrics.deltas_applied.inc()


def _seconds_since(moment: float | None) -> float:
    return math.nan if moment is None else time.time() - moment


def shown_text(text: str) -> str:
    """At most a thousand characters of a text, all of which can be encoded: an error may repeat what was published."""
    return text[:1000].encode(errors="backslashreplace").decode()
