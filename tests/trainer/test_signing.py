"""Signed publications and exports: what is not signed with the key, or under another number, is refused unread."""

import json
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from cowrec.trainer.config.run import load_config
from cowrec.trainer.export.manifest import MANIFEST, SIGNATURE, Manifest
from cowrec.trainer.online.loop import online
from cowrec.trainer.publishing.blob import (
    Blob,
    Change,
    DamagedBlob,
    TableChange,
    UnverifiedBlob,
    decode,
    encode,
    is_signed,
)
from cowrec.trainer.publishing.pin import Pin, decode_pin, encode_pin
from cowrec.trainer.publishing.publisher import Publisher
from cowrec.trainer.publishing.target import open_target
from cowrec.trainer.publishing.version_list import Versions
from cowrec.trainer.publishing.version_reader import VersionReader
from cowrec.trainer.serving.served_model import ServedModel
from cowrec.trainer.signing import BadSignature, SigningKey, read_key
from online_cases import make_case
from publishing.published_model import Model, ReaderThread, eventually, publish, publisher

SECRET = b"abcdefgh" * 4
KEY, OTHER = SigningKey(SECRET), SigningKey(b"other" * 7)
BLOB = Blob(3, 2, "delta", "line", 5.5, Change(7, 8, {"t": TableChange(np.arange(2), np.ones((2, 3), np.float32))}))
PIN = Pin(7, 5, "line", 1.5)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cowrec.trainer.publishing.version_reader._POLL_SECONDS", 0.01)


def key_file(folder: Path, content: bytes = SECRET + b"\n", mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_key_is_read_and_never_shown(tmp_path: Path, mode: int) -> None:
    key = read_key(key_file(tmp_path, mode=mode))
    assert key.signed(KEY.sign(b"purpose", b"content"), b"purpose", b"content")
    assert not key.signed(KEY.sign(b"purpose", b"content"), b"other", b"content")
    assert not key.signed(OTHER.sign(b"purpose", b"content"), b"purpose", b"content")
    assert "abcdefgh" not in f"{key!r} {key}"


def test_a_bad_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read \(No such file or directory\); create one with: openssl"):
        read_key(tmp_path / "nothing")
    for mode in (0o644, 0o604, 0o620, 0o601):
        with pytest.raises(ValueError, match=rf"other users may read or change .* \(mode {mode:o}\); chmod 600"):
            read_key(key_file(tmp_path, mode=mode))
    with pytest.raises(ValueError, match="has 31 bytes, a key needs at least 32") as error:
        read_key(key_file(tmp_path, SECRET[:-1] + b"\r\n"))
    assert "abcdefgh" not in str(error.value)


def flipped(content: bytes, rng: random.Random) -> bytes:
    altered = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        altered[rng.randrange(len(altered))] ^= 1 << rng.randrange(8)
    return bytes(altered) if altered != content else content[:-1]


@pytest.mark.parametrize(
    ("content", "load"),
    [
        (encode(BLOB, KEY), lambda content: decode(content, KEY)),
        (encode_pin(PIN, KEY), lambda content: decode_pin(content, KEY)),
    ],
    ids=["blob", "pin"],
)
def test_altered_bytes_are_refused(content: bytes, load: Callable[[bytes], object]) -> None:
    """Each byte once, each length, and random flips of several bits."""
    assert load(content)
    rng = random.Random(0)
    altered = [content[:i] + bytes([content[i] ^ (1 << i % 8)]) + content[i + 1 :] for i in range(len(content))]
    altered += [content[:length] for length in range(len(content))]
    altered += [flipped(content, rng) for _ in range(3000)]
    for each in altered:
        with pytest.raises(DamagedBlob):
            load(each)


def test_what_cannot_be_verified_is_refused() -> None:
    for signed, key, message in (
        (encode(BLOB, OTHER), KEY, "has a wrong signature: it is altered, or signed with another key"),
        (encode(BLOB), KEY, "is not signed, but a key is given"),
        (encode(BLOB, KEY), None, "is signed, and cannot be verified without the key"),
    ):
        with pytest.raises(UnverifiedBlob, match=message):
            decode(signed, key)
    for pin, key, message in (
        (encode_pin(PIN, OTHER), KEY, "signed with another key, its signature does not match"),
        (encode_pin(PIN), KEY, "the pin is not signed, but a key is given"),
        (encode_pin(PIN, KEY), None, "the pin is signed, and cannot be verified without the key"),
    ):
        with pytest.raises(DamagedBlob, match=message):
            decode_pin(pin, key)
    assert decode_pin(encode_pin(PIN, KEY), KEY) == PIN
    # The checksum of an unsigned blob does not become a signature by another MAGIC.
    unsigned = encode(BLOB)
    with pytest.raises(UnverifiedBlob):
        decode(encode(BLOB, KEY)[:16] + unsigned[16:], KEY)


def test_readers_refuse_what_others_publish(tmp_path: Path) -> None:
    """A signed version under another number, an unsigned one, one of another key, and their pins."""
    url, model, states = str(tmp_path / "published"), Model(), dict[int, Model]()
    folder = tmp_path / "published"
    with Publisher(open_target(url, publishing=True), key=KEY) as out:
        for version in range(1, 4):
            publish(out, model)
            states[version] = model.copy()
    reader = ReaderThread(url, key=KEY)
    eventually(lambda: reader.versions.caught_up)
    shutil.copy(folder / "full-000000000001.cow", folder / "full-000000000009.cow")
    eventually(lambda: reader.versions.waits_for_full)
    assert "in place of full 9 there is full 1" in reader.versions.damaged_because
    (folder / "full-000000000009.cow").unlink()
    shutil.copy(folder / "delta-000000000002.cow", folder / "delta-000000000004.cow")
    eventually(lambda: "in place of delta 4 there is delta 2" in reader.versions.damaged_because)
    (folder / "delta-000000000004.cow").unlink()
    with publisher(url) as unsigned:
        publish(unsigned, Model(5))
    eventually(lambda: "is not signed, but a key is given" in reader.versions.damaged_because)
    with closing(Versions(url)) as versions:
        with pytest.raises(ValueError, match=r"version 2 of .* cannot be reached.*choose one of 4"):
            versions.set_pin(2)
        versions.set_pin(4)
    eventually(lambda: "the pin is not signed" in reader.versions.pin_problem)
    assert [blob.version for blob in reader.seen] == [1, 2, 3]
    with closing(Versions(url, KEY)) as versions:
        assert [(each.signed, each.pinnable) for each in versions.listed()] == [(True, True)] * 3 + [(False, False)]
        versions.set_pin(2)
        eventually(lambda: reader.version == 2)
        assert reader.model.same_as(states[2])
        with closing(Versions(url)) as unsigned_versions, pytest.raises(UnverifiedBlob, match="the pin is signed"):
            unsigned_versions.release_pin()
        versions.release_pin()
    with Publisher(open_target(url, publishing=True), key=KEY) as out:
        publish(out, model)
        eventually(lambda: reader.version == 5)
        assert reader.model.same_as(model)
    reader.close()


@pytest.fixture(scope="module")
def signed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An online run that signs what it publishes, and its export."""
    case = make_case(tmp_path_factory.mktemp("signed"))
    given = ["train.batch_size=1000", "online.publish_seconds=0", f"online.key_file={key_file(case)}"]
    config = load_config(case / "run.toml", given)
    online(config, case / "data", str(case / "incoming"), case / "run", publish=str(case / "published"))
    return case


def test_an_online_run_signs_versions_and_export(signed_run: Path) -> None:
    target = open_target(str(signed_run / "published"))
    assert all(is_signed(target.read(*each)) for each in target.blobs())
    served, newest = ServedModel.load(signed_run / "run" / "base", KEY), target.blobs()[-1][0]
    for blob in VersionReader(target, key=KEY).versions(threading.Event()):
        served.apply(blob)
        if blob.version == newest:
            break
    assert served.version == newest
    written = [each.read_bytes() for each in (signed_run / "run").rglob("*") if each.is_file()]
    assert not any(SECRET in each for each in written)


def test_altered_exports_are_refused_unread(signed_run: Path, tmp_path: Path) -> None:
    """Random flips of the manifest and its signature, files added, and a manifest that is no JSON."""
    export, rng = tmp_path / "export", random.Random(1)
    shutil.copytree(signed_run / "run" / "base", export)
    Manifest.load(export, KEY)
    with pytest.raises(BadSignature, match="is signed; give the file of the key as --key-file"):
        Manifest.load(export)
    with pytest.raises(BadSignature, match="altered, or signed with another key"):
        Manifest.load(export, OTHER)
    for name in (MANIFEST, SIGNATURE):
        content = (export / name).read_bytes()
        for _ in range(300):
            (export / name).write_bytes(flipped(content, rng))
            with pytest.raises(BadSignature, match=r"is wrong: manifest\.json is altered"):
                Manifest.load(export, KEY)
        (export / name).write_bytes(content)
    (export / "vocabulary").mkdir(exist_ok=True)
    (export / "vocabulary" / "more").touch()
    with pytest.raises(BadSignature, match="has a file that its signed manifest does not list, vocabulary/more"):
        Manifest.load(export, KEY)
    (export / "vocabulary" / "more").unlink()
    weights = export / "dense.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ValueError, match=r"dense\.safetensors does not match its checksum"):
        ServedModel.load(export, KEY)
    manifest = json.loads((export / MANIFEST).read_bytes())
    (export / MANIFEST).write_bytes(b"[" * 1_000_000)
    with pytest.raises(BadSignature):
        Manifest.load(export, KEY)
    (export / SIGNATURE).unlink()
    (export / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BadSignature, match="is not signed, but a key is given; export it with --key-file"):
        Manifest.load(export, KEY)
