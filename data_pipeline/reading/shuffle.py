"""The order of samples in an epoch: windows of shards that are in memory together.

The shards are permuted, consecutive ones are grouped into windows of about `window_rows` samples, and the samples of a
window are permuted across all its shards. The order is a function of (seed, epoch), so it is the same on every rank and
in every resumed run.

A window has two permutations. `Window.order` is numpy's, drawn on the host. `Window.keyed_order` sorts keys that depend
only on the seed and a sample's position, so that every device computes the same one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# Constants of SplitMix64 (Steele, Lea and Flood 2014) as signed integers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))


@dataclass(frozen=True)
class Window:
    """Shards whose samples are shuffled together.

    Attributes:
        start: position of its first sample in the epoch.
        shards: shard numbers, in the order in which their samples are concatenated.
        samples: number of samples.
        key: (seed, epoch, number of the window), the seed of the permutation; None if samples keep their order.
        number: of the windows before it in the epoch.
    """

    start: int
    shards: tuple[int, ...]
    samples: int
    key: tuple[int, int, int] | None
    number: int = 0

    @property
    def stop(self) -> int:
        """Position after its last sample."""
        return self.start + self.samples

    def order(self) -> np.ndarray:
        """Returns the index among the concatenated samples for each position of the window, int64 [samples]."""
        if self.key is None:
            return np.arange(self.samples)
        return _generator(*self.key).permutation(self.samples)

    def keyed_order(self, device: torch.device) -> torch.Tensor:
        """Returns another such permutation, the same on every device: int64 [samples]. Does not wait for the device.

        torch's generators would not do: on CUDA their numbers depend on the GPU's number of multiprocessors, and ranks
        on different GPUs would train on different permutations.
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
            windows.append(Window(start, tuple(gathered), samples, key, len(windows)))
            start, samples, gathered = start + samples, 0, []
    return windows


def _splitmix64(state: torch.Tensor) -> torch.Tensor:
    """Returns the output of SplitMix64 for each state, an int64 whose bits are the unsigned number's."""
    for shift, factor in _ROUNDS:
        logical = (state >> shift) & ((1 << (64 - shift)) - 1)
        state = (state ^ logical) * factor
    return state


def _generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch, stream))))
