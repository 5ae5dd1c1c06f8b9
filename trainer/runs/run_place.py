"""The folder of a training run in an object store: the copy that a run trains in, which it uploads."""

import os
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from cowrec.data_pipeline.remote import Place, RemoteFolder, is_remote, local_path
from cowrec.errors import UserError
from cowrec.files import locked_folder, replace_file

from .checkpoint_files import MANIFEST, Files, checksums, rank_of
from .local_copy import cache_folder, complete_files, mirror
from .run_dir import METRICS


class RunPlace:
    """Folder of a training run: a local one, or one in an object store, of which a local copy is trained in.

    The copy is uploaded after every checkpoint, each checkpoint's manifest last, so that an interrupted upload leaves
    the checkpoint before it. What could not be uploaded stays in the copy, from which a resumed run on this machine
    continues; a file beside the copy says that there is something. The object store cannot lock the folder: two runs
    must not train in one.

    On several hosts each host has a copy, without the shards of checkpoints: a process uploads those that it wrote, and
    fetches those that it reads.

    Args:
        resume: continue the run that is there; otherwise there must be none.

    Attributes:
        name: the place, for messages.
        folder: the local folder.
        is_shared: whether all processes of the run have this folder.

    Raises:
        ValueError: the folder in the object store is not empty and not resumed, or is in use on this machine; or this
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
        """The file that is there while something of the copy has not been uploaded."""
        return self.folder.with_name(f"{self.folder.name}.waiting")

    def _waits(self, there: Collection[str]) -> bool:
        """Whether the copy has a checkpoint of the run that the object store has, or should have, but not all of it."""
        if not self._waiting.exists() or not any(self.folder.rglob(MANIFEST)):
            return False
        if not there:  # otherwise somebody has removed the run there
            return self._waiting.read_bytes() == b"all"
        own = self.folder / METRICS
        if METRICS not in there or not own.is_file():
            return False
        assert self._remote
        first, ours = (text.partition(b"\n")[0] for text in (self._remote.read(METRICS), own.read_bytes()))
        return first == ours  # which has the time of the run's first step

    def upload_shards(self, checkpoint: Path, rank: int) -> Files:
        """Uploads the shards that a process wrote, and removes them from this host; returns what a manifest lists.

        Args:
            checkpoint: unfinished folder of a checkpoint of this run, whose processes are on several hosts.
        """
        assert self._remote
        own = list(checkpoint.glob(f"__{rank}_*"))
        within = str(checkpoint.relative_to(self.folder).with_suffix(""))
        try:
            files = checksums(checkpoint, own)
            self._remote.upload(checkpoint, list(files), within=within)
        finally:
            for each in own:
                each.unlink()
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
