"""Turns of an online run: what its processes do next, decided by the first one, which alone reads the stream."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa
import torch
from torch import Tensor

from cowrec.data_pipeline import Batch, SampleStream, Schema, StreamBatch
from cowrec.data_pipeline.codec import ID_COLUMN, sample_block
from cowrec.trainer.runtime.peers import Peers
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.training.dataloading import even_slice

from .publication import Due


@dataclass(frozen=True)
class Decision:
    """What depends on time, and would differ between processes if each looked at its own clock.

    Attributes:
        saves: it is time for a snapshot.
        publishes: what it is time to publish.
    """

    saves: bool
    publishes: Due


@dataclass(frozen=True)
class Turn:
    """What all processes do in one turn.

    Attributes:
        ends: the stream has ended, with this turn's batch if there is one.
        batch: this process's slice of the samples to train on, as even as :func:`even_slice` makes it; None if no
            samples have come.
        sizes: samples of each process's slice, without padding.
        arrived: the complete batch, on the first process.
    """

    decision: Decision
    ends: bool
    batch: Batch | None = None
    sizes: tuple[int, ...] = ()
    arrived: StreamBatch | None = None


class Turns:
    """The turns of a run; all processes call each method together.

    Args:
        stream: of samples, on the first process; None on the others.

    Attributes:
        seconds: CPU time of the first process's thread for reading, encoding and sharing out samples; the others have
            none to train on meanwhile.
    """

    def __init__(self, stream: SampleStream | None, schema: Schema, process: Process) -> None:
        self._stream, self._schema, self._peers = stream, schema, Peers(process)
        self.seconds = 0.0

    def next(self, timeout: float, decide: Callable[[bool], Decision]) -> Turn:
        """Waits for samples, at most about ``timeout`` seconds, and returns the next turn.

        Args:
            timeout: in seconds.
            decide: called on the first process, with whether the stream has ended.

        Raises:
            ValueError: the source cannot be read, or cannot repeat what the journal records; on all processes.
            OSError: the journal cannot be written; on all processes.
        """
        if self._stream is None:
            return self._received()
        began = time.thread_time()
        try:
            arrived = self._stream.next_batch(timeout)
        except (ValueError, OSError) as error:
            if self._peers.count > 1:
                self._peers.numbers([True, *[0] * (3 + self._peers.count)])
                self._peers.error(error)
            raise
        decision = decide(self._stream.ended)
        turn = self._shared_out(arrived, decision, self._stream.ended)
        self.seconds += time.thread_time() - began
        return turn

    def logits(self, turn: Turn, own: Tensor) -> Tensor:
        """Logits of all samples of a turn on the first process, from those of this process's, [B]."""
        return self._peers.gathered(own.cpu(), turn.sizes)

    def _shared_out(self, arrived: StreamBatch | None, decision: Decision, ends: bool) -> Turn:
        peers, samples = self._peers, 0 if arrived is None else len(arrived.table)
        sizes = self._sizes(samples)
        if peers.count == 1:
            return Turn(decision, ends, None if arrived is None else arrived.batch, sizes, arrived)
        slices = list[pa.Table]()
        if arrived is not None:
            begins = [sum(sizes[:rank]) for rank in range(peers.count)]
            table = arrived.table.drop_columns([ID_COLUMN])
            slices = [table.slice(begin, size) for begin, size in zip(begins, sizes, strict=True)]
        sent = [_as_bytes(each) for each in slices[1:]]
        lengths = [len(each) for each in sent] or [0] * (peers.count - 1)
        peers.numbers([False, ends, decision.saves, decision.publishes.value, samples, *lengths])
        for rank, each in enumerate(sent, 1):
            peers.send(each, rank)
        return Turn(decision, ends, self._batch(slices[0], samples) if slices else None, sizes, arrived)

    def _received(self) -> Turn:
        peers = self._peers
        failed, ends, saves, publishes, samples, *lengths = peers.numbers([0] * (4 + peers.count))
        if failed:
            raise peers.error(None)
        decision, batch = Decision(bool(saves), Due(publishes)), None
        if samples:
            received = peers.receive(0, lengths[peers.rank - 1], dtype=torch.uint8)
            batch = self._batch(pa.ipc.open_stream(pa.py_buffer(received.numpy())).read_all(), samples)
        return Turn(decision, bool(ends), batch, self._sizes(samples))

    def _sizes(self, samples: int) -> tuple[int, ...]:
        """Samples of each process; the slices are those of a reader of a data set."""
        count = self._peers.count
        return tuple(end - begin for begin, end in pairwise(rank * samples // count for rank in range(count + 1)))

    def _batch(self, table: pa.Table, samples: int) -> Batch:
        return even_slice(sample_block(table, self._schema).batch(self._schema, samples), self._peers.count)


def _as_bytes(table: pa.Table) -> Tensor:
    """A table in Arrow's stream format, uint8 [n]."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return torch.frombuffer(bytearray(sink.getvalue()), dtype=torch.uint8)
