"""Pins: a target is pinned to a version, which all its readers go back to and stay at until the pin is released."""

import hashlib
import json
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from .blob import DamagedBlob, Kind

MAGIC = b"cowrec-pin"


@dataclass(frozen=True)
class Pin:
    """The pin of a target.

    A released pin is a record too: a target that has none may have lost it, and its readers stay where they are.

    Attributes:
        version: that readers serve; 0 for a released pin.
        first: the full version that it is reached from, by the deltas after it.
        lineage: of both.
        created: Unix seconds, by the clock of the machine that pinned.
    """

    version: int
    first: int
    lineage: str
    created: float

    def needs(self, version: int, kind: Kind) -> bool:
        """Whether a blob is part of what the pinned version is reached from."""
        return (self.first, "full") <= (version, kind) <= (self.version, "full")


def encode_pin(pin: Pin) -> bytes:
    """Encodes a pin: a line with MAGIC and the SHA-256 of what follows; and JSON."""
    content = json.dumps(asdict(pin)).encode()
    return b"%s %s\n%s" % (MAGIC, hashlib.sha256(content).hexdigest().encode(), content)


def decode_pin(record: bytes) -> Pin:
    """Decodes the bytes of :func:`encode_pin`. Raises DamagedBlob: they differ from what was written."""
    head, _, content = record.partition(b"\n")
    if head != b"%s %s" % (MAGIC, hashlib.sha256(content).hexdigest().encode()):
        raise DamagedBlob(f"the pin is damaged, its checksum does not match: {record[:80]!r}")
    try:
        return TypeAdapter(Pin).validate_json(content, strict=True)
    except ValidationError as error:
        raise DamagedBlob(f"the pin is not one of this version of cowrec: {error.errors()[0]['msg']}") from error
