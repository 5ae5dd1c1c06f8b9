"""Losses are read against plain sums; a process that is slow to write is waited for, and one that hangs is named."""

import math
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemWriter

from cowrec.trainer.config.sections import CheckpointConfig
from cowrec.trainer.runs.checkpoint import Checkpoints, Progress
from cowrec.trainer.runs.remote_run import RunPlace
from cowrec.trainer.runtime.errors import ProcessLost
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.runtime.processes import process_group as trainer_process_group
from cowrec.trainer.runtime.stopping import Heartbeat, LossWatch
from process_groups import in_processes, process_group, start_in_processes
from trainer_cases import free_port, launched_as


def process(rank: int = 0, world_size: int = 1) -> Process:
    return Process(rank, world_size, world_size, False, torch.device("cpu"), timedelta(minutes=1))


losses = st.lists(st.floats(0, 10, width=32) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(losses, min_size=1, max_size=4), st.integers(0, 10**6))
def test_readings_cover_the_steps_since_the_last(readings: list[list[float]], step: int) -> None:
    watch = LossWatch(process())
    for values in readings:
        for number, value in enumerate(values):
            watch.add(torch.tensor(value), step + number)
        mean, bad = watch.read()
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
    assert watch.read() == (1.5, None)


def two_processes(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        watch = LossWatch(process(rank, 2))
        assert math.isnan(watch.read()[0])
        for step in range(6):
            watch.add(torch.tensor(float(step + 10 * rank)), step)
        assert watch.read() == (7.5, None)
        for step in range(6, 12):
            watch.add(torch.tensor(math.inf if (rank, step) == (1, 9) else 1.0), step)
        assert watch.read()[1] == 9
        for step in range(12, 15):  # an infinity of each sign on the two
            watch.add(torch.tensor((-1) ** rank * math.inf if step == 13 else 1.0), step)
        assert watch.read()[1] == 13
        watch.add(torch.tensor(2.0 * rank), 15)
        assert watch.read() == (1.0, None)


def test_all_processes_read_the_same(tmp_path: Path) -> None:
    in_processes(two_processes, (str(tmp_path),), 2)


TIMEOUT = 5.0


def write(rank: int, folder: Path, port: int, end: str) -> None:
    """Rank 1 writes for twice the timeout, or hangs."""
    launched_as(rank, 2, port)
    original = FileSystemWriter.write_data

    def late(*arguments, **settings):
        if end == "hangs":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(2 * TIMEOUT)
        return original(*arguments, **settings)

    with trainer_process_group("cpu", TIMEOUT) as process:
        heartbeat, warnings = Heartbeat(process), []
        place = RunPlace(folder, resume=True)
        checkpoints = Checkpoints(place, CheckpointConfig(), process, warnings.append, heartbeat.lost)
        with patch.object(FileSystemWriter, "write_data", late if rank else original):
            try:
                with heartbeat.names_the_lost():
                    checkpoints.save({"x": torch.ones(3)}, Progress(1), {})
                    checkpoints.finish()
            except ProcessLost as error:
                (folder / "error").write_text(str(error))
                os._exit(7)
        assert (not warnings, checkpoints.latest is not None) == (True, rank == 0)


def test_a_slow_process_is_waited_for(tmp_path: Path) -> None:
    in_processes(write, (tmp_path, free_port(), "writes"), 2)
    assert (tmp_path / "checkpoints" / "step_000000001" / "checkpoint.json").exists()


@pytest.mark.thorough
def test_a_hung_process_is_named(tmp_path: Path) -> None:
    processes = start_in_processes(write, [(tmp_path, free_port(), "hangs")] * 2)
    try:
        processes[0].join(300)
        assert processes[0].exitcode == 7
        assert "no heartbeat from rank 1" in (tmp_path / "error").read_text()
    finally:
        for each in processes:
            each.kill()
            each.join()
