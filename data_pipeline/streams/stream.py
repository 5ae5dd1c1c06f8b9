"""Samples as they arrive, in the order of their times, as batches; after a crash the same batches again.

Order. The watermark is the newest time seen less `lateness_seconds`. Samples up to it are handed out by their times,
those of equal times as they arrived; so batches follow from the order of arrival alone, however it was cut into
polls. The exceptions: where more than `most_waiting` samples wait, the oldest are handed out early (counted as
forced); where no sample came for `max_wait_seconds`, all are (a flush), the last batch being short.

Malformed samples (no JSON, a value that its column cannot hold, no label, no time, one too far in the future) are
left out and counted, the first ones named in the log; and so is a chunk of which no sample has some column.

Duplicates: of samples with a `sample_id` that is one of the last `duplicates_window` distinct ones, the first counts.
Malformed samples have no id; those without one are never duplicates.

Late samples are those whose time was before the watermark when they arrived. They are counted and, as `late` says,
left out or handed out with the next batch, for whose order they come too late.

Exactly once. A `Position` holds all that decides what comes next, but for what only the moment decides: which samples
a poll returns, and whether a wait was too long. That is in the journal, on disk before it has any effect. So from a
position and the journal the stream hands out, batch by batch, what it would have without the crash, and then goes on
with what is new. Without a journal no sample is lost or repeated either, but batches may be cut otherwise.
"""

import dataclasses
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.data_pipeline.codec.codec import BadSample, Encoded, SampleCodec, encoded_rows
from cowrec.data_pipeline.dataset.batch import Batch
from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.dataset.schema import Schema
from cowrec.data_pipeline.hashing import string_hashes

from .journal import Entry, Journal
from .position import COUNTERS, Position
from .reorder import RecentIds, Waiting
from .source import Chunk, SampleSource

CHUNK_SAMPLES = 1 << 13
"""Samples of a poll at most."""
POLL_SECONDS = 1.0
NAMED = 5
"""Malformed samples that are named in the log."""

logger = logging.getLogger(__name__)

_LONG_AGO = -(1 << 62)


@dataclass(frozen=True)
class StreamBatch:
    """Samples to train on.

    Attributes:
        rows: the samples, with their times.
        schema: of the rows.
        end: where the stream stands after them; `end.counters["batches"]` is their number, from 1.
    """

    rows: SampleBlock
    schema: Schema
    end: Position

    @property
    def batch(self) -> Batch:
        """All of it as one process's batch; of several, each takes its slice of `rows`."""
        return self.rows.batch(self.schema, len(self.rows))


class SampleStream:
    """Batches of a source's samples; see the top of this file. Not to be used by two threads at a time, but for `cut`.

    Args:
        source: of raw samples.
        codec: that makes rows of them.
        batch_size: samples of a batch.
        lateness_seconds: how much older than the newest time seen a sample may be when it arrives.
        late: "drop" samples that are older, or "train" on them with the next batch.
        duplicates_window: distinct sample ids that are remembered; 0 for none.
        max_wait_seconds: hands out all that waits once no sample came for so long; 0: never.
        ahead_seconds: a sample whose time is later than the clock by more than this is malformed, since it would make
            all others late; 0: none is.
        most_waiting: samples that are held at a time, beside those of one poll.
        journal: file that makes batches repeatable; None for none.
        position: to go on from; None: the source's beginning.

    Attributes:
        position: after the last batch that was handed out.

    Raises:
        ValueError: a bad argument, or a journal and a position that do not belong together.
    """

    def __init__(
        self,
        source: SampleSource,
        codec: SampleCodec,
        *,
        batch_size: int,
        lateness_seconds: int = 0,
        late: Literal["drop", "train"] = "drop",
        duplicates_window: int = 1 << 18,
        max_wait_seconds: float = 0.0,
        ahead_seconds: int = 0,
        most_waiting: int = 1 << 20,
        journal: Path | None = None,
        position: Position | None = None,
    ) -> None:
        if batch_size < 1 or most_waiting < batch_size:
            raise ValueError(
                f"batch_size must be at least 1 and most_waiting at least that, got {batch_size} and {most_waiting}"
            )
        if min(lateness_seconds, duplicates_window, max_wait_seconds, ahead_seconds) < 0:
            raise ValueError("lateness_seconds, duplicates_window, max_wait_seconds, ahead_seconds must be at least 0")
        if late not in ("drop", "train"):
            raise ValueError(f"late must be drop or train, got {late!r}")
        self._source, self._codec, self._batch_size = source, codec, batch_size
        self._lateness, self._late, self._most = lateness_seconds, late, most_waiting
        self._max_wait, self._ahead = max_wait_seconds, ahead_seconds
        self.position = position or Position()
        if self.ended:  # more may have come since
            self.position = dataclasses.replace(self.position, ended=False)
        self._check_columns(self.position.waiting)
        self._recent = RecentIds(duplicates_window, np.concatenate(self.position.recent)) if duplicates_window else None
        self._journal = Journal(journal, self.position.entry) if journal is not None else None
        self._seeking, self._named = True, 0
        self._last_sample = time.monotonic()

    @property
    def ended(self) -> bool:
        """The source ended, and all its samples were handed out."""
        return self.position.ended and not len(self.position.waiting)

    @property
    def counters(self) -> dict[str, int]:
        """The position's, and the source's own since it was opened."""
        return {**self.position.counters, **self._source.counters}

    def __iter__(self) -> Iterator[StreamBatch]:
        """All batches, until the source ends."""
        while not self.ended:
            batch = self.next_batch(POLL_SECONDS)
            if batch is not None:
                yield batch

    def next_batch(self, timeout: float) -> StreamBatch | None:
        """The next batch; None where there is none after some `timeout` seconds, or where the stream `ended`.

        Raises:
            ValueError: a source that cannot be read, or not again as the journal says. OSError: the journal cannot be
                written.
        """
        deadline = time.monotonic() + timeout
        while True:
            count = self._ready()
            if count:
                return self._hand_out(count)
            if self.position.ended or not self._take_in(deadline):
                return None

    def cut(self, oldest: Position) -> None:
        """Forgets what the journal has from before `oldest`, the oldest position that may still be gone on from."""
        if self._journal is not None:
            self._journal.cut(oldest.entry)

    def close(self) -> None:
        """Closes the journal and the source."""
        if self._journal is not None:
            self._journal.close()
        self._source.close()

    def _ready(self) -> int:
        """How many samples the next batch has, if it can be made without more samples; else 0."""
        state = self.position
        if state.due:
            return min(self._batch_size, state.due)
        waiting = len(state.waiting)
        if waiting > self._most or self._on_time() >= self._batch_size:
            return self._batch_size
        return 0

    def _on_time(self) -> int:
        """How many samples are not after the watermark."""
        newest = self.position.newest
        if newest is None:
            return 0
        return int(np.searchsorted(self.position.waiting.time, newest - self._lateness, side="right"))

    def _hand_out(self, count: int) -> StreamBatch:
        state = self.position
        table = state.waiting.first(count)
        forced = 0 if state.due else max(0, count - self._on_time())
        self.position = dataclasses.replace(
            state,
            waiting=state.waiting.without_first(count),
            due=max(0, state.due - count),
            counters=_added(state, handed_out=count, batches=1, forced=forced),
        )
        return StreamBatch(encoded_rows(table, self._codec.schema), self._codec.schema, self.position)

    def _take_in(self, deadline: float) -> bool:
        """One entry of the journal or, at its end, one thing that happens now; False where nothing does in time."""
        entry = self._journal.past(self.position.entry) if self._journal is not None else None
        if entry is not None:
            chunk = self._again(entry) if entry.kind == "chunk" else None
            ended = False  # what was the end then may not be it now
        else:
            entry, chunk = self._happening(deadline)
            if entry is None:
                return False
            # Should the journal fail, the source is ahead of us.
            self._seeking = True
            if self._journal is not None:
                self._journal.append(entry)
            self._seeking = False
            ended = entry.kind == "end"
        self.position = dataclasses.replace(self._after(entry, chunk), ended=ended)
        return True

    def _again(self, entry: Entry) -> Chunk:
        self._seeking = True
        chunk = self._source.read(entry.partition, entry.start, entry.end)
        if len(chunk) != entry.samples:
            raise ValueError(
                f"the journal has {entry.samples} samples from {entry.start} to {entry.end}, the source has "
                f"{len(chunk)} of them left: the batches since the last snapshot cannot be repeated. Remove the "
                "journal to go on with those that are left"
            )
        return dataclasses.replace(chunk, lost=entry.lost)

    def _happening(self, deadline: float) -> tuple[Entry | None, Chunk | None]:
        if self._seeking:
            self._source.seek(self.position.places)
            self._seeking, self._last_sample = False, time.monotonic()
        while True:
            now = time.monotonic()
            waits = self._max_wait > 0 and len(self.position.waiting) > 0
            until = min(deadline, self._last_sample + self._max_wait) if waits else deadline
            chunk = self._source.poll(CHUNK_SAMPLES, min(max(0.0, until - now), POLL_SECONDS))
            now = time.monotonic()
            if chunk is not None:
                self._last_sample = now
                about = (chunk.partition, chunk.start, chunk.end, len(chunk), chunk.lost, int(time.time()))
                return Entry("chunk", *about), chunk
            if self._source.ended:
                return Entry("end"), None
            if waits and now >= self._last_sample + self._max_wait:
                return Entry("flush"), None
            if now >= deadline:
                return None, None

    def _after(self, entry: Entry, chunk: Chunk | None) -> Position:
        """The position after an entry: a function of it, of the chunk and of the position before."""
        state = self.position
        if chunk is None:
            flushes = int(entry.kind == "flush")
            return dataclasses.replace(
                state,
                entry=state.entry + 1,
                due=len(state.waiting),
                counters=_added(state, flushes=flushes),
            )
        encoded = self._encoded(chunk, entry.now)
        table, times = encoded.table, encoded.time
        repeated = self._recent.seen(_id_hashes(encoded)) if self._recent else np.zeros(len(times), bool)
        if repeated.any():
            table, times = table.filter(pa.array(~repeated)), times[~repeated]
        newest = np.maximum.accumulate(np.r_[_LONG_AGO if state.newest is None else state.newest, times])
        late = times < newest[:-1] - self._lateness
        if late.any() and self._late == "drop":
            table, times = table.filter(pa.array(~late)), times[~late]
        return dataclasses.replace(
            state,
            places={**state.places, chunk.partition: chunk.end},
            entry=state.entry + 1,
            newest=None if newest[-1] == _LONG_AGO else int(newest[-1]),
            waiting=state.waiting.add(table.combine_chunks(), times),
            recent=self._recent.parts if self._recent else state.recent,
            counters=_added(
                state,
                samples=len(chunk),
                malformed=len(encoded.bad),
                duplicates=int(repeated.sum()),
                late=int(late.sum()),
                lost=abs(chunk.lost),
            ),
        )

    def _encoded(self, chunk: Chunk, now: int) -> Encoded:
        """The good samples of a chunk; the first ones that are not are named."""
        table = isinstance(chunk.samples, pa.Table)
        raw = self._codec.from_table(chunk.samples) if table else self._codec.from_json(chunk.samples)
        try:
            encoded = self._codec.encode(raw)
        except ValueError as error:
            bad = tuple(BadSample(place, str(error)) for place in range(len(chunk)))
            encoded = dataclasses.replace(self._codec.encode(self._codec.from_objects([])), bad=bad)
        if self._ahead:
            encoded = encoded.without(
                encoded.time > now + self._ahead, f"its time is over {self._ahead} s in the future"
            )
        for each in encoded.bad[: max(0, NAMED - self._named)]:
            self._named += 1
            where = f"sample {each.index} after {chunk.start!r}" + (
                f" of partition {chunk.partition}" * bool(chunk.partition)
            )
            logger.warning("%s is left out: %s", where, each.reason)
        return encoded

    def _check_columns(self, waiting: Waiting) -> None:
        """Raises ValueError where samples that wait were encoded by another data set."""
        ours = self._codec.encode(self._codec.from_objects([])).table.schema
        for table in waiting.tables:
            if [(each.name, each.type) for each in table.schema] != [(each.name, each.type) for each in ours]:
                raise ValueError("the position is of a stream with other fields; start without it")


def _id_hashes(encoded: Encoded) -> np.ndarray:
    """uint64 [R], 0 where a sample has no id."""
    ids = encoded.sample_ids.combine_chunks()
    ids = pa.concat_arrays(ids.chunks) if isinstance(ids, pa.ChunkedArray) else ids
    hashes = np.maximum(string_hashes(ids), np.uint64(1))
    return np.where(pc.equal(ids, "").to_numpy(zero_copy_only=False), np.uint64(0), hashes)


def _added(state: Position, **counts: int) -> dict[str, int]:
    return {name: state.counters.get(name, 0) + counts.get(name, 0) for name in COUNTERS}
