"""An old version that is published again becomes the newest one, for readers and for trainers that publish later."""

import multiprocessing
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cowrec.trainer.publishing.publisher import Publisher
from cowrec.trainer.publishing.target import open_target
from cowrec.trainer.publishing.versions import list_versions, reachable, republish
from publishing.published_model import Model, eventually, publish, publisher, reading, target_url


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cowrec.trainer.publishing.follower._POLL_SECONDS", 0.01)
    monkeypatch.setattr("cowrec.trainer.publishing.publisher._PAUSE", 0.05)


@pytest.fixture(params=["directory", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with target_url(request.param, tmp_path) as url:
        yield url


def publish_many(out: Publisher, model: Model, states: dict[int, Model], count: int) -> None:
    for _ in range(count):
        publish(out, model, with_dense=len(states) % 3 == 0)
        states[out.counters()["version"]] = model.copy()


def test_readers_go_back_and_a_later_trainer_goes_on(url: str) -> None:
    """Readers take one step to the old version, those that start later read it first; from a delta and from a full one.

    A trainer that is started afterwards publishes a full version next, whatever it has resumed from.
    """
    model, states = Model(), dict[int, Model]()
    with reading(url) as reader:
        with publisher(url, compact_after=4) as out:
            publish_many(out, model, states, 11)
        eventually(lambda: reader.version == 11)
        assert reachable(list_versions(url)) == [6, 7, 8, 9, 10, 11]
        for number, old in ((12, 8), (13, 6), (14, 12)):
            assert republish(url, old) == number
            states[number] = states[old]
            eventually(lambda number=number: reader.version == number)
            assert reader.model.same_as(states[old])
            assert reader.model.step == states[old].step
        with reading(url) as late:
            eventually(lambda: late.version == 14)
            assert [(blob.version, blob.kind) for blob in late.seen] == [(14, "full")]
            assert late.model.same_as(states[8])
            with publisher(url, compact_after=4) as out:
                publish_many(out, model, states, 3)
            for each in (reader, late):
                eventually(lambda each=each: each.version == 17)
                assert [(blob.version, blob.kind) for blob in each.seen[-4:]] == [
                    (14, "full"), (15, "full"), (16, "delta"), (17, "delta"),
                ]  # fmt: skip
                assert each.model.same_as(model)
        assert [blob.version for blob in reader.seen[-6:]] == list(range(12, 18))


@pytest.mark.parametrize(
    ("kind", "problem"), [("directory", "another process is at work"), ("redis", "publishes under the name 'test'")]
)
def test_while_a_trainer_publishes_it_is_refused(
    kind: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cowrec.trainer.publishing.target.LEASE", 1.0)
    monkeypatch.setattr("cowrec.trainer.publishing.publisher.LEASE", 1.0)
    with target_url(kind, tmp_path) as url, publisher(url) as out:
        publish_many(out, Model(), {}, 3)
        before = open_target(url).blobs()
        with pytest.raises(ValueError, match=rf"{problem}.*; stop the trainer first, as its next version would"):
            republish(url, 2)
        assert open_target(url).blobs() == before


def test_a_trainer_that_nothing_locks_out_publishes_everything_next(tmp_path: Path) -> None:
    """An object store has no lock: the trainer's next version is a full one, after the one that was published again."""
    model, states = Model(), dict[int, Model]()
    with target_url("s3", tmp_path) as url, publisher(url) as out, reading(url) as reader:
        publish_many(out, model, states, 3)
        assert republish(url, 2) == 4
        eventually(lambda: reader.version == 4)
        assert reader.model.same_as(states[2])
        publish(out, model, wait=False)
        eventually(lambda: out.wants_full)
        publish(out, model)
        eventually(lambda: reader.version == 5)
        assert reader.seen[-1].kind == "full"
        assert reader.model.same_as(model)


def test_a_version_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    """The message has those that can be; damage and another lineage between a version and its full one count."""
    url, model = str(tmp_path / "published"), Model()
    with pytest.raises(ValueError, match="has no version; check the path"):
        republish(url, 1)
    assert not Path(url).exists()
    for versions in (6, 3):
        with publisher(url, compact_after=1000) as out:
            publish_many(out, model, {}, versions)
    damaged = tmp_path / "published" / "delta-000000000004.cow"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    message = "version {} of .*published cannot be published again: .*; choose one of 1 to 3, 7 to 9$"
    for version in (4, 5, 10, 0, -1):
        with pytest.raises(ValueError, match=message.format(version)):
            republish(url, version)
    listed = {(each.version, each.kind): each for each in list_versions(url)}
    assert "truncated or altered" in listed[4, "delta"].problem
    blobs = {each.version: each.blob for each in listed.values() if each.blob}
    assert blobs[1].lineage == blobs[6].lineage != blobs[7].lineage
    assert (blobs[7].change.step, blobs[7].change.sample_time) == (7, 70)
    for each in Path(url).glob("full-*"):
        each.unlink()
    with pytest.raises(ValueError, match=r"no version can be: a published version of .* is truncated"):
        republish(url, 6)


def republish_by_turns(url: str) -> None:
    while True:
        for version in (1, 2, 3):
            republish(url, version)


def test_a_killed_command_leaves_whole_versions(tmp_path: Path) -> None:
    """And no lock: whatever it has written is whole, and the next command publishes after it."""
    url, model, states = str(tmp_path), Model(), dict[int, Model]()
    with publisher(url) as out:
        publish_many(out, model, states, 3)
    context = multiprocessing.get_context("fork")
    for number in range(5):
        process = context.Process(target=republish_by_turns, args=(url,))
        process.start()
        time.sleep(0.03 * number)
        process.kill()
        process.join()
        assert not [each.problem for each in list_versions(url) if each.problem]
    newest = republish(url, 2)
    with reading(url) as reader:
        eventually(lambda: reader.version == newest)
        assert reader.model.same_as(states[2])
    assert not list(tmp_path.glob("*.partial"))


def test_more_full_versions_are_kept_if_asked(tmp_path: Path) -> None:
    with publisher(str(tmp_path), compact_after=2, keep_full=4) as out:
        publish_many(out, Model(), {}, 15)
    assert [version for version, kind in open_target(str(tmp_path)).blobs() if kind == "full"] == [4, 7, 10, 13]
    assert reachable(list_versions(str(tmp_path))) == list(range(4, 16))
    with pytest.raises(ValueError, match=re.escape("keep_full must be at least 2, got 1")):
        publisher(str(tmp_path / "other"), keep_full=1)
