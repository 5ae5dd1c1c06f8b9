"""Process groups that processes of a launcher join one after the other, on one machine and on several."""

import os

import pytest
import torch
import torch.distributed as dist

from cowrec.trainer.runtime.processes import process_group
from process_groups import in_processes
from trainer_cases import free_port, launched_as


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("store", ["torchrun's", "rank 0's"])
def test_processes_join_several_groups_in_one_store(store: str, machines: int) -> None:
    """As whoever calls train and then evaluate. Restarts of two machines' torchruns are counted separately."""
    launcher = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = launcher.port if store == "torchrun's" else free_port()
    in_processes(_join_three_groups, (port, store == "torchrun's", machines), 2)


def _join_three_groups(rank: int, port: int, of_torchrun: bool, machines: int) -> None:
    launched_as(rank, 2, port)
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(2 // machines),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHELASTIC_USE_AGENT_STORE": str(of_torchrun),
        "TORCHELASTIC_RESTART_COUNT": str(rank if machines == 2 else 3),
    }
    for timeout in (60, 120, 60):  # of train, and that of evaluate
        with process_group("cpu", timeout):
            total = torch.tensor(rank + 1)
            dist.all_reduce(total)
            assert total == 3
    os._exit(0)  # see process_groups.process_group
