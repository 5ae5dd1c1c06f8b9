"""Publishing under faults: a reader ends with the publisher's model and never skips a missing version."""

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cowrec.trainer.publishing.blob import MAGIC, Blob, Change, DamagedBlob, TableChange, decode, encode, merged
from cowrec.trainer.publishing.publisher import PublicationConfig, Publisher
from cowrec.trainer.publishing.target import Target, open_target
from cowrec.trainer.publishing.version_reader import VersionReader
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
            for feature, each in zip(deleted_features, table.deleted.tolist(), strict=True):
                self.rows.pop((name, feature, each), None)
            for feature, each, row in zip(features, table.ids.tolist(), table.rows.tolist(), strict=True):
                self.rows[name, feature, each] = row

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

    def close(self) -> None:
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def reading(url: str) -> Iterator[ReaderThread]:
    reader = ReaderThread(url)
    try:
        yield reader
    finally:
        reader.close()


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)


def publish(publisher: Publisher, model: Model, *, with_dense: bool = False, wait: bool = True) -> None:
    change = model.train(with_dense=with_dense)
    publisher.publish(change, model.everything() if publisher.wants_full else None)
    if wait:
        assert publisher.finish(30)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cowrec.trainer.publishing.version_reader._POLL_SECONDS", 0.01)
    monkeypatch.setattr("cowrec.trainer.publishing.publisher._PAUSE", 0.05)


@pytest.fixture(params=["directory", "redis", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "directory":
        yield str(tmp_path / "published")
    elif request.param == "s3":
        with s3_clients():
            yield f"s3://bucket/{tmp_path.name}"
    else:
        with redis_server(tmp_path / "redis") as server:
            yield f"{server.url}?name=test"


def publisher(url: str, **config: int) -> Publisher:
    return Publisher(open_target(url, publishing=True), PublicationConfig(**config))


def blob_of(change: Change) -> Blob:
    return Blob(7, 6, "delta", "some", 1.5, change)


def test_a_blob_is_decoded_exactly_or_rejected() -> None:
    """Every missing or altered byte is detected: the test tries all lengths and alters every byte once."""
    change = Model(3).train(with_dense=True)
    whole = encode(blob_of(change))
    found = decode(whole)
    one, other = Model(), Model()
    one.apply(change)
    other.apply(found.change)
    assert one.same_as(other)
    assert one.step == other.step == 1
    assert found.change.sample_time == 10
    assert (found.version, found.previous, found.kind, found.lineage, found.created) == (7, 6, "delta", "some", 1.5)
    for length in range(len(whole)):
        with pytest.raises(DamagedBlob):
            decode(whole[:length])
    for index in range(len(whole)):
        with pytest.raises(DamagedBlob):
            decode(whole[:index] + bytes([whole[index] ^ 64]) + whole[index + 1 :])
    with pytest.raises(DamagedBlob):
        decode(whole + b"\0")
    assert not decode(encode(blob_of(Change(0, None, {})))).change.tables


def test_a_blob_of_another_format_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cowrec.trainer.publishing.blob.FORMAT", 1)
    blob = encode(blob_of(Change(0, None, {})))
    monkeypatch.undo()
    assert blob.startswith(MAGIC)
    with pytest.raises(ValueError, match="has format 1, but this cowrec reads 2"):
        decode(blob)


@pytest.mark.parametrize("seed", range(20))
def test_merged_changes_have_the_effect_of_successive_ones(seed: int) -> None:
    model = Model(seed)
    model.train()
    start = model.copy()
    one_by_one, at_once = start.copy(), start.copy()
    changes = [model.train(with_dense=number % 3 == 1) for number in range(4)]
    joined = changes[0]
    for change in changes[1:]:
        joined = merged(joined, change)
    for change in changes:
        one_by_one.apply(change)
    at_once.apply(joined)
    assert at_once.same_as(one_by_one)
    assert at_once.same_as(model)
    for table in joined.tables.values():
        pairs = list(zip(table.ids if table.feature is None else table.feature, table.ids, strict=True))
        assert len(set(pairs)) == len(pairs)


def test_a_reader_gets_the_publishers_model_whenever_it_starts(url: str) -> None:
    """Versions are consecutive over three sessions of the publisher, each of which restarts from an older model."""
    model = Model()
    with reading(url) as early:
        sessions = []
        for _ in range(3):
            undone = model.copy()
            with publisher(url, compact_after=4) as out:
                assert out.wants_full
                for step in range(11):
                    publish(out, model, with_dense=step % 5 == 0)
                    eventually(lambda out=out: early.versions.version == out.counters()["version"])
                sessions.append(out.counters())
            assert early.model.same_as(model)
            model = undone
        assert [each["version"] for each in sessions] == [11, 22, 33]
        assert not any(each["failures"] or each["pending_rows"] for each in sessions)
        assert [blob.version for blob in early.seen] == list(range(1, 34))
        assert [blob.version for blob in early.seen if blob.kind == "full"] == [1, 12, 23]
        with reading(url) as late:
            eventually(lambda: late.versions.version == 33)
            assert late.model.same_as(early.model)
            assert late.model.step == early.model.step
            assert late.seen[0].kind == "full"
            assert len(late.seen) < 6
        assert early.versions.gaps == early.versions.damaged == early.versions.unreachable == 0
    # Versions before the second-to-last full one are removed.
    full = [version for version, kind in open_target(url).blobs() if kind == "full"]
    assert len(full) == 2
    assert min(version for version, _ in open_target(url).blobs()) == full[0]


def test_one_directory_has_one_publisher(tmp_path: Path) -> None:
    with publisher(str(tmp_path)), pytest.raises(ValueError, match="another process is at work"):
        publisher(str(tmp_path))
    with pytest.raises(ValueError, match="is not supported"):
        open_target("kafka://host/topic")


def test_a_failing_directory_loses_no_change(tmp_path: Path) -> None:
    """A file replaces the directory for a while; pending changes are published in one version once it is back."""
    folder, aside, model = tmp_path / "published", tmp_path / "aside", Model()
    with publisher(str(folder)) as out, reading(str(folder)) as reader:
        publish(out, model)
        publish(out, model)
        eventually(lambda: reader.versions.version == 2)
        folder.rename(aside)
        folder.touch()
        for _ in range(5):
            publish(out, model, with_dense=True, wait=False)
            eventually(lambda: out.counters()["failures"])
        assert not out.finish(0)
        assert out.counters()["pending_rows"] > 0
        assert out.counters()["error"]
        eventually(lambda: reader.versions.unreachable)
        folder.unlink()
        aside.rename(folder)
        eventually(lambda: reader.versions.version == 3)
        assert reader.model.same_as(model)
        assert out.finish(10)
        assert out.counters()["error"] is None
        assert [blob.kind for blob in reader.seen] == ["full", "delta", "delta"]


def test_a_frozen_redis_never_blocks_the_trainer(tmp_path: Path) -> None:
    """Redis does not answer while 20 versions are queued; later their changes are published, and none is lost."""
    model = Model()
    with redis_server(tmp_path) as server, publisher(server.url) as out, reading(server.url) as reader:
        publish(out, model)
        server.send(signal.SIGSTOP)
        for _ in range(20):
            publish(out, model, with_dense=True, wait=False)
        eventually(lambda: out.counters()["waits"] > 0)
        assert out.counters()["version"] == 1
        server.send(signal.SIGCONT)
        eventually(lambda: reader.model.same_as(model))
        assert out.finish(20)
        assert 1 < out.counters()["version"] <= 21


@pytest.mark.parametrize("appendonly", [True, False])
def test_redis_killed_and_restarted(tmp_path: Path, appendonly: bool) -> None:
    """Publishes a delta next if Redis kept its log. Without the log all versions are lost: the next one is a full one
    with an unused number, also from a publisher that has restarted since and counts from 1.
    """
    model = Model()
    with redis_server(tmp_path, appendonly=appendonly) as server, reading(server.url) as reader:
        with publisher(server.url) as out:
            for _ in range(5):
                publish(out, model)
            eventually(lambda: reader.versions.version == 5)
            server.send(signal.SIGKILL)
            publish(out, model, wait=False)
            eventually(lambda: out.counters()["failures"])
            server.start()
            if not appendonly:
                eventually(lambda: out.wants_full)
                publish(out, model, wait=False)
            eventually(lambda: reader.versions.version == 6)
            assert reader.seen[-1].kind == ("delta" if appendonly else "full")
            assert reader.model.same_as(model)
        server.send(signal.SIGKILL)
        server.start()
        with publisher(server.url) as out:
            publish(out, model)
            version = out.counters()["version"]
            assert version == (7 if appendonly else 1)
            eventually(lambda: reader.versions.version == version)
            assert reader.model.same_as(model)
            publish(out, model)
            eventually(lambda: reader.versions.version == version + 1)
            assert reader.model.same_as(model)


def damage(kind: str, target: Target, folder: Path) -> None:
    """Damages versions 3 and 4 of a directory."""
    third, fourth = folder / "delta-000000000003.cow", folder / "delta-000000000004.cow"
    content = third.read_bytes()
    match kind:
        case "truncated":
            third.write_bytes(content[:-7])
        case "altered":
            third.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "lost":
            third.unlink()
        case "swapped":
            third.write_bytes(fourth.read_bytes())
            fourth.write_bytes(content)
        case "of another lineage":
            blob = decode(content)
            third.write_bytes(encode(Blob(3, 2, "delta", "other", blob.created, blob.change)))


@pytest.mark.parametrize("kind", ["truncated", "altered", "lost", "swapped", "of another lineage"])
def test_a_reader_waits_at_a_gap_and_continues_with_the_next_full_version(tmp_path: Path, kind: str) -> None:
    model, states = Model(), dict[int, Model]()
    with publisher(str(tmp_path), compact_after=6) as out:
        for version in range(1, 7):
            publish(out, model)
            states[version] = model.copy()
        damage(kind, open_target(str(tmp_path)), tmp_path)
        with reading(str(tmp_path)) as reader:
            eventually(lambda: reader.versions.gaps)
            assert reader.versions.version == 2
            eventually(lambda: reader.versions.waits_for_full)
            assert reader.versions.damaged == (kind in ("truncated", "altered", "swapped"))
            while open_target(str(tmp_path)).blobs()[-1][1] != "full":
                publish(out, model)
                states[out.counters()["version"]] = model.copy()
            newest = out.counters()["version"]
            eventually(lambda: reader.versions.version == newest)
            assert reader.model.same_as(states[newest])
            assert [blob.version for blob in reader.seen] == [1, 2, newest]
            publish(out, model)
            eventually(lambda: reader.versions.version == newest + 1)
            assert reader.model.same_as(model)
        with reading(str(tmp_path)) as late:
            eventually(lambda: late.versions.version == newest + 1)
            assert late.model.same_as(model)


def test_a_truncated_full_version_is_replaced_by_the_one_before(tmp_path: Path) -> None:
    model = Model()
    with publisher(str(tmp_path), compact_after=3) as out:
        for _ in range(9):
            publish(out, model)
    full = sorted(tmp_path.glob("full-*.cow"))
    assert len(full) == 2
    full[-1].write_bytes(full[-1].read_bytes()[:-1])
    with reading(str(tmp_path)) as reader:
        eventually(lambda: reader.versions.version == 9)
        assert reader.model.same_as(model)
        assert reader.versions.damaged == 1
