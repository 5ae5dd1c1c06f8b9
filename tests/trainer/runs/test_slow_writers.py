"""A process that takes long to write its part of a checkpoint is waited for; one that was lost is not."""

import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from cowrec.trainer.config.sections import CheckpointConfig
from cowrec.trainer.runs.checkpoint import Checkpoints, Progress
from cowrec.trainer.runs.remote_run import RunPlace
from cowrec.trainer.runtime.errors import ProcessLost
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.runtime.stopping import Heartbeat
from process_groups import in_processes, start_in_processes
from trainer_cases import free_port, launched_as

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

    with process_group("cpu", TIMEOUT) as process:
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
