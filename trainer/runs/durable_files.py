"""Files that are on the disk once they are written, and their checksums."""

import hashlib
import os
from pathlib import Path


def write_file(file: Path, content: bytes) -> None:
    """Writes a file through to the disk. Raises OSError where the disk is full."""
    with file.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Has the disk hold the names in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
