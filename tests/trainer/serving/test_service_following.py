"""`cowrec serve --follow` applies published versions while it answers, and keeps answering if the target fails."""

import hashlib
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from commands.command_line import Cowrec
from cowrec.trainer.export.export import export_run
from cowrec.trainer.publishing.blob import MAGIC, Blob, Change, TableChange, encode
from cowrec.trainer.publishing.publisher import Publisher
from cowrec.trainer.publishing.target import open_target
from cowrec.trainer.serving.service import Limits
from run_comparison import wait_for
from servers.redis_server import redis_server
from serving import DEADLINE, Client, predictions, raw_samples, served_folder, serving, serving_here
from trained_runs import run

HEADER_BYTES = len(MAGIC) + 32


@pytest.fixture(scope="module")
def folder() -> Path:
    """A run and its export, and a run of one more epoch and its export."""
    folder = served_folder()
    run(folder, folder / "longer")
    export_run(folder / "longer", folder / "longer-export")
    return folder


def everything(export: Path, step: int, sample_time: int | None = None) -> Change:
    """A complete model, as a trainer publishes it."""
    rows = {file.stem: load_file(file)["rows"].numpy() for file in sorted((export / "tables").iterdir())}
    tables = {name: TableChange(np.arange(len(each)), each) for name, each in rows.items()}
    dense = {name: each.numpy() for name, each in load_file(export / "dense.safetensors").items()}
    return Change(step, sample_time, tables, dense)


def published(publisher: Publisher, change: Change) -> int:
    """Publishes a complete model as the next version, again if the target failed meanwhile; returns its number."""
    publisher.publish(change, change)
    deadline = time.monotonic() + DEADLINE
    while not publisher.finish(2):
        assert time.monotonic() < deadline, publisher.counters()
        if publisher.counters()["pending_rows"]:  # none while a version is being written, which this would follow
            publisher.publish(change, change)
    version: int = publisher.counters()["version"]
    return version


def answers_as(server: Client, folder: Path, name: str, version: int) -> None:
    """Compares predictions, with the tolerance of test_service.py."""
    status, answer = server.predict(raw_samples(folder))
    assert (status, answer["version"]) == (200, version)
    np.testing.assert_allclose(answer["probabilities"], predictions(folder, name), atol=1e-6)


def test_published_versions_are_served(folder: Path, tmp_path: Path) -> None:
    """Covers a directory that is created later, and a server that was killed and restarted.

    The server is ready from the first version on, and no longer when that is too old.
    """
    target = tmp_path / "published"
    with serving(folder / "export", "--follow", str(target), status="waiting") as server:
        assert server.ask("GET", "/livez")[0] == 200
        wait_for(lambda: f"{target} has no version yet; check --follow" in server.ask("GET", "/readyz")[1]["problem"])
        assert server.ask("GET", "/readyz")[0] == 503
        status, answer = server.predict(raw_samples(folder))
        assert (status, "have not been applied yet" in answer["error"]) == (503, True), answer
        assert server.metrics()["cowrec_ready"] == 0
        with Publisher(open_target(str(target), publishing=True)) as publisher:
            now = int(time.time())
            version = published(publisher, everything(folder / "longer-export", 10, now - 1000))
            health = server.wait_for("version", version)
            assert (health["step"], health["sample_time"]) == (10, now - 1000)
            server.wait_for("status", "ok")
            answers_as(server, folder, "longer", version)
            metrics = server.metrics()
            assert metrics["cowrec_deltas_applied_total"] >= 1
            assert metrics["cowrec_model_version"] == version
            assert 1000 <= metrics["cowrec_model_age_seconds"] < 1000 + 60
            assert 0 <= metrics["cowrec_last_delta_age_seconds"] < 60
            assert metrics["cowrec_following"] == metrics["cowrec_ready"] == 1
            assert server.ask("GET", "/readyz")[0] == 200
            back = published(publisher, everything(folder / "export", 5))
            server.wait_for("version", back)
            answers_as(server, folder, "run", back)
        code, printed = server.send(signal.SIGKILL)
        assert code == -signal.SIGKILL
        assert re.search(rf"cowrec: version \d+ \(full, step 10\) of {re.escape(str(target))} is served\n", printed)
    old = ("--follow", str(target), "--max-age", "0.1")
    with serving(folder / "longer-export", *old, port=server.port, status="degraded") as server:
        status, answer = server.ask("GET", "/readyz")
        assert (status, "--max-age is 0.1" in answer["problem"]) == (503, True), answer
        answers_as(server, folder, "run", back)


def test_a_target_that_fails_only_delays_versions(folder: Path, tmp_path: Path) -> None:
    """Redis is killed and restarted, empty: the last applied version is served, and later ones are applied.

    Its password is neither shown nor logged.
    """
    with (
        redis_server(tmp_path / "redis", password="hush-hush") as redis,
        serving(folder / "export", "--follow", redis.url, status="waiting") as server,
        Publisher(open_target(redis.url, publishing=True)) as publisher,
    ):
        version = published(publisher, everything(folder / "longer-export", 10))
        server.wait_for("version", version)
        redis.send(signal.SIGKILL)
        health = server.wait_for("status", "degraded")
        shown = f"redis://***@127.0.0.1:{redis.port}/0"
        assert f"{shown} cannot be reached" in health["problem"]
        assert "hush" not in str([health, server.ask("GET", "/metrics")])
        assert server.ask("GET", "/health")[0] == 200
        assert server.metrics()["cowrec_following"] == 0
        answers_as(server, folder, "longer", version)
        redis.start()
        wait_for(lambda: f"{shown} has lost its versions; check it" in server.health()["problem"])
        assert server.ask("GET", "/readyz")[0] == 200
        answers_as(server, folder, "longer", version)
        later = published(publisher, everything(folder / "export", 5))
        server.wait_for("version", later)
        server.wait_for("status", "ok")
        answers_as(server, folder, "run", later)
        printed = server.send(signal.SIGTERM)[1]
        assert printed.count("cannot be reached") == printed.count(f"{shown} is followed again") == 1, printed
        assert "hush" not in printed


def test_servers_go_back_to_a_version_that_is_published_again(cowrec: Cowrec, folder: Path, tmp_path: Path) -> None:
    """A running server goes on with the trainer's next version."""
    target = tmp_path / "published"
    good, bad = everything(folder / "export", 5), everything(folder / "longer-export", 10)
    with serving(folder / "export", "--follow", str(target), status="waiting") as server:
        with Publisher(open_target(str(target), publishing=True)) as publisher:
            assert (published(publisher, good), published(publisher, bad)) == (1, 2)
            server.wait_for("version", 2)
            code, _, error = cowrec("versions", target, "--republish", "1")
            assert (code, "another process is at work" in error) == (2, True)
        answers_as(server, folder, "longer", 2)
        code, printed, _ = cowrec("versions", target, "--republish", "1")
        assert (code, printed.startswith("version 1 is published again as version 3")) == (0, True)
        assert (server.wait_for("version", 3)["step"], server.health()["status"]) == (5, "ok")
        answers_as(server, folder, "run", 3)
        code, listed, _ = cowrec("versions", target)
        rows = [" ".join(line.split()[:3]) for line in listed.splitlines()[1:]]
        assert (code, rows) == (0, ["1 full 5", "2 delta 10", "3 full 5"])
        with Publisher(open_target(str(target), publishing=True)) as publisher:
            assert published(publisher, bad) == 4
        server.wait_for("version", 4)
        answers_as(server, folder, "longer", 4)
    code, _, error = cowrec("versions", target, "--republish", "9")
    assert (code, "choose one of 3 to 4" in error) == (2, True)


def test_a_version_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "published"
    whole = everything(folder / "longer-export", 10)
    wrong = Change(10, None, {"street": next(iter(whole.tables.values()))}, {})
    with (
        serving(folder / "export", "--follow", str(target), status="waiting") as server,
        Publisher(open_target(str(target), publishing=True)) as publisher,
    ):
        version = published(publisher, whole)
        server.wait_for("status", "ok")
        published(publisher, wrong)
        assert "table 'street'" in server.wait_for("status", "degraded")["problem"]
        assert server.metrics()["cowrec_deltas_refused_total"] >= 1
        answers_as(server, folder, "longer", version)
        publisher.close()
        # A name that JSON can express, and text cannot.
        named = Blob(9, 8, "full", "x", 0.0, Change(10, None, whole.tables, {"x" * 12_000: np.zeros(1, np.float32)}))
        content = encode(named)[HEADER_BYTES:].replace(b"x" * 12_000, rb"\ud800" * 2000)
        (target / "full-000000000009.cow").write_bytes(MAGIC + hashlib.sha256(content).digest() + content)
        wait_for(lambda: r"\ud800" in server.health()["problem"])
        assert server.ask("GET", "/readyz")[0] == server.ask("GET", "/metrics")[0] == 200


def test_a_target_that_hangs_is_reported_and_abandoned(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Whoever opens a FIFO without a writer blocks, as on a network file system that hangs."""
    monkeypatch.setattr("cowrec.trainer.publishing.follower.DEADLINE", 0.1)
    target = tmp_path / "published"
    with Publisher(open_target(str(target), publishing=True)) as publisher:
        published(publisher, everything(folder / "longer-export", 5))
    with serving_here(folder / "export", Limits(timeout_ms=1000 * DEADLINE), str(target)) as (server, _):
        os.mkfifo(target / "full-000000000002.cow")
        problem = server.wait_for("status", "degraded")["problem"]
        assert f"{target} cannot be reached (a read has taken 0 seconds so far)" in problem
        assert server.metrics()["cowrec_following"] == 0
        answers_as(server, folder, "longer", 1)
    os.close(os.open(target / "full-000000000002.cow", os.O_WRONLY | os.O_NONBLOCK))
