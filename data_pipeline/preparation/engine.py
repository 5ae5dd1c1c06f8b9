"""Engines that process partitions of raw files: threads of this process, or a Dask cluster (dask_engine.py).

Both run the same functions on the same partitions and yield results in the same order, so the data set does not depend
on the engine.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from itertools import islice
from typing import Protocol, TypeVar

from cowrec.data_pipeline.parallel import ordered_map
from cowrec.data_pipeline.raw_files.reading import blocks
from cowrec.data_pipeline.raw_files.segments import Block, Partition, RawFile, Report, Source, Survey

Shared = TypeVar("Shared")
Result = TypeVar("Result")


class Engine(Protocol):
    """Runs module-level functions on files and partitions."""

    def survey(self, work: Survey, sources: Sequence[Source], report: Report) -> Sequence[RawFile]:
        """Returns `work(source, report)` of each file, in order."""
        ...

    def map(
        self, work: Callable[[Shared, int, list[Block]], Result], shared: Shared, partitions: Sequence[Partition]
    ) -> Generator[Result, None, None]:
        """Yields `work(shared, number, blocks)` of each partition, in order, with a bounded number of results."""
        ...


class LocalEngine:
    """Reads in the calling thread and processes partitions with one thread per core."""

    def survey(self, work: Survey, sources: Sequence[Source], report: Report) -> Sequence[RawFile]:
        return [work(source, report) for source in sources]

    def map(
        self, work: Callable[[Shared, int, list[Block]], Result], shared: Shared, partitions: Sequence[Partition]
    ) -> Generator[Result, None, None]:
        return ordered_map(lambda item: work(shared, item[0].number, item[1]), load_blocks(partitions))


def load_blocks(partitions: Iterable[Partition]) -> Generator[tuple[Partition, list[Block]], None, None]:
    """Yields partitions with their blocks. Raises ValueError if a file is missing or changed since the survey."""
    partitions = list(partitions)
    with closing(blocks(segment for each in partitions for segment in each.segments)) as found:
        for each in partitions:
            yield each, list(islice(found, len(each.segments)))
