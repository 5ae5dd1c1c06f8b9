"""Signatures of what is published and exported: HMAC-SHA256 with a secret key that trainers and servers share."""

import hashlib
import hmac
import stat
from pathlib import Path

LEAST_BYTES = 32
_OTHERS = stat.S_IRWXO | stat.S_IWGRP


class BadSignature(ValueError):
    """Raised for what is not signed, or not with this key, or is signed and there is no key to verify it."""


class SigningKey:
    """A secret key; its text shows nothing of it.

    Args:
        secret: at least `LEAST_BYTES`.
    """

    def __init__(self, secret: bytes) -> None:
        if len(secret) < LEAST_BYTES:
            raise ValueError(f"a key must have at least {LEAST_BYTES} bytes, got {len(secret)}")
        self._secret = secret

    def sign(self, purpose: bytes, content: bytes | memoryview) -> bytes:
        """Signs content, in 32 bytes; the signature does not hold for another purpose."""
        signature = hmac.new(self._secret, purpose, hashlib.sha256)
        signature.update(content)
        return signature.digest()

    def signed(self, signature: bytes, purpose: bytes, content: bytes | memoryview) -> bool:
        """Whether a signature is that of this key, compared in constant time."""
        return hmac.compare_digest(signature, self.sign(purpose, content))


def read_key(path: str | Path) -> SigningKey:
    """Reads a key from a file; line ends after it are left out.

    Raises:
        ValueError: the file does not exist, has too few bytes, or may be read or changed by other users.
    """
    path = Path(path)
    try:
        mode, secret = path.stat().st_mode, path.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise ValueError(
            f"the key file {path} cannot be read ({error.strerror}); create one with: openssl rand -hex 32"
        ) from error
    if mode & _OTHERS:
        raise ValueError(
            f"other users may read or change the key file {path} (mode {stat.S_IMODE(mode):o}); chmod 600 {path}"
        )
    if len(secret) < LEAST_BYTES:
        raise ValueError(
            f"the key file {path} has {len(secret)} bytes, a key needs at least {LEAST_BYTES}; create one with:"
            " openssl rand -hex 32"
        )
    return SigningKey(secret)
