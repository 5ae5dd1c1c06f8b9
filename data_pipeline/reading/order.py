"""Which samples a batch has: the order of an epoch, its global batches, and the parts of shards that are read.

The shards are permuted, consecutive ones are grouped into windows of about `window_rows` samples, which are in memory
together, and the samples of a window are permuted across all its shards. The order is a function of (seed, epoch), so
it is the same on every rank and in every resumed run.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

# SplitMix64 (Steele, Lea and Flood 2014) in signed integers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))


@dataclass(frozen=True)
class Window:
    """Shards whose samples are shuffled together.

    Attributes:
        start: position of its first sample in the epoch.
        shards: shard numbers, in the order in which their samples are concatenated.
        key: (seed, epoch, number of the window), the seed of the permutations; None if samples keep their order.
    """

    start: int
    shards: tuple[int, ...]
    samples: int
    key: tuple[int, int, int] | None

    @property
    def stop(self) -> int:
        return self.start + self.samples

    def order(self) -> np.ndarray:
        """Returns the index among the concatenated samples for each position, int64 [samples], drawn by numpy."""
        if self.key is None:
            return np.arange(self.samples)
        return _generator(*self.key).permutation(self.samples)

    def keyed_order(self, device: torch.device) -> torch.Tensor:
        """Returns another permutation, which every device computes alike and without a wait: int64 [samples].

        Numbers of torch's CUDA generators depend on the GPU, so that ranks would train on different permutations.
        """
        positions = torch.arange(self.samples, device=device)
        if self.key is None:
            return positions
        start = int(np.random.SeedSequence(self.key).generate_state(1, np.uint64).view(np.int64)[0])
        return torch.argsort(_splitmix64(positions * _STEP + start), stable=True)


def epoch_windows(shards: Sequence[int], window_rows: int, *, shuffle: bool, seed: int, epoch: int) -> list[Window]:
    """Returns the windows of an epoch over shards of the given sizes; each but the last has at least `window_rows`."""
    numbers = np.arange(len(shards))
    if shuffle:
        numbers = _generator(seed, epoch, 0).permutation(numbers)
    windows: list[Window] = []
    start, samples, gathered = 0, 0, []
    for position, number in enumerate(numbers.tolist()):
        gathered.append(number)
        samples += shards[number]
        if samples >= window_rows or position == len(numbers) - 1:
            key = (seed, epoch, len(windows) + 1) if shuffle else None
            windows.append(Window(start, tuple(gathered), samples, key))
            start, samples, gathered = start + samples, 0, []
    return windows


def _splitmix64(state: torch.Tensor) -> torch.Tensor:
    """Returns the output of SplitMix64 for each state, as the int64 of the same bits."""
    for shift, factor in _ROUNDS:
        logical = (state >> shift) & ((1 << (64 - shift)) - 1)
        state = (state ^ logical) * factor
    return state


def _generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch, stream))))


class GlobalBatches:
    """Consecutive global batches that cover an epoch.

    Args:
        batch_size: size of the batches after the first ones.
        first: sizes of the first batches, at most `samples` in all.
        shares: for each batch, its share of the samples of its step; 1 by default.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        first: Sequence[int] = (),
        *,
        drop_last: bool = False,
        shares: Sequence[float] = (),
    ) -> None:
        self._shares = shares
        self._samples, self._batch_size = samples, batch_size
        self._starts = [0, *accumulate(first)]
        full, remainder = divmod(samples - self._starts[-1], batch_size)
        self._steps = len(first) + full + bool(remainder and not drop_last)

    def __len__(self) -> int:
        return self._steps

    def start(self, step: int) -> int:
        """Returns the position of the first sample of a batch, which is the number of samples before it."""
        after = step - (len(self._starts) - 1)
        start = self._starts[step] if after < 0 else self._starts[-1] + after * self._batch_size
        return min(start, self._samples)

    def share(self, step: int) -> float:
        """Returns the share of the samples of its step that a batch has."""
        return self._shares[step] if self._shares else 1.0

    def passes(self, step: int, passes: int) -> int:
        """Returns the number of parts of a batch that `in_passes` makes, at most the number of its samples."""
        return min(passes, self.start(step + 1) - self.start(step))

    def in_passes(self, passes: int) -> "GlobalBatches":
        """Splits each batch into consecutive parts whose sizes differ by at most one."""
        if passes == 1:
            return self
        sizes, shares = list[int](), list[float]()
        for step in range(len(self)):
            size, number = self.start(step + 1) - self.start(step), self.passes(step, passes)
            parts = [(part + 1) * size // number - part * size // number for part in range(number)]
            sizes += parts
            shares += [part / size for part in parts]
        return GlobalBatches(sum(sizes), 1, sizes, shares=shares)

    def of_rank(self, step: int, rank: int, world_size: int) -> tuple[int, int, int]:
        """Returns the positions (start, stop) of a rank's contiguous slice of a batch, and the size of the batch.

        The slices cover the batch and differ by at most one sample in size.
        """
        first = self.start(step)
        size = self.start(step + 1) - first
        return first + rank * size // world_size, first + (rank + 1) * size // world_size, size

    def turns(
        self, windows: Iterable[Window], step: int, rank: int, world_size: int
    ) -> Iterator[tuple[Window, list[slice]]]:
        """Yields consecutive windows, from that of batch `step` on, and a rank's slices of the batches in each.

        Slices are positions in the window; a batch that ends in a later window has a slice in both.
        """
        for window in windows:
            slices = []
            for batch in range(step, len(self)):
                start, stop, _ = self.of_rank(batch, rank, world_size)
                slices.append(slice(*(min(max(end - window.start, 0), window.samples) for end in (start, stop))))
                if stop > window.stop:
                    break
                step += 1
            yield window, slices


@dataclass(frozen=True)
class ShardPart:
    """Consecutive samples of shard `number`, which has `shard_samples`, from index `start` on."""

    number: int
    start: int
    samples: int
    shard_samples: int


def parts_within(shards: Sequence[int], start: int, stop: int) -> list[ShardPart]:
    """Returns the parts of shards of the given sizes with samples [start, stop), and empty shards, of all samples."""
    parts = []
    for number, end in enumerate(accumulate(shards)):
        first = end - shards[number]
        low, high = max(start, first), min(stop, end)
        if low < high or not shards[number]:
            parts.append(ShardPart(number, low - first, max(high - low, 0), shards[number]))
    return parts


def positions(parts: Sequence[ShardPart], starts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns the indices of the parts' samples in a block of complete shards, the first of which are at `starts`."""
    firsts = [start + part.start for part, start in zip(parts, starts, strict=True)]
    return torch.cat(
        [torch.arange(first, first + part.samples, device=device) for part, first in zip(parts, firsts, strict=True)]
    )
