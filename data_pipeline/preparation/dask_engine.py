"""Partitions worked on by a Dask cluster, all of whose machines see the raw files and the output folder."""

import pickle
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cowrec.data_pipeline.raw.partitions import Block, Partition, RawFile, Report

from .engine import Result, Shared, loaded

if TYPE_CHECKING:
    from distributed import Client, Future

PLAN_FILE = "plan.pickle"


@contextmanager
def dask_engine(scheduler: str, folder: Path) -> Generator["DaskEngine", None, None]:
    """An engine on the cluster whose scheduler has this address, such as tcp://host:8786.

    What all tasks need lies in `folder` for that time, which all workers must see.

    Raises:
        ValueError: Dask is not installed, or no worker answers. OSError: no scheduler answers.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ValueError("a scheduler needs Dask, which is not installed: pip install 'cowrec[dask]'") from None
    with Client(scheduler, set_as_default=False) as client:
        if not client.nthreads():
            raise ValueError(f"the scheduler {scheduler} has no workers; start some: dask worker {scheduler}")
        yield DaskEngine(client, folder)


class DaskEngine:
    """Hands out a file or a partition as a task. Of a compressed file, which cannot be entered in the middle, one task
    does all partitions that begin in it.
    """

    def __init__(self, client: "Client", folder: Path) -> None:
        self._client, self._folder = client, folder

    def survey(self, work: Callable[[str, Report], RawFile], paths: Sequence[str], report: Report) -> Sequence[RawFile]:
        files = []
        for file in self._ordered(partial(_surveyed, work), None, paths):
            files.append(file)
            report(sum(segment.file_bytes for segment in file.segments))
        return files

    def map(
        self, work: Callable[[Shared, int, list[Block]], Result], shared: Shared, partitions: Sequence[Partition]
    ) -> Generator[Result, None, None]:
        for results in self._ordered(partial(_worked, work), shared, _runs(partitions)):
            yield from results

    def _ordered(self, task: Callable, shared: object, items: Iterable) -> Generator:
        """`task(shared, item)` of each item in order, two a thread under way at a time."""
        path = self._folder / PLAN_FILE
        with path.open("wb") as file:
            pickle.dump(shared, file, protocol=5)
        # A task, so that workers get it from each other, one that dies loses nothing, and the end of it frees it.
        loaded_once = self._client.submit(_load, path, pure=False)
        most = 2 * sum(self._client.nthreads().values())
        pending: deque[Future] = deque()
        try:
            for item in items:
                pending.append(self._client.submit(task, loaded_once, item, pure=False))
                if len(pending) > most:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            self._client.cancel([*pending, loaded_once])
            path.unlink()


def _load(path: Path) -> object:
    with path.open("rb") as file:
        return pickle.load(file)


def _surveyed(work: Callable[[str, Report], RawFile], _: None, path: str) -> RawFile:
    return work(path, lambda _: None)


def _worked(
    work: Callable[[Shared, int, list[Block]], Result], shared: Shared, run: Sequence[Partition]
) -> list[Result]:
    return [work(shared, each.number, blocks) for each, blocks in loaded(run)]


def _runs(partitions: Sequence[Partition]) -> list[list[Partition]]:
    """Partitions that one task is to do: each by itself, those that begin in the same compressed file together."""
    runs: list[list[Partition]] = []
    for each in partitions:
        first = each.segments[0]
        if first.plain or not runs or runs[-1][0].segments[0].path != first.path:
            runs.append([])
        runs[-1].append(each)
    return runs
