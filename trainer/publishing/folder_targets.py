"""Publication targets that are folders, with files ``delta-000000000012.cow`` and ``full-000000000012.cow``."""

import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cowrec.data_pipeline.files import locked_folder, replace_file
from cowrec.data_pipeline.remote import RemoteFolder

from .blob import Kind

PIN, _PIN_LOCK = "pin", "pin.lock"


class PinChanged(OSError):
    """Raised when a target was pinned, or its pin released, since the pin was read."""


class DirectoryTarget:
    """Directory. Its pin is the file ``pin``, and is written, and blobs removed, under the lock of ``pin.lock``."""

    def __init__(self, folder: Path, *, publishing: bool = False) -> None:
        self._folder = folder
        self._lock = ExitStack()
        if publishing:
            self._lock.enter_context(locked_folder(folder))
            for unfinished in folder.glob("*.cow.partial"):
                unfinished.unlink()
            (folder / _PIN_LOCK).touch()  # versions are removed under it when the disk is full

    def blobs(self) -> list[tuple[int, Kind]]:
        return _blobs_of(os.listdir(self._folder) if self._folder.exists() else [])

    def read(self, version: int, kind: Kind) -> bytes:
        return self._path(version, kind).read_bytes()

    def write(self, version: int, kind: Kind, blob: bytes) -> None:
        path = self._path(version, kind)
        if path.exists():
            raise FileExistsError(f"{path} exists already, written by another publisher; stop it or use another target")
        replace_file(path, blob)

    def remove(self, version: int, kind: Kind, pin: bytes | None) -> None:
        with self._pin_lock():
            if self.pin() != pin:
                raise PinChanged(f"the pin of {self._folder} has changed")
            self._path(version, kind).unlink(missing_ok=True)

    def pin(self) -> bytes | None:
        try:
            return (self._folder / PIN).read_bytes()
        except FileNotFoundError:
            return None

    def set_pin(self, pin: bytes, needed: Sequence[tuple[int, Kind]]) -> None:
        with self._pin_lock():
            _require(needed, self.blobs())
            replace_file(self._folder / PIN, pin)

    def keep(self) -> None:
        pass  # locked

    def close(self) -> None:
        self._lock.close()

    def _path(self, version: int, kind: Kind) -> Path:
        return self._folder / _file_name(version, kind)

    @contextmanager
    def _pin_lock(self) -> Iterator[None]:
        with (self._folder / _PIN_LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class RemoteTarget:
    """Folder in an object store with files as in :class:`DirectoryTarget`. Nothing locks it: publish from one place."""

    def __init__(self, uri: str) -> None:
        self._folder = RemoteFolder(uri)

    def blobs(self) -> list[tuple[int, Kind]]:
        return _blobs_of(self._folder.list())

    def read(self, version: int, kind: Kind) -> bytes:
        return self._folder.read(_file_name(version, kind))

    def write(self, version: int, kind: Kind, blob: bytes) -> None:
        if (version, kind) in self.blobs():
            raise FileExistsError(
                f"{self._folder.uri} has {_file_name(version, kind)} already, written by another publisher; stop it or"
                " use another target"
            )
        self._folder.write(_file_name(version, kind), blob)

    def remove(self, version: int, kind: Kind, pin: bytes | None) -> None:
        if self.pin() != pin:
            raise PinChanged(f"the pin of {self._folder.uri} has changed")
        self._folder.remove([_file_name(version, kind)])

    def pin(self) -> bytes | None:
        try:
            return self._folder.read(PIN)
        except FileNotFoundError:
            return None

    def set_pin(self, pin: bytes, needed: Sequence[tuple[int, Kind]]) -> None:
        before = self.pin()
        _require(needed, self.blobs())
        self._folder.write(PIN, pin)
        try:  # again, as the publisher may have read the pin before
            _require(needed, self.blobs())
        except FileNotFoundError:
            if before is not None:  # else the caller releases the pin: readers may have seen it
                self._folder.write(PIN, before)
            raise

    def keep(self) -> None:
        pass

    def close(self) -> None:
        pass


def _require(needed: Sequence[tuple[int, Kind]], available: Sequence[tuple[int, Kind]]) -> None:
    for version, kind in needed:
        if (version, kind) not in available:
            raise FileNotFoundError(f"{_file_name(version, kind)} has been removed by the publisher since it was read")


def _file_name(version: int, kind: Kind) -> str:
    return f"{kind}-{version:012d}.cow"


def _blobs_of(names: Iterable[str]) -> list[tuple[int, Kind]]:
    """Version and kind of the blobs among files, the oldest first."""
    found = (re.fullmatch(r"(delta|full)-(\d{12})\.cow", name) for name in names)
    return sorted((int(match[2]), match[1]) for match in found if match)  # type: ignore[misc]
