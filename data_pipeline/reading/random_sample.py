"""A random sample of a split, kept in memory, to measure a model on part of the training split."""

import os
from collections.abc import Iterator
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.dataset.schema import Schema
from cowrec.data_pipeline.dataset.shards import load_shards

from .global_batches import GlobalBatches

if TYPE_CHECKING:
    from cowrec.data_pipeline.dataset.batch import Batch


class RandomSample:
    """Batches of a random sample of a split, for one rank; all epochs have the same, in the stored order.

    Takes the place of an unshuffled `Reader`. The constructor reads the shards once, one at a time, and keeps the
    sample on the device. All ranks draw the same sample.

    Args:
        data_dir: a prepared data set.
        split: "train" or "test".
        rows: samples to draw, without replacement; all if there are fewer.
        among: samples of the split to draw from, the first ones; by default all.
        batch_size, rank, world_size, device, true_logits: as of a reader.
        seed: seed of the draw.

    Raises:
        ValueError: a shard is missing or damaged.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        split: str,
        rows: int,
        *,
        batch_size: int,
        among: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        device: str | torch.device = "cpu",
        true_logits: bool = False,
    ) -> None:
        self.schema = Schema.load(data_dir).of_batches(true_logits=true_logits)
        self.split, self.batch_size, self.device = split, batch_size, torch.device(device)
        self._rank, self._world_size = rank, world_size
        shards = self.schema.split(split).shards
        among = sum(shards) if among is None else among
        draw = np.random.default_rng(seed)
        chosen = np.sort(draw.choice(among, min(rows, among), replace=False, shuffle=False))
        ends = np.searchsorted(chosen, [0, *accumulate(shards)])

        def parts() -> Iterator[tuple[int, SampleBlock]]:
            start = 0
            for number, (first, stop) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
                if first < stop:
                    block = load_shards(Path(data_dir), self.schema, split, [number])
                    yield first, block.take(torch.from_numpy(chosen[first:stop] - start))
                start += shards[number]

        self._block = SampleBlock.assemble(self.schema, len(chosen), parts(), self.device)

    @property
    def num_rows(self) -> int:
        """Samples over all ranks."""
        return len(self._block)

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return ceil(self.num_rows / self.batch_size)

    def positions(self, step: int) -> slice:
        """Positions in the sample of this rank's part of global batch `step`."""
        batches = GlobalBatches(self.num_rows, self.batch_size)
        start, stop, _ = batches.of_rank(step, self._rank, self._world_size)
        return slice(start, stop)

    def epoch(self, epoch: int) -> Iterator["Batch"]:
        """Yields the batches, the same in every epoch."""
        for step in range(len(self)):
            own = self.positions(step)
            index = torch.arange(own.start, own.stop, device=self.device)
            size = min(self.batch_size, self.num_rows - step * self.batch_size)
            yield self._block.take(index).batch(self.schema, size)
