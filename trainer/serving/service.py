"""A prediction service: a model, the samples it is asked about, and the versions of it that arrive meanwhile."""

import dataclasses
import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cowrec.data_pipeline import SampleCodec
from cowrec.trainer.publishing.blob import Blob

from .following import Following
from .metrics import ServiceMetrics
from .micro_batcher import MicroBatcher
from .served_model import ServedModel

BATCH = 1024
"""Samples computed together at most, unless a request has more."""

Result = float | str
"""The click probability of a sample, or what is wrong with it."""


@dataclass(frozen=True)
class Limits:
    """What a service takes upon itself.

    Attributes:
        request_bytes: of a request's body.
        samples: of one request.
        concurrent_requests: predictions that are asked for at the same time; more are sent away.
    """

    request_bytes: int = 1 << 20
    samples: int = 1000
    concurrent_requests: int = 256

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")


class Service:
    """What answers requests; the HTTP side is in service_routes.py.

    Args:
        export_dir: folder of an exported model.
        follow: publication target whose versions are applied as they come; None for none.
        limits: see :class:`Limits`.

    Raises:
        ValueError: ``follow`` is not the URL of a publication target.

    Attributes:
        ready: the model is loaded and warm.
        failure: what went wrong while it was loaded; None where nothing did.
    """

    def __init__(self, export_dir: Path, follow: str | None = None, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.metrics = ServiceMetrics(self)
        self.ready = False
        self.failure: Exception | None = None
        self._export_dir = export_dir
        self._gathering: MicroBatcher[Mapping[str, Any], Result] = MicroBatcher(
            self._compute, max(BATCH, self.limits.samples)
        )
        self._following = Following(follow, self._apply, self.metrics.deltas_refused.inc) if follow else None

    def load(self) -> None:
        """Loads the model, predicts once so that everything is compiled, and only then is ready."""
        try:
            self._codec = SampleCodec.load(self._export_dir)
            self._model = ServedModel.load(self._export_dir)
            self._compute([dict.fromkeys(self._codec.columns)])
        except Exception as error:  # told by `serve`, in whose thread it is not
            self.failure = error
            return
        self.ready = True
        if self._following:
            self._following.start()

    def close(self) -> None:
        """Stops following."""
        if self._following:
            self._following.close()

    async def predict(self, samples: Sequence[Mapping[str, Any]]) -> Sequence[Result]:
        """The click probability of each sample, or what is wrong with it."""
        return await self._gathering.results(samples)

    def health(self) -> dict[str, Any]:
        """What is said about the model; times in seconds."""
        if not self.ready:
            return {"status": "loading"}
        problem = self._following.problem if self._following else ""
        return {
            "status": "degraded" if problem else "ok",
            "problem": problem,
            "version": self.version,
            "step": self._model.step,
            "sample_time": self._model.sample_time,
            "age_seconds": time.time() - self.sample_time,
        }

    @property
    def version(self) -> int:
        """Of the model that answers; 0 is the export's own."""
        return self._model.version if self.ready else 0

    @property
    def step(self) -> int:
        """Training steps that the model has taken."""
        return self._model.step if self.ready else 0

    @property
    def sample_time(self) -> float:
        """Newest sample trained on, Unix seconds; NaN where it is not known."""
        known = self._model.sample_time if self.ready else None
        return math.nan if known is None else float(known)

    def counters(self) -> dict[str, int]:
        """As :meth:`ServedModel.counters`."""
        return self._model.counters() if self.ready else {}

    @property
    def applied_time(self) -> float:
        """When a version was applied last, Unix seconds; NaN where none was."""
        return self._following.applied_time if self._following else math.nan

    @property
    def following(self) -> float:
        """1 where a source is followed and nothing is wrong with it."""
        return float(self._following is not None and not self._following.problem)

    def _compute(self, samples: Sequence[Mapping[str, Any]]) -> Sequence[Result]:
        wanted = self._codec.columns
        results: list[Result] = [_missing(sample, wanted) for sample in samples]
        asked = [place for place, wrong in enumerate(results) if not wrong]
        rows, bad = self._codec.encode_request([samples[place] for place in asked])
        for each in bad:
            results[asked[each.index]] = f"{each.reason}; correct the value, or give null where it is missing"
        good = [place for place in asked if not results[place]]
        if good:
            for place, probability in zip(good, self._model.predict(rows).tolist(), strict=True):
                results[place] = probability
            self.metrics.predictions.inc(len(good))
            self.metrics.batch_samples.observe(len(good))
        return results

    def _apply(self, blob: Blob) -> None:
        with self.metrics.delta_seconds.time():
            self._model.apply(blob)
        self.metrics.deltas_applied.inc()


def _missing(sample: Mapping[str, Any], wanted: Sequence[str]) -> str:
    """What is wrong with a sample that lacks a column; empty where none is missing."""
    for name in wanted:
        if name not in sample:
            return f"column {name} is not there; give null where the value is missing"
    return ""


def serve(
    export_dir: Path,
    follow: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
) -> None:
    """Answers requests until SIGTERM or SIGINT; those under way are finished.

    Args:
        export_dir, follow, limits: see :class:`Service`.
        host: address to listen at; by default this machine's own, which others cannot reach.
        port: to listen at.

    Raises:
        ValueError: no exported model in ``export_dir``, or a damaged one; ``follow`` is no publication target.
    """
    import uvicorn

    from .routes import service_app

    # Batches are small, and the other cores are for other requests' HTTP: threads would wait for each other.
    torch.set_num_threads(1)
    service = Service(export_dir, follow, limits)
    config = uvicorn.Config(
        service_app(service, lambda: setattr(server, "should_exit", True)),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,  # longer than proxies keep a connection: they are to close it, not we as they use it
        server_header=False,
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    # uvicorn sends itself the signal once more when all is done; to end by SIGTERM is to end well.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run()
    if service.failure:
        raise service.failure
