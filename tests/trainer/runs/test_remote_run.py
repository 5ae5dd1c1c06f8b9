"""Runs, exports and their copies in a real S3 server, against the same in local folders."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

from cowrec.data_pipeline.remote import RemoteFolder
from cowrec.trainer.config.run import load_config
from cowrec.trainer.export.export import export_run
from cowrec.trainer.export.manifest import Manifest
from cowrec.trainer.runs.remote_run import RunPlace, cache_folder, local_copy
from cowrec.trainer.training.loop import train
from cowrec.trainer.training.saved_run import evaluate_run
from run_comparison import same
from servers.s3_server import S3Server, s3_clients
from trainer_cases import checkpoint, config_file, interrupted, make_data

OFTEN = ["checkpoint.every_steps=3", "checkpoint.keep_last=2"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_clients() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("COWREC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    make_data(folder, ("price", "city"))
    config_file(folder)
    run(folder, folder / "local")
    return folder


def run(folder: Path, place: str | Path, *, resume: bool = False) -> dict[str, Any]:
    return train(load_config(folder / "run.toml", OFTEN), folder / "data", place, resume=resume)


def stored(server: S3Server, path: str) -> set[str]:
    found = server.files().get_file_info(pafs.FileSelector(path, recursive=True))
    return {each.path.removeprefix(f"{path}/") for each in found if each.type == pafs.FileType.File}


def files(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


def test_a_run_in_an_object_store_equals_a_local_one(folder: Path, server: S3Server) -> None:
    uri, data = "s3://bucket/runs/whole", "s3://bucket/data"
    RemoteFolder(data).upload(folder / "data", sorted(files(folder / "data")))
    config = load_config(folder / "run.toml", OFTEN)
    train(config, data, uri)
    copy = local_copy(uri, "run")
    assert same(checkpoint(copy), checkpoint(folder / "local"))
    one, other = (
        {name.partition(".tfevents")[0] for name in names}  # followed by the time and the process
        for names in (stored(server, "bucket/runs/whole"), files(folder / "local"))
    )
    assert one | {"checkpoint.pt"} == other | {"checkpoint.pt"}  # which `checkpoint` writes
    assert evaluate_run(copy, data) == evaluate_run(folder / "local", folder / "data")
    with pytest.raises(ValueError, match=r"data set s3://bucket/none does not exist, or is empty"):
        evaluate_run(copy, "s3://bucket/none")
    with pytest.raises(ValueError, match=r"folder s3://bucket/runs/whole is not empty; continue its run with --resume"):
        run(folder, uri)


def test_a_run_continues_on_a_machine_without_a_copy(folder: Path, server: S3Server, tmp_path: Path) -> None:
    uri = "s3://bucket/runs/continued"
    early = interrupted(folder / "local", 9, tmp_path / "early")
    place = RunPlace(uri, resume=False)
    shutil.copytree(early, place.folder, dirs_exist_ok=True)
    place.push()
    assert "checkpoints/step_000000009/checkpoint.json" in stored(server, "bucket/runs/continued")
    shutil.rmtree(cache_folder(uri, "training-"))
    report = run(folder, uri, resume=True)
    assert report["steps"] == 10
    assert same(checkpoint(local_copy(uri)), checkpoint(folder / "local"))
    # A checkpoint that the run no longer keeps is gone there too.
    overrides = ["checkpoint.every_steps=3", "checkpoint.keep_last=1", "train.epochs=3"]
    train(load_config(folder / "run.toml", overrides), folder / "data", uri, resume=True)
    kept = {name.split("/")[1] for name in stored(server, "bucket/runs/continued") if name.startswith("checkpoints/")}
    assert kept == {"step_000000015"}


def test_an_export_is_copied_with_its_manifest_last(folder: Path, server: S3Server) -> None:
    manifest = export_run(folder / "local", "s3://bucket/exports/one")
    assert stored(server, "bucket/exports/one") == {*manifest.files, "manifest.json"}
    assert Manifest.load(local_copy("s3://bucket/exports/one", "export")) == manifest
    with pytest.raises(ValueError, match=r"s3://bucket/exports/one is not empty"):
        export_run(folder / "local", "s3://bucket/exports/one")
    with pytest.raises(ValueError, match=r"export s3://bucket/exports/none does not exist, or is empty"):
        local_copy("s3://bucket/exports/none", "export")
