"""Stream of samples: batches in time order from a source, identical again after a crash.

Order. The watermark is the newest sample time seen minus `lateness_seconds`; it waits for the partitions of a source
that have more samples to read (see `reorder.follow`). Samples up to the watermark are returned in order of time, then
of arrival, so batches depend on the order of arrival alone, not on how polls divided it. There are two exceptions: if
more than `most_waiting` samples wait, the oldest are returned before the watermark (counted as forced); if no sample
arrives for `max_wait_seconds`, all waiting samples are returned (a flush), and the last batch is short.

Malformed samples (not JSON, a value of the wrong type, no label, no time, a time too far in the future or not in
`TIME_LIMITS`, JSON without any feature) are dropped, counted and kept in a file, and the first ones are logged. A key
that JSON lacks is a missing value, and a column that no sample of a chunk has is logged once. A table without a column,
or whose column has a wrong type, is malformed as a whole. If too many samples are malformed, the stream keeps its
position and waits, or ends.

Duplicates: a sample whose `sample_id` is one of the last `duplicates_window` distinct ones is dropped and counted.
Samples without an id are never duplicates; ids of malformed samples are not remembered.

Late samples, older than the watermark when they arrive, are counted and, by `late`, dropped or returned next.

Exactly-once delivery. From a position and the journal (see `position`), the stream returns the same batches as without
the crash, then new samples. Without a journal no sample is lost or repeated either, but batches may differ.
"""

import dataclasses
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from cowrec.errors import UserError

from ..codec import Encoded, SampleCodec, sample_block
from ..dataset.sample_block import SampleBlock
from ..dataset.schema import Schema
from ..encoding.numbers import count_bounded
from .chunks import ChunkEncoder, id_hashes
from .malformed import MalformedPolicy, MalformedSamples
from .position import Entry, Journal, Position
from .reorder import Followed, RecentIds, follow
from .source import Chunk, SampleSource

if TYPE_CHECKING:
    from ..dataset.batch import Batch


CHUNK_SAMPLES = 1 << 13
"""Maximum samples per poll."""
POLL_SECONDS = 1.0
CORRECTION_SECONDS = 10.0
"""Time until samples of which too many were malformed are looked at again."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StreamBatch:
    """Samples to train on, as `Encoded.table`, and the position after them; `end.counters["batches"]` counts from 1."""

    table: pa.Table
    schema: Schema
    end: Position

    @cached_property
    def block(self) -> SampleBlock:
        """The samples as tensors, with their times."""
        return sample_block(self.table, self.schema)

    @property
    def batch(self) -> "Batch":
        """The samples as the batch of one process; each of several processes takes a slice of `block` instead."""
        return self.block.batch(self.schema, len(self.block))


class SampleStream:
    """Batches of a source's samples; see the module's docstring. Only `trim` may be called from another thread.

    Args:
        fewest: samples of the shortest batch: fewer wait for others, also at the end, until the stream is resumed.
        lateness_seconds: how much older than the newest time seen a sample may be when it arrives.
        late: "drop" late samples, or "train" on them with the next batch.
        duplicates_window: number of distinct sample ids to remember; 0: none.
        max_wait_seconds: returns all waiting samples after this long without a new one; 0: never.
        ahead_seconds: a sample further ahead of the clock is malformed, as it would make all others late; 0: no limit.
        most_waiting: maximum number of waiting samples, in addition to those of one poll.
        malformed: see `MalformedPolicy`; None: malformed samples are dropped and counted.
        journal: file that makes batches repeatable; None: no journal.
        position: position to resume from; None: the source's beginning.
        lost: "stop" at samples of the journal that the source no longer has, or "continue" and count them.

    `position` is that after the last batch returned.

    Raises ValueError: an argument is invalid, or the journal and the position do not match.
    """

    def __init__(
        self,
        source: SampleSource,
        codec: SampleCodec,
        *,
        batch_size: int,
        fewest: int = 1,
        lateness_seconds: int = 0,
        late: Literal["drop", "train"] = "drop",
        duplicates_window: int = 1 << 18,
        max_wait_seconds: float = 0.0,
        ahead_seconds: int = 0,
        most_waiting: int = 1 << 20,
        malformed: MalformedPolicy | None = None,
        journal: Path | None = None,
        position: Position | None = None,
        lost: Literal["stop", "continue"] = "stop",
    ) -> None:
        if fewest < 1 or batch_size < 2 * fewest - 1:
            raise UserError(
                f"batch_size must be at least {max(1, 2 * fewest - 1)}, for batches of {fewest} samples and more (2 for"
                f" a network with batch normalisation), got {batch_size}"
            )
        if most_waiting < batch_size:
            raise UserError(f"most_waiting must be at least batch_size, got {most_waiting} and {batch_size}")
        if min(lateness_seconds, duplicates_window, max_wait_seconds, ahead_seconds) < 0:
            raise UserError("lateness_seconds, duplicates_window, max_wait_seconds, ahead_seconds must be at least 0")
        if late not in ("drop", "train"):
            raise UserError(f"late must be drop or train, got {late!r}")
        self._source, self._schema, self._encoder = source, codec.schema, ChunkEncoder(codec, ahead_seconds)
        self._batch_size, self._fewest, self._lateness, self._late = batch_size, fewest, lateness_seconds, late
        self._max_wait, self._max_waiting = max_wait_seconds, most_waiting
        self._lost = lost
        self._malformed, self._waits_until = MalformedSamples(malformed or MalformedPolicy()), 0.0
        self.position = position or Position()
        if self.ended:  # the source may have new samples since
            self.position = dataclasses.replace(self.position, ended=False)
        waiting, expected = self.position.waiting, self._encoder.no_samples().table.schema
        if len(waiting) and not waiting.table.schema.equals(expected):
            raise UserError("the position is of a stream with other fields; start without it")
        self._recent = RecentIds(duplicates_window, np.concatenate(self.position.recent)) if duplicates_window else None
        self._journal = Journal(journal, self.position.entry) if journal is not None else None
        self._must_seek, self._last_arrival = True, time.monotonic()

    @property
    def ended(self) -> bool:
        """True once the source ended and all its samples were returned, but for fewer than the shortest batch has."""
        return self.position.ended and len(self.position.waiting) < self._fewest

    @property
    def counters(self) -> dict[str, int]:
        """Counters of the position, and those of the source since it was opened."""
        return {**self.position.counters, **self._source.counters}

    @property
    def missing(self) -> Mapping[str, int]:
        """Samples without a value by field, since the stream was opened; see `chunks.MissingValues`."""
        return self._encoder.missing

    @property
    def waits_for_correction(self) -> bool:
        """Whether no sample is taken, as too many of the next ones are malformed."""
        return self._malformed.waits

    def __iter__(self) -> Iterator[StreamBatch]:
        """Yields batches until the source ends."""
        while not self.ended:
            batch = self.next_batch(POLL_SECONDS)
            if batch is not None:
                yield batch

    def next_batch(self, timeout: float) -> StreamBatch | None:
        """Returns the next batch; None if there is none within about `timeout` seconds, or once the stream `ended`.

        With a timeout of 0 it takes all samples that have arrived, until they make a batch.

        Raises ValueError: the source cannot be read, or cannot repeat the journal; OSError: the journal cannot be
        written.
        """
        deadline = time.monotonic() + timeout
        while True:
            count = self._ready()
            if count:
                return self._take_batch(count)
            if self.position.ended or not self._advance(deadline) or (timeout and time.monotonic() > deadline):
                return None

    def trim(self, oldest: Position) -> None:
        """Removes the journal's entries before `oldest`, the oldest position that may still be resumed from."""
        if self._journal is not None:
            self._journal.trim(oldest.entry)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._source.close()

    def _ready(self) -> int:
        """Size of the next batch if it needs no more samples, else 0."""
        state = self.position
        if state.due >= self._fewest:
            rest = state.due - self._batch_size
            return state.due if rest <= 0 else self._batch_size - max(0, self._fewest - rest)
        if len(state.waiting) > self._max_waiting or self._before_watermark() >= self._batch_size:
            return self._batch_size
        return 0

    def _before_watermark(self) -> int:
        """Number of waiting samples up to the watermark."""
        present = self.position.present
        if present is None:
            return 0
        return int(np.searchsorted(self.position.waiting.time, present - self._lateness, side="right"))

    def _take_batch(self, count: int) -> StreamBatch:
        state = self.position
        table = state.waiting.first(count)
        forced = 0 if state.due else max(0, count - self._before_watermark())
        self.position = dataclasses.replace(
            state,
            waiting=state.waiting.without_first(count),
            due=max(0, state.due - count),
            counters=state.counted(handed_out=count, batches=1, forced=forced),
        )
        return StreamBatch(table, self._schema, self.position)

    def _advance(self, deadline: float) -> bool:
        """Applies the next entry of the journal or, after its end, the next event; False if none comes in time."""
        entry = self._journal.recorded(self.position.entry) if self._journal is not None else None
        if entry is not None:
            chunk = self._read_again(entry) if entry.kind == "chunk" else None
            encoded = self._encoder.encode(chunk, entry.now) if chunk is not None else None
            ended = False  # the source may have new samples since
        else:
            entry, chunk = self._next_event(deadline)
            if entry is None:
                return False
            # If the journal fails, or the samples are not taken, the source is ahead of the position.
            self._must_seek = True
            encoded = None
            if chunk is not None:
                encoded = self._encoder.encode(chunk, entry.now)
                if not self._malformed.accept(len(chunk), encoded.bad):
                    self._waits_until = time.monotonic() + CORRECTION_SECONDS
                    return False
                self._malformed.keep(chunk, encoded.bad)
            if self._journal is not None:
                self._journal.append(entry)
            self._must_seek = False
            ended = entry.kind == "end"
        self.position = dataclasses.replace(self._position_after(entry, chunk, encoded), ended=ended)
        return True

    def _read_again(self, entry: Entry) -> Chunk:
        self._must_seek = True
        chunk = self._source.read(entry.partition, entry.start, entry.end)
        lost = entry.samples - len(chunk)
        message = (
            f"the journal has {entry.samples} samples from {entry.start} to {entry.end}, the source only {len(chunk)}"
        )
        if lost and (self._lost == "stop" or lost < 0):
            raise UserError(
                f"{message}: the batches since the last snapshot cannot be repeated. Continue without them by"
                ' online.on_lost_samples = "continue"'
            )
        if lost:
            logger.warning("%s; the others are lost", message)
        return dataclasses.replace(chunk, lost=abs(entry.lost) + lost if lost else entry.lost, behind=entry.behind)

    def _next_event(self, deadline: float) -> tuple[Entry | None, Chunk | None]:
        if self._must_seek:
            self._source.seek(self.position.partitions)
            self._must_seek, self._last_arrival = False, time.monotonic()
        while True:
            now = time.monotonic()
            may_flush = self._max_wait > 0 and len(self.position.waiting) >= self._fewest
            until = min(deadline, self._last_arrival + self._max_wait) if may_flush else deadline
            wait, waits = min(max(0.0, until - now), POLL_SECONDS), now < self._waits_until
            if waits:
                time.sleep(min(wait, self._waits_until - now))
            chunk = None if waits else self._source.poll(CHUNK_SAMPLES, wait)
            now = time.monotonic()
            if chunk is not None:
                self._last_arrival = now
                fields = (chunk.partition, chunk.start, chunk.end, len(chunk), chunk.lost, int(time.time()))
                return Entry("chunk", *fields, chunk.behind), chunk
            if self._source.ended and not waits:
                return Entry("end"), None
            if may_flush and now >= self._last_arrival + self._max_wait:
                return Entry("flush"), None
            if now >= deadline:
                return None, None

    def _position_after(self, entry: Entry, chunk: Chunk | None, encoded: Encoded | None) -> Position:
        """Returns the position after an entry, a function of the entry, its chunk and the position before."""
        state = self.position
        if chunk is None or encoded is None:
            counters = state.counted(flushes=int(entry.kind == "flush"))
            return dataclasses.replace(state, entry=state.entry + 1, due=len(state.waiting), counters=counters)
        self._encoder.count_missing(encoded)
        table, times = encoded.table, encoded.time
        repeated = self._recent.seen(id_hashes(encoded)) if self._recent else np.zeros(len(times), bool)
        if repeated.any():
            table, times = table.filter(pa.array(~repeated)), times[~repeated]
        followed = self._followed(chunk, times)
        late = times < followed.present - self._lateness
        if late.any() and self._late == "drop":
            table, times = table.filter(pa.array(~late)), times[~late]
        return dataclasses.replace(
            state,
            partitions=_without(state.partitions, chunk.forgotten) | {chunk.partition: chunk.end},
            entry=state.entry + 1,
            present=followed.after,
            newest=_without(state.newest, chunk.forgotten) | {chunk.partition: followed.newest},
            waiting=state.waiting.add(table.combine_chunks(), times),
            recent=self._recent.parts if self._recent else state.recent,
            counters=state.counted(
                samples=len(chunk),
                malformed=len(encoded.bad),
                duplicates=int(repeated.sum()),
                late=int(late.sum()),
                bounded=count_bounded(encoded.schema.dense, encoded.table).total(),
                lost=abs(chunk.lost),
            ),
        )

    def _followed(self, chunk: Chunk, times: np.ndarray) -> Followed:
        """Moves the present over a chunk's samples; it waits for the partitions that are behind."""
        newest = self.position.newest
        others = {name: time for name, time in newest.items() if name != chunk.partition}
        # A partition that has given samples without a time is not waited for.
        behind = [name for name in chunk.behind if name not in newest or newest[name] is not None]
        return follow(
            times,
            self.position.present,
            newest.get(chunk.partition),
            behind=[others.get(name) for name in behind if name != chunk.partition],
            others=list(others.values()),
            has_backlog=bool(behind),
        )


def _without(each: Mapping[str, Any], forgotten: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in each.items() if name not in forgotten} if forgotten else dict(each)
