"""Runs over several hosts, which are network namespaces here: launch lines, plans, and faults of hosts and links."""

import re
import signal
import time
from pathlib import Path

import pytest
import torch

from run_comparison import assert_same, lines, wait_for
from servers.host_runs import ENDLESS, MIXED, SETTINGS, finish, start, training
from servers.hosts import hosts
from trainer_cases import case_folder, checkpoint, tensors, train_in_processes

pytestmark = pytest.mark.thorough

NAMED_WITHIN = 60.0
"""Seconds in which a lost host is named: that, the wait for heartbeats and for the store, and a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case_folder(tmp_path_factory, "hosts")


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


OF_RANK_1 = r"no heartbeat from rank 1 on host2 \(last heartbeat at"
OF_RANK_0 = "rank 0 on host1 (has ended, or its machine )?does not answer"
FAULTS = {
    "host 2 loses its power": ("crash", "host2", "host1", OF_RANK_1),
    "host 1 loses its power": ("crash", "host1", "host2", OF_RANK_0),
    "host 2 hangs": ("freeze", "host2", "host1", OF_RANK_1),
    "the link of host 2 is cut": ("cut", "host2", "host1", OF_RANK_1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_host_is_named_and_the_other_ends(folder: Path, tmp_path: Path, fault: str) -> None:
    """Also where it had rank 0 and torchrun's store; with Linux's default the other would wait for a quarter hour."""
    what, whom, other, message = FAULTS[fault]
    with hosts(2, tmp_path / "logs") as two:
        for name in two.names:  # as docs/train.md recommends
            two.run(name, ["sh", "-c", "echo 5 > /proc/sys/net/ipv4/tcp_retries2"])
        restarts = 3 if whom == "host1" else 0  # which torchrun cannot make without its store
        start(two, training(folder, tmp_path / "run", ENDLESS, restarts=restarts))
        wait_for(lambda: lines(tmp_path / "run") > 10)
        {"crash": two.crash, "cut": two.cut, "freeze": lambda name: two.send(name, signal.SIGSTOP)}[what](whom)
        wait_for(lambda: bool(re.search(message, two.log(other))), NAMED_WITHIN)
        assert two.wait(240, [other])[other] != 0


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
        ranks = re.findall(r"MiB on each of (\d+) ranks", four.log("host1"))
    assert ranks == ["4", "3", "4"]
