"""A run in an object store over hosts that share no folder for it: network namespaces, one of which has the store."""

import re
import sys
import time
from pathlib import Path

import pytest

from run_comparison import assert_same, wait_for
from servers.host_runs import MIXED, SETTINGS, finish, start, training
from servers.hosts import Hosts, hosts
from servers.s3_server import client_environment
from trainer_cases import ENVIRONMENT, config_file, make_data, train_in_processes

pytestmark = pytest.mark.thorough

URI = "s3://bucket/run"
COPY = f"from cowrec.trainer.runs.remote_run import local_copy; print(local_copy({URI!r}))"


def start_store(all_hosts: Hosts, name: str) -> dict[str, str]:
    """Starts an S3 server with a bucket on a host; returns the environment of its clients."""
    all_hosts.start(name, [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "9000"])
    wait_for(lambda: "Running on" in all_hosts.log(name))
    endpoint = f"http://{name}:9000"
    all_hosts.run(name, ["curl", "--silent", "--fail", "--request", "PUT", f"{endpoint}/bucket"])
    return client_environment(endpoint)


def stored(log: str, name: str) -> set[str]:
    """Checkpoints of which a file has been stored completely, by the log of the store."""
    done = rf'"(?:POST \S*/(step_\d+)/{name}\?uploadId|PUT \S*/(step_\d+)/{name} HTTP)'
    return {one or other for one, other in re.findall(done, log)}


def test_a_host_that_dies_while_it_uploads_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """Resumed on the same hosts, then on one more; compared with as many processes of one machine."""
    make_data(tmp_path)
    config_file(tmp_path)
    settings = [*SETTINGS, *MIXED, "checkpoint.every_steps=3", "train.epochs=12"]
    longer = [*settings[:-1], "train.epochs=13"]
    with hosts(4, tmp_path / "logs") as four:
        environment = start_store(four, "host4")
        two, three = four.names[:2], four.names[:3]
        start(four, training(tmp_path, URI, settings), two, environment)
        wait_for(lambda: len(stored(four.log("host4"), "checkpoint.json")) == 2)
        four.block("host2", "host4")
        wait_for(lambda: bool(half_stored(four)))
        time.sleep(3)  # a request that the store is answering
        wait_for(lambda: bool(half_stored(four)))
        four.crash("host2")
        assert four.wait(240, ["host1"])["host1"] != 0
        assert half_stored(four)
        four.mend("host2")
        four.unblock("host2", "host4")
        start(four, training(tmp_path, URI, settings), two, environment)
        finish(four, two)
        assert "continuing from" in four.log("host1") + four.log("host2")
        case = {"config": f"{tmp_path}/run.toml", "data": f"{tmp_path}/data", "run_dir": f"{tmp_path}/one"}
        train_in_processes([case | {"set": settings}], tmp_path / "outcomes", 2)
        assert_same(copy(four, environment), tmp_path / "one")
        start(four, training(tmp_path, URI, longer, hosts="3"), three, environment)
        finish(four, three)
        train_in_processes([case | {"set": longer, "resume": True}], tmp_path / "outcomes", 3)
        assert_same(copy(four, environment), tmp_path / "one")


def half_stored(all_hosts: Hosts) -> set[str]:
    """Checkpoints of which rank 0's shard is stored, and rank 1's is not."""
    log = all_hosts.log("host4")
    return stored(log, "__0_0.distcp") - stored(log, "__1_0.distcp")


def copy(all_hosts: Hosts, environment: dict[str, str]) -> Path:
    """Downloads the run; returns its folder."""
    cache = {"COWREC_CACHE": str(all_hosts.log_file("reader"))}
    return Path(all_hosts.run("host1", [sys.executable, "-c", COPY], {**ENVIRONMENT, **environment, **cache}).strip())
