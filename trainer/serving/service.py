"""A prediction service: a model that answers requests while newer versions of it are applied."""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cowrec.data_pipeline import SampleCodec
from cowrec.trainer.publishing.blob import Blob
from cowrec.trainer.publishing.version_follower import VersionFollower

from .limits import Limits
from .metrics import ServiceMetrics
from .micro_batcher import MicroBatcher
from .served_model import ServedModel

logger = logging.getLogger(__name__)

BATCH = 1024
"""Samples computed together at most, unless a single request may have more."""

_NOT_FINITE = "the prediction is not a finite number; correct the numbers of the sample, some are too large"

Result = float | dict[str, float] | str
"""The click probability of a sample, or that of each of several tasks by its label; or an error message."""


class Service:
    """Answers prediction requests; routes.py is its HTTP interface, and server.py runs both.

    Args:
        export_dir: folder of an exported model.
        follow: URL of a publication target whose versions are applied as they are published; None for none.
        limits: see :class:`Limits`.
        max_age: seconds since the publication of the served version, after which the service is not ready; None for
            any age.

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
    ) -> None:
        if max_age is not None and not (follow and max_age > 0):
            raise ValueError(f"--max-age must be above 0 seconds and needs --follow, got {max_age}")
        self.limits, self._max_age = limits or Limits(), max_age
        self.metrics = ServiceMetrics(self._values)
        self.loaded = False
        self.failure: Exception | None = None
        self._export_dir = export_dir
        self._batcher: MicroBatcher[Mapping[str, Any], Result] = MicroBatcher(
            self._compute, max(BATCH, self.limits.samples)
        )
        self._follower = VersionFollower(follow, self._apply, self.metrics.deltas_refused.inc) if follow else None

    def load(self) -> None:
        """Loads the model and predicts once, so that everything is compiled before the service is ready."""
        try:
            self._codec = SampleCodec.load(self._export_dir)
            self._model = ServedModel.load(self._export_dir)
            self._compute([dict.fromkeys(self._codec.columns)])
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

    async def predict(self, samples: Sequence[Mapping[str, Any]], due: float = math.inf) -> Sequence[Result]:
        """The click probability or an error message for each sample. Raises Late, see `MicroBatcher.results`."""
        return await self._batcher.results(samples, due)

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
            "step": self._model.step,
            "sample_time": self._model.sample_time,
            "age_seconds": _seconds_since(self._model.sample_time),
        }

    def _too_old(self) -> str:
        if self._max_age is None or self._follower is None:
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
        }
        if not self.loaded:
            return ages
        return {**ages, "model_version": self.version, "model_step": self._model.step, **self._model.counters()}

    def _compute(self, samples: Sequence[Mapping[str, Any]]) -> Sequence[Result]:
        columns = self._codec.columns
        results: list[Result] = [_missing(sample, columns) for sample in samples]
        complete = [index for index, error in enumerate(results) if not error]
        block, bad = self._codec.encode_request([samples[index] for index in complete])
        for each in bad:
            results[complete[each.index]] = f"{each.reason}; correct the value, or use null if it is missing"
        good = [index for index in complete if not results[index]]
        if good:
            labels = self._model.schema.labels
            predicted = self._model.predict(block)
            finite: Any = np.isfinite(predicted.reshape(len(good), -1)).all(axis=1)
            for index, found, is_finite in zip(good, predicted.tolist(), finite, strict=True):
                if not is_finite:
                    results[index] = _NOT_FINITE
                else:
                    results[index] = found if len(labels) == 1 else dict(zip(labels, found, strict=True))
            self.metrics.predictions.inc(len(good))
            self.metrics.batch_samples.observe(len(good))
        return results

    def _apply(self, blob: Blob) -> None:
        with self.metrics.delta_seconds.time():
            self._model.apply(blob)
        self.metrics.deltas_applied.inc()


def _seconds_since(moment: float | None) -> float:
    return math.nan if moment is None else time.time() - moment


def shown_text(text: str) -> str:
    """At most a thousand characters of a text, all of which can be encoded: an error may repeat what was published."""
    return text[:1000].encode(errors="backslashreplace").decode()


def _missing(sample: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Error message for a sample that lacks a column; empty if it has all."""
    for name in columns:
        if name not in sample:
            return f"column {name} is missing; use null for a missing value"
    return ""
