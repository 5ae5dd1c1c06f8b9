"""Local copies of folders of runs, exports and data in object stores."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cowrec.data_pipeline.remote import Place, RemoteFolder, copy_without_shards, is_remote, local_path
from cowrec.errors import UserError
from cowrec.files import PARTIAL


def local_copy(
    place: Place, what: str = "folder", *, shards: bool = True, copied: Callable[[str], bool] = lambda _: True
) -> Path:
    """Returns the local path of a place; a folder in an object store is copied first, what has changed of it.

    Args:
        what: the folder is, for messages.
        shards: whether to copy the shards of a data set, too, which otherwise are copied when they are read.
        copied: chooses the files by their names; all by default.

    Raises:
        ValueError: there is no such folder in the object store.
        OSError: the object store does not answer.
    """
    if not is_remote(place):
        return local_path(place)
    uri = os.fspath(place)
    folder = cache_folder(uri)
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (mirror(RemoteFolder(uri), folder, copied) if shards else copy_without_shards(uri, folder)):
            raise UserError(f"{what} {uri} does not exist, or is empty")
    return folder


def local_data(place: Place) -> Path:
    """Returns the local folder of a data set, without shards of one in an object store; see :func:`local_copy`."""
    return local_copy(place, "data set", shards=False)


@contextmanager
def written_folder(place: Place, *, last: str) -> Iterator[Path]:
    """Gives a local folder to write, which is then copied to the place if that is in an object store.

    Args:
        place: a path or a URI, of a new or empty folder.
        last: name of the file that is copied last, without which the folder is not complete.

    Raises:
        ValueError: the folder in the object store is not empty.
        OSError: the object store does not answer.
    """
    if not is_remote(place):
        yield local_path(place)
        return
    remote = RemoteFolder(os.fspath(place))
    if remote.list():
        raise UserError(f"{remote.uri} is not empty; choose another folder or remove it")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "folder"
        yield folder
        remote.upload(
            folder, sorted((name for name, _ in complete_files(folder)), key=lambda name: (name == last, name))
        )


def cache_folder(uri: str, purpose: str = "") -> Path:
    """Returns the local folder for a copy of a folder in an object store.

    It is in $COWREC_CACHE, by default `~/.cache/cowrec` ($XDG_CACHE_HOME/cowrec), and may be removed at any time when
    no process uses it.

    Raises:
        ValueError: none of these variables is set, and the user has no home folder.
    """
    try:
        parent = Path(
            os.environ.get("COWREC_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "cowrec")
        )
    except RuntimeError:
        raise UserError(f"{uri} needs a folder for a copy, and this user has no home; set COWREC_CACHE") from None
    key = f"{uri.rstrip('/')} {os.environ.get('AWS_ENDPOINT_URL', '')}"
    name = uri.split("?")[0].rstrip("/").rpartition("/")[2]
    return parent / f"{name}-{purpose}{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def mirror(remote: RemoteFolder, folder: Path, copied: Callable[[str], bool] = lambda _: True) -> bool:
    """Makes a local folder equal to the copied files of a remote one; returns whether that has files."""
    wanted = remote.list()
    for name, _ in list(complete_files(folder)):
        if name not in wanted:
            (folder / name).unlink()
    remote.download(folder, copied)
    for each in sorted(folder.rglob("*"), reverse=True) if folder.is_dir() else ():
        if each.suffix == PARTIAL:
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        elif each.is_dir() and not any(each.iterdir()):
            each.rmdir()
    return bool(wanted)


def complete_files(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields names, sizes and times of the complete files of a folder."""
    for each in sorted(folder.rglob("*")) if folder.is_dir() else ():
        name = each.relative_to(folder)
        if each.is_file() and not any(part.endswith(PARTIAL) for part in name.parts):
            status = each.stat()
            yield str(name), (status.st_size, status.st_mtime_ns)
