"""What `cowrec versions` does: it lists the versions of a target, and publishes an old full one again as the newest."""

import time
import uuid
from contextlib import closing
from dataclasses import dataclass, replace

from cowrec.errors import UserError
from cowrec.urls import without_credentials

from .blob import Blob, Change, DamagedBlob, Kind, OtherFormat, encode
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


def republish(url: str, version: int) -> int:
    """Publishes an old full version again as a new one, which becomes the newest.

    Its lineage is new, so that no delta of a trainer is taken for the next one: a trainer that publishes on later
    begins with a full version after it.

    Args:
        url: of the target; nobody else may publish there.
        version: of an intact full version.

    Returns:
        The number of the new version.

    Raises:
        UserError: there is no such version, and the message has those that can be chosen; or a trainer publishes there.
        OSError: the target cannot be reached, or is full.
    """
    with closing(open_target(url)) as target:
        listed = _listed(target, url)  # before the target is opened for writing, which creates a folder
    full = [each.version for each in listed if each.kind == "full" and each.blob]
    if version not in full:
        problem = next((each.problem for each in reversed(listed) if each.problem), "wait for the next one")
        choice = f"choose one of {', '.join(map(str, full))}" if full else f"there is none: {problem}"
        raise UserError(f"version {version} of {without_credentials(url)} is not an intact full version; {choice}")
    try:
        target = open_target(url, publishing=True)
    except UserError as error:
        raise UserError(
            f"{error}; stop the trainer first, as its next version would replace version {version} at once"
        ) from error
    with closing(target):
        blob, newest = decode_as(version, "full", target.read(version, "full")), target.blobs()[-1][0]
        again = replace(blob, version=newest + 1, previous=newest, lineage=uuid.uuid4().hex, created=time.time())
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
