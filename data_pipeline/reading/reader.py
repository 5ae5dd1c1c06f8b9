"""The reader of a prepared data set: yields the batches of an epoch of one split.

Global batch k of an epoch has the same samples in the same order for any number of ranks, streamed or resident. Readers
for CUDA draw another order than those for CPU, one that the GPU can compute.

An epoch is streamed window by window; each rank loads the shards of a window and takes its own slices of the global
batches. G samples of a global batch, W ranks.
"""

import copy
import os
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from cowrec.errors import UserError

from ..dataset.sample_block import SampleBlock
from ..dataset.schema import WINDOW_ROWS, Schema
from ..dataset.shards import load_shards
from ..parallel import prefetched
from .order import GlobalBatches, Window, epoch_windows, parts_within, positions

if TYPE_CHECKING:
    from ..dataset.batch import Batch


class _Loaded(NamedTuple):
    """A window in memory, in which batches are slices of an order of the block's samples."""

    window: Window
    slices: list[slice]
    block: SampleBlock
    order: torch.Tensor


Batches: TypeAlias = Generator["Batch", None, None]
Windows: TypeAlias = Generator[_Loaded, None, None]


class Reader:
    """Batches of one split, for one rank.

    If the split is resident on a GPU, order and batches are made there, and no batch waits for the device; with list
    fields one batch of each window does, and with sequences every batch. Criteo (41 million samples, 39 columns) takes
    6.6 GB. The split needs `resident_bytes` of free memory when it is loaded, by the constructor or by `make_resident`
    after a trainer has built its model.

    Args:
        data_dir: a folder written by `prepare` or `synthesize`.
        rows: the samples of the split to read, a range of their stored order; by default all.
        batch_size: G, the global batch size.
        passes: parts of each global batch, of about the same size, that are yielded one after the other as batches with
            their `share`; at most as many as it has samples. Steps count global batches.
        rank, world_size: rank r takes samples [r * G // W, (r + 1) * G // W) of each global batch.
        shuffle: use a new order every epoch, across shards and within windows; otherwise the stored order.
        resident: store the samples on `device` and gather batches there.
        window_rows: samples in memory, and shuffled together, while streaming; up to three windows exist at a time.
        true_logits: also read the logits of the true click probabilities, if the data set has them.

    Raises ValueError: an invalid argument, a folder that is no data set, or a `resident` split that does not fit.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        split: str,
        *,
        batch_size: int,
        passes: int = 1,
        rows: range | None = None,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        device: str | torch.device = "cpu",
        resident: bool = False,
        window_rows: int = WINDOW_ROWS,
        true_logits: bool = False,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("passes", passes), ("window_rows", window_rows)):
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        if not 0 <= rank < world_size:
            raise UserError(f"rank must be in [0, world_size), got rank {rank} of {world_size}")
        self._stored = Schema.load(data_dir)
        self.schema = self._stored.of_batches(true_logits=true_logits)
        self.split, self.batch_size = split, batch_size
        self.device = torch.device(device)
        size = self.schema.split(split)
        rows = range(size.rows) if rows is None else rows
        if rows.step != 1 or not 0 <= rows.start <= rows.stop <= size.rows:
            raise UserError(f"rows must be a range within the {size.rows:,} samples of the {split} split, got {rows}")
        self._parts = parts_within(size.shards, rows.start, rows.stop)
        self._sizes = [part.samples for part in self._parts]
        self._data_dir = Path(data_dir)
        self._rank, self._world_size = rank, world_size
        self._shuffle, self._seed, self._window_rows, self._passes = shuffle, seed, window_rows, passes
        self._global_batches = GlobalBatches(self.num_rows, batch_size, drop_last=drop_last)
        self._yielded = self._global_batches.in_passes(passes)
        self._keyed_order = self.device.type == "cuda"
        self._resident_block: SampleBlock | None = None
        if resident:
            self.make_resident()

    @property
    def num_rows(self) -> int:
        """Samples of an epoch over all ranks; with `drop_last`, an epoch may yield fewer."""
        return sum(self._sizes)

    @property
    def resident_bytes(self) -> int:
        """Bytes that `make_resident` stores; for a part of a split, by its share of the samples."""
        loaded, rows = sum(part.shard_samples for part in self._parts), self.schema.split(self.split).rows
        return ceil(resident_bytes(self.schema, self.split) * loaded / max(1, rows))

    def make_resident(self) -> None:
        """Stores the samples on the device, from where all later epochs take their batches.

        Raises ValueError if the split does not fit, or a shard is missing or damaged.
        """
        if self._resident_block is not None:
            return
        needed, available = self.resident_bytes, available_bytes(self.device)
        if available is not None and needed > available:
            raise UserError(
                f"resident: the {self.split} split needs {needed:,} bytes on {self.device}, {available:,} are "
                'available; train with data.resident = "no", or "auto", which streams it, or use more memory'
            )
        self._resident_block = self._load(range(len(self._parts)), self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def with_values_of(self, index: torch.Tensor, fields: Collection[str]) -> "Reader":
        """Returns a reader of the samples of a resident split, each with values of another sample in some fields.

        `index` has the numbers of the other samples in the stored order, int64 [samples] on the device. `fields` are
        names of dense and sparse fields.
        """
        assert self._resident_block is not None
        assert len(index) == len(self._resident_block)
        other = copy.copy(self)
        other._resident_block = self._resident_block.with_values_of(index, self.schema, fields)
        return other

    def positions(self, step: int) -> slice:
        """Returns the positions in an epoch, or in the split without shuffling, of this rank's samples of a step."""
        start, stop, _ = self._global_batches.of_rank(step, self._rank, self._world_size)
        return slice(start, stop)

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""
        return len(self._global_batches)

    def passes(self, step: int) -> int:
        """Returns the number of batches that a global batch is yielded in, the same on every rank."""
        return self._global_batches.passes(step, self._passes)

    def samples_before(self, step: int) -> int:
        """Returns the number of samples, over all ranks, of the first `step` global batches of an epoch."""
        return self._global_batches.start(step)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator["Batch"]:
        """Yields the batches of an epoch from `start_step` on, without reading earlier windows.

        A thread prepares batches ahead of the consumer and ends with the iterator. If the split is resident on a GPU
        there is no thread: the consumer launches all work on its own stream, ahead of the device.

        Raises ValueError if, while iterating, a shard is missing or damaged, or another data set replaced this one.
        """
        if not 0 <= start_step <= len(self):
            raise UserError(f"start_step must be in [0, {len(self)}], got {start_step}")
        on_gpu, loaded = self.device.type == "cuda", partial(self._loaded, epoch, start_step)
        batches = partial(self._batches, step=self._first(start_step))
        if self._resident_block is None:
            streamed = prefetched(lambda: batches(prefetched(loaded, capacity=1), pin=on_gpu))
            return _copied_to_gpu(streamed, self.device) if on_gpu else streamed
        return batches(loaded()) if on_gpu else prefetched(lambda: batches(loaded()))

    def _first(self, start_step: int) -> int:
        """Returns the number of batches that an epoch yields before a step."""
        return start_step if self._passes == 1 else sum(map(self.passes, range(start_step)))

    def _batches(self, windows: Windows, step: int, pin: bool = False) -> Batches:
        """Makes batches of this rank's slices; concatenates the parts of a slice that spans several windows."""
        parts: list[SampleBlock] = []
        with closing(windows):
            for window, slices, block, order in windows:
                for part in block.take_each(order, slices):
                    if len(part) or not parts:
                        parts.append(part)
                    _, stop, size = self._yielded.of_rank(step, self._rank, self._world_size)
                    if stop > window.stop:
                        break
                    batch = SampleBlock.concat(parts).batch(self.schema, size)
                    batch.share = self._yielded.share(step)
                    yield batch.pin_memory() if pin else batch
                    parts = []
                    step += 1

    def _loaded(self, epoch: int, start_step: int) -> Windows:
        """Yields the windows of an epoch from a step on; loads their shards unless the split is resident."""
        starts = self._starts(range(len(self._parts)))
        first, end = self.samples_before(start_step), self.samples_before(len(self))
        windows = epoch_windows(self._sizes, self._window_rows, shuffle=self._shuffle, seed=self._seed, epoch=epoch)
        windows = [window for window in windows if window.stop > first and window.start < end]
        step, of_rank = self._first(start_step), (self._rank, self._world_size)
        for window, slices in self._yielded.turns(windows, step, *of_rank):
            if self._resident_block is None:
                block, own = self._load(window.shards), self._starts(window.shards)
            else:
                block, own = self._resident_block, [starts[part] for part in window.shards]
            yield _Loaded(window, slices, block, self._order(window, own, block.label.device))

    def _load(self, shards: Sequence[int], device: torch.device | str = "cpu") -> SampleBlock:
        numbers = tuple(self._parts[part].number for part in shards)
        try:
            return load_shards(self._data_dir, self.schema, self.split, numbers, device)
        finally:  # in place of an error about such a shard, too
            if Schema.load(self._data_dir) != self._stored:
                where = f"{self._data_dir} was replaced by another data set since this run began"
                raise UserError(f"{where}, whose ids mean something else; start a new run")

    def _starts(self, parts: Sequence[int]) -> list[int]:
        """Returns where the complete shards of parts start in a block of them, and where the last shard ends."""
        return [0, *accumulate(self._parts[part].shard_samples for part in parts)]

    def _order(self, window: Window, starts: Sequence[int], device: torch.device) -> torch.Tensor:
        """Returns the index for each position of the window in a block whose shards start at `starts`."""
        order = window.keyed_order(device) if self._keyed_order else torch.from_numpy(window.order())
        parts = [self._parts[part] for part in window.shards]
        return positions(parts, starts[: len(parts)], device)[order.to(device)]


def _copied_to_gpu(batches: Generator["Batch", None, None], device: torch.device) -> Generator["Batch", None, None]:
    """Copies page-locked batches on a separate stream, one ahead of the consumer."""
    stream = torch.cuda.Stream(device)

    def copy(batch: "Batch") -> tuple["Batch", torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return batch.to(device, non_blocking=True), stream.record_event()

    def hand_over(batch: "Batch", copied: torch.cuda.Event) -> "Batch":
        consumer = torch.cuda.current_stream(device)
        consumer.wait_event(copied)
        batch.record_stream(consumer)
        return batch

    with closing(batches):
        ahead: tuple[Batch, torch.cuda.Event] | None = None
        for batch in batches:
            following = copy(batch)
            if ahead:
                yield hand_over(*ahead)
            ahead = following
        if ahead:
            yield hand_over(*ahead)


def resident_bytes(schema: Schema, split: str = "train") -> int:
    """Returns the bytes that `Reader(resident=True)` stores for a split."""
    size = schema.split(split)
    id_bytes = 8 if schema.has_raw_ids else 4
    numbers = len(schema.labels) + schema.sample_weights + schema.true_logits + len(schema.dense)
    total = size.rows * (4 * numbers + 8 * schema.timed)
    for field in schema.sparse:
        if field.is_list:
            value_bytes = id_bytes + (4 if field.has_weights else 0)
            total += 8 * (size.rows + 1) + value_bytes * size.values.get(field.name, 0)
        else:
            total += id_bytes * size.rows
    return total


def available_bytes(device: torch.device) -> int | None:
    """Returns the free bytes of the GPU, or of the machine within the limits of its container; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return min([_sizes(Path("/proc/meminfo"))["MemAvailable:"] * 1024, *bytes_within_limits()])
    except (OSError, KeyError, ValueError):
        return None


def bytes_within_limits(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Returns the bytes that each memory limit of this process leaves, with those of reclaimable file pages.

    A container may see only its own group, as the root. Source: the kernel's documents of cgroups 1 and 2.
    """
    left = []
    for line in groups.read_text(encoding="utf-8").splitlines() if groups.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, usage, pages = _GROUP_FILES_1 if controllers else _GROUP_FILES_2
        folder = root.joinpath(*["memory"] * bool(controllers), path.lstrip("/"))
        for group in (folder, *folder.parents):
            with suppress(OSError, KeyError, ValueError):  # no such group, or no limit
                most, used = (int((group / name).read_text(encoding="ascii")) for name in (limit, usage))
                left.append(max(most - used + _sizes(group / "memory.stat")[pages], 0))
    return left


_GROUP_FILES_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_GROUP_FILES_2 = ("memory.max", "memory.current", "inactive_file")


def _sizes(file: Path) -> dict[str, int]:
    return {line.split()[0]: int(line.split()[1]) for line in file.read_text(encoding="ascii").splitlines()}
