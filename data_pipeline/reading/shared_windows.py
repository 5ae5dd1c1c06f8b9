"""Windows that several ranks read together: each loads some of a window's shards and answers what the others ask of it.

Each rank owns a run of consecutive shards of a window, and decodes 1/W of an epoch: where the shards of a window cannot
be divided evenly, the longer runs are other ranks' in the next. A rank asks the owners for the samples of its slices.
Ranks ask by window, and answer in a thread: a rank may be windows ahead, close an epoch early or have started another.
Sizes: W ranks, R samples of a window, N of them in this rank's shards, B in this rank's slices.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from cowrec.data_pipeline.dataset.block_bytes import packed, unpacked
from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.dataset.schema import Schema

from .exchange import Exchange
from .shuffle import Window

_MOST_KEPT = 8
"""Parts of windows that some ranks have not asked for; no more than W + 2, as ranks read up to three windows ahead. A
part that is not kept is loaded again."""
_OTHERS_ASK_WITHIN = 20.0
"""Seconds that an error waits for ranks that have not asked yet, so that each of them reports it."""


@dataclass(frozen=True)
class WindowSource:
    """How a reader reads its windows.

    Attributes:
        windows: epoch -> its windows, by the position of the first sample.
        slices: (epoch, window, step, rank) -> positions in the window of the rank's slices of the batches from `step`.
        starts: shards of a window -> where each starts in a block of these complete shards, and where the last ends.
        index: the sample in that block for each position of a window, int64 [R].
        load: loads complete shards of a window.
    """

    windows: Callable[[int], Mapping[int, Window]]
    slices: Callable[[int, Window, int, int], list[slice]]
    starts: Callable[[Sequence[int]], list[int]]
    index: Callable[[Window], torch.Tensor]
    load: Callable[[Sequence[int]], SampleBlock]


class SharedWindows:
    """This rank's share in reading the windows of one reader.

    Args:
        exchange: transport to the other ranks.
        rank, world_size: of this rank, of all.
        schema: of the samples.
        read: how the reader reads.
    """

    def __init__(self, exchange: Exchange, rank: int, world_size: int, schema: Schema, read: WindowSource) -> None:
        self._exchange, self._rank, self._world_size = exchange, rank, world_size
        self._schema, self._read = schema, read
        self._parts: dict[tuple[int, int], _Part] = {}
        self._asked = threading.Condition()
        self._number = exchange.serve(self)

    def load(self, epoch: int, window: Window, step: int) -> tuple[SampleBlock, torch.Tensor]:
        """Returns this rank's samples of a window, and the order in which its slices have them, int64 [B].

        Raises:
            ValueError, OSError: a shard cannot be read, by this rank or by another.
            RuntimeError: another rank has ended, or does not answer.
        """
        part, question = self._part(epoch, window.start), (epoch, window.start, step)
        others = [rank for rank in part.owners if rank != self._rank]
        if part.error:
            with suppress(ValueError, OSError, RuntimeError):
                self._exchange.ask(self._number, question, others)
            self._wait_for_questions(part)
            raise part.error
        try:
            answers = self._exchange.ask(self._number, question, others)
        except (ValueError, OSError):
            self._wait_for_questions(part)
            raise
        slices = self._read.slices(epoch, window, step, self._rank)
        run, blocks = part.runs(slices), {self._rank: part.samples(slices)}
        samples = torch.bincount(run, minlength=len(part.owners)).tolist()
        for rank, answer in zip(others, answers, strict=True):
            blocks[rank] = unpacked(answer, self._schema, samples[part.owners.index(rank)])
        self._taken(epoch, window.start, self._rank)
        order = torch.empty(len(run), dtype=torch.int64)
        order[torch.argsort(run, stable=True)] = torch.arange(len(run))
        return SampleBlock.concat([blocks[rank] for rank in part.owners] or [blocks[self._rank]]), order

    def answer(self, rank: int, question: Sequence[int]) -> torch.Tensor:
        """Returns the bytes of the samples in this rank's shards that another rank's slices of a window have."""
        epoch, start, step = question
        part = self._part(epoch, start)
        if part.error:
            raise part.error
        return packed(part.samples(self._read.slices(epoch, self._read.windows(epoch)[start], step, rank)))

    def answered(self, rank: int, question: Sequence[int]) -> None:
        """Drops this rank's part of a window once all ranks have their samples of it."""
        epoch, start, _ = question
        self._taken(epoch, start, rank)

    def _taken(self, epoch: int, start: int, rank: int) -> None:
        with self._asked:
            part = self._parts.get((epoch, start))
            if part is None:
                return
            part.to_ask.discard(rank)
            if not part.to_ask:
                del self._parts[epoch, start]
            self._asked.notify_all()

    def _wait_for_questions(self, part: "_Part") -> None:
        """Waits until all others know the error of this rank, or have this rank's part."""
        with self._asked:
            self._asked.wait_for(lambda: part.to_ask <= {self._rank}, _OTHERS_ASK_WITHIN)

    def _part(self, epoch: int, start: int) -> "_Part":
        with self._asked:  # also so that it is loaded once
            if (epoch, start) not in self._parts:
                while len(self._parts) >= min(self._world_size + 2, _MOST_KEPT):
                    del self._parts[next(iter(self._parts))]
                window = self._read.windows(epoch)[start]
                self._parts[epoch, start] = _Part(window, self._rank, self._world_size, self._read)
            return self._parts[epoch, start]


class _Part:
    """This rank's shards of a window.

    Attributes:
        owners: the rank of each run of shards.
        to_ask: ranks that have not taken their samples.
        error: why the shards cannot be read, or None.
    """

    def __init__(self, window: Window, rank: int, world_size: int, read: WindowSource) -> None:
        number = len(window.shards)
        owners = [(each * world_size // number + window.number) % world_size for each in range(number)]
        self.owners = list(dict.fromkeys(owners))
        self.to_ask = set(range(world_size)) if rank in owners else {rank}
        starts = read.starts(window.shards)
        self._ends = torch.tensor([starts[number - owners[::-1].index(owner)] for owner in self.owners])
        self._index = read.index(window)
        own = [each for each, owner in enumerate(owners) if owner == rank]
        start, stop = (starts[own[0]], starts[own[-1] + 1]) if own else (0, 0)
        self._positions = ((self._index >= start) & (self._index < stop)).nonzero().flatten()
        self._rows = self._index[self._positions] - start
        self.error: ValueError | OSError | None = None
        try:
            self._block = read.load([window.shards[each] for each in own])
        except (ValueError, OSError) as error:
            self.error = error

    def runs(self, slices: Sequence[slice]) -> torch.Tensor:
        """Returns the run of shards that each sample at positions of the window is in, int32 [B]."""
        index = torch.cat([self._index[:0], *(self._index[each] for each in slices)])
        return torch.bucketize(index, self._ends, right=True, out_int32=True)

    def samples(self, slices: Sequence[slice]) -> SampleBlock:
        """Returns the samples in this rank's shards at positions of the window, in their order."""
        bounds = torch.tensor([[each.start, each.stop] for each in slices], dtype=torch.int64).reshape(-1, 2)
        ends = torch.searchsorted(self._positions, bounds).tolist()
        return self._block.take(torch.cat([self._rows[:0], *(self._rows[first:stop] for first, stop in ends)]))
