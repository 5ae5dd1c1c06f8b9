"""Runs in an object store of processes that share no folder, against runs of processes of one machine."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from cowrec.trainer.runs.remote_run import local_copy
from process_groups import in_processes
from run_comparison import assert_same
from servers.s3_server import S3Server, s3_clients
from trainer_cases import config_file, free_port, launched_as, make_data, train_case, train_in_processes

TABLES = 'sharding.tables={city="row_wise"}'
SETTINGS = ["checkpoint.every_steps=3", "checkpoint.keep_last=2", TABLES]
PATH = "bucket/runs/separate"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_clients() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COWREC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield server


def train_on_hosts(folder: Path, server: S3Server, count: int, settings: list[str]) -> list[str]:
    """Trains or resumes with a process on each host; returns the outcomes. ``folder/cacheN`` has a host's copies."""
    case = {"config": f"{folder}/run.toml", "data": f"{folder}/data", "run_dir": f"s3://{PATH}", "set": settings}
    in_processes(_train_on_host, (case | {"resume": True}, folder, server.environment, free_port(), count), count)
    return [(folder / f"outcome{rank}").read_text() for rank in range(count)]


def _train_on_host(
    rank: int, case: dict[str, object], folder: Path, environment: dict[str, str], port: int, count: int
) -> None:
    launched_as(rank, count, port)
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {**environment, **alone, "COWREC_CACHE": f"{folder}/cache{rank}"}
    logging.basicConfig(filename=folder / "log", level=logging.INFO, force=True)
    (folder / f"outcome{rank}").write_text(train_case(case))


def names(server: S3Server) -> set[str]:
    selector = pafs.FileSelector(PATH, recursive=True)
    found = server.files().get_file_info(selector)
    return {each.path.removeprefix(f"{PATH}/") for each in found if each.type == pafs.FileType.File}


def shards(found: Iterator[Path]) -> set[str]:
    return {each.name for each in found if each.suffix == ".distcp"}


def test_hosts_that_share_no_folder_train_and_resume(server: S3Server, tmp_path: Path) -> None:
    """Also with a missing shard; compared with a run of as many processes in one folder."""
    make_data(tmp_path, ("price", "city"))
    config_file(tmp_path)
    case = {"config": f"{tmp_path}/run.toml", "data": f"{tmp_path}/data", "run_dir": f"{tmp_path}/run", "set": SETTINGS}
    train_in_processes([case], tmp_path / "outcomes", 2)

    assert train_on_hosts(tmp_path, server, 2, SETTINGS) == ["ok", "ok"]
    assert_same(local_copy(f"s3://{PATH}"), tmp_path / "run")
    written = {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    manifest = json.loads((local_copy(f"s3://{PATH}") / "checkpoints/step_000000010/checkpoint.json").read_text())
    assert manifest["files"].keys() == written
    kept = {each.split("/")[1] for each in names(server) if each.startswith("checkpoints/")}
    assert kept == {"step_000000009", "step_000000010"}
    assert shards(tmp_path.glob("cache*/**/*")) == set()

    server.files().delete_file(f"{PATH}/checkpoints/step_000000010/__1_0.distcp")
    assert train_on_hosts(tmp_path, server, 2, SETTINGS) == ["ok", "ok"]
    log = (tmp_path / "log").read_text()
    assert "step_000000010 is damaged: it has no __1_0.distcp; taking /" in log
    assert_same(local_copy(f"s3://{PATH}"), tmp_path / "run")
