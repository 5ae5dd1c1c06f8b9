"""Local copies of data sets in object stores, without their shards: a shard is fetched when it is read."""

import json
import re
from pathlib import Path

from .files import PARTIAL
from .remote import RemoteFolder, stamp

_SOURCE = ".source"
"""File in a copy with the URI that it is a copy of, and size and time of each shard when the copy was made."""
_SHARD = re.compile(r"(?!vocabulary/)[^/]+/\d+\.parquet")


def copy_without_shards(uri: str, folder: Path) -> bool:
    """Copies what a data set has besides shards, and removes from the copy what has changed since it was fetched.

    One process at a time. Returns whether there is such a data set.

    Raises:
        OSError: the object store does not answer, or the disk is full.
    """
    remote = RemoteFolder(uri)
    found = remote.list()
    for each in folder.rglob("*"):
        name = str(each.relative_to(folder))
        if not each.is_file() or name == _SOURCE or name.endswith(PARTIAL):  # which another process may be fetching
            continue
        if name not in found or stamp(each) != (found[name].size, found[name].mtime_ns):
            each.unlink()
    remote.download(folder, lambda name: not _SHARD.fullmatch(name))
    if found:
        shards = {name: [each.size, each.mtime_ns] for name, each in found.items() if _SHARD.fullmatch(name)}
        (folder / _SOURCE).write_text(json.dumps({"uri": uri, "shards": shards}), encoding="utf-8")
    return bool(found)


def fetch_missing(folder: Path, name: str) -> None:
    """Fetches a file that a copy of a data set lacks; does nothing if the folder is no copy, or the store lacks it too.

    Raises:
        OSError: the object store does not answer, the file has changed there since, or the disk is full.
    """
    if not (folder / name).exists() and (folder / _SOURCE).exists():
        source = json.loads((folder / _SOURCE).read_text(encoding="utf-8"))
        RemoteFolder(source["uri"]).fetch(name, folder, source["shards"].get(name))
