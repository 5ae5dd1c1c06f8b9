"""Work on one CUDA stream that another stream's work depends on is waited for; streams only record here."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from adam_case import SMALL, started
from cowrec.data_pipeline.reading.reader import _copied_to_gpu
from cowrec.sparse_opt.tbe.one_process import look_up_directly
from cowrec.trainer.training.pipeline import CudaGraphCapture
from random_problems.drawing import small_problem
from random_problems.training import batches_of, state_of

pytest_plugins = ["one_group"]


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
    """Stands for the streams of torch.cuda, or of another device."""

    def __init__(self, patch: pytest.MonkeyPatch, device: Any = torch.cuda) -> None:
        self.current = Stream()
        patch.setattr(device, "Stream", Stream)
        patch.setattr(device, "current_stream", lambda *_: self.current)
        patch.setattr(device, "stream", self._stream)

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
    batches: Any = (each for each in made)
    for batch in _copied_to_gpu(batches, torch.device("cuda")):
        assert streams.current.follows(batch.copied)
        assert batch.used_on is streams.current
        streams.current.work()
        taken.append(batch)
        for ahead in made[len(taken) : len(taken) + 1]:
            assert not streams.current.follows(ahead.copied)
    assert taken == made


ROWS_AHEAD = {
    "one lookup": {},
    "two lookups, other order": {"pooling": "mean,sum"},
    "several shardings, weights": {"sharding": "row_wise,table_wise", "weighted": True},
    "empty bags": {"idle": (1,), "parts": 2},
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ROWS_AHEAD)
def test_rows_are_replayed_ahead_beside_a_step(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They wait until the step's rows have caught up and are waited for at its end; they change no bit."""
    problem = small_problem(**SMALL | {"steps": 12} | ROWS_AHEAD[name])
    batches, ends, replayed = [batch for (batch,) in batches_of(problem)], [], []
    for ahead in (False, True):
        model, optimizer = started(problem=problem)
        look_up_directly(model)
        model(batches[0])[0].backward()
        with monkeypatch.context() as patch:
            streams = Streams(patch, torch.cpu)
            main = streams.current
            for each in optimizer.lookups:
                rows = each.clipped.rows
                patch.setattr(rows, "catch_up", watched(rows.catch_up, streams, main, replayed))
            for batch, following in pairwise(batches[1:]):
                with optimizer.replaying_ahead(following.ids0 if ahead else None):
                    model(batch)[0].backward()
                assert all(main.follows(each) for each in replayed)
        ends.append(state_of(model))
        assert len(replayed) == ahead * (len(batches) - 2) * len(optimizer.lookups)
    one, other = ends
    assert all((one[name] == other[name]).all() for name in one)


def watched(catch_up: Any, streams: Streams, main: Stream, replayed: list[Stream]) -> Any:
    """Records the work of replaying rows, ahead of their step or within it."""

    def recorded(*arguments: Any, ahead: bool = False) -> Any:
        assert (streams.current is main) != ahead
        if ahead:
            assert streams.current.follows(caught_up[-1])
            own.append(streams.current.work())
            replayed.append(own[-1])
        else:
            assert all(main.follows(each) for each in own)
            caught_up.append(main.work())
        return catch_up(*arguments, ahead=ahead)

    caught_up: list[Stream] = []
    own: list[Stream] = []
    return recorded
