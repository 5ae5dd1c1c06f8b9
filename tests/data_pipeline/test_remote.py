"""Places by URI, against a real S3 server."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cowrec.data_pipeline.remote import RemoteFolder, is_remote, local_path, open_filesystem, require_local
from servers.s3_server import S3Server, s3_clients


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_clients() as server:
        yield server


def test_places_are_recognized(tmp_path: Path) -> None:
    assert all(map(is_remote, ("s3://bucket/run", "gs://bucket", "hdfs://host:9000/data")))
    assert not any(map(is_remote, ("runs/s3", tmp_path, f"file://{tmp_path}")))
    assert local_path(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert local_path("data/criteo") == Path("data/criteo")
    with pytest.raises(ValueError, match=r"ftp://host/x: scheme 'ftp' is not supported; use a path, s3://"):
        is_remote("ftp://host/x")
    with pytest.raises(ValueError, match=r"was a URI before it became a path"):
        is_remote(Path("s3://bucket/run"))
    with pytest.raises(ValueError, match=r"journal s3://b/x must be a local folder: it is appended to"):
        require_local("s3://b/x", "journal", "it is appended to")


def test_a_folder_is_copied_to_the_store_and_back(server: S3Server, tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    content = {"a.txt": b"first", "deep/b.bin": os.urandom(9 << 20), "deep/empty": b""}
    for name, data in content.items():
        (one / name).parent.mkdir(parents=True, exist_ok=True)
        (one / name).write_bytes(data)
    remote = RemoteFolder("s3://bucket/some/run/")
    assert remote.list() == {}
    remote.upload(one, list(content))
    assert {name: found.size for name, found in remote.list().items()} == {n: len(d) for n, d in content.items()}
    assert remote.list(within="deep").keys() == {"deep/b.bin", "deep/empty"}
    remote.download(other, lambda name: name != "a.txt")
    remote.download(other)
    assert {str(each.relative_to(other)): each.read_bytes() for each in other.rglob("*") if each.is_file()} == content
    # Equal files are not copied again.
    kept = (other / "deep/b.bin").stat().st_ino
    remote.write("a.txt", b"changed")
    remote.download(other)
    assert (other / "a.txt").read_bytes() == remote.read("a.txt") == b"changed"
    assert (other / "deep/b.bin").stat().st_ino == kept
    remote.remove(["deep/b.bin", "never"])
    assert remote.list().keys() == {"a.txt", "deep/empty"}
    with pytest.raises(FileNotFoundError, match=r"s3://bucket/some/run/never does not exist"):
        remote.read("never")


def test_errors_name_the_place(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=r"s3://no-such-bucket/run"):
        RemoteFolder("s3://no-such-bucket/run").write("a", b"")
    with pytest.raises(ValueError, match=r"s3://bucket/\?nonsense=1 cannot be opened: .*nonsense"):
        open_filesystem("s3://bucket/?nonsense=1")
