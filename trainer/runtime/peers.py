"""Exchange of tensors between the processes of a run, on the CPU and apart from the model's own communication."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .processes import Process

CHUNK = 1 << 20
"""Columns that are sent at a time, which bounds what the receiver holds."""


class Peers:
    """A gloo group of all processes, which call each method together; a process alone exchanges nothing.

    Calls from several threads need a group for each thread.

    Args:
        process: this process; waits for another are bounded by its timeout.

    Attributes:
        rank, count: of this process; of all of them.
    """

    def __init__(self, process: Process) -> None:
        self.rank, self.count = process.rank, process.world_size
        self._group = None if self.count == 1 else dist.new_group(backend="gloo", timeout=process.timeout)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def numbers(self, values: Sequence[int]) -> list[int]:
        """Numbers of the first process; the others pass as many, of any value."""
        if self.count == 1:
            return list(values)
        sent = torch.tensor(values, dtype=torch.int64)
        dist.broadcast(sent, 0, group=self._group)
        return sent.tolist()

    def error(self, error: Exception | None) -> Exception:
        """The error of the first process."""
        found = [error]
        if self.count > 1:
            dist.broadcast_object_list(found, 0, group=self._group)
        assert found[0] is not None
        return found[0]

    def send(self, values: Tensor, rank: int) -> None:
        """Sends a contiguous tensor on the CPU to a process, which receives it meanwhile."""
        dist.send(values, rank, group=self._group)

    def receive(self, rank: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Receives a tensor of this shape from a process."""
        received = torch.empty(shape, dtype=dtype)
        dist.recv(received, rank, group=self._group)
        return received

    def gathered(self, values: Tensor, sizes: Sequence[int]) -> Tensor:
        """Values of all processes, by rank, on the first one; on the others this process's own.

        Args:
            values: float32 [n].
            sizes: n of each process.
        """
        if self.count == 1:
            return values
        padded = torch.zeros(max(sizes))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in sizes] if self.is_first else None
        dist.gather(padded, parts, 0, group=self._group)
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)]) if parts else values

    def all_columns(self, own: Tensor) -> Iterator[Tensor]:
        """Yields the columns of all processes, by rank, in chunks, int64 [k, n], of this process's [k, m]."""
        if self.count == 1:
            yield own
            return
        for rank, count in enumerate(self._counts(own.shape[1])):
            for first in range(0, count, CHUNK):
                size = min(CHUNK, count - first)
                chunk = torch.empty(len(own), size, dtype=torch.int64)
                if rank == self.rank:
                    chunk.copy_(own[:, first : first + size])
                dist.broadcast(chunk, rank, group=self._group)
                yield chunk

    def columns_on_first(self, own: Tensor) -> Tensor:
        """Columns of all processes, by rank, int64 [k, n], on the first one; on the others this process's own."""
        if self.count == 1:
            return own
        counts = self._counts(own.shape[1])
        if self.is_first:
            others = enumerate(counts[1:], 1)
            parts = [self.receive(rank, len(own), count, dtype=torch.int64) for rank, count in others if count]
            return torch.cat([own, *parts], 1)
        if own.shape[1]:
            self.send(own.contiguous(), 0)
        return own

    def _counts(self, count: int) -> list[int]:
        counts = torch.empty(self.count, dtype=torch.int64)
        dist.all_gather_into_tensor(counts, torch.tensor([count]), group=self._group)
        return counts.tolist()
