"""A killed `prepare` leaves no data set; the next one starts again with a warning."""

import logging
import os
import signal
from pathlib import Path

import psutil
import pytest

from cowrec.data_pipeline import PrepareConfig, Reader, Schema, prepare, work_bytes
from process_groups import start_in_processes
from raw_cases import content, write_criteo
from refusal import refused
from run_comparison import wait_for

CONFIG = PrepareConfig(shard_rows=100)


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    write_criteo(folder / "train.txt", 1000)
    return folder / "train.txt"


def preparing(_: int, raw: Path, out: Path, share: float, number: int) -> None:
    """Prepares, and sends itself a signal once, after a share of the work."""
    remaining = share * work_bytes([raw])

    def progress(count: int) -> None:
        nonlocal remaining
        remaining -= count
        if remaining <= 0:
            remaining = float("inf")
            os.kill(os.getpid(), number)

    prepare("criteo", [raw], out, CONFIG, progress=progress)


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_killed_prepare_starts_again_with_a_warning(raw, tmp_path, caplog, share):
    """Covers a kill by signal 9 in the first pass, and one after all is written but before the rename."""
    out = tmp_path / "out"
    (killed,) = start_in_processes(preparing, [(raw, out, share, signal.SIGKILL)])
    killed.join(600)
    assert killed.exitcode == -signal.SIGKILL
    (left,) = tmp_path.glob("out*")
    assert left.name == f"out.partial-{killed.pid}"
    refused("not a prepared data set", Reader, left, "train", batch_size=8)
    with caplog.at_level(logging.WARNING):
        prepare("criteo", [raw], out, CONFIG)
    assert caplog.messages == [
        f"process {killed.pid} ended before {out} was complete; removing {left} and starting again"
    ]
    prepare("criteo", [raw], tmp_path / "never killed", CONFIG)
    assert content(out) == content(tmp_path / "never killed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["never killed", "out", "raw"]


@pytest.mark.thorough
def test_a_running_prepare_is_not_disturbed(raw, tmp_path):
    """The other process pauses in the middle of its work until the test lets it continue."""
    out = tmp_path / "out"
    (other,) = start_in_processes(preparing, [(raw, out, 0.5, signal.SIGSTOP)])
    wait_for(lambda: psutil.Process(other.pid).status() == psutil.STATUS_STOPPED)
    with pytest.raises(ValueError, match=rf"out is being written by process {other.pid}, in .*wait until it is done"):
        prepare("criteo", [raw], out, CONFIG)
    os.kill(other.pid, signal.SIGCONT)
    other.join(600)
    assert other.exitcode == 0
    assert Schema.load(out).splits["train"].rows + Schema.load(out).splits["test"].rows == 1000


def test_reused_process_ids_are_not_running_processes(raw, tmp_path, caplog):
    """A new process in a container often has the id of an earlier one: only the holder of the lock is running."""
    for process in (os.getpid(), 1):
        (tmp_path / f"out.partial-{process}" / "train").mkdir(parents=True)
    (tmp_path / "outer.partial-1").mkdir()
    prepare("criteo", [raw], tmp_path / "out", CONFIG)
    assert len(caplog.messages) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "outer.partial-1", "raw"]


def test_a_data_set_moved_for_an_overwrite_is_restored(raw, tmp_path):
    """A kill between the two renames of an overwrite leaves only the old data set."""
    prepare("criteo", [raw], tmp_path / "out.replaced-7", CONFIG)
    before = content(tmp_path / "out.replaced-7")
    refused("exists and is not empty", prepare, "criteo", [raw], tmp_path / "out", CONFIG)
    assert content(tmp_path / "out") == before
    (tmp_path / "out.replaced-7").mkdir()
    prepare("criteo", [raw], tmp_path / "out", CONFIG, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"]


def test_a_users_own_folders_of_like_names_are_left_alone(raw, tmp_path):
    names = ["out.partial-week", "out.partial-week-7", "out.replaced-7", "out.replaced-old"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("precious")
    for overwrite in (False, True):
        prepare("criteo", [raw], tmp_path / "out", CONFIG, overwrite=overwrite)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", *names, "raw"]
        assert all((tmp_path / name / "notes.txt").read_text() == "precious" for name in names)
