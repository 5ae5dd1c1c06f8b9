"""Publication targets: a directory, an object store or Redis. A blob appears complete or not at all."""

import errno
import os
import re
import socket
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlencode, urlunsplit

from cowrec.data_pipeline.redis_client import is_refusal, open_redis
from cowrec.data_pipeline.remote import RemoteFolder, is_remote, local_path
from cowrec.errors import UserError
from cowrec.files import locked_folder, replace_file
from cowrec.urls import split_url

from .blob import Kind

DEADLINE = 10.0
"""Seconds that Redis may take to answer."""

LEASE = 15.0
"""Seconds for which a publisher has a name in Redis, after it was last renewed."""

_PART_BYTES = 16 << 20
"""Size of the parts of a blob in Redis, which limits a value to 512 MiB and answers nobody else while it takes one."""


class LeaseHeld(OSError):
    """Raised when another process publishes to a target."""


class Target(Protocol):
    """Storage of blobs by kind and version. Methods raise OSError if the target cannot be reached or is full, with
    ``errno.ENOSPC`` in the latter case."""

    def blobs(self) -> list[tuple[int, Kind]]:
        """Version and kind of all blobs, the oldest first."""
        ...

    def read(self, version: int, kind: Kind) -> bytes:
        """Reads a blob. Raises FileNotFoundError if it does not exist, or no longer does."""
        ...

    def write(self, version: int, kind: Kind, blob: bytes) -> None:
        """Writes a blob. Raises FileExistsError if it exists; blobs are never overwritten."""
        ...

    def remove(self, version: int, kind: Kind) -> None:
        """Removes a blob; does nothing if it does not exist."""
        ...

    def keep(self) -> None:
        """Keeps other publishers away; call it every ``LEASE / 3`` seconds. Raises LeaseHeld if another publishes."""
        ...

    def close(self) -> None: ...


def open_target(url: str, *, publishing: bool = False) -> Target:
    """Opens the target of a URL: ``redis://HOST:PORT/DB?name=NAME``, ``s3://BUCKET/FOLDER`` (see
    :mod:`cowrec.data_pipeline.remote`), or a directory.

    Args:
        url: as above. NAME, by default "cowrec", separates the publications in one Redis.
        publishing: whether the caller writes; a directory is then created and locked against other publishers, a name
            in Redis leased. For a lease that a killed publisher has left, this waits until it ends.

    Raises:
        ValueError: another process publishes there, or the URL is invalid.
    """
    if split_url(url).scheme in ("redis", "rediss"):
        return RedisTarget(url, publishing=publishing)
    try:
        is_remote(url)
    except ValueError as error:
        raise UserError(f"publication target {error}, or redis://HOST:PORT/DB?name=NAME") from None
    return FolderTarget(url, publishing=publishing)


class FolderTarget:
    """Folder with files ``delta-000000000012.cow`` and ``full-000000000012.cow``: a directory, or one in an object
    store, which nothing locks: publish there from one place."""

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

    def keep(self) -> None:
        pass  # locked

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
    """Redis with lists ``NAME:delta:12`` and ``NAME:full:12`` of the parts of blobs, and the sorted set
    ``NAME:versions`` of both.

    A blob is written under another name, ``NAME:partial:...``, and renamed by the transaction that adds its last part.
    What a publisher leaves unfinished expires.

    ``NAME:publisher`` is the lease of the publisher. Every part is written in a transaction that fails if another
    publisher has it by then, so that one which hung for longer than its lease cannot write among the other's versions.
    """

    def __init__(self, url: str, *, publishing: bool = False) -> None:
        parts = split_url(url)
        query = parse_qs(parts.query)
        self._name = query.pop("name", ["cowrec"])[0]
        self._lease, self._partial = f"{self._name}:publisher", f"{self._name}:partial:{uuid.uuid4().hex}"
        plain = urlunsplit(parts._replace(query=urlencode(query, doseq=True)))
        self._redis = open_redis(plain, socket_timeout=DEADLINE, socket_connect_timeout=DEADLINE)
        import redis

        self._redis.set_retry(redis.retry.Retry(redis.backoff.NoBackoff(), 0))  # every retry would wait as long again
        self._error, self._out_of_memory = redis.RedisError, redis.exceptions.OutOfMemoryError
        self._owner = f"process {os.getpid()} of {socket.gethostname()} ({uuid.uuid4().hex[:8]})" if publishing else ""
        if publishing:
            self._wait_for_lease()

    def blobs(self) -> list[tuple[int, Kind]]:
        with self._named_errors():
            members: Any = self._redis.zrange(f"{self._name}:versions", 0, -1)
        kinds = (member.decode().split(":") for member in members)
        return sorted((int(version), kind) for kind, version in kinds)

    def read(self, version: int, kind: Kind) -> bytes:
        key, blob = self._key(version, kind), BytesIO()
        with self._named_errors():
            parts: Any = self._redis.llen(key)
            for number in range(max(parts, 1)):
                part: Any = self._redis.lindex(key, number)
                if part is None:
                    raise FileNotFoundError(f"Redis has no {key}")
                blob.write(part)
        return blob.getvalue()

    def write(self, version: int, kind: Kind, blob: bytes) -> None:
        key, content, firsts = self._key(version, kind), memoryview(blob), range(0, len(blob), _PART_BYTES)
        for number, first in enumerate(firsts):
            self.keep()
            with self._named_errors(), self._redis.pipeline(transaction=True) as transaction:
                transaction.watch(self._partial)
                if number and transaction.llen(self._partial) != number:
                    raise OSError(f"Redis has lost parts of {key} while it was written")
                self._holds_lease(transaction)
                if number == 0:
                    transaction.delete(self._partial)
                transaction.rpush(self._partial, content[first : first + _PART_BYTES])
                transaction.pexpire(self._partial, round(LEASE * 1000))
                if first == firsts[-1]:
                    transaction.zadd(f"{self._name}:versions", {f"{kind}:{version}": version})
                    transaction.renamenx(self._partial, key)
                    transaction.persist(key)
                done = transaction.execute()
        if not done[-2]:
            raise FileExistsError(f"Redis has {key} already, written by another publisher; stop it or use another name")

    def remove(self, version: int, kind: Kind) -> None:
        with self._named_errors(), self._redis.pipeline(transaction=True) as transaction:
            transaction.zrem(f"{self._name}:versions", f"{kind}:{version}")
            transaction.delete(self._key(version, kind))
            transaction.execute()

    def keep(self) -> None:
        with self._named_errors(), self._redis.pipeline(transaction=True) as transaction:
            if self._holds_lease(transaction):
                transaction.pexpire(self._lease, round(LEASE * 1000))
            else:
                transaction.set(self._lease, self._owner, px=round(LEASE * 1000))
            transaction.execute()

    def _holds_lease(self, transaction: Any) -> bool:
        """Begins a transaction that fails if another publisher takes the lease before it is executed. Returns whether
        this one has it; raises LeaseHeld if another has."""
        transaction.watch(self._lease)
        holder = transaction.get(self._lease)
        transaction.multi()
        if holder is not None and holder != self._owner.encode():
            holder = holder.decode(errors="replace")
            raise LeaseHeld(f"{holder} publishes under the name {self._name!r}; stop it, or use another name")
        return holder is not None

    def _wait_for_lease(self) -> None:
        """Takes the lease. Raises ValueError if another publisher renews it, or Redis refuses the password.

        Without Redis, it is taken later.
        """
        deadline = time.monotonic() + LEASE * 1.5
        while True:
            try:
                return self.keep()
            except LeaseHeld as error:
                if time.monotonic() > deadline:
                    raise UserError(f"Redis: {error}") from None
            except OSError as error:
                if is_refusal(error.__cause__):
                    raise UserError(f"{error}; correct the user and the password of the address") from None
                return
            time.sleep(LEASE / 30)

    def close(self) -> None:
        if self._owner:
            with suppress(OSError), self._named_errors(), self._redis.pipeline(transaction=True) as transaction:
                if self._holds_lease(transaction):
                    transaction.delete(self._lease)
                    transaction.execute()
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
            raise OSError(f"Redis: {type(error).__name__}: {error}") from error
