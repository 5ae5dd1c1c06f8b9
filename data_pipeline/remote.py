"""Files and folders in object stores and other file systems that pyarrow opens by URI: s3://, gs://, hdfs://, file://.

A local copy of a data set in an object store begins without shards: a shard is fetched when it is read.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.fs as pafs

from cowrec.errors import UserError
from cowrec.files import PARTIAL
from cowrec.urls import without_credentials

Place: TypeAlias = str | os.PathLike[str]
"""A local path or a URI."""

SCHEMES = ("s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss", "file")
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_COLLAPSED = re.compile(rf"({'|'.join(SCHEMES)}):/")
"""What pathlib makes of a URI."""


def is_remote(place: Place) -> bool:
    """Returns whether a place is a URI of a supported file system other than the local one.

    Raises ValueError if the scheme is not supported, the URI has credentials or lost a slash, or it is not UTF-8.
    """
    text = os.fspath(place)
    if text.encode(errors="replace").decode() != text:
        raise UserError(f"the path {text!r} is not UTF-8, as libraries and the files of runs need it; rename it")
    found = _URI.match(text)
    if found is None:
        if _COLLAPSED.match(text):
            raise UserError(f"{text!r} was a URI before it became a path; pass it as a string")
        return False
    scheme, shown = found[1].lower(), without_credentials(text)
    if scheme not in SCHEMES:
        known = ", ".join(f"{known_scheme}://" for known_scheme in SCHEMES)
        raise UserError(f"{shown}: scheme {scheme!r} is not supported; use a path, {known}")
    if shown != text:
        raise UserError(
            f"{shown}: credentials in a URI would be seen in process lists and logs; give them in the environment, for"
            " S3 as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return scheme != "file"


def local_path(place: Place) -> Path:
    """Returns the path of a local place, which may be a file:// URI. Raises ValueError if it is not local."""
    if is_remote(place):
        raise UserError(f"{os.fspath(place)} is not local")
    text = os.fspath(place)
    try:
        return Path(pafs.FileSystem.from_uri(text)[1] if _URI.match(text) else text)
    except pa.ArrowInvalid as error:
        remedy = "write three slashes, file:///folder, and %20 for a space, or a path"
        raise UserError(f"{text} is no valid URI ({error}); {remedy}") from None


def require_local(place: Place, what: str, why: str) -> Path:
    """Returns the path of a place. Raises ValueError with `what` the place is for, and `why`, if it is not local."""
    if is_remote(place):
        raise UserError(f"{what} {os.fspath(place)} must be a local folder: {why}")
    return local_path(place)


def open_filesystem(uri: str) -> tuple[pafs.FileSystem, str]:
    """Opens the file system of a URI; also returns the path within it. Raises ValueError if it cannot be opened.

    Credentials, regions and endpoints come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL,
    GOOGLE_APPLICATION_CREDENTIALS, ...), or from the query of the URI (`?region=...`), see pyarrow.
    """
    try:
        opened: tuple[Any, str] = pafs.FileSystem.from_uri(uri)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{uri} cannot be opened: {error}") from error
    return opened


class RemoteFolder:
    """A folder in an object store, which need not exist, with files by their relative names.

    An object appears completely or not at all. Methods raise OSError if the store does not answer.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._files, path = open_filesystem(uri)
        self._path = PurePosixPath(path)

    def list(self, *, within: str = "") -> dict[str, pafs.FileInfo]:
        """Returns size and time of all files in the folder, or below `within`, by name.

        Raises OSError if a name has a part "..", which would lead out of a copy.
        """
        selector = pafs.FileSelector(str(self._path / within), allow_not_found=True, recursive=True)
        with _named(self.uri):
            found = self._files.get_file_info(selector)
        files = [info for info in found if info.type == pafs.FileType.File]
        names = [PurePosixPath(info.path).relative_to(self._path) for info in files]
        if outside := next((name for name in names if ".." in name.parts), None):
            raise OSError(f'{self.uri} has an object "{outside}", which would be copied to another folder; remove it')
        return dict(zip(map(str, names), files, strict=True))

    def read(self, name: str) -> bytes:
        with _named(f"{self.uri}/{name}"), self._files.open_input_stream(str(self._path / name)) as file:
            content: bytes = file.read()
            return content

    def write(self, name: str, content: bytes) -> None:
        path = self._path / name
        with _named(f"{self.uri}/{name}"):
            self._files.create_dir(str(path.parent), recursive=True)
            with self._files.open_output_stream(str(path)) as file:
                file.write(content)

    def remove(self, names: Sequence[str]) -> None:
        """Removes files that exist, in order."""
        for name in names:
            with _named(f"{self.uri}/{name}"):
                if self._files.get_file_info(str(self._path / name)).type != pafs.FileType.NotFound:
                    self._files.delete_file(str(self._path / name))

    def download(self, folder: Path, wanted: Callable[[str], bool] = lambda _: True) -> None:
        """Copies the wanted files into a local folder, unless it has files of their size and time."""
        for name, found in self.list().items():
            target = folder / name
            if wanted(name) and not (target.is_file() and stamp(target) == (found.size, found.mtime_ns)):
                target.parent.mkdir(parents=True, exist_ok=True)
                # Other processes may copy the same file.
                self._copy(name, found, target, target.with_name(f"{target.name}.{os.getpid()}{PARTIAL}"))

    def fetch(self, name: str, folder: Path, expected: Sequence[int] | None = None) -> None:
        """Copies a file, if there is one, that a local folder lacks, or waits until another process has copied it.

        Raises OSError if the disk is full, or the file has another size, or time in nanoseconds, than `expected`.
        """
        with _named(f"{self.uri}/{name}"):
            found = self._files.get_file_info(str(self._path / name))
        if found.type != pafs.FileType.File:
            return
        if expected and [found.size, found.mtime_ns] != list(expected):
            raise OSError(f"{self.uri}/{name} has changed since this run began; start a new run on the changed data")
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + PARTIAL)
        with partial.open("ab") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if target.exists():
                partial.unlink(missing_ok=True)  # made by this process, after the other one had finished
            else:
                self._copy(name, found, target, partial)

    def _copy(self, name: str, found: pafs.FileInfo, target: Path, partial: Path) -> None:
        with (
            _named(f"{self.uri}/{name}"),
            self._files.open_input_stream(str(self._path / name)) as source,
            partial.open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy, 1 << 22)
        os.utime(partial, ns=(found.mtime_ns, found.mtime_ns))
        partial.replace(target)

    def upload(self, folder: Path, names: Sequence[str], *, within: str = "") -> None:
        """Copies files of a local folder, in order, to this folder or below `within`."""
        for name in names:
            path = self._path / within / name
            with _named(f"{self.uri}/{path.relative_to(self._path)}"):
                self._files.create_dir(str(path.parent), recursive=True)
                # A stream that is closed by an error would leave the part that was written.
                pafs.copy_files(
                    str(folder / name),
                    str(path),
                    source_filesystem=pafs.LocalFileSystem(),
                    destination_filesystem=self._files,
                    use_threads=False,
                )


def stamp(file: Path) -> tuple[int, int]:
    """Returns size and time of a file; a copy has those of the original."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


@contextmanager
def _named(uri: str) -> Iterator[None]:
    """Adds the URI to errors of pyarrow."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{uri} does not exist ({error})") from error
    except (OSError, pa.ArrowException) as error:
        raise OSError(f"{uri}: {error}") from error


_SOURCE = ".source"
"""File in a copy with the URI of the original, and size and time of each shard when the copy was made."""
_SHARD = re.compile(r"(?!vocabulary/)[^/]+/\d+\.parquet")


def copy_without_shards(uri: str, folder: Path) -> bool:
    """Copies what a data set has besides shards, and removes from the copy what has changed since it was fetched.

    Must not run in two processes at a time. Returns whether there is a data set.
    """
    remote = RemoteFolder(uri)
    found = remote.list()
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if not path.is_file() or name == _SOURCE or name.endswith(PARTIAL):  # which another process may be fetching
            continue
        if name not in found or stamp(path) != (found[name].size, found[name].mtime_ns):
            path.unlink()
    remote.download(folder, lambda name: not _SHARD.fullmatch(name))
    if found:
        shards = {name: [info.size, info.mtime_ns] for name, info in found.items() if _SHARD.fullmatch(name)}
        (folder / _SOURCE).write_text(json.dumps({"uri": uri, "shards": shards}), encoding="utf-8")
    return bool(found)


def fetch_missing(folder: Path, name: str) -> None:
    """Fetches a file that a copy of a data set lacks, unless the folder is no copy or the store lacks the file too.

    Raises OSError if the object store does not answer, the file has changed there since, or the disk is full.
    """
    if not (folder / name).exists() and (folder / _SOURCE).exists():
        source = json.loads((folder / _SOURCE).read_text(encoding="utf-8"))
        RemoteFolder(source["uri"]).fetch(name, folder, source["shards"].get(name))
