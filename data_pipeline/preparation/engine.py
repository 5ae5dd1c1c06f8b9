"""Where the partitions of raw files are worked on: here by threads, or by a Dask cluster (dask_engine.py).

Both run the same functions on the same partitions and give the results in the same order, so that what comes out does
not depend on the engine.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from itertools import islice
from typing import Protocol, TypeVar

from cowrec.data_pipeline.parallel import ordered_map
from cowrec.data_pipeline.raw.partitions import Block, Partition, RawFile, Report, blocks

Shared = TypeVar("Shared")
Result = TypeVar("Result")


class Engine(Protocol):
    """Runs functions of modules on files and partitions."""

    def survey(self, work: Callable[[str, Report], RawFile], paths: Sequence[str], report: Report) -> Sequence[RawFile]:
        """`work(path, report)` of each file, in order."""
        ...

    def map(
        self, work: Callable[[Shared, int, list[Block]], Result], shared: Shared, partitions: Sequence[Partition]
    ) -> Generator[Result, None, None]:
        """Yields `work(shared, number, blocks)` of each partition, in order; few results exist at a time."""
        ...


class LocalEngine:
    """This thread reads, one thread per core works."""

    def survey(self, work: Callable[[str, Report], RawFile], paths: Sequence[str], report: Report) -> Sequence[RawFile]:
        return [work(path, report) for path in paths]

    def map(
        self, work: Callable[[Shared, int, list[Block]], Result], shared: Shared, partitions: Sequence[Partition]
    ) -> Generator[Result, None, None]:
        return ordered_map(lambda item: work(shared, item[0].number, item[1]), loaded(partitions))


def loaded(partitions: Iterable[Partition]) -> Generator[tuple[Partition, list[Block]], None, None]:
    """Partitions with their text. Raises ValueError where a file is missing or changed since the survey."""
    partitions = list(partitions)
    with closing(blocks(segment for each in partitions for segment in each.segments)) as text:
        for each in partitions:
            yield each, list(islice(text, len(each.segments)))
