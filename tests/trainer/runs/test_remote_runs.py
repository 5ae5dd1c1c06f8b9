"""Data sets, runs and exports in a real S3 server, against the same in local folders."""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
import torch

from commands.command_line import Cowrec
from cowrec.data_pipeline import Reader
from cowrec.data_pipeline.dataset.shards import shard_path
from cowrec.data_pipeline.remote import RemoteFolder, fetch_missing
from cowrec.trainer import evaluate, export_model, load_config, train
from cowrec.trainer.config.sections import CheckpointConfig
from cowrec.trainer.export.manifest import Manifest
from cowrec.trainer.runs.checkpoint import Checkpoints, Progress, list_checkpoints
from cowrec.trainer.runs.local_copy import RunPlace, cache_folder, local_copy, local_data
from cowrec.trainer.runtime.processes import Process
from numbered_data import flat, ids, write_numbered
from process_groups import in_processes, process_group
from refusal import refused
from run_comparison import assert_same, wait_for
from servers.s3_server import S3Server, s3_clients
from trained_runs import make_folder
from trainer_cases import case_of, free_port, interrupted, launched_as, train_case, train_in_processes

OFTEN = ["checkpoint.every_steps=3", "checkpoint.keep_last=2"]
OPTIONS: dict[str, Any] = {"batch_size": 7, "window_rows": 20, "shuffle": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_clients() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COWREC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield server


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "data", 60, 10, lists=True)


@pytest.fixture
def uri(server: S3Server, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The data set in the store, where nothing of it has been copied to this machine."""
    monkeypatch.setenv("COWREC_CACHE", str(tmp_path / "cache"))
    place = f"s3://bucket/{tmp_path.name}"
    RemoteFolder(place).upload(data, sorted(files(data)))
    return place


def fetched(folder: Path) -> set[int]:
    """Numbers of the training shards in a copy, which has no file in part."""
    assert not list(folder.rglob("*.partial"))
    return {int(path.stem) for path in (folder / "train").glob("*")}


def test_a_shard_is_copied_when_it_is_read_and_kept(uri: str, data: Path) -> None:
    copy = local_data(uri)
    assert fetched(copy) == set()
    assert ids(Reader(copy, "train", rows=range(20), batch_size=10)) == [list(range(10)), list(range(10, 20))]
    assert fetched(copy) == {0, 1}
    kept = shard_path(copy, "train", 0).stat().st_ino
    assert local_data(uri) == copy
    assert sorted(flat(ids(Reader(copy, "train", **OPTIONS)))) == list(range(60))
    assert shard_path(copy, "train", 0).stat().st_ino == kept


def test_a_shard_that_has_changed_is_copied_again(uri: str, tmp_path: Path) -> None:
    copy = local_data(uri)
    list(Reader(copy, "train", **OPTIONS).epoch(0))
    other = write_numbered(tmp_path / "other", 60, 10, lists=True, labelled=False)
    RemoteFolder(uri).upload(other, ["train/00003.parquet"])
    RemoteFolder(uri).remove(["train/00005.parquet"])
    assert fetched(local_data(uri)) == {0, 1, 2, 4}
    labels = torch.cat([batch.label for batch in Reader(copy, "train", rows=range(50), batch_size=10).epoch(0)])
    assert labels.isnan().nonzero().flatten().tolist() == list(range(30, 40))


def test_a_missing_or_damaged_shard_is_refused_as_in_a_folder(uri: str, tmp_path: Path) -> None:
    """And so is one that has changed in the store since the copy was made, which would mix two data sets."""
    RemoteFolder(uri).write("train/00004.parquet", b"PAR1 and no more")
    copy = local_data(uri)
    RemoteFolder(uri).remove(["train/00002.parquet"])
    RemoteFolder(uri).write("train/00001.parquet", RemoteFolder(uri).read("train/00003.parquet"))
    for number, problem in ((2, "is missing, though 'test''s schema.json"), (4, "is damaged")):
        reader = Reader(copy, "train", rows=range(10 * number, 10 * number + 10), batch_size=10)
        with pytest.raises(ValueError, match=f"{shard_path(copy, 'train', number)} {problem}"):
            list(reader.epoch(0))
    with pytest.raises(OSError, match=r"train/00001\.parquet has changed since this run began"):
        list(Reader(copy, "train", rows=range(10, 20), batch_size=10).epoch(0))
    refused(r"data set s3://bucket/none does not exist, or is empty", local_data, "s3://bucket/none")
    assert not (cache_folder("s3://bucket/none") / "train").exists()


def test_readers_that_need_a_shard_at_once_have_it_complete(uri: str, data: Path) -> None:
    copy, name = local_data(uri), "train/00001.parquet"
    (copy / "train").mkdir(exist_ok=True)
    (copy / f"{name}.partial").write_bytes(b"of a process that was killed" * 1000)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: fetch_missing(copy, name), range(8)))
    assert (copy / name).read_bytes() == (data / name).read_bytes()
    assert fetched(copy) == {1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("remote"), ("price", "city"))
    run(folder, folder / "local")
    return folder


def run(folder: Path, place: str | Path, *more: str, resume: bool = False) -> dict[str, Any]:
    return train(load_config(folder / "run.toml", [*OFTEN, *more]), folder / "data", place, resume=resume)


def stored(server: S3Server, path: str) -> set[str]:
    found = server.files().get_file_info(pafs.FileSelector(path, recursive=True))
    return {file.path.removeprefix(f"{path}/") for file in found if file.type == pafs.FileType.File}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_run_in_an_object_store_equals_a_local_one(folder: Path, server: S3Server, cowrec: Cowrec) -> None:
    uri, data = "s3://bucket/runs/whole", "s3://bucket/data"
    RemoteFolder(data).upload(folder / "data", sorted(files(folder / "data")))
    train(load_config(folder / "run.toml", OFTEN), data, uri)
    copy = local_copy(uri, "run")
    assert_same(copy, folder / "local")
    both = [stored(server, "bucket/runs/whole"), files(folder / "local")]
    one, other = ({name.partition(".tfevents")[0] for name in names} for names in both)  # then time and process
    assert one == other
    assert evaluate(copy, data) == evaluate(folder / "local", folder / "data")
    shutil.rmtree(cache_folder(uri))
    code, printed, _ = cowrec("plot", uri, folder / "local", "--output", folder / "runs.png")
    assert (code, files(cache_folder(uri))) == (0, {"metrics.jsonl"})
    whole, local = (line.split() for line in printed.splitlines() if line.startswith(("whole", "local")))
    assert whole[1:-1] == local[1:-1], "all but the speed"
    warm = [
        run(folder, folder / f"warm{n}", f"train.warm_start={place}") for n, place in enumerate((uri, folder / "local"))
    ]
    assert warm[0]["auc"] == warm[1]["auc"] != evaluate(copy, data)["auc"]
    refused(r"data set s3://bucket/none does not exist, or is empty", evaluate, copy, "s3://bucket/none")
    refused(r"folder s3://bucket/runs/whole is not empty; continue its run with --resume", run, folder, uri)


def test_a_run_continues_on_a_machine_without_a_copy(folder: Path, server: S3Server, tmp_path: Path) -> None:
    uri = "s3://bucket/runs/continued"
    early = interrupted(folder / "local", 9, tmp_path / "early")
    place = RunPlace(uri, resume=False)
    shutil.copytree(early, place.folder, dirs_exist_ok=True)
    place.push()
    assert "checkpoints/step_000000009/checkpoint.json" in stored(server, "bucket/runs/continued")
    shutil.rmtree(cache_folder(uri, "training-"))
    assert run(folder, uri, resume=True)["steps"] == 10
    assert_same(local_copy(uri), folder / "local")
    # A checkpoint that the run no longer keeps is gone there too.
    run(folder, uri, "checkpoint.keep_last=1", "train.epochs=3", resume=True)
    kept = {name.split("/")[1] for name in stored(server, "bucket/runs/continued") if name.startswith("checkpoints/")}
    assert kept == {"step_000000015"}


def test_a_run_that_could_not_be_uploaded_continues_from_its_copy(
    folder: Path, server: S3Server, tmp_path: Path
) -> None:
    """The bucket is missing from the first epoch's end on; then it is there, as it was."""
    owner = pafs.S3FileSystem(
        access_key="test", secret_key="test", region="us-east-1", endpoint_override=server.endpoint,
        allow_bucket_creation=True, allow_bucket_deletion=True,
    )  # fmt: skip
    uri, place = "s3://late/run", tmp_path / "before"

    def after_epoch(end: dict[str, Any]) -> bool:
        if end["epoch"] == 1:
            wait_for(lambda: "checkpoints/step_000000005/checkpoint.json" in RemoteFolder(uri).list())
            RemoteFolder(uri).download(place)
            owner.delete_dir("late")
        return False

    owner.create_dir("late")
    config = load_config(folder / "run.toml", ["train.epochs=3", "checkpoint.keep_last=9", "checkpoint.every_steps=0"])
    message = (
        r"the checkpoint of step 15 is complete in .*step_000000015, but could not be uploaded .*;"
        " when the object store answers, train with --resume on this machine$"
    )
    refused(message, train, config, folder / "data", uri, after_epoch=after_epoch)
    owner.create_dir("late")
    RemoteFolder(uri).upload(place, sorted(files(place)))
    assert not any("step_000000015" in name for name in files(place))
    report = train(config, folder / "data", uri, resume=True)
    assert (report["steps"], "step_000000015" in " ".join(stored(server, "late/run"))) == (15, True)
    train(config, folder / "data", tmp_path / "local")
    assert_same(local_copy(uri), tmp_path / "local")


def test_an_export_is_copied_with_its_manifest_last(folder: Path, server: S3Server) -> None:
    manifest = export_model(folder / "local", "s3://bucket/exports/one")
    assert stored(server, "bucket/exports/one") == {*manifest.files, "manifest.json"}
    assert Manifest.load(local_copy("s3://bucket/exports/one", "export")) == manifest
    refused(r"s3://bucket/exports/one is not empty", export_model, folder / "local", "s3://bucket/exports/one")
    with pytest.raises(ValueError, match=r"export s3://bucket/exports/none does not exist, or is empty"):
        local_copy("s3://bucket/exports/none", "export")


SETTINGS = [*OFTEN, 'sharding.tables={city="row_wise"}']
PATH = "bucket/runs/separate"


def train_on_hosts(folder: Path, server: S3Server, count: int, settings: list[str], path: str = PATH) -> list[str]:
    """Trains or resumes with a process on each host; returns the outcomes. ``folder/cacheN`` has a host's copies."""
    case = case_of(folder, f"s3://{path}", *settings, resume=True)
    return outcomes_on_hosts(folder, [case] * count, server.environment)


def outcomes_on_hosts(folder: Path, cases: list[dict[str, Any]], environment: dict[str, str]) -> list[str]:
    """Runs the case of each host, in a process of its own; returns the outcomes."""
    count = len(cases)
    in_processes(_train_on_host, (cases, folder, environment, free_port(), count), count)
    return [(folder / f"outcome{rank}").read_text() for rank in range(count)]


def _train_on_host(rank: int, cases: list[Any], folder: Path, environment: dict, port: int, count: int) -> None:
    launched_as(rank, count, port)
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {**environment, **alone, "COWREC_CACHE": f"{folder}/cache{rank}"}
    logging.basicConfig(filename=folder / "log", level=logging.INFO, force=True)
    (folder / f"outcome{rank}").write_text(train_case(cases[rank]))


@pytest.mark.thorough
def test_hosts_that_share_no_folder_train_and_resume(server: S3Server, tmp_path: Path) -> None:
    """Also with a missing shard; compared with a run of as many processes in one folder."""
    make_folder(tmp_path, ("price", "city"))
    train_in_processes(case_of(tmp_path, tmp_path / "run", *SETTINGS))
    assert train_on_hosts(tmp_path, server, 2, SETTINGS) == ["ok", "ok"]
    assert_same(local_copy(f"s3://{PATH}"), tmp_path / "run")
    manifest = json.loads((local_copy(f"s3://{PATH}") / "checkpoints/step_000000010/checkpoint.json").read_text())
    assert manifest["files"].keys() == {"__0_0.distcp", "__1_0.distcp", ".metadata"}
    kept = {name.split("/")[1] for name in stored(server, PATH) if name.startswith("checkpoints/")}
    assert kept == {"step_000000009", "step_000000010"}
    assert not list(tmp_path.glob("cache*/**/*.distcp"))

    server.files().delete_file(f"{PATH}/checkpoints/step_000000010/__1_0.distcp")
    assert train_on_hosts(tmp_path, server, 2, SETTINGS) == ["ok", "ok"]
    log = (tmp_path / "log").read_text()
    assert "step_000000010 is damaged: it has no __1_0.distcp; taking /" in log
    assert_same(local_copy(f"s3://{PATH}"), tmp_path / "run")


@pytest.mark.thorough
def test_hosts_with_run_folders_of_their_own_are_refused(tmp_path: Path) -> None:
    """Each would write the shards of its processes only; hosts that share the folder train."""
    make_folder(tmp_path, ("price", "city"))
    own = [case_of(tmp_path, tmp_path / f"host{rank}" / "run") for rank in range(2)]
    for outcome in outcomes_on_hosts(tmp_path, own, {}):
        assert re.search("run folder .*host0/run is not shared: files of the processes 1 are not there; .* s3", outcome)
    assert not list(tmp_path.glob("host*/*"))
    shared = [case_of(tmp_path, tmp_path / "shared")] * 2
    assert outcomes_on_hosts(tmp_path, shared, {}) == ["ok", "ok"]
    assert not list((tmp_path / "shared").glob("*.partial"))


def test_a_checkpoint_without_a_shard_is_not_sealed(tmp_path: Path) -> None:
    """Something removes a shard, or another host has it, while the checkpoint is being written."""
    one = Process(0, 1, 1, False, torch.device("cpu"))
    with process_group(0, 1, str(tmp_path)):
        checkpoints = Checkpoints(RunPlace(tmp_path / "run", resume=True), CheckpointConfig(), one)
        state = {"weight": torch.ones(3)}
        checkpoints.save(state, Progress(1), {})
        checkpoints.save(state, Progress(2), {}, lambda partial: (partial / "__0_0.distcp").unlink())
        refused("step 2 could not be written .*lacks __0_0.distcp.* good checkpoint is .*0001", checkpoints.finish)
    assert checkpoints.failures == 1
    assert [checkpoint.name for checkpoint in list_checkpoints(checkpoints.folder)] == ["step_000000001"]
