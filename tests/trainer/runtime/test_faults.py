"""Injected faults: killed and hung processes, a full disk, deleted data, NaN in one sample."""

import random
import re
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from commands.forked_commands import Forked
from cowrec.trainer.config.run import load_config
from cowrec.trainer.training.loop import train
from run_comparison import assert_same, lines, wait_for
from trainer_cases import case_folder, checkpoint, config_file, make_data, tensors, train_in_processes

OFTEN = ["checkpoint.every_steps=7", "train.log_every=1", "model.dropout=0.2"]
LONG = [*OFTEN, "train.epochs=30"]
"""150 steps."""
LARGE, SMALL_FILE = ["model.hidden=[400]", "train.log_every=1000"], 150_000
"""A model whose checkpoint has a file above SMALL_FILE bytes, while the metrics' file stays below."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case_folder(tmp_path_factory, "faults")


def training(folder: Path, run_dir: Path, *overrides: str, processes: int = 1, restarts: int = 0) -> Forked:
    command = ["train", f"{folder}/run.toml", "--data", f"{folder}/data", "--run-dir", run_dir, "--resume"]
    settings = (part for each in overrides for part in ("--set", each))
    return Forked(*command, *settings, processes=processes, restarts=restarts)


@pytest.fixture
def start() -> Iterator[Callable[..., Forked]]:
    """Starts a training; its processes are killed at the end of the test."""
    started: list[Forked] = []

    def begin(*given: Any, **options: int) -> Forked:
        started.append(training(*given, **options))
        return started[-1]

    yield begin
    for process in started:
        process.kill_all()


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    run_dir = folder / "undisturbed"
    case = {"config": folder / "run.toml", "data": folder / "data", "run_dir": run_dir, "set": LONG}
    train_in_processes([case], folder / "outcomes", 2)
    return run_dir


@pytest.mark.parametrize("whom", ["one rank", "all ranks"])
def test_kills_at_random_moments_change_no_bit(
    folder: Path, undisturbed: Path, tmp_path: Path, start, whom: str, pytestconfig: pytest.Config
) -> None:
    """Kills during joining, training, evaluation or saving; torchrun restarts the run, which resumes."""
    kills, rng = pytestconfig.getoption("--kills"), random.Random(whom)
    run_dir = tmp_path / "run"
    launcher = start(folder, run_dir, *LONG, processes=2, restarts=1000)
    for _ in range(kills):
        before = lines(run_dir)
        # Waits for progress first, since a run that is killed without any would never end.
        wait_for(lambda before=before: lines(run_dir) != before or launcher.poll() is not None)
        time.sleep(rng.uniform(0, 1.5))
        ranks = launcher.ranks()
        for rank in ranks if whom == "all ranks" else ranks[rng.randrange(2) :][:1]:
            rank.kill()
        if launcher.poll() is not None:
            break
    assert launcher.wait(timeout=240) == 0, launcher.stderr.read()
    assert_same(run_dir, undisturbed)
    assert not list(run_dir.rglob("*.partial"))


def test_a_hung_rank_is_named(folder: Path, tmp_path: Path, start) -> None:
    endless = ["train.epochs=100000", "train.timeout_seconds=5"]
    launcher = start(folder, tmp_path / "run", *endless, processes=2)
    wait_for(lambda: lines(tmp_path / "run") > 5)
    _, hung = launcher.ranks()
    hung.send_signal(signal.SIGSTOP)
    for line in launcher.stderr:
        if f"no heartbeat from rank 1 on {socket.gethostname()} (last heartbeat at step" in line:
            break
    else:
        pytest.fail("no message names the rank")
    hung.kill()
    assert launcher.wait(timeout=60) != 0


def test_a_full_disk_costs_a_checkpoint_but_not_the_run(folder: Path, tmp_path: Path, start) -> None:
    """The system refuses large files for a while; earlier checkpoints stay, and later ones are written."""
    run_dir = tmp_path / "run"
    process = start(folder, run_dir, "train.epochs=100000", *LARGE)
    for line in process.stderr:
        if line.startswith("epoch 3/"):
            break
    unlimited = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (SMALL_FILE, resource.RLIM_INFINITY))
    for line in process.stderr:
        if line.startswith("warning: "):
            break
    assert "the checkpoint of step" in line
    assert "could not be written" in line
    last = line.rpartition("the last good checkpoint is ")[2].strip()
    assert Path(last).is_dir()
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
    wait_for(lambda: max(each.name for each in (run_dir / "checkpoints").glob("step_?????????")) > Path(last).name)
    process.terminate()
    assert process.wait(timeout=60) == 130
    assert not list(run_dir.rglob("*.partial"))


def test_a_disk_that_stays_full_ends_in_an_error(folder: Path, tmp_path: Path, start) -> None:
    run_dir = tmp_path / "run"
    process = start(folder, run_dir, "train.epochs=60", *LARGE)
    for line in process.stderr:
        if line.startswith("epoch 3/"):
            break
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (SMALL_FILE, resource.RLIM_INFINITY))
    printed = process.stderr.read()
    assert process.wait(timeout=120) == 2
    assert "error: the checkpoint of step 300 could not be written" in printed
    assert "free disk space or repair the folder, then train with --resume" in printed
    assert list((run_dir / "checkpoints").glob("step_?????????"))
    process = start(folder, run_dir, "train.epochs=60", *LARGE)
    assert process.wait(timeout=120) == 0


def test_a_shard_deleted_between_epochs_is_named(tmp_path: Path, start) -> None:
    make_data(tmp_path)
    config_file(tmp_path)
    process = start(tmp_path, tmp_path / "run", "train.epochs=100000", processes=2)
    printed = ""
    for line in process.stderr:
        printed += line
        if line.startswith("epoch 2/"):
            for shard in (tmp_path / "data" / "train").iterdir():
                shard.unlink()
    assert process.wait(timeout=60) != 0
    # The line end of one process may come after the line of the other.
    assert len(re.findall(r"cowrec \(rank \d\): error: \S*/data/train/\d+.parquet is missing", printed)) == 2
    assert list((tmp_path / "run" / "checkpoints").glob("step_?????????"))


def test_nan_in_one_ranks_row_stops_all_and_keeps_the_last_checkpoint(tmp_path: Path, start) -> None:
    make_data(tmp_path)
    config_file(tmp_path)
    run_dir = tmp_path / "run"
    train(load_config(tmp_path / "run.toml"), tmp_path / "data", run_dir)
    shard = next((tmp_path / "data" / "train").iterdir())
    rows = pq.read_table(shard)
    price = rows["price"].to_numpy().copy()
    price[17] = np.nan
    pq.write_table(rows.set_column(rows.schema.get_field_index("price"), "price", [price]), shard)
    launcher = start(tmp_path, run_dir, "train.epochs=4", "train.log_every=1", processes=2)
    printed = launcher.stderr.read()
    assert launcher.wait(timeout=60) != 0
    # Only one of the two processes has the sample in its part of the batch, but both report it.
    assert printed.count("the loss was not finite at step") == 2
    assert printed.count(f"the last good checkpoint is {run_dir}/checkpoints/step_000000010") == 2
    assert all(value.isfinite().all() for value in tensors(checkpoint(run_dir)["model"]).values())
