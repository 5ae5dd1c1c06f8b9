"""A model in plain dictionaries, its publisher and its readers, for tests of publishing."""

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cowrec.trainer.publishing.blob import Blob, Change, TableChange
from cowrec.trainer.publishing.follower import VersionReader
from cowrec.trainer.publishing.publisher import Publisher
from cowrec.trainer.publishing.target import open_target
from servers.redis_server import redis_server
from servers.s3_server import s3_clients

WIDTH = 4
Key = tuple[str, int, int]
"""Table, feature, id."""
SHARED, PLAIN = "shared", "plain"


class Model:
    """A model in plain dictionaries that changes at random; the shared table has rows of two features."""

    def __init__(self, seed: int = 0) -> None:
        self.rows: dict[Key, list[float]] = {}
        self.dense = [0.0]
        self.step = 0
        self._rng = random.Random(seed)

    def copy(self) -> "Model":
        other = Model(self.step)
        other.rows, other.dense, other.step = dict(self.rows), list(self.dense), self.step
        return other

    def train(self, *, with_dense: bool = False) -> Change:
        """Writes some rows, including new ones, and deletes some."""
        self.step += 1
        ids = [(SHARED, f, i) for f in range(2) for i in (-7, 2, 5, 1 << 60)] + [(PLAIN, 0, i) for i in range(6)]
        written = self._rng.sample(ids, 4)
        for key in written:
            self.rows[key] = [self._rng.random() for _ in range(WIDTH)]
        deleted = [
            key for key in sorted(self.rows) if key[0] == SHARED and key not in written and self._rng.random() < 0.3
        ]
        for key in deleted:
            del self.rows[key]
        if with_dense:
            self.dense = [self._rng.random()]
        return self._change(written, deleted, with_dense)

    def everything(self) -> Change:
        return self._change(list(self.rows), [], True)

    def apply(self, change: Change, *, full: bool = False) -> None:
        """The oracle: one entry at a time."""
        if full:
            self.rows = {}
        self.step = change.step
        self.dense = list(change.dense.get("bias", self.dense))
        for name, table in change.tables.items():
            features = [0] * len(table.ids) if table.feature is None else table.feature.tolist()
            deleted_features = (
                [0] * len(table.deleted) if table.deleted_feature is None else table.deleted_feature.tolist()
            )
            for feature, value in zip(deleted_features, table.deleted.tolist(), strict=True):
                self.rows.pop((name, feature, value), None)
            for feature, value, row in zip(features, table.ids.tolist(), table.rows.tolist(), strict=True):
                self.rows[name, feature, value] = row

    def same_as(self, other: "Model") -> bool:
        near = {key: np.float32(row).tolist() for key, row in self.rows.items()}
        return near == {key: np.float32(row).tolist() for key, row in other.rows.items()} and np.allclose(
            self.dense, other.dense
        )

    def _change(self, written: list[Key], deleted: list[Key], with_dense: bool) -> Change:
        tables = {}
        for name in (SHARED, PLAIN):
            here, removed = ([key for key in keys if key[0] == name] for keys in (written, deleted))
            features = (
                (np.array([key[1] for key in here], np.int64), np.array([key[1] for key in removed], np.int64))
                if name == SHARED
                else (None, None)
            )
            tables[name] = TableChange(
                np.array([key[2] for key in here], np.int64),
                np.array([self.rows[key] for key in here], np.float32).reshape(-1, WIDTH),
                np.array([key[2] for key in removed], np.int64),
                *features,
            )
        return Change(self.step, self.step * 10, tables, {"bias": np.array(self.dense)} if with_dense else {})


class ReaderThread:
    """Applies the versions of a target to a model in a thread."""

    def __init__(self, url: str) -> None:
        self.model, self.seen = Model(), list[Blob]()
        self.versions = VersionReader(open_target(url))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for blob in self.versions.versions(self._stop):
            self.model.apply(blob.change, full=blob.kind == "full")
            self.seen.append(blob)

    @property
    def version(self) -> int:
        """The last version that the model has; 0 before the first."""
        return self.seen[-1].version if self.seen else 0

    def close(self) -> None:
        self._stop.set()
        self._thread.join(600)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def reading(url: str) -> Iterator[ReaderThread]:
    reader = ReaderThread(url)
    try:
        yield reader
    finally:
        reader.close()


def publish(publisher: Publisher, model: Model, *, with_dense: bool = False, wait: bool = True) -> None:
    change = model.train(with_dense=with_dense)
    publisher.publish(change, model.everything() if publisher.wants_full else None)
    if wait:
        assert publisher.finish(60)


def publisher(url: str, **config: int) -> contextlib.closing[Publisher]:
    return contextlib.closing(Publisher(open_target(url, publishing=True), "of some data", **config))


@contextlib.contextmanager
def target_url(kind: str, folder: Path) -> Iterator[str]:
    """The URL of an empty target: a "directory", "redis" or "s3"."""
    if kind == "directory":
        yield str(folder / "published")
    elif kind == "s3":
        with s3_clients():
            yield f"s3://bucket/{folder.name}"
    else:
        with redis_server(folder / "redis") as server:
            yield f"{server.url}?name=test"
