"""Work on one CUDA stream that another stream's work depends on is waited for; streams only record here."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cowrec.data_pipeline.reading.reader import _copied_to_gpu
from cowrec.trainer.sharded_model.step import CudaGraphCapture


class Stream:
    """Stands for torch.cuda.Stream, and for an event, which is a stream's work so far: counts of work by stream."""

    def __init__(self, *_: Any) -> None:
        self.done = Counter[int]()

    def work(self) -> "Stream":
        """Adds work; returns an event after it."""
        self.done[id(self)] += 1
        return self.record_event()

    def record_event(self) -> "Stream":
        event = Stream()
        event.done = self.done.copy()
        return event

    def wait_stream(self, other: "Stream") -> None:
        self.done |= other.done

    wait_event = wait_stream

    def follows(self, event: "Stream") -> bool:
        """Whether all of an event's work is done before the stream's next."""
        return event.done <= self.done


class Streams:
    """Stands for torch.cuda's streams."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = Stream()
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", lambda *_: self.current)
        patch.setattr(torch.cuda, "stream", self._stream)

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


def test_warm_up_steps_wait_for_what_is_before_them_and_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, steps = Streams(monkeypatch), []
    capture, main = CudaGraphCapture(), streams.current

    def step() -> Any:
        assert streams.current is not main
        assert streams.current.follows(prepared)
        steps.append(streams.current.work())
        return ()

    for _ in range(3):
        prepared = main.work()
        capture.warm_up(step)
        assert streams.current is main
        assert main.follows(steps[-1])


class Copied:
    """Stands for a batch: its copy is work on the current stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self.used_on = streams, None

    def to(self, *_: Any, **__: Any) -> "Copied":
        self.copied = self._streams.current.work()
        return self

    def record_stream(self, stream: Stream) -> None:
        self.used_on = stream


def test_batches_are_used_after_their_copy_and_kept_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    made, taken = [Copied(streams) for _ in range(5)], []
    batches: Any = (stream for stream in made)
    for batch in _copied_to_gpu(batches, torch.device("cuda")):
        assert streams.current.follows(batch.copied)
        assert batch.used_on is streams.current
        streams.current.work()
        taken.append(batch)
        for ahead in made[len(taken) : len(taken) + 1]:
            assert not streams.current.follows(ahead.copied)
    assert taken == made
