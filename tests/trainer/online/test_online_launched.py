"""Online training under torchrun: kills, restarts and SIGTERM change no bit of the model and no row of its readers."""

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from commands.forked_commands import Forked
from online_cases import SAMPLES, assert_readers_equal_an_export, make_case, online_in_processes
from run_comparison import assert_same, lines, wait_for

SETTINGS = ["online.snapshot_seconds=0.3", "online.publish_seconds=0.1", "train.log_every=1", "train.batch_size=32"]
SETTINGS += ["optimizer.absent_rows=lazy", "id_table.expire_after=''", "id_table.capacity=700"]
SETTINGS += ['sharding.tables={C1 = "column_wise", C2 = "data_parallel"}']
"""125 steps; readers have every row exactly."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stream, and ``undisturbed``, a run of two processes."""
    folder = make_case(tmp_path_factory.mktemp("online_launched"))
    run_dir, source = str(folder / "undisturbed"), str(folder / "incoming")
    undisturbed = {"folder": str(folder), "source": source, "run_dir": run_dir, "set": SETTINGS}
    assert online_in_processes([undisturbed], folder / "case", 2) == [["ok"]] * 2
    return folder


@pytest.fixture
def start(case: Path, tmp_path: Path) -> Iterator[Callable[[], Forked]]:
    """Function that starts the run in two processes, or continues it; they are killed at the end of the test.

    The stream ``tmp_path/in`` does not end.
    """
    started: list[Forked] = []
    shutil.copytree(case / "incoming", tmp_path / "in")
    (tmp_path / "in" / "_END").unlink()
    command = ["online", f"{case}/run.toml", "--data", f"{case}/data", "--source", f"{tmp_path}/in", "--resume"]
    command += ["--run-dir", f"{tmp_path}/run", "--publish", f"{tmp_path}/published"]
    command += [part for each in SETTINGS for part in ("--set", each)]

    def begin() -> Forked:
        started.append(Forked(*command, processes=2, restarts=1000))
        return started[-1]

    yield begin
    for process in started:
        process.kill_all()


@pytest.mark.thorough
def test_kills_and_sigterm_change_neither_model_nor_readers(
    case: Path, tmp_path: Path, start: Callable[[], Forked], pytestconfig: pytest.Config
) -> None:
    """One rank is killed, then the other, then torchrun, whose ranks save; SIGTERM saves too. The run is resumed."""
    rng, run_dir = random.Random(0), tmp_path / "run"
    launcher = start()
    for number in range(pytestconfig.getoption("--kills")):
        wait_for(progress(run_dir))  # or the run would never end
        time.sleep(rng.uniform(0, 0.5))
        launcher.ranks()[number % 2].kill()
    wait_for(progress(run_dir))
    ranks = launcher.ranks()
    launcher.kill()
    launcher.wait()
    assert not psutil.wait_procs(ranks, timeout=60)[1], "they notice that torchrun has ended"
    kept = newest(run_dir)
    launcher = start()
    wait_for(progress(run_dir, steps=10))
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    assert said.count("cowrec: stopped at step") == 1, said
    assert newest(run_dir) >= kept
    (tmp_path / "in" / "_END").touch()
    launcher = start()
    _, said = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, said
    assert_same(run_dir, case / "undisturbed")
    assert_readers_equal_an_export(case, run_dir, tmp_path / "published", case / "undisturbed")


def progress(run_dir: Path, steps: int = 1) -> Callable[[], bool]:
    """Condition that the run has taken steps since now, or all of them."""
    before = lines(run_dir)
    return lambda: lines(run_dir) >= before + 3 * steps or newest(run_dir) == f"step_{SAMPLES // 32:09d}"


def newest(run_dir: Path) -> str:
    return max((each.name for each in (run_dir / "checkpoints").glob("step_?????????")), default="")
