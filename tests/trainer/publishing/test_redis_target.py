"""Redis as a target: one publisher for each name, also after kills and hangs; old versions go before new ones fail."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from cowrec.trainer.publishing.blob import Change
from cowrec.trainer.publishing.follower import VersionFollower
from cowrec.trainer.publishing.publisher import Publisher
from cowrec.trainer.publishing.target import open_target
from publishing.published_model import eventually
from servers.redis_server import redis_server

WEIGHTS = 1_000_000


def publisher(url: str) -> Publisher:
    """Each version is followed by a full one."""
    return Publisher(open_target(url, publishing=True), compact_after=1)


def publish(out: Publisher, step: int, weights: int = 1) -> None:
    full = Change(step, step, {}, {"bias": np.full(weights, step, np.float32)})
    out.publish(Change(step, step, {}, {}), full if out.wants_full else None)


def test_one_name_has_one_publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is renewed without publications too, given back at the end, and ends with a killed publisher. One that
    hung beyond its lease cannot write among the versions of the next."""
    monkeypatch.setattr("cowrec.trainer.publishing.target.LEASE", 4.0)
    monkeypatch.setattr("cowrec.trainer.publishing.publisher.LEASE", 4.0)
    with redis_server(tmp_path) as server:
        with publisher(server.url) as first:
            publish(first, 1)
            with pytest.raises(ValueError, match=rf"process {os.getpid()} of .* publishes under the name 'cowrec'"):
                publisher(server.url)  # waits longer than the lease
        hung = open_target(server.url, publishing=True)
        with publisher(server.url) as second:
            publish(second, 2)
            assert second.finish(30)
            versions = hung.blobs()
            with pytest.raises(OSError, match="publishes under the name 'cowrec'; stop it, or use another name"):
                hung.write(9, "delta", b"written too late")
            assert open_target(server.url).blobs() == versions
            with publisher(f"{server.url}?name=other") as other:
                publish(other, 1)


def test_a_full_redis_loses_its_old_versions_first(tmp_path: Path) -> None:
    """Four million bytes a version, and room for three and a half; the one that is written takes twice its size."""
    with redis_server(tmp_path) as server, publisher(server.url) as out:
        used = server.client().info("memory")["used_memory"]
        server.client().config_set("maxmemory", used + 14_000_000)
        for step in range(1, 5):
            publish(out, step, WEIGHTS)
            assert out.finish(30)
        assert out.counters()["failures"] == 0
        server.client().config_set("maxmemory", used)
        publish(out, 5, WEIGHTS)
        deadline = time.monotonic() + 30
        while "Redis is full" not in (out.counters()["error"] or ""):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        server.client().config_set("maxmemory", 0)
        assert out.finish(30)


def test_a_redis_killed_while_its_newest_version_is_applied(tmp_path: Path) -> None:
    """The version counts as the newest, so that it is served, although Redis never answered again."""
    with redis_server(tmp_path) as server, publisher(server.url) as out:
        publish(out, 1)
        assert out.finish(30)
        follower = VersionFollower(server.url, lambda blob: server.send(signal.SIGKILL), lambda: None)
        try:
            follower.start()
            eventually(lambda: "cannot be reached" in follower.problem)
            assert follower.caught_up
        finally:
            follower.close()
        server.start()
