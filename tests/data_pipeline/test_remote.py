"""Places by URI, against a real S3 server; URLs are shown without their credentials, in errors of libraries too."""

import os
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from commands.command_line import exit_code
from cowrec.data_pipeline.remote import RemoteFolder, is_remote, local_path, open_filesystem, require_local
from cowrec.data_pipeline.streams.open import open_source
from cowrec.trainer.publishing.target import open_target
from cowrec.urls import without_credentials
from refusal import refused
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
    refused(r"ftp://host/x: scheme 'ftp' is not supported; use a path, s3://", is_remote, "ftp://host/x")
    refused(r"was a URI before it became a path", is_remote, Path("s3://bucket/run"))
    for place in ("file://data/criteo", "file:///data/my set", "file:///data/50%"):
        refused(rf"{place} is no valid URI .*write three slashes, file:///folder, and %20", local_path, place)
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
    assert {str(path.relative_to(other)): path.read_bytes() for path in other.rglob("*") if path.is_file()} == content
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


def test_an_object_whose_name_leads_out_of_the_folder_is_not_copied(server: S3Server, tmp_path: Path) -> None:
    """Whoever may write to a bucket can choose such names, though not with pyarrow."""
    remote = RemoteFolder("s3://bucket/untrusted/export")
    client = boto3.client("s3", endpoint_url=server.endpoint)
    for name in ("taken", "untrusted/export/manifest.json", "untrusted/export/deep/../../../taken"):
        client.put_object(Bucket="bucket", Key=name, Body=b"{}")
    with pytest.raises(OSError, match=r's3://bucket/untrusted/export has an object "deep/../../../taken", which would'):
        remote.download(tmp_path / "a" / "copy")
    assert list(tmp_path.iterdir()) == []


def test_errors_name_the_place(server: S3Server) -> None:
    with pytest.raises(OSError, match=r"s3://no-such-bucket/run"):
        RemoteFolder("s3://no-such-bucket/run").write("a", b"")
    refused(r"s3://bucket/\?nonsense=1 cannot be opened: .*nonsense", open_filesystem, "s3://bucket/?nonsense=1")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0?stream=clicks", "redis://host:6379/0?stream=clicks"),
        ("redis://user:hush@host/0?stream=a&password=hush", "redis://***@host/0?stream=a&password=***"),
        ("kafka://a:1,b:2/topic?sasl.password=hush&acks=1", "kafka://a:1,b:2/topic?sasl.password=***&acks=1"),
        ("s3://KEY:hu/sh@bucket/x?region=eu", "s3://***@bucket/x?region=eu"),
        ("hdfs://host:9000/a@b", "hdfs://host:9000/a@b"),
        ("data/a:b@c", "data/a:b@c"),
    ],
)
def test_credentials_are_hidden(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


@pytest.mark.parametrize(
    ("opening", "url"),
    [
        (open_source, "redis://:hush@host/0"),  # without a stream
        (open_source, "kafka://user:hush@host/topic"),
        (open_source, "http://:hush@host"),
        (open_target, "redis://:hu#sh@host/0"),
        (open_target, "redis://:hush@host/0?nonsense=1"),
        (open_target, "ftp://user:hush@host"),
        (is_remote, "s3://KEY:hu/sh@bucket"),
    ],
)
def test_errors_do_not_show_credentials(opening, url: str) -> None:
    with pytest.raises(ValueError, match=r"\*\*\*@") as caught:
        opening(url)
    assert not any(part in str(caught.value) for part in ("hu/", "hu#", "hush", "sh@", "'hu"))
    assert caught.value.__suppress_context__ or not caught.value.__context__


def test_commands_do_not_print_credentials(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("serve", "s3://KEY:hush@bucket/export"), ("predict", "run", "--data", "x", "-o", "s3://K:hush@b/p")):
        assert exit_code(monkeypatch, *words) == 2
        printed = capsys.readouterr()
        assert "s3://***@b" in printed.err
        assert "hush" not in printed.err + printed.out
