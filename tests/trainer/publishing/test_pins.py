"""Pins: all readers of a target go back to a version, by one step, and stay there until the pin is released."""

import multiprocessing
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cowrec.trainer.publishing.pin import Pin, decode_pin
from cowrec.trainer.publishing.publisher import Publisher
from cowrec.trainer.publishing.target import open_target
from cowrec.trainer.publishing.version_list import Versions
from publishing.published_model import Model, eventually, publish, publisher, reading, target_url
from servers.redis_server import redis_server


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cowrec.trainer.publishing.version_reader._POLL_SECONDS", 0.01)
    monkeypatch.setattr("cowrec.trainer.publishing.version_reader._REREAD_SECONDS", 0.3)
    monkeypatch.setattr("cowrec.trainer.publishing.publisher._PAUSE", 0.05)


@pytest.fixture(params=["directory", "redis", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with target_url(request.param, tmp_path) as url:
        yield url


def pin(url: str, version: int) -> Pin:
    with closing(Versions(url)) as versions:
        return versions.set_pin(version)


def release(url: str) -> None:
    with closing(Versions(url)) as versions:
        versions.release_pin()


def publish_many(out: Publisher, model: Model, states: dict[int, Model], count: int) -> None:
    for _ in range(count):
        publish(out, model, with_dense=len(states) % 3 == 0)
        states[out.counters()["version"]] = model.copy()


def pinnable(url: str) -> list[int]:
    with closing(Versions(url)) as versions:
        return sorted({each.version for each in versions.listed() if each.pinnable})


def test_readers_go_back_by_one_step_and_stay(url: str) -> None:
    """While the trainer publishes, removes old versions, and restarts; a reader that ignores pins goes on.

    A reader that starts meanwhile reads the pinned version alone. After the release, each goes to the newest version,
    by one step, and what only the pin needed is removed.
    """
    model, states = Model(), dict[int, Model]()
    with reading(url) as one, reading(url) as other, reading(url, obeys_pin=False) as canary:
        with publisher(url, compact_after=4) as out:
            publish_many(out, model, states, 11)
            eventually(lambda: one.version == other.version == 11)
            assert pinnable(url) == [6, 7, 8, 9, 10, 11]
            found = pin(url, 8)
            assert (found.version, found.first) == (8, 6)
            eventually(lambda: one.version == other.version == 8)
            for reader in (one, other):
                assert [blob.version for blob in reader.seen][-2:] == [11, 8]
                assert reader.model.same_as(states[8])
                assert reader.model.step == states[8].step
            publish_many(out, model, states, 13)
        with publisher(url, compact_after=4) as out:
            publish_many(out, model, states, 8)
            eventually(lambda: canary.version == 32)
            assert canary.model.same_as(model)
            with reading(url) as late:
                eventually(lambda: late.versions.caught_up)
                assert [blob.version for blob in late.seen] == [8]
                assert late.model.same_as(states[8])
            assert one.version == other.version == 8
            assert one.versions.caught_up
            release(url)
            eventually(lambda: one.version == other.version == 32)
            for reader in (one, other):
                assert [blob.version for blob in reader.seen][-2:] == [8, 32]
                assert reader.model.same_as(model)
            assert open_target(url).blobs()[0] == (6, "full")
            publish_many(out, model, states, 4)
            assert open_target(url).blobs()[0] > (8, "full")
            eventually(lambda: one.version == 36)
            assert [blob.version for blob in one.seen][-4:] == [33, 34, 35, 36]
            assert one.versions.gaps == 0


def test_a_version_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    """The message has those that can be; damage and another lineage between a version and its full one count."""
    url, model = str(tmp_path / "published"), Model()
    with pytest.raises(ValueError, match="has no version; check the path"):
        pin(url, 1)
    with publisher(url, compact_after=1000) as out:
        publish_many(out, model, {}, 6)
    with publisher(url, compact_after=1000) as out:
        publish_many(out, model, {}, 3)
    damaged = tmp_path / "published" / "delta-000000000004.cow"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1])
    message = "version {} of .*published cannot be reached: .*; choose one of 1 to 3, 7 to 9$"
    for version in (4, 5, 10, 0, -1):
        with pytest.raises(ValueError, match=message.format(version)):
            pin(url, version)
    assert open_target(url).pin() is None
    with closing(Versions(url)) as versions:
        listed = {(each.version, each.kind): each for each in versions.listed()}
    assert "truncated or altered" in listed[4, "delta"].problem
    assert listed[1, "full"].lineage == listed[6, "delta"].lineage != listed[7, "full"].lineage
    assert (listed[7, "full"].step, listed[7, "full"].sample_time) == (7, 70)
    # A pinned version that is damaged later: who has it keeps it, nobody reads another one.
    assert pin(url, 3).lineage == listed[1, "full"].lineage
    with reading(url) as reader:
        eventually(lambda: reader.version == 3)
        full = tmp_path / "published" / "full-000000000001.cow"
        intact = full.read_bytes()
        full.write_bytes(intact[:-1])
        with reading(url) as late:
            eventually(lambda: late.versions.pin_problem)
            assert "version 3, to which it is pinned, is damaged or missing" in late.versions.pin_problem
            assert not late.seen
            content = full.read_bytes()
            full.write_bytes(intact)
            eventually(lambda: late.version == 3)
            assert not late.versions.pin_problem
            full.write_bytes(content)
            assert pin(url, 8).first == 7
            eventually(lambda: reader.version == late.version == 8)
            assert not late.versions.pin_problem
        record = tmp_path / "published" / "pin"
        record.write_bytes(record.read_bytes()[:-2])
        eventually(lambda: "the pin is damaged" in reader.versions.pin_problem)
        assert [blob.version for blob in reader.seen] == [3, 8]
        release(url)
        eventually(lambda: reader.version == 9)


def test_a_target_that_loses_its_pin_releases_nobody(tmp_path: Path) -> None:
    """Redis, without its log, is killed: its readers stay, whatever is published then, until the pin is released."""
    model, states = Model(), dict[int, Model]()
    with redis_server(tmp_path) as server, reading(server.url) as reader, publisher(server.url) as out:
        publish_many(out, model, states, 5)
        eventually(lambda: reader.version == 5)
        pin(server.url, 4)
        eventually(lambda: reader.version == 4)
        server.send(signal.SIGKILL)
        with pytest.raises(OSError, match="Redis: ConnectionError"):
            pin(server.url, 3)
        eventually(lambda: reader.versions.unreachable_because)
        publish(out, model, wait=False)
        eventually(lambda: out.counters()["failures"])
        server.start()
        eventually(lambda: out.wants_full)
        publish(out, model, wait=False)
        eventually(lambda: out.counters()["version"] == 6)
        eventually(lambda: not reader.versions.unreachable_because)
        with reading(server.url) as other:
            eventually(lambda: other.version == 6)
        assert reader.seen[-1].version == 4
        assert reader.model.same_as(states[4])
        release(server.url)
        eventually(lambda: reader.version == 6)
        assert reader.model.same_as(model)


@pytest.mark.parametrize("kind", ["directory", "redis"])
def test_what_a_pin_needs_is_never_removed(kind: str, tmp_path: Path) -> None:
    """The oldest version is pinned again and again while a publisher removes it: one of the two fails."""
    with target_url(kind, tmp_path) as url, publisher(url, compact_after=1) as out, closing(Versions(url)) as versions:
        model, stopped, wrong, pinned = Model(), threading.Event(), list[object](), 0
        publish(out, model)

        def publish_all() -> None:
            while not stopped.is_set():
                publish(out, model)

        thread = threading.Thread(target=publish_all)
        thread.start()
        target = open_target(url)
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            oldest = target.blobs()[0][0]
            try:
                found = versions.set_pin(oldest)
            except ValueError:
                continue
            pinned += 1
            count = out.counters()["version"]
            eventually(lambda count=count: out.counters()["version"] > count + 2)
            if (found.first, "full") not in target.blobs():
                wrong.append(found)
            versions.release_pin()
            eventually(lambda oldest=oldest: target.blobs()[0][0] > oldest)
        stopped.set()
        thread.join()
        assert pinned
        assert not wrong


def pin_by_turns(url: str) -> None:
    with closing(Versions(url)) as versions:
        while True:
            for version in (1, 2, 3):
                versions.set_pin(version)


@pytest.mark.parametrize("kind", ["directory", "redis"])
def test_a_killed_command_leaves_one_pin_or_the_other(kind: str, tmp_path: Path) -> None:
    """Killed while it pins, it leaves no lock, and a pin that is obeyed."""
    with target_url(kind, tmp_path) as url:
        with publisher(url) as out:
            publish_many(out, Model(), {}, 3)
        context = multiprocessing.get_context("fork")
        pin(url, 1)
        for number in range(10):
            process = context.Process(target=pin_by_turns, args=(url,))
            process.start()
            time.sleep(0.03 * number)
            process.kill()
            process.join()
            record = open_target(url).pin()
            assert record is not None
            assert decode_pin(record).version in (1, 2, 3)
        with reading(url) as reader:
            assert pin(url, 2).version == 2
            eventually(lambda: reader.version == 2)


def test_more_full_versions_are_kept_if_asked(tmp_path: Path) -> None:
    with publisher(str(tmp_path), compact_after=2, keep_full=4) as out:
        publish_many(out, Model(), {}, 15)
    assert [version for version, kind in open_target(str(tmp_path)).blobs() if kind == "full"] == [4, 7, 10, 13]
    assert pinnable(str(tmp_path)) == list(range(4, 16))
    with pytest.raises(ValueError, match=re.escape("publication.keep_full must be at least 2, got 1")):
        publisher(str(tmp_path / "other"), keep_full=1)
