"""What `cowrec versions` does: it lists the versions of a target, and publishes an old one again as the newest."""

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from cowrec.errors import UserError
from cowrec.urls import without_credentials

from .blob import Blob, Change, DamagedBlob, Kind, OtherFormat, encode, joined, merged
from .follower import decode_as
from .target import Target, open_target


@dataclass(frozen=True)
class ListedVersion:
    """One blob of a target.

    Attributes:
        version, kind: see :class:`Blob`.
        size: in bytes.
        blob: without the content of its tables and weights; None if it cannot be read.
        problem: why it cannot be read.
    """

    version: int
    kind: Kind
    size: int
    blob: Blob | None
    problem: str = ""


def list_versions(url: str) -> list[ListedVersion]:
    """Reads all versions of a target, the oldest first.

    Raises:
        ValueError: there are none, or the URL is not that of a target.
        OSError: the target cannot be reached.
    """
    with closing(open_target(url)) as target:
        return _listed(target, url)


def reachable(listed: Sequence[ListedVersion]) -> list[int]:
    """The versions that can be published again: full ones, and those that deltas lead to from one."""
    return sorted({chain[-1].version for each in listed for chain in _chains(listed, each.version)})


def republish(url: str, version: int) -> int:
    """Publishes the complete state of an old version as a new full version, which becomes the newest.

    Its lineage is new, so that no delta of a trainer is taken for the next one: a trainer that publishes on later
    begins with a full version after it.

    Args:
        url: of the target; nobody else may publish there.
        version: to publish again.

    Returns:
        The number of the new version.

    Raises:
        ValueError: the version cannot be reached, and the message has those that can; or a trainer publishes there.
        OSError: the target cannot be reached, or is full.
    """
    with closing(open_target(url)) as target:
        listed = _listed(target, url)  # before the target is opened for writing, which creates a folder
    chain = next((each for each in _chains(listed, version) if each[-1].version == version), None)
    if chain is None:
        can = _ranges(reachable(listed))
        problem = next((each.problem for each in reversed(listed) if each.problem), "wait for the next full one")
        raise UserError(
            f"version {version} of {without_credentials(url)} cannot be published again: it, or one that it is based"
            f" on, is damaged or not there; {f'choose one of {can}' if can else f'no version can be: {problem}'}"
        )
    try:
        target = open_target(url, publishing=True)
    except ValueError as error:
        raise UserError(
            f"{error}; stop the trainer first, as its next version would replace version {version} at once"
        ) from error
    with closing(target):
        blob = _composed(decode_as(each.version, each.kind, target.read(each.version, each.kind)) for each in chain)
        newest = target.blobs()[-1][0]
        again = replace(
            blob, version=newest + 1, previous=newest, kind="full", lineage=uuid.uuid4().hex, created=time.time()
        )
        target.write(again.version, "full", encode(again))
    return again.version


def _listed(target: Target, url: str) -> list[ListedVersion]:
    found = []
    for version, kind in target.blobs():
        try:
            content = target.read(version, kind)
        except FileNotFoundError:  # removed since it was listed
            continue
        try:
            blob = decode_as(version, kind, content)
        except (DamagedBlob, OtherFormat) as error:
            found.append(ListedVersion(version, kind, len(content), None, str(error)))
            continue
        without = replace(blob, change=Change(blob.change.step, blob.change.sample_time, {}))
        found.append(ListedVersion(version, kind, len(content), without))
    if not found:
        raise UserError(f"{without_credentials(url)} has no version; check the path or URL, or wait for the first one")
    return found


def _chains(listed: Sequence[ListedVersion], version: int) -> Iterator[list[Blob]]:
    """Yields for each intact full version up to ``version``, the newest first, it and the deltas that lead to that.

    A chain ends before ``version`` where a delta is missing, damaged or of another lineage.
    """
    intact = {(each.version, each.kind): each.blob for each in listed if each.blob}
    for start in sorted((number for number, kind in intact if kind == "full" and number <= version), reverse=True):
        chain = [intact[start, "full"]]
        for number in range(start + 1, version + 1):
            delta = intact.get((number, "delta"))
            if delta is None or (delta.previous, delta.lineage) != (number - 1, chain[0].lineage):
                break
            chain.append(delta)
        yield chain


def _composed(chain: Iterator[Blob]) -> Blob:
    """Composes a full version and the deltas after it into a full one."""
    first, change = next(chain), None
    for each in chain:  # the large one is copied once
        change = joined(change, each.change)
    return first if change is None else replace(first, change=merged(first.change, change).without_deleted())


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: "3 to 12, 15"."""
    runs = itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0])
    ends = ([number for _, number in run] for _, run in runs)
    return ", ".join(f"{each[0]} to {each[-1]}" if len(each) > 1 else str(each[0]) for each in ends)
