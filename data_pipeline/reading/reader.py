"""The reader: a prepared data set, one split of it, as an endless choice of epochs of batches.

The global batch k of an epoch has the same rows in the same order whatever the number of ranks and whether the rows are
streamed or resident. Sizes: G rows of a global batch, W ranks.
"""

import os
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from cowrec.data_pipeline.dataset.batch import Batch
from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.data_pipeline.dataset.schema import Schema
from cowrec.data_pipeline.dataset.shards import load_shards

from .memory import check_fits
from .prefetch import prefetched
from .shuffle import Window, epoch_windows, rank_slice

WINDOW_ROWS = 1 << 20
"""Rows shuffled together by default: about 170 MB for Criteo's 39 fields."""

Batches: TypeAlias = Generator[Batch, None, None]
Windows: TypeAlias = Generator[tuple[Window, SampleBlock, torch.Tensor], None, None]


class Reader:
    """Batches of one split, for one rank.

    Args:
        data_dir: a folder made by `prepare` or `synthesize`.
        split: "train" or "test".
        batch_size: G, the global batch; each rank gets its contiguous part of it.
        rank, world_size: rank r takes rows [r * G // W, (r + 1) * G // W) of each global batch.
        shuffle: a new order every epoch, across shards and within windows; otherwise the stored order.
        seed: of the shuffle.
        drop_last: leave out the last global batch where it is short. At evaluation, keep it.
        device: where batches are yielded.
        resident: keep the whole split on `device` and gather batches there.
        window_rows: rows in memory, and shuffled together, while streaming; up to three windows exist at a time.

    Raises:
        ValueError: on a bad argument, a folder that is no data set, or `resident` where it does not fit.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        split: str,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        device: str | torch.device = "cpu",
        resident: bool = False,
        window_rows: int = WINDOW_ROWS,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, world_size), got rank {rank} of {world_size}")
        if window_rows < 1:
            raise ValueError(f"window_rows must be at least 1, got {window_rows}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self.schema = Schema.load(data_dir)
        self.split = split
        self.batch_size = batch_size
        self.device = torch.device(device)
        self._size = self.schema.split(split)
        self._data_dir = Path(data_dir)
        self._rank, self._world_size = rank, world_size
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._window_rows = window_rows
        self._everything = self._load_everything() if resident else None

    @property
    def num_rows(self) -> int:
        """Rows of the split over all ranks; with `drop_last`, an epoch serves fewer."""
        return self._size.rows

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""
        whole, rest = divmod(self.num_rows, self.batch_size)
        return whole + bool(rest and not self._drop_last)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from `start_step` on, without reading what lies before.

        A thread stays ahead of the consumer; it ends with the iterator, also where that is closed or dropped early.
        Where the rows are resident on a GPU the thread prepares only their order: the gather itself must be launched
        on the consumer's stream.

        Raises:
            ValueError: here for a bad argument; while iterating for a missing or damaged shard.
        """
        if epoch < 0:
            raise ValueError(f"epoch must be at least 0, got {epoch}")
        if not 0 <= start_step <= len(self):
            raise ValueError(f"start_step must be in [0, {len(self)}], got {start_step}")
        on_gpu = self.device.type == "cuda"
        if self._everything is not None:
            if on_gpu:
                return self._batches(prefetched(lambda: self._resident(epoch, start_step)), start_step)
            return prefetched(lambda: self._batches(self._resident(epoch, start_step), start_step))
        batches = prefetched(lambda: self._batches(self._streamed(epoch, start_step), start_step, pin=on_gpu))
        return self._moved(batches) if on_gpu else batches

    def _moved(self, batches: Batches) -> Batches:
        """Copies page-locked batches to the GPU on a stream of their own, each while the one before is computed."""
        stream = torch.cuda.Stream(self.device)

        def copy(batch: Batch) -> tuple[Batch, torch.cuda.Event]:
            with torch.cuda.stream(stream):
                return batch.to(self.device, non_blocking=True), stream.record_event()

        def given(batch: Batch, copied: torch.cuda.Event) -> Batch:
            consumer = torch.cuda.current_stream(self.device)
            consumer.wait_event(copied)
            batch.record_stream(consumer)
            return batch

        with closing(batches):
            ahead: tuple[Batch, torch.cuda.Event] | None = None
            for batch in batches:
                following = copy(batch)
                if ahead:
                    yield given(*ahead)
                ahead = following
            if ahead:
                yield given(*ahead)

    def _batches(self, windows: Windows, step: int, pin: bool = False) -> Batches:
        """Cuts windows into this rank's slices; a slice that crosses a border is put together from its parts."""
        parts: list[SampleBlock] = []
        with closing(windows):
            for window, rows, order in windows:
                order = order.to(rows.label.device, non_blocking=True)
                while step < len(self):
                    start, stop, size = self._slice(step)
                    index = order[max(start - window.start, 0) : max(stop - window.start, 0)]
                    if len(index) or not parts:
                        parts.append(rows.take(index))
                    if stop > window.stop:
                        break
                    batch = SampleBlock.concat(parts).batch(self.schema, size)
                    yield batch.pin_memory() if pin else batch
                    parts = []
                    step += 1

    def _slice(self, step: int) -> tuple[int, int, int]:
        return rank_slice(step, self.batch_size, self.num_rows, self._rank, self._world_size)

    def _windows(self, epoch: int, start_step: int) -> list[Window]:
        windows = epoch_windows(
            self._size.shards, self._window_rows, shuffle=self._shuffle, seed=self._seed, epoch=epoch
        )
        first, end = start_step * self.batch_size, len(self) * self.batch_size
        return [each for each in windows if each.stop > first and each.start < end]

    def _streamed(self, epoch: int, start_step: int) -> Windows:
        def load() -> Windows:
            for window in self._windows(epoch, start_step):
                rows = load_shards(self._data_dir, self.schema, self.split, window.shards)
                yield window, rows, torch.from_numpy(window.order())

        return prefetched(load, capacity=1)

    def _resident(self, epoch: int, start_step: int) -> Windows:
        assert self._everything is not None
        sizes = np.asarray(self._size.shards)
        starts = np.cumsum(sizes) - sizes
        for window in self._windows(epoch, start_step):
            laid_out = np.concatenate([np.arange(starts[each], starts[each] + sizes[each]) for each in window.shards])
            order = torch.from_numpy(laid_out[window.order()])
            # Copied by the consumer, on whose stream it is used and may be freed.
            yield window, self._everything, order.pin_memory() if self.device.type == "cuda" else order

    def _load_everything(self) -> SampleBlock:
        """The whole split on the device, copied there window by window."""
        check_fits(self.schema, self.split, self.device)
        windows = epoch_windows(self._size.shards, self._window_rows, shuffle=False, seed=0, epoch=0)
        pieces = ((each.start, load_shards(self._data_dir, self.schema, self.split, each.shards)) for each in windows)
        everything = SampleBlock.assemble(self.schema, self.num_rows, pieces, self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return everything
