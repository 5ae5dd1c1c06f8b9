"""Versions as bytes, publishing under faults, going back: a reader ends with the model and skips no version."""

import contextlib
import dataclasses
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cowrec.trainer.config.sections import OnlineConfig
from cowrec.trainer.publishing.blob import (
    MAGIC,
    Blob,
    Change,
    DamagedBlob,
    OtherFormat,
    decode,
    encode,
    merged,
)
from cowrec.trainer.publishing.follower import VersionFollower
from cowrec.trainer.publishing.publisher import Publisher
from cowrec.trainer.publishing.target import open_target
from cowrec.trainer.publishing.versions import list_versions, republish
from publishing.published_model import Model, publish, publisher, reading, target_url
from refusal import refused
from run_comparison import wait_for
from servers.redis_server import redis_server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cowrec.trainer.publishing.follower._POLL_SECONDS", 0.01)
    monkeypatch.setattr("cowrec.trainer.publishing.publisher._PAUSE", 0.05)


@pytest.fixture(params=["directory", "redis", pytest.param("s3", marks=pytest.mark.thorough)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with target_url(request.param, tmp_path) as url:
        yield url


def publish_many(out: Publisher, model: Model, states: dict[int, Model], count: int) -> None:
    for _ in range(count):
        publish(out, model, with_dense=len(states) % 3 == 0)
        states[out.counters()["version"]] = model.copy()


def blob_of(change: Change) -> Blob:
    return Blob(7, 6, "delta", "some", 1.5, change, "of some data")


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
    assert dataclasses.replace(found, change=change) == blob_of(change)
    damaged = {len(whole): [whole + b"\0"]}
    for index in range(len(whole)):
        damaged[index] = [whole[:index], whole[:index] + bytes([whole[index] ^ 64]) + whole[index + 1 :]]
    for index, blobs in damaged.items():
        for blob in blobs:
            with pytest.raises(OtherFormat if len(b"cowrec-") <= index < len(MAGIC) else DamagedBlob):
                decode(blob)
    assert not decode(encode(blob_of(Change(0, None, {})))).change.tables


@pytest.mark.parametrize("seed", range(4))
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
                    wait_for(lambda out=out: early.version == out.counters()["version"])
                sessions.append(out.counters())
            assert early.model.same_as(model)
            model = undone
        assert [session["version"] for session in sessions] == [11, 22, 33]
        assert not any(session["failures"] or session["pending_rows"] for session in sessions)
        assert [blob.version for blob in early.seen] == list(range(1, 34))
        assert [blob.version for blob in early.seen if blob.kind == "full"] == [1, 12, 23]
        with reading(url) as late:
            wait_for(lambda: late.version == 33)
            assert late.model.same_as(early.model)
            assert (late.model.step, late.seen[0].kind) == (early.model.step, "full")
            assert len(late.seen) < 6
    # Versions before the second-to-last full one are removed.
    full = [version for version, kind in open_target(url).blobs() if kind == "full"]
    assert len(full) == 2
    assert min(version for version, _ in open_target(url).blobs()) == full[0]


def test_a_failing_directory_loses_no_change(tmp_path: Path) -> None:
    """A file replaces the directory for a while; pending changes are published in one version once it is back."""
    folder, aside, model = tmp_path / "published", tmp_path / "aside", Model()
    with publisher(str(folder)) as out, reading(str(folder)) as reader:
        publish(out, model)
        publish(out, model)
        wait_for(lambda: reader.version == 2)
        folder.rename(aside)
        folder.touch()
        for _ in range(5):
            publish(out, model, with_dense=True, wait=False)
            wait_for(lambda: out.counters()["failures"])
        assert not out.finish(0)
        assert out.counters()["pending_rows"] > 0
        assert out.counters()["error"]
        assert out.is_behind, "more changes would only be merged into those that wait"
        wait_for(lambda: reader.versions.unreachable_because)
        folder.unlink()
        aside.rename(folder)
        wait_for(lambda: reader.version == 3)
        assert reader.model.same_as(model)
        assert out.finish(10)
        assert out.counters()["error"] is None
        assert not out.is_behind
        assert [blob.kind for blob in reader.seen] == ["full", "delta", "delta"]


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float64])
def test_buffers_of_any_type_are_published(dtype: Any) -> None:
    """Of networks of one's own, such as masks."""
    dense = {"mask": np.eye(3).astype(dtype)}
    found = decode(encode(blob_of(Change(1, None, {}, dense)))).change.dense["mask"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, dense["mask"])


@pytest.mark.thorough
def test_a_frozen_redis_never_blocks_the_trainer(tmp_path: Path) -> None:
    """Redis does not answer while 20 versions are queued; later their changes are published, and none is lost."""
    model = Model()
    with redis_server(tmp_path) as server, publisher(server.url) as out, reading(server.url) as reader:
        publish(out, model)
        server.send(signal.SIGSTOP)
        for _ in range(20):
            publish(out, model, with_dense=True, wait=False)
        assert out.counters()["version"] == 1
        server.send(signal.SIGCONT)
        wait_for(lambda: reader.model.same_as(model))
        assert out.finish(20)
        assert 1 < out.counters()["version"] <= 21


@pytest.mark.thorough
@pytest.mark.parametrize("appendonly", [True, False])
def test_redis_killed_and_restarted(tmp_path: Path, appendonly: bool) -> None:
    """Publishes a delta next if Redis kept its log. Without the log all versions are lost: the next one is a full one
    with an unused number, also from a publisher that has restarted since and counts from 1.
    """
    model = Model()
    with redis_server(tmp_path, appendonly=appendonly) as server, reading(server.url) as reader:
        with publisher(server.url) as out:
            publish_many(out, model, {}, 5)
            wait_for(lambda: reader.version == 5)
            server.send(signal.SIGKILL)
            publish(out, model, wait=False)
            wait_for(lambda: out.counters()["failures"])
            server.start()
            if not appendonly:
                wait_for(lambda: out.wants_full)
                publish(out, model, wait=False)
            wait_for(lambda: reader.version == 6)
            assert reader.seen[-1].kind == ("delta" if appendonly else "full")
            assert reader.model.same_as(model)
        server.send(signal.SIGKILL)
        server.start()
        with publisher(server.url) as out:
            publish(out, model)
            version = out.counters()["version"]
            assert version == (7 if appendonly else 1)
            wait_for(lambda: reader.version == version)
            assert reader.model.same_as(model)
            publish(out, model)
            wait_for(lambda: reader.version == version + 1)
            assert reader.model.same_as(model)


def damage(kind: str, folder: Path) -> None:
    """Damages versions 3 and 4 of a directory."""
    third, fourth = folder / "delta-000000000003.cow", folder / "delta-000000000004.cow"
    content, later = third.read_bytes(), fourth.read_bytes()
    other = encode(dataclasses.replace(decode(content), lineage="other"))
    changed = {"truncated": content[:-7], "altered": content[:-1] + bytes([content[-1] ^ 1])}
    third.write_bytes((changed | {"swapped": later, "of another lineage": other}).get(kind, b""))
    if kind == "swapped":
        fourth.write_bytes(content)
    if kind == "lost":
        third.unlink()


@pytest.mark.parametrize("kind", ["truncated", "altered", "lost", "swapped", "of another lineage"])
def test_a_reader_waits_at_a_gap_and_continues_with_the_next_full_version(tmp_path: Path, kind: str) -> None:
    model, states = Model(), dict[int, Model]()
    with publisher(str(tmp_path), compact_after=6) as out:
        publish_many(out, model, states, 6)
        damage(kind, tmp_path)
        with reading(str(tmp_path)) as reader:
            wait_for(lambda: reader.versions.waits_for_full)
            assert reader.version == 2
            assert bool(reader.versions.damaged_because) == (kind in ("truncated", "altered", "swapped"))
            while open_target(str(tmp_path)).blobs()[-1][1] != "full":
                publish_many(out, model, states, 1)
            newest = out.counters()["version"]
            wait_for(lambda: reader.version == newest)
            assert reader.model.same_as(states[newest])
            assert [blob.version for blob in reader.seen] == [1, 2, newest]
            publish(out, model)
            wait_for(lambda: reader.version == newest + 1)
            assert reader.model.same_as(model)
        with reading(str(tmp_path)) as late:
            wait_for(lambda: late.version == newest + 1)
            assert late.model.same_as(model)


def test_after_a_refused_version_the_next_full_one_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a follower that has the version before, and of one that starts later."""
    monkeypatch.setattr("cowrec.trainer.publishing.follower._PAUSE", 0.001)
    model, states, applied = Model(), dict[int, Model](), list[list[int]]()

    def follow() -> VersionFollower:
        own = list[int]()
        applied.append(own)

        def apply(blob: Blob) -> None:
            if (blob.version, blob.kind) == (3, "delta"):
                raise ValueError("it does not fit")
            own.append(blob.version)

        follower = VersionFollower(str(tmp_path), apply, lambda: None)
        follower.start()
        return follower

    with publisher(str(tmp_path), compact_after=5) as out, contextlib.closing(follow()) as early:
        publish_many(out, model, states, 4)
        wait_for(lambda: "does not fit" in early.problem)
        with contextlib.closing(follow()) as late:
            wait_for(lambda: "does not fit" in late.problem and late.caught_up)
            assert applied == [[1, 2], [1, 2]]
            publish_many(out, model, states, 9)
            full = max(version for version, kind in open_target(str(tmp_path)).blobs() if kind == "full")
            assert full > 3
            for follower in (early, late):
                wait_for(lambda follower=follower: not follower.problem)
            wait_for(lambda: all(own[-1] == 13 for own in applied))
    for own in applied:
        assert own[:2] == [1, 2]
        assert own[2:] == list(range(own[2], 14))
        assert own[2] > 3


@pytest.mark.parametrize("problem", ["truncated", "of a newer format"])
def test_a_full_version_that_cannot_be_read_is_replaced_by_the_one_before(tmp_path: Path, problem: str) -> None:
    model = Model()
    with publisher(str(tmp_path), compact_after=3) as out:
        publish_many(out, model, {}, 9)
    full = sorted(tmp_path.glob("full-*.cow"))
    assert len(full) == 2
    content = full[-1].read_bytes()
    full[-1].write_bytes(content[:-1] if problem == "truncated" else MAGIC[:-1] + b"9" + content[len(MAGIC) :])
    with reading(str(tmp_path)) as reader:
        wait_for(lambda: reader.version == 9)
        assert reader.model.same_as(model)


def test_names_in_redis_are_apart_and_versions_are_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_server(tmp_path) as server:
        target, other = (open_target(f"{server.url}{query}", publishing=True) for query in ("", "?name=other"))
        target.write(1, "full", b"one")
        other.write(1, "full", b"another")
        with pytest.raises(FileExistsError, match="Redis has cowrec:full:1 already"):
            target.write(1, "full", b"second")
        assert (target.blobs(), target.read(1, "full"), other.read(1, "full")) == ([(1, "full")], b"one", b"another")
        target.remove(1, "full")
        with pytest.raises(FileNotFoundError, match="Redis has no cowrec:full:1"):
            target.read(1, "full")
        assert not target.blobs()


def full_versions(url: str) -> list[int]:
    return [version for version, kind in open_target(url).blobs() if kind == "full"]


@pytest.mark.parametrize("url", ["directory", "redis"], indirect=True)
def test_readers_go_back_and_a_later_trainer_goes_on(url: str) -> None:
    """Readers take one step to the old version, and those that start later read it first.

    A trainer that is started afterwards publishes a full version next, whatever it has resumed from.
    """
    model, states = Model(), dict[int, Model]()
    with reading(url) as reader:
        with publisher(url, compact_after=4) as out:
            publish_many(out, model, states, 11)
        wait_for(lambda: reader.version == 11)
        assert full_versions(url) == [6, 11]
        for number, old in ((12, 6), (13, 11), (14, 12)):
            assert republish(url, old) == number
            states[number] = states[old]
            wait_for(lambda number=number: reader.version == number)
            assert reader.model.same_as(states[old])
            assert reader.model.step == states[old].step
        with reading(url) as late:
            wait_for(lambda: late.version == 14)
            assert [(blob.version, blob.kind) for blob in late.seen] == [(14, "full")]
            assert late.model.same_as(states[6])
            with publisher(url, compact_after=4) as out:
                publish_many(out, model, states, 3)
            for follower in (reader, late):
                wait_for(lambda follower=follower: follower.version == 17)
                assert [blob.version for blob in follower.seen[-4:]] == [14, 15, 16, 17]
                assert [blob.kind for blob in follower.seen[-4:]] == ["full", "full", "delta", "delta"]
                assert follower.model.same_as(model)
        assert [blob.version for blob in reader.seen[-6:]] == list(range(12, 18))


def test_while_a_trainer_publishes_no_other_does(tmp_path: Path) -> None:
    problem, url = "another process is at work", str(tmp_path / "published")
    refused("is not supported", open_target, "kafka://host/topic")
    with publisher(url) as out:
        publish_many(out, Model(), {}, 3)
        before = open_target(url).blobs()
        refused(problem, publisher, url)
        refused(problem, republish, url, 1)
        assert open_target(url).blobs() == before


def test_a_trainer_that_nothing_locks_out_publishes_everything_next(tmp_path: Path) -> None:
    """An object store has no lock: the trainer's next version is a full one, after the one that was published again."""
    model, states = Model(), dict[int, Model]()
    with target_url("s3", tmp_path) as url, publisher(url) as out, reading(url) as reader:
        publish_many(out, model, states, 3)
        assert republish(url, 1) == 4
        wait_for(lambda: reader.version == 4)
        assert reader.model.same_as(states[1])
        publish(out, model, wait=False)
        wait_for(lambda: out.wants_full)
        publish(out, model)
        wait_for(lambda: reader.version == 5)
        assert reader.seen[-1].kind == "full"
        assert reader.model.same_as(model)


def test_only_intact_full_versions_are_published_again(tmp_path: Path) -> None:
    """The message has those that can be."""
    url, model = str(tmp_path / "published"), Model()
    refused("has no version; check the path", republish, url, 1)
    assert not Path(url).exists()
    for versions in (6, 3):
        with publisher(url, compact_after=1000) as out:
            publish_many(out, model, {}, versions)
    for version in (4, 10, 0, -1):
        refused(
            f"version {version} of .*published is not an intact full version; choose one of 1, 7$",
            republish,
            url,
            version,
        )
    listed = {(found.version, found.kind): found for found in list_versions(url)}
    blobs = {found.version: found.blob for found in listed.values() if found.blob}
    assert blobs[1].lineage == blobs[6].lineage != blobs[7].lineage
    assert (blobs[7].change.step, blobs[7].change.sample_time) == (7, 70)
    for path in Path(url).glob("full-*"):
        path.write_bytes(path.read_bytes()[:-1])
    refused(r"there is none: a published version of .* is truncated or altered", republish, url, 1)


def test_more_full_versions_are_kept_if_asked(tmp_path: Path) -> None:
    with publisher(str(tmp_path), compact_after=2, keep_full=4) as out:
        publish_many(out, Model(), {}, 15)
    assert full_versions(str(tmp_path)) == [4, 7, 10, 13]
    refused(re.escape("online.keep_full_versions must be at least 2, got 1"), OnlineConfig, keep_full_versions=1)
