"""Checkpoints: the whole state of a run through torch.distributed.checkpoint, as tensors alone.

Saving copies the state and writes it while training goes on. Loading fits any number of processes and any sharding, and
runs no code: tensors are read as tensors, and the library's own description of them, a pickle, through an unpickler
that knows nothing else.
"""

import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torchrec.distributed import DistributedModelParallel

from cowrec.sparse_opt import EmbeddingAdam
from cowrec.sparse_opt.tbe.lookup import find_lookups
from cowrec.trainer.config.run import CheckpointConfig
from cowrec.trainer.runtime.processes import Process, on_first
from cowrec.trainer.sharded_model.build import row_ids_of
from cowrec.trainer.sharded_model.dense_adam import DenseAdam

from .checkpoint_folder import Progress, newest_intact, remove_unfinished, seal, unfinished

_MOMENT = 20.0
"""Seconds; other processes may be gone, or hang, and their part of a checkpoint with them."""

Beside = Callable[[Path], None]
"""Writes files of its own into the folder of a checkpoint."""
State = dict[str, Any]
"""Nested dictionaries of Tensors and ShardedTensors."""


class Checkpoints:
    """The checkpoints that a run writes. All processes make the same calls together.

    Args:
        folder: of the run's checkpoints.
        config: which are kept, and whether training goes on while one is written.
        process: this process.
        say: told of a checkpoint that could not be written.
    """

    def __init__(self, folder: Path, config: CheckpointConfig, process: Process, say: Callable[[str], None]):
        self.latest: Path | None = None
        self._folder, self._config, self._process, self.say = folder, config, process, say
        # A group of its own: what the writing threads tell each other must not meet the model's collectives.
        self._group = dist.new_group(backend="gloo") if process.world_size > 1 else None
        self._pending: tuple[int, Future[Path | None]] | None = None
        self._failure: str | None = None

    def clean(self) -> None:
        """Removes what a process that was killed has left; call it where no other can be at work in the folder."""
        on_first(self._process, lambda: remove_unfinished(self._folder))

    def save(self, state: State, progress: Progress, about: dict[str, Any], beside: Beside | None = None) -> None:
        """Writes ``folder/step_N``, which appears whole or not at all; returns once the state has been copied.

        Where it cannot be written that is said, earlier ones stay, and the run goes on; see :meth:`finish`. ``beside``
        is called later, on the first process, while training goes on.
        """
        self._settle()
        partial = unfinished(self._folder, progress.step)
        written: Future[Any] = dcp.async_save(  # type: ignore[assignment]
            state, checkpoint_id=partial, process_group=self._group, async_stager=_Copies()
        )
        sealed: Future[Path | None] = Future()
        self._pending = progress.step, sealed

        def finish(done: Future[Any]) -> None:
            try:
                done.result()
                if beside and self._process.is_first:
                    beside(partial)
                sealed.set_result(seal(partial, progress, about, self._config) if self._process.is_first else None)
            except BaseException as error:  # CheckpointException is no Exception, and the waiting thread wants all
                shutil.rmtree(partial, ignore_errors=True)
                sealed.set_exception(error)

        written.add_done_callback(finish)
        if not self._config.asynchronous:
            self._settle()

    def finish(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            ValueError: the last one could not be written.
        """
        self._settle()

        def check() -> None:
            if self._failure:
                raise ValueError(f"{self._failure}; make room or mend the folder, then train with --resume")

        on_first(self._process, check)

    def abandon(self) -> None:
        """Gives what is being written a moment to be finished, where the run ends in an error."""
        if self._pending:
            with suppress(CheckpointException, Exception):
                self._pending[1].result(_MOMENT)

    def _settle(self) -> None:
        if self._pending is None:
            return
        step, sealed = self._pending
        self._pending = self._failure = None
        try:
            self.latest = sealed.result() or self.latest
        except (CheckpointException, Exception) as error:
            last = f"the last good one is {self.latest}" if self.latest else "there is none before it"
            self._failure = f"the checkpoint of step {step} could not be written ({_cause(error)}); {last}"
            self.say(f"warning: {self._failure}")


def run_state(
    model: DistributedModelParallel, dense_optimizer: DenseAdam, embedding_optimizer: EmbeddingAdam | None
) -> State:
    """Everything that training changes: weights, and the state of both optimizers, sharing their memory.

    Rows that are behind stay so, and the embedding optimizer's state says how far they are.
    """
    with embedding_optimizer.as_stored() if embedding_optimizer else nullcontext():
        weights = model.state_dict()
    of_tables = embedding_optimizer.state_dict() if embedding_optimizer else model.fused_optimizer.state_dict()["state"]
    state: State = {"model": weights, "dense_optimizer": dense_optimizer.tensors(), "iterations": _iterations(model)}
    state |= _id_tables(model)
    # The library takes an empty dictionary, of a process without tables, for an object to pickle.
    return state | ({"embedding_optimizer": of_tables} if of_tables else {})


def random_state(process: Process) -> State:
    """What this process's random numbers go on from, by its rank."""
    state = {"cpu": torch.get_rng_state()}
    if process.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(process.device)
    return {f"random_{process.rank}_of_{process.world_size}": state}


def load_run(
    folder: Path,
    model: DistributedModelParallel,
    dense_optimizer: DenseAdam,
    embedding_optimizer: EmbeddingAdam | None,
    process: Process,
    say: Callable[[str], None],
) -> tuple[Path, Progress] | None:
    """Loads the newest intact checkpoint into a run in place; None where there is none. All processes call.

    Processes whose number has changed start with new random numbers.

    Raises:
        ValueError: all checkpoints are damaged, of another format, or do not fit the run.
    """
    found = _newest(folder, process, say)
    if found is None:
        return None
    path, progress = found
    reader = _TensorReader(path)
    with _named_errors(path):
        stored = {key.partition(".")[0] for key in reader.read_metadata().state_dict_metadata}
        random = {key: value for key, value in random_state(process).items() if key in stored}
        if embedding_optimizer:
            embedding_optimizer.steps = progress.step
        state = run_state(model, dense_optimizer, embedding_optimizer) | random
        dcp.load(state, storage_reader=reader)
        _take_over(state, model, embedding_optimizer)
        model.fused_optimizer.set_optimizer_step(int(state["iterations"]))
        for of_process in random.values():
            torch.set_rng_state(of_process["cpu"])
            if "cuda" in of_process:
                torch.cuda.set_rng_state(of_process["cuda"], process.device)
    return path, progress


def load_model(
    folder: Path, model: nn.Module, replayed: EmbeddingAdam | None, process: Process, say: Callable[[str], None]
) -> Progress:
    """Loads the newest intact checkpoint's weights into a sharded model in place. All processes call.

    Args:
        folder: of a run's checkpoints.
        model: with tables like the run's.
        replayed: the tables' optimizer where rows of the checkpoint may be behind; it then brings them up to date.
        process: this process.
        say: told of each damaged checkpoint that is passed over.

    Returns:
        How far the checkpoint had come.

    Raises:
        ValueError: there is no checkpoint, all are damaged, or they do not fit the model.
    """
    found = _newest(folder, process, say)
    if found is None:
        raise ValueError(f"no checkpoint in {folder}; train the run first")
    path, progress = found
    with _named_errors(path):
        if replayed:
            replayed.steps = progress.step
        with replayed.as_stored() if replayed else nullcontext():
            state = {"model": model.state_dict()} | _id_tables(model)
        if replayed:
            state["embedding_optimizer"] = replayed.state_dict()
        reader = _TensorReader(path)
        reader.read_metadata()  # fails in its own words; older libraries would look for another description
        dcp.load(state, storage_reader=reader)
        _take_over(state, model, replayed)
    return progress


def _id_tables(model: nn.Module) -> State:
    """Which ids have which rows, where the run gives them rows."""
    ids = row_ids_of(model)
    return {"id_tables": ids.tables.state_dict()} if ids and ids.tables else {}


def _iterations(model: DistributedModelParallel) -> Tensor:
    """Forward passes as FBGEMM counts them; ranks without a table count none."""
    counted = torch.tensor(max((lookup.iterations for lookup in find_lookups(model)[0]), default=0))
    if dist.get_world_size() > 1:
        counted = counted.to(model.device)
        dist.all_reduce(counted, dist.ReduceOp.MAX)
    return counted


def _take_over(state: State, model: nn.Module, embedding_optimizer: EmbeddingAdam | None) -> None:
    with embedding_optimizer.as_stored() if embedding_optimizer else nullcontext():
        model.load_state_dict(state["model"])
    ids = row_ids_of(model)
    if ids and ids.tables:
        ids.tables.load_state_dict(state["id_tables"])
    if embedding_optimizer:
        embedding_optimizer.load_state_dict(state["embedding_optimizer"])


def _newest(folder: Path, process: Process, say: Callable[[str], None]) -> tuple[Path, Progress] | None:
    """The newest intact checkpoint, as the first process finds it; reading files once is enough."""
    found: list[tuple[Path, Progress] | None] = [None]

    def look() -> None:
        found[0] = newest_intact(folder, say)

    on_first(process, look)
    dist.broadcast_object_list(found, src=0)
    return found[0]


class _named_errors:
    """Errors of the library as a ValueError that names the checkpoint."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        # Whatever a decoder raises; CheckpointException is not an Exception.
        if isinstance(error, CheckpointException | Exception):
            raise ValueError(f"{self._path} does not fit this run, or is damaged: {_cause(error)}") from error


class _Copies(AsyncStager):
    """Copies a state to the CPU before training goes on; the library's own stager does not know sharded tensors."""

    _synchronize_after_execute = False

    def stage(self, state_dict: State) -> State:
        return {key: _copied(value) for key, value in state_dict.items()}

    def synchronize_staging(self) -> None:
        pass

    def close(self) -> None:
        pass


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, ShardedTensor):
        shards = [Shard(_copied(shard.tensor), shard.metadata) for shard in value.local_shards()]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, value.metadata(), process_group=value._process_group
        )
    assert isinstance(value, Tensor)
    return value.detach().to("cpu", copy=True)


class _TensorReader(FileSystemReader):
    """Reads tensors alone, and runs no code of whoever wrote the files."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(f".metadata holds {type(metadata).__name__}, not a description of tensors")
        for key, value in metadata.state_dict_metadata.items():
            if isinstance(value, BytesStorageMetadata):
                raise ValueError(f"{key} is no tensor; other objects would be unpickled, and are refused")
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
"""What the library's description of tensors is made of."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)


def _cause(error: BaseException) -> str:
    """The first failure of a rank, without the tracebacks that the library puts into its message."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
