"""The times of samples: counted to divide a data set by time, and compared with the order of the samples."""

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from cowrec.data_pipeline.encoding.dense import ValueCounts
from cowrec.data_pipeline.raw.layouts import Layout
from cowrec.data_pipeline.raw.parsing import parse
from cowrec.data_pipeline.raw_files.segments import Block, Partition, Report

from .engine import Engine
from .splitting import MOST_TIMES, TRAIN

logger = logging.getLogger(__name__)


def count_times(engine: Engine, partitions: Sequence[Partition], layout: Layout, report: Report) -> ValueCounts:
    """Counts the times of all samples that are not bad, in a pass over the files."""
    times = ValueCounts(MOST_TIMES)
    with closing(engine.map(_times, layout, partitions)) as results:
        for partition, counted in zip(partitions, results, strict=True):
            times.merge(counted)
            report(partition.file_bytes)
    return times


def _times(layout: Layout, number: int, blocks: Sequence[Block]) -> ValueCounts:
    times = ValueCounts(MOST_TIMES)
    for block in blocks:
        parsed = parse(block, layout)
        assert parsed.time is not None
        times.add(parsed.time)
    return times


@dataclass
class TimeOrder:
    """The newest training sample and the times of the others, to notice that a split by order leaks the future.

    Attributes:
        newest: Unix seconds of the newest training sample.
        others: times of the samples for validation and testing.
    """

    newest: int | None = None
    others: ValueCounts = field(default_factory=lambda: ValueCounts(MOST_TIMES))

    def add(self, time: np.ndarray | None, splits: np.ndarray) -> None:
        """Adds samples: int64 [R] Unix seconds, and the index of the split of each."""
        if time is not None:
            train = splits == TRAIN
            self._extend(int(time[train].max()) if train.any() else None)
            self.others.add(time[splits > TRAIN])

    def merge(self, other: "TimeOrder") -> None:
        """Adds those of another part of the samples."""
        self._extend(other.newest)
        self.others.merge(other.others)

    def report(self) -> None:
        """Warns if samples for validation or testing are older than the newest training sample."""
        if self.newest is None or not self.others.total:
            return
        older = self.others.counts[self.others.values < self.newest].sum() / self.others.total
        if older > 0:
            logger.warning(
                "the samples are not sorted by time: %.3g %% of those for validation and testing are older than the"
                ' newest training sample, so the model trains on their future; use split = "time"',
                100 * older,
            )

    def _extend(self, newest: int | None) -> None:
        if newest is not None:
            self.newest = newest if self.newest is None else max(self.newest, newest)
