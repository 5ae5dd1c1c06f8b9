"""Local copies of folders in object stores: of runs, exports and data, and of the run that is being trained."""

import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cowrec.data_pipeline.remote import Place, RemoteFolder, copy_without_shards, is_remote, local_path
from cowrec.errors import UserError
from cowrec.files import PARTIAL, locked_folder, replace_file

from .checkpoint_files import MANIFEST, Files, checksums, rank_of
from .run_dir import METRICS


def local_copy(
    place: Place, what: str = "folder", *, shards: bool = True, copied: Callable[[str], bool] = lambda _: True
) -> Path:
    """Returns the local path of a place; of a folder in an object store, all that has changed is copied first.

    Args:
        what: name of the folder's kind, for messages.
        shards: whether to copy the shards of a data set, too; otherwise they are copied when they are read.
        copied: chooses files by their names.

    Raises UserError: there is no such folder in the object store; OSError: the object store does not answer.
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
    """Gives a local folder to write, which is then copied to a place in an object store; the file ``last`` comes last.

    Raises UserError if the folder in the object store is not empty, and OSError if the store does not answer.
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

    It is in $COWREC_CACHE, by default `~/.cache/cowrec` ($XDG_CACHE_HOME/cowrec), and may be removed while unused.
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
    for path in sorted(folder.rglob("*"), reverse=True) if folder.is_dir() else ():
        if path.suffix == PARTIAL:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    return bool(wanted)


def complete_files(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields names, sizes and times of the complete files of a folder."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        name = path.relative_to(folder)
        if path.is_file() and not any(part.endswith(PARTIAL) for part in name.parts):
            status = path.stat()
            yield str(name), (status.st_size, status.st_mtime_ns)


class RunPlace:
    """Folder of a training run: a local one, or the local copy of one in an object store.

    The copy is uploaded after every checkpoint, each checkpoint's manifest last: an interrupted upload leaves the
    checkpoint before it. A resumed run on this machine continues from what could not be uploaded; the file `_waiting`
    beside the copy marks it. The object store cannot lock the folder: two runs must not train in one.

    On several hosts each host has a copy, without the shards of checkpoints: a process uploads the shards that it
    wrote, and fetches those that it reads.

    ``name`` is the place, for messages, and ``is_shared`` tells whether all processes of the run have this folder.

    Raises:
        UserError: the folder in the object store is not empty and not resumed, or is in use on this machine; or this
            machine has a run for it that was not uploaded and is not resumed.
        OSError: the object store does not answer; also from every method.
    """

    def __init__(self, place: Place, *, resume: bool) -> None:
        self._remote: RemoteFolder | None = None
        self._uploaded: dict[str, tuple[int, int]] = {}
        self.name, self.is_shared = os.fspath(place), True
        if not is_remote(place):
            self.folder = local_path(place)
            return
        uri = self.name
        self.is_shared = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
        # Hosts may share the folder of the cache, as where the home folder is on NFS.
        purpose = "training-" if self.is_shared else f"training-{socket.gethostname()}-"
        self.folder, self._remote = cache_folder(uri, purpose), RemoteFolder(uri)
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return  # the first process of the machine copies, before it joins the others
        with locked_folder(self.folder):
            there = self._remote.list()
            if not resume and there:
                raise UserError(
                    f"run folder {uri} is not empty; continue its run with --resume, or choose another with --run-dir"
                )
            if self._waits(there):
                if not resume:
                    raise UserError(
                        f"the last run in {uri} could not be uploaded and is in {self.folder}; continue it with"
                        " --resume, or remove that folder"
                    )
                self._uploaded = {name: (found.size, 0) for name, found in there.items()}
                self.push()
            else:
                mirror(self._remote, self.folder, self._is_copied)
        self._uploaded = self._copied_files()

    def push(self) -> None:
        """Uploads what has changed since the last call, and removes checkpoints that are no longer kept."""
        if self._remote is None:
            return
        files = self._copied_files()
        changed = [name for name, stamp in files.items() if self._uploaded.get(name) != stamp]
        if self.is_shared:  # the file's text is whether the store has something of this run
            replace_file(self._waiting, b"more" if self._uploaded else b"all")
        self._remote.upload(self.folder, sorted(changed, key=lambda name: (_is_manifest(name), name)))
        gone = self._uploaded.keys() - files.keys()
        if not self.is_shared:
            shards = {name for name in self._remote.list() if _is_shard(name)}
            gone |= {name for name in shards if not (self.folder / name).with_name(MANIFEST).exists()}
        self._remote.remove(sorted(gone, key=lambda name: (not _is_manifest(name), name)))
        self._uploaded = files
        self._waiting.unlink(missing_ok=True)

    @property
    def _waiting(self) -> Path:
        """The file that exists while a part of the copy has not been uploaded."""
        return self.folder.with_name(f"{self.folder.name}.waiting")

    def _waits(self, there: Collection[str]) -> bool:
        """Tells whether the copy has a checkpoint of the run that the object store lacks in part."""
        if not self._waiting.exists() or not any(self.folder.rglob(MANIFEST)):
            return False
        if not there:  # "more" would mean that somebody has removed the run there
            return self._waiting.read_bytes() == b"all"
        own = self.folder / METRICS
        if METRICS not in there or not own.is_file():
            return False
        assert self._remote
        first, ours = (text.partition(b"\n")[0] for text in (self._remote.read(METRICS), own.read_bytes()))
        return first == ours  # which has the time of the run's first step

    def upload_shards(self, checkpoint: Path, rank: int) -> Files:
        """Uploads a process's shards of an unfinished checkpoint, and removes them here; returns their entries."""
        assert self._remote
        own = list(checkpoint.glob(f"__{rank}_*"))
        within = str(checkpoint.relative_to(self.folder).with_suffix(""))
        try:
            files = checksums(checkpoint, own)
            self._remote.upload(checkpoint, list(files), within=within)
        finally:
            for shard in own:
                shard.unlink()
            with suppress(OSError):  # other processes of this host have files in it
                checkpoint.rmdir()
        return files

    def fetch(self, checkpoint: Path, names: Collection[str]) -> None:
        """Downloads files of a checkpoint that this host does not have, if they exist."""
        if self._remote and not self.is_shared:
            within = checkpoint.relative_to(self.folder)
            wanted = {str(within / name) for name in names}
            self._remote.download(self.folder, wanted.__contains__)

    def _is_copied(self, name: str) -> bool:
        return self.is_shared or not _is_shard(name)

    def _copied_files(self) -> dict[str, tuple[int, int]]:
        return {name: stamp for name, stamp in complete_files(self.folder) if self._is_copied(name)}


def _is_shard(name: str) -> bool:
    return rank_of(Path(name).name) is not None


def _is_manifest(name: str) -> bool:
    return name.endswith(MANIFEST)
