"""Faults of an online run, caused for real: kills, also under torchrun, a full disk, a target that hangs."""

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from commands.forked_commands import run_forked
from cowrec.data_pipeline.synthetic.drifting import drifting_tables
from online_cases import DRIFT, SAMPLES, assert_readers_equal_an_export, case_fixture, online_case, write_stream
from run_comparison import assert_same, lines, wait_for
from servers.redis_server import RedisServer, redis_server
from trainer_cases import outcomes_in_processes

OFTEN = ["online.snapshot_seconds=0.2", "online.publish_seconds=0.1", "train.log_every=1", "train.batch_size=16"]
# On a busy machine a poll may take longer than the default, after which a partial batch would be trained on.
OFTEN += ["online.max_wait_seconds=0"]
EXACT = ["optimizer.absent_rows=lazy", "id_table.expire_after=''", "id_table.capacity=700"]
"""Settings under which readers have every row exactly: no row changes while absent, no id expires."""


case = case_fixture()


def command(case: Path, run_dir: Path, *overrides: str, source: Path | None = None, publish: str = "") -> list[str]:
    """Arguments of ``cowrec``."""
    parts = ["online", f"{case}/run.toml", "--data", f"{case}/data"]
    parts += ["--source", str(source or case / "incoming"), "--run-dir", str(run_dir), "--resume"]
    parts += ["--publish", publish] if publish else []
    return [*parts, *(part for override in overrides for part in ("--set", override))]


def finish(parts: list[str]) -> str:
    """Runs a command to its end; returns its output."""
    done = run_forked(*parts)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def undisturbed(case: Path) -> Path:
    finish(command(case, case / "undisturbed", *OFTEN, *EXACT))
    return case / "undisturbed"


@pytest.mark.thorough
def test_kills_at_random_moments_change_neither_model_nor_readers(
    case: Path, undisturbed: Path, tmp_path: Path, start: Callable, pytestconfig: pytest.Config
) -> None:
    """Kills while the run starts, trains, saves or publishes; it is restarted each time."""
    rng, run_dir, published = random.Random(0), tmp_path / "run", tmp_path / "published"
    parts = command(case, run_dir, *OFTEN, *EXACT, publish=str(published))
    for _ in range(pytestconfig.getoption("--kills")):
        before = lines(run_dir)
        process = start(*parts)
        # Each kill comes after some progress, or the run would never end.
        wait_for(lambda before=before, process=process: lines(run_dir) != before or process.poll() is not None)
        time.sleep(rng.uniform(0, 1.0))
        process.kill()
        process.communicate()
    finish(parts)
    assert_same(run_dir, undisturbed)
    assert_readers_equal_an_export(case, run_dir, published, undisturbed)


def test_sigterm_before_the_first_step(case: Path, tmp_path: Path, start: Callable) -> None:
    """While samples wait for others to make a batch."""
    write_stream(tmp_path / "in", list(drifting_tables(DRIFT, 0, 10, chunk_rows=10)), end=False)
    given = ["online.report_seconds=0", "online.max_wait_seconds=0"]
    process = start(*command(case, tmp_path / "run", *given, source=tmp_path / "in"))
    wait_for(lambda: lines(tmp_path / "run") or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "stopped at step 0; nothing was trained on yet; to continue, add --run-dir" in said


@pytest.mark.thorough
def test_a_killed_redis_loses_nothing(case: Path, undisturbed: Path, tmp_path: Path, start: Callable) -> None:
    """Killed in the middle of the stream with every command on disk; the model equals that of an undisturbed run.

    Nothing that the run prints or writes has the password of the stream and of the publication.
    """
    tables = list(drifting_tables(DRIFT, 0, SAMPLES, chunk_rows=500))
    with redis_server(tmp_path / "redis", appendonly=True, password="hush-hush") as server:
        send(server, tables[:4])
        source, run_dir = f"{server.url}?stream=samples", tmp_path / "run"
        parts = command(case, run_dir, *OFTEN, *EXACT, "online.max_wait_seconds=3", source=source, publish=server.url)
        process = start(*parts)
        wait_for(lambda: lines(run_dir) > 100)
        server.send(signal.SIGKILL)
        server.start()
        send(server, tables[4:])
        wait_for(lambda: trained(run_dir) == SAMPLES)
        process.send_signal(signal.SIGTERM)
        printed, said = process.communicate(timeout=600)
    assert process.returncode == 130, said
    assert f"following redis://***@127.0.0.1:{server.port}/0?stream=samples" in printed + said
    assert "hush" not in printed + said
    assert not [file for file in run_dir.rglob("*") if file.is_file() and b"hush" in file.read_bytes()]
    assert_same(run_dir, undisturbed)


def send(server: RedisServer, tables: list[pa.Table]) -> None:
    """Sends samples as entries of the stream, a JSON object each."""
    with server.client() as client:
        for table in tables:
            batch = client.pipeline(transaction=False)
            for sample in table.to_pylist():
                batch.xadd("samples", {"sample": json.dumps(sample)})
            batch.execute()


def trained(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
    return max((line["samples"] for line in found if line["kind"] == "train"), default=0)


SETTINGS = [*OFTEN, *EXACT, "train.batch_size=32", 'sharding.tables={C1 = "column_wise", C2 = "data_parallel"}']
"""125 steps; readers have every row exactly."""


@pytest.mark.thorough
def test_kills_and_sigterm_under_torchrun_change_neither_model_nor_readers(
    case: Path, tmp_path: Path, start: Callable, pytestconfig: pytest.Config
) -> None:
    """One rank is killed, then the other, then torchrun, whose ranks save; SIGTERM saves too. The run is resumed."""
    rng, run_dir, undisturbed = random.Random(0), tmp_path / "run", tmp_path / "undisturbed"
    given = {"folder": str(case), "source": str(case / "incoming"), "run_dir": str(undisturbed), "set": SETTINGS}
    assert outcomes_in_processes(online_case, [given], 2) == [["ok"]] * 2
    shutil.copytree(case / "incoming", tmp_path / "in")
    (tmp_path / "in" / "_END").unlink()
    published = str(tmp_path / "published")
    parts = command(case, run_dir, *SETTINGS, source=tmp_path / "in", publish=published)
    launcher = start(*parts, processes=2, restarts=1000)
    for number in range(pytestconfig.getoption("--kills")):
        wait_for(progress(run_dir))  # or the run would never end
        time.sleep(rng.uniform(0, 0.5))
        launcher.ranks()[number % 2].kill()
    wait_for(progress(run_dir))
    ranks = launcher.ranks()
    launcher.kill()
    launcher.wait()
    assert not psutil.wait_procs(ranks, timeout=600)[1], "they notice that torchrun has ended"
    kept = newest(run_dir)
    launcher = start(*parts, processes=2, restarts=1000)
    wait_for(progress(run_dir, steps=10))
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=600)
    assert launcher.returncode != 0
    assert said.count("cowrec: stopped at step") == 1, said
    assert newest(run_dir) >= kept
    (tmp_path / "in" / "_END").touch()
    launcher = start(*parts, processes=2, restarts=1000)
    _, said = launcher.communicate(timeout=600)
    assert launcher.returncode == 0, said
    assert_same(run_dir, undisturbed)
    assert_readers_equal_an_export(case, run_dir, published, undisturbed)


def progress(run_dir: Path, steps: int = 1) -> Callable[[], bool]:
    """Condition that the run has taken steps since now, or all of them."""
    before = lines(run_dir)
    return lambda: lines(run_dir) >= before + 3 * steps or newest(run_dir) == f"step_{SAMPLES // 32:09d}"


def newest(run_dir: Path) -> str:
    return max((path.name for path in (run_dir / "checkpoints").glob("step_?????????")), default="")
