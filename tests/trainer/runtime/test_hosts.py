"""Runs over several hosts, which are network namespaces here: launch lines, plans, and faults of hosts and links."""

import re
import shlex
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from run_comparison import assert_same, lines, wait_for
from servers.hosts import Hosts, hosts
from trainer_cases import ENVIRONMENT, checkpoint, config_file, make_data, tensors, train_in_processes

pytestmark = pytest.mark.thorough

TIMEOUT = 10
"""Seconds after which a process that keeps the others waiting counts as hung."""
NAMED_WITHIN = 60.0
"""Seconds in which a lost host is named: that, the wait for heartbeats and for the store, and a busy machine."""
SETTINGS = ["model.dropout=0.2", "train.log_every=1", f"train.timeout_seconds={TIMEOUT}"]
ENDLESS = [*SETTINGS, "train.epochs=100000", "checkpoint.every_steps=20"]
MIXED = ["sharding.plan=table_wise", 'sharding.tables={city="row_wise",tags="column_wise",history="data_parallel"}']


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    make_data(folder)
    config_file(folder)
    return folder


def launch_line(hosts: str, processes: int) -> list[str]:
    """The command of docs/scaling.md for several machines, up to the configuration."""
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()
    found = re.search(r"    (torchrun --nnodes 8 (?:.+\\\n)+.+ cowrec.trainer train) CONFIG.toml", page)
    assert found
    line = found[1].replace("\\\n", " ").replace("--nnodes 8", f"--nnodes {hosts}")
    line = line.replace("--nproc-per-node 8", f"--nproc-per-node {processes}")
    return shlex.split(line.replace("HOST", "host1"))


def training(
    folder: Path, run_dir: Path, settings: Sequence[str], *, hosts: str = "2", processes: int = 1, restarts: int = 0
) -> list[str]:
    command = launch_line(hosts, processes)
    if restarts:
        command[1:1] = ["--max-restarts", str(restarts)]
    command += [f"{folder}/run.toml", "--data", f"{folder}/data", "--run-dir", str(run_dir), "--resume"]
    return [*command, *(part for each in settings for part in ("--set", each))]


def start(hosts: Hosts, command: list[str], names: Sequence[str] = ()) -> None:
    for name in names or hosts.names:
        hosts.start(name, command, {**ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def finish(hosts: Hosts) -> None:
    for name, code in hosts.wait(seconds=240).items():
        assert code == 0, f"{name}:\n{hosts.log(name)}"


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
    case = {"config": f"{folder}/run.toml", "data": f"{folder}/data", "run_dir": f"{tmp_path}/one", "set": settings}
    train_in_processes([case], tmp_path / "outcomes", 2)
    assert_same(tmp_path / "run", tmp_path / "one")


def weights_and_moments(run_dir: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint, without the states of the processes' random number generators."""
    return {key: value for key, value in tensors(checkpoint(run_dir)).items() if value.is_floating_point()}


@pytest.mark.parametrize("plan", ["table_row_wise", "row_wise", "column_wise", "data_parallel"])
def test_hosts_of_two_processes_train_as_one_process(folder: Path, tmp_path: Path, plan: str) -> None:
    settings = [f"sharding.plan={plan}"]
    with hosts(2, tmp_path / "logs") as two:
        start(two, training(folder, tmp_path / "run", settings, processes=2))
        finish(two)
    case = {"config": f"{folder}/run.toml", "data": f"{folder}/data", "run_dir": f"{tmp_path}/one", "set": []}
    train_in_processes([case], tmp_path / "outcomes", 1)
    found, expected = weights_and_moments(tmp_path / "run"), weights_and_moments(tmp_path / "one")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].allclose(value, rtol=1e-4, atol=1e-6), key


FAULTS = {
    "host 2 loses its power": ("crash", "host2", "host1", r"no heartbeat from rank 1 on host2 \(last heartbeat at"),
    "host 1 loses its power": ("crash", "host1", "host2", "the machine of rank 0 on host1 does not answer"),
    "host 2 hangs": ("freeze", "host2", "host1", r"no heartbeat from rank 1 on host2 \(last heartbeat at"),
    "the link of host 2 is cut": ("cut", "host2", "host1", r"no heartbeat from rank 1 on host2 \(last heartbeat at"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_host_is_named(folder: Path, tmp_path: Path, fault: str) -> None:
    what, whom, other, message = FAULTS[fault]
    with hosts(2, tmp_path / "logs") as two:
        start(two, training(folder, tmp_path / "run", ENDLESS))
        wait_for(lambda: lines(tmp_path / "run") > 10)
        {"crash": two.crash, "cut": two.cut, "freeze": lambda name: two.send(name, signal.SIGSTOP)}[what](whom)
        wait_for(lambda: bool(re.search(message, two.log(other))), NAMED_WITHIN)


def test_a_run_goes_on_with_fewer_hosts_and_takes_one_back(folder: Path, tmp_path: Path) -> None:
    """Four hosts, of which one loses its power and returns; three are enough. No step is left out or done twice."""
    run_dir = tmp_path / "run"
    command = training(folder, run_dir, ENDLESS, hosts="3:4", restarts=10)
    with hosts(4, tmp_path / "logs") as four:
        start(four, command)
        wait_for(lambda: lines(run_dir) > 60)
        four.crash("host3")
        wait_for(lambda: four.log("host1").count("continuing from") == 1, 240.0)
        on_three = lines(run_dir)
        wait_for(lambda: lines(run_dir) > on_three + 60)
        four.mend("host3")
        start(four, command, ["host3"])
        wait_for(lambda: four.log("host1").count("continuing from") == 2, 240.0)
        on_four = lines(run_dir)
        wait_for(lambda: lines(run_dir) > on_four + 60)
        ranks = re.findall(r"weights, MiB by rank: (.*)", four.log("host1"))
    assert [len(each.split(",")) for each in ranks] == [4, 3, 4]
