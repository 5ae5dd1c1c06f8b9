"""A `prepare` that is killed: nothing half-made is taken for whole, and the next one begins anew, saying so."""

import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cowrec.data_pipeline import PrepareConfig, Reader, Schema, prepare, work_bytes
from raw_cases import content, write_criteo

CONFIG = PrepareConfig(shard_rows=100)
PREPARE = """
    import os, signal, sys
    from cowrec.data_pipeline import PrepareConfig, prepare
    done = 0
    def progress(count):
        global done
        done += count
        if done >= {at}:
            {then}
    prepare("criteo", [{raw!r}], {out!r}, PrepareConfig(shard_rows=100), progress=progress)
"""


@pytest.fixture
def raw(tmp_path):
    folder = tmp_path / "raw"
    folder.mkdir()
    write_criteo(folder / "train.txt", 1000)
    return folder / "train.txt"


def preparing(raw: Path, out: Path, share: float, then: str) -> subprocess.Popen:
    """A process that prepares, and does something once a share of the work is done."""
    script = PREPARE.format(at=share * work_bytes([raw]), then=then, raw=str(raw), out=str(out))
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_killed_prepare_starts_anew_and_says_so(raw, tmp_path, caplog, share):
    """Killed by signal 9 in the first pass, and when all is written but not yet in its place."""
    out = tmp_path / "out"
    killed = preparing(raw, out, share, "os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.wait(60) == -signal.SIGKILL
    (left,) = tmp_path.glob("out*")
    assert left.name == f"out.partial-{killed.pid}"
    with pytest.raises(ValueError, match="not a prepared data set"):
        Reader(left, "train", batch_size=8)
    with caplog.at_level(logging.WARNING):
        prepare("criteo", [raw], out, CONFIG)
    assert caplog.messages == [
        f"process {killed.pid} ended before {out} was done; its {left} is removed, starting anew"
    ]
    prepare("criteo", [raw], tmp_path / "never killed", CONFIG)
    assert content(out) == content(tmp_path / "never killed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["never killed", "out", "raw"]


def test_a_living_prepare_is_left_alone(raw, tmp_path):
    """The other one waits in the middle of its work until it is told to go on."""
    out = tmp_path / "out"
    other = preparing(raw, out, 0.5, "sys.stdout.write('*'); sys.stdout.flush(); done = -1e9; sys.stdin.read(1)")
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.read(1) == "*"
    with pytest.raises(ValueError, match=rf"out is being made by process {other.pid}, in .*wait until it is done"):
        prepare("criteo", [raw], out, CONFIG)
    other.communicate("*", timeout=60)
    assert other.returncode == 0
    assert Schema.load(out).splits["train"].rows + Schema.load(out).splits["test"].rows == 1000


def test_the_number_of_a_dead_process_may_be_anyones(raw, tmp_path, caplog):
    """In a container a new process often has the number of the one before: only who holds the lock is alive."""
    for process in (os.getpid(), 1):
        (tmp_path / f"out.partial-{process}" / "train").mkdir(parents=True)
    (tmp_path / "outer.partial-1").mkdir()
    prepare("criteo", [raw], tmp_path / "out", CONFIG)
    assert len(caplog.messages) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "outer.partial-1", "raw"]


def test_what_was_moved_away_to_be_replaced_comes_back(raw, tmp_path):
    """Killed between the two renames of an overwrite, the old data set is the only one there is."""
    prepare("criteo", [raw], tmp_path / "out.replaced-7", CONFIG)
    before = content(tmp_path / "out.replaced-7")
    with pytest.raises(ValueError, match="exists and is not empty"):
        prepare("criteo", [raw], tmp_path / "out", CONFIG)
    assert content(tmp_path / "out") == before
    (tmp_path / "out.replaced-7").mkdir()
    prepare("criteo", [raw], tmp_path / "out", CONFIG, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "raw"]
