"""Injected faults: killed, slow and hung processes, a full disk, deleted data; what processes read of losses."""

import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.training.active_run import LossWatch
from process_groups import in_processes, process_group
from run_comparison import assert_same, lines, wait_for
from trained_runs import data_folder, make_folder
from trainer_cases import ENVIRONMENT, case_of, newest_progress, train_in_processes

OFTEN = ["checkpoint.every_steps=7", "train.log_every=1", "model.dropout=0.2"]
LONG = [*OFTEN, "train.epochs=30"]
"""150 steps."""
LARGE, SMALL_FILE = ["model.hidden=[400]", "train.log_every=1000"], 150_000
"""A model whose checkpoint has a file above SMALL_FILE bytes, while the metrics' file stays below."""


folder = data_folder()


def training(folder: Path, run_dir: Path, *overrides: str) -> list[str]:
    """Arguments of ``cowrec``."""
    command = ["train", f"{folder}/run.toml", "--data", f"{folder}/data", "--run-dir", f"{run_dir}", "--resume"]
    return [*command, *(part for override in overrides for part in ("--set", override))]


def line_with(process, text: str) -> str:
    """The first line on stderr that has a text."""
    return next(line for line in process.stderr if text in line)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    train_in_processes(case_of(folder, folder / "undisturbed", *LONG))
    return folder / "undisturbed"


@pytest.mark.thorough
@pytest.mark.parametrize("whom", ["one rank", "all ranks"])
def test_kills_at_random_moments_change_no_bit(
    folder: Path, undisturbed: Path, tmp_path: Path, start, whom: str, pytestconfig: pytest.Config
) -> None:
    """Kills during joining, training, evaluation or saving; torchrun restarts the run, which resumes."""
    rng, run_dir = random.Random(whom), tmp_path / "run"
    launcher = start(*training(folder, run_dir, *LONG), processes=2, restarts=1000)
    for _ in range(pytestconfig.getoption("--kills")):
        before = lines(run_dir)
        # Waits for progress first, since a run that is killed without any would never end.
        wait_for(lambda before=before: lines(run_dir) != before or launcher.poll() is not None)
        time.sleep(rng.uniform(0, 1.5))
        ranks = launcher.ranks()
        for rank in ranks if whom == "all ranks" else ranks[rng.randrange(2) :][:1]:
            rank.kill()
        if launcher.poll() is not None:
            break
    assert launcher.wait(timeout=600) == 0, launcher.stderr.read()
    assert_same(run_dir, undisturbed)
    assert not list(run_dir.rglob("*.partial"))


@pytest.mark.thorough
def test_a_hung_rank_ends_the_run(folder: Path, tmp_path: Path, start) -> None:
    endless = ["train.epochs=100000", "train.timeout_seconds=5"]
    launcher = start(*training(folder, tmp_path / "run", *endless), processes=2)
    wait_for(lambda: lines(tmp_path / "run") > 5)
    waiting, hung = launcher.ranks()
    hung.send_signal(signal.SIGSTOP)
    waiting.wait(timeout=600)
    hung.kill()
    assert launcher.wait(timeout=600) != 0


@pytest.mark.thorough
def test_a_full_disk_costs_a_checkpoint_but_not_the_run(folder: Path, tmp_path: Path, start) -> None:
    """The system refuses large files for a while; earlier checkpoints stay, and later ones are written."""
    run_dir = tmp_path / "run"
    process = start(*training(folder, run_dir, "train.epochs=100000", *LARGE))
    line_with(process, "epoch 3/")
    unlimited = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (SMALL_FILE, resource.RLIM_INFINITY))
    line = line_with(process, "warning: ")
    assert re.search("the checkpoint of step .*could not be written", line)
    last = line.rpartition("the last good checkpoint is ")[2].strip()
    assert Path(last).is_dir()
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
    wait_for(lambda: max(path.name for path in (run_dir / "checkpoints").glob("step_?????????")) > Path(last).name)
    process.terminate()
    assert process.wait(timeout=600) == 130
    assert not list(run_dir.rglob("*.partial"))


@pytest.mark.thorough
def test_a_shard_deleted_between_epochs_is_named(tmp_path: Path, start) -> None:
    process = start(*training(make_folder(tmp_path), tmp_path / "run", "train.epochs=100000"), processes=2)
    printed = ""
    for line in process.stderr:
        printed += line
        if line.startswith("epoch 2/"):
            for shard in (tmp_path / "data" / "train").iterdir():
                shard.unlink()
    assert process.wait(timeout=600) != 0
    # The line end of one process may come after the line of the other.
    assert len(re.findall(r"cowrec \(rank \d\): error: \S*/data/train/\d+.parquet is missing", printed)) == 2
    assert list((tmp_path / "run" / "checkpoints").glob("step_?????????"))


@pytest.mark.thorough
@pytest.mark.parametrize("ended", ["ctrl_c", "launcher_killed"])
def test_both_ranks_end_with_one_checkpoint(folder: Path, tmp_path: Path, ended: str) -> None:
    """The terminal sends SIGINT to every process of its group, and torchrun sends it to the ranks again. If torchrun is
    killed, its ranks must not go on alone."""
    run_dir = tmp_path / ended
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "cowrec.trainer", "train", f"{folder}/run.toml", "--data", f"{folder}/data"]
    command += ["--run-dir", str(run_dir), "--set", "train.epochs=100000", "--set", "train.log_every=1000000"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    seen = ""
    for line in process.stderr or ():
        seen += line
        if line.startswith("epoch 1/"):
            os.killpg(process.pid, signal.SIGINT) if ended == "ctrl_c" else process.kill()
    assert process.wait(timeout=600) != 0
    assert seen.count("cowrec: stopped at step") == 1, seen
    newest = sorted((run_dir / "checkpoints").iterdir())[-1]
    assert f"saved {newest}" in seen
    assert not list(run_dir.rglob("*.partial"))
    assert newest_progress(run_dir)["step"] == int(newest.name.removeprefix("step_"))
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def process(rank: int = 0, world_size: int = 1) -> Process:
    return Process(rank, world_size, world_size, False, torch.device("cpu"), timedelta(minutes=1))


losses = st.lists(st.floats(0, 10, width=32) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=12)


@given(st.lists(losses, min_size=1, max_size=4), st.integers(0, 10**6))
def test_readings_cover_the_steps_since_the_last(readings: list[list[float]], step: int) -> None:
    watch = LossWatch(process())
    for values in readings:
        for number, value in enumerate(values):
            watch.add(torch.tensor(value), step + number)
        bad, mean = watch.check(), watch.mean()
        wrong = [step + number for number, value in enumerate(values) if not math.isfinite(value)]
        assert bad == (wrong[0] if wrong else None)
        if wrong or not values:
            assert not math.isfinite(mean)
        else:  # both sum in float64
            assert mean == pytest.approx(math.fsum(values) / len(values), rel=1e-12)
        step += len(values)


def test_a_loss_may_be_overwritten_by_the_next_step() -> None:
    """As that of a captured step, which writes its results to the same memory."""
    watch, loss = LossWatch(process()), torch.zeros(())
    for step in range(4):
        loss.fill_(step)
        watch.add(loss, step)
    assert (watch.check(), watch.mean()) == (None, 1.5)


def two_processes(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        watch = LossWatch(process(rank, 2))
        assert watch.check() is None
        assert math.isnan(watch.mean())
        for step in range(6):
            watch.add(torch.tensor(float(step + 10 * rank)), step)
        assert (watch.check(), watch.mean()) == (None, 7.5)
        for step in range(6, 12):
            watch.add(torch.tensor(math.inf if (rank, step) == (1, 9) else 1.0), step)
        assert (watch.check(), watch.mean()) == (9, math.inf)
        for step in range(12, 15):  # an infinity of each sign on the two
            watch.add(torch.tensor((-1) ** rank * math.inf if step == 13 else 1.0), step)
        assert watch.check() == 13
        assert math.isnan(watch.mean())
        watch.add(torch.tensor(2.0 * rank), 15)
        assert (watch.check(), watch.mean()) == (None, 1.0)


def test_all_processes_read_the_same(tmp_path: Path) -> None:
    in_processes(two_processes, (str(tmp_path),), 2)
