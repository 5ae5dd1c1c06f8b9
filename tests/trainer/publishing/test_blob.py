"""Whatever the metadata of a published version hold, they are refused unless they are those of a version."""

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from cowrec.trainer.publishing.blob import MAGIC, Blob, Change, DamagedBlob, TableChange, decode, encode

HEADER = len(MAGIC) + 32
BLOB = Blob(3, 2, "delta", "line", 5.5, Change(7, 8, {"t": TableChange(np.arange(2), np.ones((2, 3), np.float32))}))


def with_header(change: Any) -> bytes:
    """The bytes of BLOB, with its JSON header as changed by a function, and the checksum of that."""
    content = encode(BLOB)[HEADER:]
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    written = json.dumps(header).encode()
    content = len(written).to_bytes(8, "little") + written + content[8 + length :]
    return MAGIC + hashlib.sha256(content).digest() + content


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", "0"), ("version", '"3"'), ("version", "true"), ("version", "3.0"), ("previous", "-1"),
        ("kind", '"half"'), ("kind", "[]"), ("lineage", "null"), ("lineage", "{}"),
        ("created", '"now"'), ("created", "NaN"), ("created", "-Infinity"), ("created", "null"),
        ("step", "1" + "0" * 400), ("step", "NaN"), ("step", "null"), ("step", "9007199254740992"),
        ("sample_time", '"never"'), ("sample_time", "Infinity"), ("sample_time", "1" + "0" * 400),
        ("sample_time", "[1]"), ("sample_time", "true"),
        ("version", "3,"), ("version", "[" * 100_000),
    ],
)  # fmt: skip
def test_wrong_metadata_are_refused(key: str, value: str) -> None:
    with pytest.raises(DamagedBlob):
        decode(with_header(lambda header: header["__metadata__"].update({key: value})))


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "BF16"}, {"dtype": None}, {"shape": "x"}, {"shape": [1, 3]}, {"shape": [2, 3, 1]},
        {"data_offsets": [0, 1 << 70]}, {"data_offsets": [0]}, {"data_offsets": ["0", "24"]},
    ],
)  # fmt: skip
def test_wrong_tensors_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(DamagedBlob):
        decode(with_header(lambda header: header["t.rows"].update(wrong)))


def test_intact_metadata_are_accepted() -> None:
    found = decode(with_header(lambda header: None))
    assert (found.version, found.created, found.change.step, found.change.sample_time) == (3, 5.5, 7, 8)
    without_time = with_header(lambda header: header["__metadata__"].update(sample_time="null"))
    assert decode(without_time).change.sample_time is None
