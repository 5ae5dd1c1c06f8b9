"""The files of a checkpoint: a manifest with their checksums, and tensors, which are read without running code.

torch.distributed.checkpoint describes the tensors in a pickle. That is read by an unpickler that accepts only the
classes of such descriptions, so that a file from an untrusted source runs nothing.
"""

import hashlib
import json
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future as TorchFuture

from cowrec.data_pipeline.parallel import ordered_map
from cowrec.errors import UserError
from cowrec.files import checksum

FORMAT = 1
MANIFEST = "checkpoint.json"
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")

Files = Mapping[str, Sequence[Any]]
"""Size and SHA-256 of files of a checkpoint, by name."""
Fetch = Callable[[Path, Collection[str]], None]
"""Makes files of a checkpoint present in its folder, if there are such files."""


def rank_of(name: str) -> int | None:
    """Returns the process that wrote a shard of a checkpoint; None for another file."""
    found = _SHARD.fullmatch(name)
    return int(found[1]) if found else None


def checksums(folder: Path, files: Iterable[Path]) -> dict[str, tuple[int, str]]:
    ordered = sorted(files)
    sums = zip(ordered, ordered_map(checksum, ordered), strict=True)
    return {str(file.relative_to(folder)): (file.stat().st_size, sha256) for file, sha256 in sums}


def damage(folder: Path, files: Files) -> str:
    """Describes the first file of a folder that is missing or differs from its entry in a manifest; "" without one."""
    for name, (size, sha256) in files.items():
        file = folder / name
        if not file.is_file():
            return f"it has no {name}"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
        if checksum(file) != sha256:
            return f"{name} has another checksum than when it was written"
    return ""


class Damaged(UserError):
    """A checkpoint that cannot be used; the message names it and the reason."""


def load_manifest(path: Path) -> dict[str, Any]:
    """Loads a checkpoint's manifest; raises Damaged, or UserError for another format."""
    try:
        manifest = dict(json.loads((path / MANIFEST).read_text(encoding="utf-8")))
        intact = manifest.pop("sha256") == manifest_checksum(manifest)
    except (FileNotFoundError, KeyError):
        raise Damaged(f"{path} is damaged: {MANIFEST} or its checksum is missing") from None
    except (ValueError, TypeError) as error:
        raise Damaged(f"{path} is damaged: {MANIFEST} cannot be read ({error})") from None
    if not intact:
        raise Damaged(f"{path} is damaged: {MANIFEST} has another checksum than when it was written")
    if manifest["format"] != FORMAT:
        raise UserError(
            f"{path} is of format {manifest['format']!r}, this cowrec reads {FORMAT}; use the version that wrote it"
        )
    return manifest


def manifest_checksum(manifest: dict[str, Any]) -> str:
    """Computes the SHA-256 of a manifest's other entries, whatever spaces the file has."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def all_present(path: Path, names: Collection[str]) -> None:
    """The :data:`Fetch` of a folder that has all files."""


def checkpoint_keys(path: Path) -> set[str]:
    """Returns the keys of the tensors that a checkpoint holds; those of nested dictionaries are joined by dots."""
    return set(TensorReader(path).read_metadata().state_dict_metadata)


def read_checkpoint(path: Path, state: dict[str, Any], fetch: Fetch = all_present) -> None:
    """Reads a checkpoint into the tensors of ``state``, in place; they may be sharded in any way."""
    reader = TensorReader(path, fetch)
    reader.read_metadata()  # raises its own error first; older libraries would look for another file
    dcp.load(state, storage_reader=reader)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns any error of decoding or loading into a UserError that names the checkpoint."""
    try:
        yield
    except (CheckpointException, Exception) as error:  # CheckpointException is not an Exception
        raise UserError(f"{path} does not fit this run, or is damaged: {cause_of(error)}") from error


def cause_of(error: BaseException) -> str:
    """Describes the first failure of a rank, without the tracebacks that the library puts into its message."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, RuntimeError) and "unexpected pos" in str(error):  # what torch's writer makes of it
        return "a file could not be written completely; its disk is probably full"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


class TensorReader(FileSystemReader):
    """Reads tensors and refuses every other object."""

    def __init__(self, path: Path, fetch: Fetch = all_present) -> None:
        super().__init__(path)
        self._folder, self._fetch = path, fetch

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        self._fetch(self._folder, {self.storage_data[item.storage_index].relative_path for item in plan.items})
        return super().read_data(plan, planner)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._fetch(self._folder, [".metadata"])
        with (self._folder / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise UserError(f".metadata holds {type(metadata).__name__}, not a description of tensors")
        for key, value in metadata.state_dict_metadata.items():
            if isinstance(value, BytesStorageMetadata):
                raise UserError(f"{key} is not a tensor; other objects would have to be unpickled and are refused")
        return metadata


_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("BytesStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "pathlib": {"PosixPath"},
}
"""Classes that the library's description of tensors consists of."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles :data:`_CLASSES` only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 store the member of an enumeration
            return _member
        module = module.removesuffix("._local")  # of pathlib in Python 3.13 alone
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")
        return super().find_class(module, name)


def _member(kind: Any, name: str) -> Any:
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"builtins.getattr of {kind!r} is not allowed in a checkpoint")
    return kind[name]
