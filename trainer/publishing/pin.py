"""Pins: a target is pinned to a version, which all its readers go back to and stay at until the pin is released."""

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from cowrec.trainer.signing import SigningKey

from .blob import DamagedBlob, Kind, UnverifiedBlob

MAGIC, SIGNED = b"cowrec-pin", b"cowrec-signed-pin"


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


def encode_pin(pin: Pin, key: SigningKey | None = None) -> bytes:
    """Encodes a pin: a line with MAGIC and the SHA-256 of what follows, or SIGNED and its signature; and JSON."""
    content = json.dumps(asdict(pin)).encode()
    magic, proof = (SIGNED, key.sign(SIGNED, content)) if key else (MAGIC, hashlib.sha256(content).digest())
    return b"%s %s\n%s" % (magic, proof.hex().encode(), content)


def decode_pin(record: bytes, key: SigningKey | None = None) -> Pin:
    """Decodes the bytes of :func:`encode_pin`.

    Raises:
        UnverifiedBlob: they are not signed with the key, or signed and there is none.
        DamagedBlob: they differ from what was written.
    """
    head, _, content = record.partition(b"\n")
    magic, _, proof = head.partition(b" ")
    if magic == SIGNED and key is None:
        raise UnverifiedBlob("the pin is signed, and cannot be verified without the key; give its file as --key-file")
    if magic == MAGIC and key:
        raise UnverifiedBlob("the pin is not signed, but a key is given; pin again with --key-file")
    expected = key.sign(SIGNED, content) if key else hashlib.sha256(content).digest()
    if magic not in (MAGIC, SIGNED) or not hmac.compare_digest(proof, expected.hex().encode()):
        problem = "or signed with another key, its signature" if key else "its checksum"
        raise DamagedBlob(f"the pin is damaged, {problem} does not match: {record[:80]!r}")
    try:
        return TypeAdapter(Pin).validate_json(content, strict=True)
    except ValidationError as error:
        raise DamagedBlob(f"the pin is not one of this version of cowrec: {error.errors()[0]['msg']}") from error
