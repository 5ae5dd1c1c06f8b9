"""`prepare` on a Dask cluster over several hosts, network namespaces here, one of which is lost."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from cowrec.data_pipeline import PrepareConfig, prepare
from raw_cases import content, write_criteo
from run_comparison import wait_for
from servers.hosts import hosts

pytest.importorskip("distributed")
pytestmark = pytest.mark.thorough

PAGE = Path(__file__).parents[3] / "docs" / "train.md"


def documented(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The commands of docs/train.md: of the scheduler, of a worker, and of the preparation."""
    found = re.search(r"(dask scheduler) .*\n *(dask worker .*?)  .*\n *(cowrec prepare .*)\n", PAGE.read_text())
    assert found
    line = found[3].replace("/data/day_*.txt", str(folder / "raw")).replace("/data/criteo", str(folder / "there"))
    scheduler, worker, command = (shlex.split(each.replace("HOST", "host1")) for each in (found[1], found[2], line))
    return scheduler, worker, [sys.executable, "-m", "cowrec.trainer", *command[1:], "--set", "prepare.shard_rows=100"]


def test_a_lost_host_changes_no_byte(tmp_path: Path) -> None:
    write_criteo(tmp_path / "raw", 15_000)
    scheduler, worker, command = documented(tmp_path)
    with hosts(4, tmp_path / "logs") as four:
        four.start("host1", scheduler)
        workers = ["host2", "host3"]
        for each in workers:
            four.start(each, worker)
        wait_for(lambda: all("Registered to" in four.log(each) for each in workers))
        four.start("host4", command)
        wait_for(lambda: any(tmp_path.glob("there.partial-*/train/*.parquet")))
        four.crash("host3")
        assert not (tmp_path / "there").exists()
        assert four.wait(600, ["host4"])["host4"] == 0, four.log("host4")
        assert "Remove worker addr: tcp://10.77.0.3" in four.log("host1")
    prepare("criteo", [tmp_path / "raw"], tmp_path / "here", PrepareConfig(shard_rows=100))
    assert content(tmp_path / "here") == content(tmp_path / "there")
