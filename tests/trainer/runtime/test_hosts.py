"""Runs over several hosts, which are network namespaces here: launch lines, plans, and faults of hosts and links."""

import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from run_comparison import assert_close, assert_same, lines, up_to_date, wait_for
from servers.hosts import Hosts, hosts
from servers.s3_server import client_environment
from trained_runs import data_folder
from trainer_cases import ENVIRONMENT, case_of, train_in_processes

TIMEOUT = 10
"""Seconds after which a process that keeps the others waiting counts as hung."""
SETTINGS = ["model.dropout=0.2", "train.log_every=1", f"train.timeout_seconds={TIMEOUT}"]
ENDLESS = [*SETTINGS, "train.epochs=100000", "checkpoint.every_steps=20"]
MIXED = ["sharding.plan=table_wise", 'sharding.tables={city="row_wise",tags="column_wise",history="data_parallel"}']


def launch_line(hosts: str, processes: int) -> list[str]:
    """The command of docs/train.md for several machines, up to the configuration."""
    page = (Path(__file__).parents[3] / "docs" / "train.md").read_text()
    found = re.search(r"    (torchrun --nnodes 8 (?:.+\\\n)+.+ cowrec.trainer train) CONFIG.toml", page)
    assert found
    line = found[1].replace("\\\n", " ").replace("--nnodes 8", f"--nnodes {hosts}")
    line = line.replace("--nproc-per-node 8", f"--nproc-per-node {processes}")
    return shlex.split(line.replace("HOST", "host1"))


def training(
    folder: Path,
    run_dir: Path | str,
    settings: Sequence[str],
    *,
    hosts: str = "2",
    processes: int = 1,
    restarts: int = 0,
) -> list[str]:
    command = launch_line(hosts, processes)
    if restarts:
        command[1:1] = ["--max-restarts", str(restarts)]
    command += [f"{folder}/run.toml", "--data", f"{folder}/data", "--run-dir", str(run_dir), "--resume"]
    return [*command, *(part for each in settings for part in ("--set", each))]


def start(hosts: Hosts, command: list[str], names: Sequence[str] = (), environment: Mapping[str, str] = {}) -> None:
    """Starts a run on all hosts, or on these; each has a cache of its own."""
    for name in names or hosts.names:
        own = {"COWREC_CACHE": str(hosts.log_file(name).with_suffix(".cache"))}
        hosts.start(name, command, {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **own, **environment})


def finish(hosts: Hosts, names: Sequence[str] = ()) -> None:
    """Waits until all hosts, or these, have ended without an error."""
    for name, code in hosts.wait(600, names).items():
        assert code == 0, f"{name}:\n{hosts.log(name)}"


pytestmark = pytest.mark.thorough


folder = data_folder()


def test_a_link_cut_for_seconds_changes_no_bit_of_a_run_of_two_hosts(folder: Path, tmp_path: Path) -> None:
    """With the documented launch line and four kinds of tables; compared with two processes of one machine."""
    settings = [*SETTINGS, *MIXED, "train.epochs=12"]
    with hosts(2, tmp_path / "logs") as two:
        start(two, training(folder, tmp_path / "run", settings))
        wait_for(lambda: lines(tmp_path / "run") > 10)
        two.cut("host2")
        time.sleep(5)
        two.mend("host2")
        finish(two)
    train_in_processes(case_of(folder, tmp_path / "one", *settings))
    assert_same(tmp_path / "run", tmp_path / "one")


@pytest.mark.parametrize("plan", ["table_row_wise", "row_wise", "column_wise", "data_parallel"])
def test_hosts_of_two_processes_train_as_one_process(folder: Path, tmp_path: Path, plan: str) -> None:
    settings = [f"sharding.plan={plan}"]
    with hosts(2, tmp_path / "logs") as two:
        start(two, training(folder, tmp_path / "run", settings, processes=2))
        finish(two)
    train_in_processes(case_of(folder, tmp_path / "one"), processes=1)
    assert_close(up_to_date(tmp_path / "one"), up_to_date(tmp_path / "run"), rtol=1e-4)


FAULTS = {
    "host 2 loses its power": ("crash", "host2", "host1"),
    "host 1 loses its power": ("crash", "host1", "host2"),
    "host 2 hangs": ("freeze", "host2", "host1"),
    "the link of host 2 is cut": ("cut", "host2", "host1"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_where_a_host_is_lost_the_other_ends(folder: Path, tmp_path: Path, fault: str) -> None:
    """Also where it had rank 0 and torchrun's store; with Linux's default the other would wait for a quarter hour."""
    what, whom, other = FAULTS[fault]
    with hosts(2, tmp_path / "logs") as two:
        for name in two.names:  # as docs/train.md recommends
            two.run(name, ["sh", "-c", "echo 5 > /proc/sys/net/ipv4/tcp_retries2"])
        restarts = 3 if whom == "host1" else 0  # which torchrun cannot make without its store
        start(two, training(folder, tmp_path / "run", ENDLESS, restarts=restarts))
        wait_for(lambda: lines(tmp_path / "run") > 10)
        {"crash": two.crash, "cut": two.cut, "freeze": lambda name: two.send(name, signal.SIGSTOP)}[what](whom)
        assert two.wait(600, [other])[other] != 0


def test_a_run_goes_on_with_fewer_hosts_and_takes_one_back(folder: Path, tmp_path: Path) -> None:
    """Four hosts, of which one loses its power and returns; three are enough. No step is left out or done twice."""
    run_dir = tmp_path / "run"
    command = training(folder, run_dir, ENDLESS, hosts="3:4", restarts=10)
    with hosts(4, tmp_path / "logs") as four:
        start(four, command)
        wait_for(lambda: lines(run_dir) > 60)
        four.crash("host3")
        wait_for(lambda: four.log("host1").count("continuing from") == 1)
        on_three = lines(run_dir)
        wait_for(lambda: lines(run_dir) > on_three + 60)
        four.mend("host3")
        start(four, command, ["host3"])
        wait_for(lambda: four.log("host1").count("continuing from") == 2)
        on_four = lines(run_dir)
        wait_for(lambda: lines(run_dir) > on_four + 60)
        ranks = re.findall(r"MiB on each of (\d+) ranks", four.log("host1"))
    assert ranks == ["4", "3", "4"]


URI = "s3://bucket/run"
COPY = f"from cowrec.trainer.runs.local_copy import local_copy; print(local_copy({URI!r}))"


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


def test_a_host_that_dies_while_it_uploads_leaves_the_checkpoint_before(folder: Path, tmp_path: Path) -> None:
    """Hosts share an object store alone, which is on one of them. Resumed on the same hosts, then on one more; compared
    with as many processes of one machine."""
    settings = [*SETTINGS, *MIXED, "checkpoint.every_steps=3", "train.epochs=12"]
    longer = [*settings[:-1], "train.epochs=13"]
    with hosts(4, tmp_path / "logs") as four:
        environment = start_store(four, "host4")
        two, three = four.names[:2], four.names[:3]
        start(four, training(folder, URI, settings), two, environment)
        wait_for(lambda: len(stored(four.log("host4"), "checkpoint.json")) == 2)
        four.block("host2", "host4")
        wait_for(lambda: bool(half_stored(four)))
        time.sleep(3)  # a request that the store is answering
        wait_for(lambda: bool(half_stored(four)))
        four.crash("host2")
        assert four.wait(600, ["host1"])["host1"] != 0
        assert half_stored(four)
        four.mend("host2")
        four.unblock("host2", "host4")
        start(four, training(folder, URI, settings), two, environment)
        finish(four, two)
        assert "continuing from" in four.log("host1") + four.log("host2")
        train_in_processes(case_of(folder, tmp_path / "one", *settings))
        assert_same(copy(four, environment), tmp_path / "one")
        start(four, training(folder, URI, longer, hosts="3"), three, environment)
        finish(four, three)
        train_in_processes(case_of(folder, tmp_path / "one", *longer, resume=True), processes=3)
        assert_same(copy(four, environment), tmp_path / "one")


def half_stored(all_hosts: Hosts) -> set[str]:
    """Checkpoints of which rank 0's shard is stored, and rank 1's is not."""
    log = all_hosts.log("host4")
    return stored(log, "__0_0.distcp") - stored(log, "__1_0.distcp")


def copy(all_hosts: Hosts, environment: dict[str, str]) -> Path:
    """Downloads the run; returns its folder."""
    cache = {"COWREC_CACHE": str(all_hosts.log_file("reader"))}
    return Path(all_hosts.run("host1", [sys.executable, "-c", COPY], {**ENVIRONMENT, **environment, **cache}).strip())
