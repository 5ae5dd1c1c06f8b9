"""`cowrec versions`: lists the versions of a target, and publishes an old full one again as the newest."""

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
    """One blob of a target: its ``size`` in bytes and the ``blob`` without tables and weights, or its ``problem``."""

    version: int
    kind: Kind
    size: int
    blob: Blob | None
    problem: str = ""


def list_versions(url: str) -> list[ListedVersion]:
    """Reads all versions of a target, the oldest first.

    Raises ValueError: there are none, or the URL is not that of a target; OSError: the target cannot be reached.
    """
    with closing(open_target(url)) as target:
        return _listed(target, url)


def republish(url: str, version: int) -> int:
    """Publishes an old full version again as a new one, which becomes the newest. Returns its number.

    Its lineage is new: no delta of a trainer follows it, and a trainer that publishes on begins with a full version.
    Nobody else may publish to the target meanwhile.

    Raises:
        UserError: there is no such intact full version; the message has those that can be chosen.
        OSError: the target cannot be reached, or is full.
    """
    with closing(open_target(url)) as target:
        listed = _listed(target, url)  # before the target is opened for writing, which creates a folder
    full = [blob.version for blob in listed if blob.kind == "full" and blob.blob]
    if version not in full:
        problem = next((blob.problem for blob in reversed(listed) if blob.problem), "wait for the next one")
        choice = f"choose one of {', '.join(map(str, full))}" if full else f"there is none: {problem}"
        raise UserError(f"version {version} of {without_credentials(url)} is not an intact full version; {choice}")
    with closing(open_target(url, publishing=True)) as target:
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
