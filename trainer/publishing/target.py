"""Publication targets: a directory, an object store or Redis. A blob appears complete or not at all."""

import errno
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlencode, urlunsplit

from cowrec.data_pipeline.redis_client import REDIS_SCHEMES, open_redis, refusal
from cowrec.data_pipeline.remote import RemoteFolder, is_remote, local_path
from cowrec.errors import UserError
from cowrec.files import locked_folder, replace_file
from cowrec.urls import split_url

from .blob import Kind

DEADLINE = 10.0
"""Seconds that Redis may take to answer."""

_MOST_BYTES = 512 << 20
"""Size of the largest value in Redis."""


class Target(Protocol):
    """Storage of blobs by kind and version.

    Methods raise OSError if the target cannot be reached or is full, with ``errno.ENOSPC`` in the latter case.
    """

    def blobs(self) -> list[tuple[int, Kind]]:
        """Version and kind of all blobs, the oldest first."""

    def read(self, version: int, kind: Kind) -> bytes:
        """Reads a blob. Raises FileNotFoundError if it does not exist, or no longer does."""

    def write(self, version: int, kind: Kind, blob: bytes) -> None:
        """Writes a blob. Raises FileExistsError if it exists; blobs are never overwritten."""

    def remove(self, version: int, kind: Kind) -> None:
        """Removes a blob; does nothing if it does not exist."""

    def close(self) -> None: ...


def open_target(url: str, *, publishing: bool = False) -> Target:
    """Opens the target of a URL: ``redis://HOST:PORT/DB?name=NAME`` or that of Sentinels (see
    :func:`cowrec.data_pipeline.redis_client.open_redis`), ``s3://BUCKET/FOLDER`` (see
    :mod:`cowrec.data_pipeline.remote`), or a directory.

    NAME, by default "cowrec", separates the publications in one Redis. With ``publishing`` a directory is created and
    locked against other publishers.

    Raises UserError: another process publishes to the directory, Redis refuses the password or is a Cluster, or the URL
    is invalid.
    """
    if split_url(url).scheme in REDIS_SCHEMES:
        return RedisTarget(url, publishing=publishing)
    try:
        is_remote(url)
    except ValueError as error:
        raise UserError(f"publication target {error}, or redis://HOST:PORT/DB?name=NAME") from None
    return FolderTarget(url, publishing=publishing)


class FolderTarget:
    """Folder with files ``delta-000000000012.cow`` and ``full-000000000012.cow``.

    It is a directory, or a folder in an object store. Nothing locks the latter: publish there from one place.
    """

    def __init__(self, url: str, *, publishing: bool = False) -> None:
        self._files = RemoteFolder(url) if is_remote(url) else _Directory(local_path(url))
        self._lock = ExitStack()
        if publishing and isinstance(self._files, _Directory):
            self._lock.enter_context(self._files.locked())

    def blobs(self) -> list[tuple[int, Kind]]:
        found = (re.fullmatch(r"(delta|full)-(\d{12})\.cow", name) for name in self._files.list())
        return sorted((int(match[2]), match[1]) for match in found if match)  # type: ignore[misc]

    def read(self, version: int, kind: Kind) -> bytes:
        return self._files.read(_file_name(version, kind))

    def write(self, version: int, kind: Kind, blob: bytes) -> None:
        name = _file_name(version, kind)
        if name in self._files.list():
            raise FileExistsError(
                f"{self._files.uri} has {name} already, written by another publisher; stop it or use another target"
            )
        self._files.write(name, blob)

    def remove(self, version: int, kind: Kind) -> None:
        self._files.remove([_file_name(version, kind)])

    def close(self) -> None:
        self._lock.close()


def _file_name(version: int, kind: Kind) -> str:
    return f"{kind}-{version:012d}.cow"


class _Directory:
    """A local directory, with the methods of a RemoteFolder that a target needs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.uri = folder, str(folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Creates the directory and locks it against other publishers."""
        with locked_folder(self._folder):
            for unfinished in self._folder.glob("*.cow.partial"):
                unfinished.unlink()
            yield

    def list(self) -> Collection[str]:
        return os.listdir(self._folder) if self._folder.exists() else ()

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        replace_file(self._folder / name, content)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)


class RedisTarget:
    """Redis with values ``NAME:delta:12`` and ``NAME:full:12``, and the sorted set ``NAME:versions`` of both.

    Nothing locks a name: publish under it from one place.
    """

    def __init__(self, url: str, *, publishing: bool = False) -> None:
        parts = split_url(url)
        query = parse_qs(parts.query)
        self._name = query.pop("name", ["cowrec"])[0]
        plain = urlunsplit(parts._replace(query=urlencode(query, doseq=True)))
        self._redis = open_redis(plain, socket_timeout=DEADLINE, socket_connect_timeout=DEADLINE)
        import redis

        self._error, self._out_of_memory = redis.RedisError, redis.exceptions.OutOfMemoryError
        if publishing:
            self._require_login()

    def _require_login(self) -> None:
        """Raises UserError if Redis refuses the user, or is a Cluster. A Redis that does not answer may do so later."""
        try:
            with self._named_errors():  # a Cluster keeps these two keys apart
                self._redis.exists(f"{self._name}:versions", self._key(0, "full"))
        except OSError as error:
            if remedy := refusal(error.__cause__):
                raise UserError(f"{error}; {remedy}") from None

    def blobs(self) -> list[tuple[int, Kind]]:
        with self._named_errors():
            members: Any = self._redis.zrange(f"{self._name}:versions", 0, -1)
        kinds = (member.decode().split(":") for member in members)
        return sorted((int(version), kind) for kind, version in kinds)

    def read(self, version: int, kind: Kind) -> bytes:
        key = self._key(version, kind)
        with self._named_errors():
            blob: Any = self._redis.get(key)
        if blob is None:
            raise FileNotFoundError(f"Redis has no {key}")
        return bytes(blob)

    def write(self, version: int, kind: Kind, blob: bytes) -> None:
        key = self._key(version, kind)
        if len(blob) > _MOST_BYTES:
            raise UserError(
                f"{key} has {len(blob):,} bytes, and a value of Redis at most {_MOST_BYTES:,}; publish to a folder, or"
                " to s3://BUCKET/FOLDER"
            )
        with self._named_errors(), self._redis.pipeline(transaction=True) as transaction:
            transaction.setnx(key, blob)
            transaction.zadd(f"{self._name}:versions", {f"{kind}:{version}": version})
            is_new, _ = transaction.execute()
        if not is_new:
            raise FileExistsError(f"Redis has {key} already, written by another publisher; stop it or use another name")

    def remove(self, version: int, kind: Kind) -> None:
        with self._named_errors():  # a transaction would be refused by a Redis that is full
            self._redis.delete(self._key(version, kind))
            self._redis.zrem(f"{self._name}:versions", f"{kind}:{version}")

    def close(self) -> None:
        self._redis.close()

    def _key(self, version: int, kind: Kind) -> str:
        return f"{self._name}:{kind}:{version}"

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except self._out_of_memory as error:
            raise OSError(errno.ENOSPC, "Redis is full; raise its maxmemory, or publish to a directory") from error
        except self._error as error:
            self._redis.connection_pool.disconnect()  # the name of a server that has become a replica may be another's
            raise OSError(f"Redis: {type(error).__name__}: {error}") from error
