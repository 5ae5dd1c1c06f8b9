"""Engines that process partitions of raw files: threads of this process, or a Dask cluster.

Both run the same functions on the same partitions in the same order, so the data set does not depend on the engine.
"""

import pickle
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from cowrec.errors import UserError

from ..parallel import in_order, ordered_map
from ..raw.inputs import Block, Partition, RawFile, Report, Source, Survey
from ..raw.reading import blocks

if TYPE_CHECKING:
    from distributed import Client


Shared = TypeVar("Shared")
Result = TypeVar("Result")
Work: TypeAlias = Callable[[Shared, int, list[Block]], Result]
Results: TypeAlias = Generator[Result, None, None]


class LocalEngine:
    """Reads in the calling thread and processes partitions with one thread per core."""

    def survey(self, work: Survey, sources: Sequence[Source], report: Report) -> Sequence[RawFile]:
        """Returns `work(source, report)` of each file, in order."""
        return [work(source, report) for source in sources]

    def map(self, work: Work[Shared, Result], shared: Shared, partitions: Sequence[Partition]) -> Results[Result]:
        """Yields `work(shared, number, blocks)` of each partition, in order; few results exist at a time."""
        return ordered_map(lambda item: work(shared, item[0].number, item[1]), load_blocks(partitions))


def load_blocks(partitions: Sequence[Partition]) -> Results[tuple[Partition, list[Block]]]:
    """Yields partitions with their blocks. Raises ValueError if a file is missing or changed since the survey."""
    with closing(blocks(segment for partition in partitions for segment in partition.segments)) as found:
        for partition in partitions:
            yield partition, list(islice(found, len(partition.segments)))


SHARED_FILE = "shared.pickle"


@contextmanager
def dask_engine(scheduler: str, folder: Path) -> Generator["DaskEngine", None, None]:
    """Connects to the cluster of a scheduler, such as tcp://host:8786; all workers must be able to access `folder`.

    Raises ValueError if Dask is not installed or there is no worker, and OSError if the scheduler does not answer.
    """
    try:
        from distributed import Client
    except ImportError:
        raise UserError("a scheduler requires Dask, which is not installed: pip install 'cowrec[dask]'") from None
    with Client(scheduler, set_as_default=False) as client:
        if not client.nthreads():
            raise UserError(f"the scheduler {scheduler} has no workers; start some: dask worker {scheduler}")
        yield DaskEngine(client, folder)


class DaskEngine:
    """Submits a task for each file or partition; those of one compressed file, which is read in order, are one task."""

    def __init__(self, client: "Client", folder: Path) -> None:
        self._client, self._folder = client, folder

    def survey(self, work: Survey, sources: Sequence[Source], report: Report) -> Sequence[RawFile]:
        files = []
        for file in self._ordered(partial(_survey, work), None, sources):
            files.append(file)
            report(sum(segment.file_bytes for segment in file.segments))
        return files

    def map(self, work: Work[Shared, Result], shared: Shared, partitions: Sequence[Partition]) -> Results[Result]:
        for results in self._ordered(partial(_process, work), shared, _tasks(partitions)):
            yield from results

    def _ordered(self, task: Callable[[Any, Any], Result], shared: object, items: Iterable[Any]) -> Results[Result]:
        """Yields `task(shared, item)` of each item in order, with at most two pending tasks per thread."""
        path = self._folder / SHARED_FILE
        with path.open("wb") as file:
            pickle.dump(shared, file, protocol=5)
        # As a task its result is shared between workers, survives the loss of one, and is freed at the end.
        shared_future = self._client.submit(_load, path, pure=False)
        most = 2 * sum(self._client.nthreads().values())
        try:
            yield from in_order(lambda item: self._client.submit(task, shared_future, item, pure=False), items, most)
        finally:
            shared_future.cancel()
            path.unlink()


def _load(path: Path) -> object:
    with path.open("rb") as file:
        return pickle.load(file)


def _survey(work: Survey, _: None, source: Source) -> RawFile:
    return work(source, lambda _: None)


def _process(work: Work[Shared, Result], shared: Shared, partitions: Sequence[Partition]) -> list[Result]:
    return [work(shared, partition.number, blocks) for partition, blocks in load_blocks(partitions)]


def _tasks(partitions: Sequence[Partition]) -> list[list[Partition]]:
    tasks: list[list[Partition]] = []
    for partition in partitions:
        first = partition.segments[0]
        if first.direct or not tasks or tasks[-1][0].segments[0].source != first.source:
            tasks.append([])
        tasks[-1].append(partition)
    return tasks


Engine: TypeAlias = LocalEngine | DaskEngine
"""Runs module-level functions on files and partitions."""
