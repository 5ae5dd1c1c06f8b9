"""Folders of runs and exports in object stores: copies for reading, and the copy that a training run uploads."""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cowrec.data_pipeline.files import PARTIAL, locked_folder
from cowrec.data_pipeline.remote import Place, RemoteFolder, is_remote, local_path

from .checkpoint_folder import MANIFEST


def local_copy(place: Place, what: str = "folder") -> Path:
    """Returns the local path of a place; a folder in an object store is copied first, what has changed of it.

    Copies are kept in `cache_folder`.

    Args:
        place: a path or a URI.
        what: the place is, for messages.

    Raises:
        ValueError: there is no such folder in the object store.
        OSError: the object store does not answer.
    """
    if not is_remote(place):
        return local_path(place)
    uri = os.fspath(place)
    folder = cache_folder(uri)
    with _one_at_a_time(folder):
        if not _mirror(RemoteFolder(uri), folder):
            raise ValueError(f"{what} {uri} does not exist, or is empty")
    return folder


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
        raise ValueError(f"{remote.uri} is not empty; choose another folder or remove it")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "folder"
        yield folder
        remote.upload(folder, sorted((name for name, _ in _files(folder)), key=lambda name: (name == last, name)))


def cache_folder(uri: str, purpose: str = "") -> Path:
    """Returns the local folder for a copy of a folder in an object store.

    It is in $COWREC_CACHE, by default `~/.cache/cowrec` ($XDG_CACHE_HOME/cowrec), and may be removed at any time when
    no process uses it.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parent = Path(os.environ.get("COWREC_CACHE") or Path(home) / "cowrec")
    key = f"{uri.rstrip('/')} {os.environ.get('AWS_ENDPOINT_URL', '')}"
    name = uri.split("?")[0].rstrip("/").rpartition("/")[2]
    return parent / f"{name}-{purpose}{hashlib.sha256(key.encode()).hexdigest()[:16]}"


class RunPlace:
    """Folder of a training run: a local one, or one in an object store, of which a local copy is trained in.

    The copy is uploaded after every checkpoint, each checkpoint's manifest last, so that an interrupted upload leaves
    the checkpoint before it. The object store cannot lock the folder: two machines must not train in one.

    Args:
        place: a path or a URI.
        resume: continue the run that is there; otherwise there must be none.

    Attributes:
        folder: the local folder.

    Raises:
        ValueError: the folder in the object store is not empty and not resumed, is in use on this machine, or the run
            has processes on other machines, whose parts of checkpoints would be missing.
        OSError: the object store does not answer.
    """

    def __init__(self, place: Place, *, resume: bool) -> None:
        self._remote: RemoteFolder | None = None
        self._uploaded: dict[str, tuple[int, int]] = {}
        if not is_remote(place):
            self.folder = local_path(place)
            return
        uri = os.fspath(place)
        self.folder, self._remote = cache_folder(uri, "training-"), RemoteFolder(uri)
        if os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1"):
            raise ValueError(
                f"--run-dir {uri}: all processes of a run in an object store must be on one machine; with several"
                " machines use a folder that they share, for example on NFS"
            )
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return  # the first process of the machine copies, before it joins the others
        with locked_folder(self.folder):
            if not resume and self._remote.list():
                raise ValueError(
                    f"run folder {uri} is not empty; continue its run with --resume, or choose another with --run-dir"
                )
            _mirror(self._remote, self.folder)
        self._uploaded = dict(_files(self.folder))

    def push(self) -> None:
        """Uploads what has changed since the last call, and removes checkpoints that are no longer kept.

        Raises:
            OSError: the object store does not answer.
        """
        if self._remote is None:
            return
        files = dict(_files(self.folder))
        changed = [name for name, stamp in files.items() if self._uploaded.get(name) != stamp]
        self._remote.upload(self.folder, sorted(changed, key=lambda name: (_is_manifest(name), name)))
        gone = self._uploaded.keys() - files.keys()
        self._remote.remove(sorted(gone, key=lambda name: (not _is_manifest(name), name)))
        self._uploaded = files


def _is_manifest(name: str) -> bool:
    return name.endswith(MANIFEST)


def _mirror(remote: RemoteFolder, folder: Path) -> bool:
    """Makes a local folder equal to a remote one; returns whether that has files."""
    wanted = remote.list()
    for name, _ in list(_files(folder)):
        if name not in wanted:
            (folder / name).unlink()
    remote.download(folder)
    for each in sorted(folder.rglob("*"), reverse=True) if folder.is_dir() else ():
        if each.suffix == PARTIAL:
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        elif each.is_dir() and not any(each.iterdir()):
            each.rmdir()
    return bool(wanted)


def _files(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields names, sizes and times of the complete files of a folder."""
    for each in sorted(folder.rglob("*")) if folder.is_dir() else ():
        name = each.relative_to(folder)
        if each.is_file() and not any(part.endswith(PARTIAL) for part in name.parts):
            status = each.stat()
            yield str(name), (status.st_size, status.st_mtime_ns)


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Waits until no other process copies to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
