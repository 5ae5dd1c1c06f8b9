"""URLs are shown without their credentials, in errors of libraries too."""

from pathlib import Path

import pytest

from commands.command_line import exit_code
from cowrec.data_pipeline.remote import is_remote
from cowrec.data_pipeline.streams.open import open_sink, open_source
from cowrec.data_pipeline.urls import without_credentials
from cowrec.trainer.publishing.target import open_target


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0?stream=clicks", "redis://host:6379/0?stream=clicks"),
        ("redis://user:hush@host/0?stream=a&password=hush", "redis://***@host/0?stream=a&password=***"),
        ("rediss://hush@host", "rediss://***@host"),
        ("redis://:h/u?s#h@hush@host:1/0", "redis://***@host:1/0"),
        ("kafka://a:1,b:2/topic?sasl.password=hush&acks=1", "kafka://a:1,b:2/topic?sasl.password=***&acks=1"),
        ("s3://KEY:hu/sh@bucket/x?region=eu", "s3://***@bucket/x?region=eu"),
        ("s3://bucket/x?endpoint_override=http://user:hush@host", "s3://***@host"),
        ("s3://bucket/mail/a@b", "s3://bucket/mail/a@b"),
        ("hdfs://host:9000/a@b", "hdfs://host:9000/a@b"),
        ("abfs://container@account/x", "abfs://container@account/x"),
        ("data/a:b@c", "data/a:b@c"),
    ],
)
def test_credentials_are_hidden(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


@pytest.mark.parametrize(
    ("opening", "url"),
    [
        (open_source, "redis://:hush@host/0"),  # without a stream
        (open_source, "redis://:hu/sh@host/0?stream=a"),  # redis-py takes "hu" for a port
        (open_source, "redis://:hush@host/0?stream=a&socket_timeout=soon"),
        (open_source, "kafka://user:hush@host/topic"),
        (open_source, "http://:hush@host"),
        (open_sink, "redis://:hu\u2100sh@host/0?stream=a"),  # refused by urllib
        (open_target, "redis://:hu#sh@host/0"),
        (open_target, "redis://:hush@host/0?nonsense=1"),
        (open_target, "ftp://user:hush@host"),
        (is_remote, "s3://KEY:hush@bucket"),
        (is_remote, "s3://KEY:hu/sh@bucket"),
    ],
)
def test_errors_do_not_show_credentials(opening, url: str) -> None:
    with pytest.raises(ValueError, match=r"\*\*\*@") as caught:
        opening(url)
    assert not any(part in str(caught.value) for part in ("hu/", "hu#", "hush", "sh@", "'hu"))
    assert caught.value.__suppress_context__ or not caught.value.__context__


def test_commands_do_not_print_credentials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for words in (("serve", "s3://KEY:hush@bucket/export"), ("predict", "run", "--data", "x", "-o", "s3://K:hush@b/p")):
        assert exit_code(monkeypatch, *words) == 2
        printed = capsys.readouterr()
        assert "s3://***@b" in printed.err
        assert "hush" not in printed.err + printed.out
