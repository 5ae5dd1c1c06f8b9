"""A range of a split's samples, in the stored order, as parts of its shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass(frozen=True)
class ShardPart:
    """Consecutive samples of one shard.

    Attributes:
        number: of the shard.
        start: index of the first sample within the shard.
        samples: number of samples.
        shard_samples: number of samples of the complete shard.
    """

    number: int
    start: int
    samples: int
    shard_samples: int


def parts_within(shards: Sequence[int], start: int, stop: int) -> list[ShardPart]:
    """Returns the parts of shards of the given sizes that hold samples [start, stop) of all their samples.

    Shards without samples are parts too, so that the complete range has all shards.
    """
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
