"""Data sets in a real S3 server, of which each machine copies the shards that it reads."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cowrec.data_pipeline import Reader
from cowrec.data_pipeline.dataset.shards import shard_path
from cowrec.data_pipeline.remote import RemoteFolder, fetch_missing
from cowrec.trainer.runs.remote_run import cache_folder, local_data
from numbered_data import flat, ids, write_numbered
from servers.s3_server import S3Server, s3_clients

SHARDS = 6
OPTIONS: dict[str, Any] = {"batch_size": 7, "window_rows": 20, "shuffle": True}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_clients() as server:
        yield server


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_numbered(tmp_path / "data", 60, 10, lists=True)


@pytest.fixture
def uri(server: S3Server, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The data set in the store, where nothing of it has been copied to this machine."""
    monkeypatch.setenv("COWREC_CACHE", str(tmp_path / "cache"))
    place = f"s3://bucket/{tmp_path.name}"
    RemoteFolder(place).upload(data, [str(each.relative_to(data)) for each in data.rglob("*") if each.is_file()])
    return place


def fetched(folder: Path) -> set[int]:
    """Numbers of the training shards in a copy, which has no file in part."""
    assert not list(folder.rglob("*.partial"))
    return {int(each.stem) for each in (folder / "train").glob("*")}


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
    for rows, number, problem in (
        (range(20, 30), 2, "is missing, though 'test''s schema.json"),
        (range(40, 50), 4, "is damaged"),
    ):
        with pytest.raises(ValueError, match=f"{shard_path(copy, 'train', number)} {problem}"):
            list(Reader(copy, "train", rows=rows, batch_size=10).epoch(0))
    with pytest.raises(OSError, match=r"train/00001\.parquet has changed since this run began"):
        list(Reader(copy, "train", rows=range(10, 20), batch_size=10).epoch(0))
    with pytest.raises(ValueError, match=r"data set s3://bucket/none does not exist, or is empty"):
        local_data("s3://bucket/none")
    assert not (cache_folder("s3://bucket/none") / "train").exists()


def test_readers_that_need_a_shard_at_once_have_it_complete(uri: str, data: Path) -> None:
    copy, name = local_data(uri), "train/00001.parquet"
    (copy / "train").mkdir(exist_ok=True)
    (copy / f"{name}.partial").write_bytes(b"of a process that was killed" * 1000)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: fetch_missing(copy, name), range(8)))
    assert (copy / name).read_bytes() == (data / name).read_bytes()
    assert fetched(copy) == {1}
