"""Runs over several hosts, started with the launch line of the documentation."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from servers.hosts import Hosts
from trainer_cases import ENVIRONMENT

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
