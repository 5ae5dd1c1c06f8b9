"""Chains of versions: a full one and the deltas after it, from which any of them is reached in one step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import Protocol, TypeVar

import numpy as np

from .blob import Blob, Change, DamagedBlob, Kind, decode, merged
from .target import Target


class Version(Protocol):
    """What a chain needs to know of a version; see :class:`Blob`."""

    @property
    def version(self) -> int: ...

    @property
    def previous(self) -> int: ...

    @property
    def lineage(self) -> str: ...


AnyVersion = TypeVar("AnyVersion", bound=Version)


def read_blob(target: Target, version: int, kind: Kind) -> Blob:
    """Reads a version. Raises what :meth:`Target.read` and :func:`decode_as` do."""
    return decode_as(version, kind, target.read(version, kind))


def decode_as(version: int, kind: Kind, content: bytes) -> Blob:
    """Decodes the bytes of a version as :func:`decode` does. Raises DamagedBlob too if they are those of another."""
    blob = decode(content)
    if (blob.version, blob.kind) != (version, kind):
        raise DamagedBlob(f"in place of {kind} {version} there is {blob.kind} {blob.version}")
    return blob


def chains(
    available: Sequence[tuple[int, Kind]], version: int, read: Callable[[int, Kind], AnyVersion | None]
) -> Iterator[list[AnyVersion]]:
    """Yields for each full version up to ``version``, the newest first, the longest chain that leads towards that.

    Args:
        available: version and kind of the blobs of the target.
        version: at which chains end; they end before it where a delta is missing, damaged or of another lineage.
        read: reads a version; None for one that is missing or damaged.
    """
    for start in sorted((number for number, kind in available if kind == "full" and number <= version), reverse=True):
        first = read(start, "full")
        if first is None:
            continue
        chain = [first]
        for number in range(start + 1, version + 1):
            delta = read(number, "delta") if (number, "delta") in available else None
            if delta is None or (delta.previous, delta.lineage) != (number - 1, first.lineage):
                break
            chain.append(delta)
        yield chain


def composed(chain: Sequence[Blob]) -> Blob:
    """Composes a chain into a full version with the number of its last one."""
    first, *deltas = chain
    if not deltas:
        return first
    change = merged(first.change, reduce(merged, (each.change for each in deltas)))  # the large one is copied once
    none = np.empty(0, np.int64)
    tables = {
        name: replace(table, deleted=none, deleted_feature=None if table.feature is None else none)
        for name, table in change.tables.items()
    }
    last = deltas[-1]
    return replace(first, version=last.version, previous=last.previous, created=last.created,
                   change=Change(change.step, change.sample_time, tables, change.dense))  # fmt: skip
