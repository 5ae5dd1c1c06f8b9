"""Training steps on fake CUDA tensors: ``main()`` takes steps of the cases on stdin and prints what each step did.

Stubs stand for what needs a device: FBGEMM's lookup, DistributedDataParallel's buckets, and Triton's launches, which
compile only.
"""

import gc
import json
import multiprocessing
import os
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.utils._pytree import tree_leaves
from torchrec.distributed import embeddingbag, model_parallel

from ahead_of_time import Launch, recorded_launches
from cowrec.data_pipeline import Batch, DenseField, Schema, SparseField
from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.models import build_model
from cowrec.sparse_opt.clipping.update_check import UpdateCheck
from cowrec.sparse_opt.kernels import layout
from cowrec.sparse_opt.optim.embedding_adam import GraphedSteps
from cowrec.trainer.config.run import config_from, with_defaults
from cowrec.trainer.runs.checkpoint import _CpuStager
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model import build
from cowrec.trainer.sharded_model import step as training_step
from cowrec.trainer.sharded_model.run_plan import LrSchedule, RunPlan
from cowrec.trainer.sharded_model.step import Output, TakeStep
from cowrec.trainer.training.active_run import LossWatch
from cowrec.trainer.training.state import TrainState
from device_watch import Call, DeviceWatch, ReadWatch, numbers
from fake_cuda import build_guard, fake_cuda, fake_process_group, run_with_guard, sizes_of_peers

DENSE_FIELDS, FIELDS, ROWS = 13, 26, 10_000
_RANDOM = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """A run, and the process whose steps to take."""

    config: dict[str, dict[str, Any]]  # by section; ``train.batch_size`` is that of all processes
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class Report:
    """What a training step did, after the first ones of a run. Places are ``operator in module.function``, sorted."""

    error: str = ""  # traceback of the error that ended the run; the other attributes are then empty
    # Numbers of operators that start work on the device, by place: one after the other, and at once in a graph.
    launches: dict[str, int] = field(default_factory=dict)
    captured: dict[str, int] = field(default_factory=dict)
    crossings: list[str] = field(default_factory=list)  # places of operators with tensors of several devices
    changing: list[str] = field(default_factory=list)  # of those whose numbers or shapes are others in the next step
    frozen: list[str] = field(default_factory=list)  # of those that a captured graph repeats with the first numbers
    recompiled: list[str] = field(default_factory=list)  # kernels that the next step compiles again
    lost: list[str] = field(default_factory=list)  # of a graph whose memory is gone after batches of other sizes
    waits: list[str] = field(default_factory=list)  # what reads sizes from the device, as several processes must


def reports(cases: Mapping[str, Case]) -> dict[str, Report]:
    """Takes the cases' steps in a process of its own; skips the test where that is impossible."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"the compiler {compiler} is not installed; it builds the device guard that fake tensors need")
    library = build_guard(compiler)
    printed = run_with_guard(library, "fake_training", json.dumps([asdict(case) for case in cases.values()]))
    found = json.loads(printed.splitlines()[-1])
    return {name: Report(**report) for name, report in zip(cases, found, strict=True)}


def main() -> None:
    """Reads cases as JSON from stdin; prints the list of their reports as the last line."""
    cases = [Case(**case) for case in json.loads(sys.stdin.read())]
    # TorchRec keeps process groups for the life of a process.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        print(json.dumps([asdict(report) for report in pool.map(_reported, cases, chunksize=1)]))


def _reported(case: Case) -> Report:
    waits: list[str] = []
    try:
        with ExitStack() as stack:
            stack.enter_context(fake_process_group(case.rank, case.world_size))
            stack.enter_context(fake_cuda(case.rank))
            stack.enter_context(_stubs())
            if case.world_size > 1:
                stack.enter_context(sizes_of_peers(waits))
            run = _Run(case, stack.enter_context(recorded_launches()))
            report = _report(run, waits)  # keeps no tensor
            run.save()
            return replace(report, lost=run.lost())
    except Exception:
        return Report(error=traceback.format_exc())


def _report(run: "_Run", waits: list[str]) -> Report:
    run.take_first_steps()
    host, graph = run.record()
    waits.clear()
    next_host, next_graph = run.record()
    compiled = {id(kernel.kernel) for kernel in (*host.kernels, *graph.kernels)}
    recompiled = {
        kernel.name for kernel in (*next_host.kernels, *next_graph.kernels) if id(kernel.kernel) not in compiled
    }
    return Report(
        launches=host.launches(),
        captured=graph.launches(),
        crossings=sorted(host.crossings() | graph.crossings()),
        changing=host.changing(next_host),
        frozen=graph.changing(next_graph),
        recompiled=sorted(recompiled),
        waits=sorted(set(waits)),
    )


class _Record(NamedTuple):
    """Operators and Triton kernels, each in their order."""

    calls: list[Call]
    kernels: list[Launch]

    def crossings(self) -> set[str]:
        """Places of operators with tensors of several devices, and of kernels with tensors on the host."""
        operators = {call.place for call in self.calls if len(call.devices) > 1}
        return operators | {f"{kernel.name} in Triton" for kernel in self.kernels if "cpu" in devices(kernel.arguments)}

    def launches(self) -> dict[str, int]:
        places = [call.place for call in self.calls if call.launches]
        return dict(Counter([*places, *(f"{kernel.name} in Triton" for kernel in self.kernels)]))

    def changing(self, other: "_Record") -> list[str]:
        """Places of operators whose numbers or shapes are others there."""
        calls = zip(self.calls, other.calls, strict=True)
        changed = {one.place for one, two in calls if (one.numbers, one.shapes) != (two.numbers, two.shapes)}
        for kernel, same in zip(self.kernels, other.kernels, strict=True):
            if numbers(kernel.arguments) != numbers(same.arguments):
                changed.add(f"{kernel.name} in Triton")
        return sorted(changed)


class _Run:
    """A training run whose data are on the device. ``launches`` is the list of :func:`recorded_launches`."""

    def __init__(self, case: Case, launches: list[Launch]) -> None:
        config, self._schema = with_defaults(config_from(case.config), 0), _schema(case.config)
        self._process = Process(case.rank, case.world_size, case.world_size, False, torch.device("cuda", case.rank))
        with patch.object(training_step, "CudaGraphCapture", lambda: self):
            self._state = TrainState(RunPlan.of(config, self._schema, self._process, schedule=LrSchedule(100)))
        self._losses = LossWatch(self._process)
        size = config.train.batch_size // self._process.world_size
        self._batches = map(self._state.ids.training, self._epoch(size))
        self._watch, self._launches, self._graph = DeviceWatch(), launches, _Record([], [])
        self._reads, self._size = ReadWatch(), size

    def take_first_steps(self) -> None:
        """Takes the first steps, and step 14: steps 15 and 16 would be different to Triton if they were arguments."""
        for _ in range(3):
            self._step()
        self._state.steps = 13
        if self._state.adam:
            self._state.adam.steps = 13
        self._step()

    def record(self) -> tuple[_Record, _Record]:
        """Takes a step; returns what the host started and what a captured graph contains."""
        self._launches.clear()
        with DeviceWatch() as self._watch:
            self._step()
        return _Record(self._watch.calls, list(self._launches)), self._graph

    def save(self) -> None:
        """Copies the run's state as a checkpoint does, to the CPU."""
        with self._state._as_stored():
            state = self._state._weights() | self._state._tables(None)
            copied = _CpuStager().stage(state | {"dense_optimizer": self._state.dense_optimizer.tensors()})
        assert "cuda" not in devices(_local_tensors(copied))

    def lost(self) -> list[str]:
        """Places of the captured graph whose memory is gone, after steps of other sizes have taken place."""
        read, self._graph = self._reads.read, _Record([], [])
        self._state.model.eval()
        with torch.no_grad(), patch.object(layout, "_MOST_SIZES", 1):
            for size in (self._size // 2, self._size // 4):
                self._state.pipeline.progress(iter([next(self._epoch(size))]))
        self._launches.clear()
        gc.collect()
        return sorted({place for place, storage in read if storage.expired()})

    def _step(self) -> None:
        step = self._state.step(self._batches)
        self._losses.add(step.loss, self._state.steps - 1)

    # This and the next stand for a CUDA graph.
    def warm_up(self, step: TakeStep) -> Output:
        return step()

    def capture(self, step: TakeStep) -> TakeStep:
        """Takes the step again, operator by operator, at each replay."""

        def replay() -> Output:
            calls, kernels = self._watch.calls, self._launches
            first_call, first_kernel = len(calls), len(kernels)
            assert self._state.adam
            with GraphedSteps(self._state.adam).capturing():  # the host counts elsewhere
                with ReadWatch() as self._reads:
                    output = step()
                for kernel in kernels[first_kernel:]:
                    self._reads.add(f"{kernel.name} in Triton", kernel.arguments)
            self._graph = _Record(calls[first_call:], kernels[first_kernel:])
            del calls[first_call:], kernels[first_kernel:]
            return output

        return replay

    def _epoch(self, size: int) -> Iterator[Batch]:
        """Batches as the reader of a resident data set makes them."""
        samples, device = 16 * size, self._process.device
        kind = torch.int64 if self._schema.has_raw_ids else torch.int32
        ids = torch.empty(samples, FIELDS, dtype=kind, device=device)
        dense, label = torch.empty(samples, DENSE_FIELDS, device=device), torch.empty(samples, device=device)
        order = torch.empty(samples, dtype=torch.int64, device=device)
        block = SampleBlock(dense, label, ids, {})
        for part in order.split(size):
            yield block.take(part).batch(self._schema, size * self._process.world_size)


def devices(arguments: Any) -> set[str]:
    """Kinds of devices of the tensors among arguments."""
    return {leaf.device.type for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}


def _local_tensors(state: Any) -> Any:
    """Nested dictionaries with this process's shards in the place of sharded tensors."""
    if isinstance(state, dict):
        return {key: _local_tensors(value) for key, value in state.items()}
    return [shard.tensor for shard in state.local_shards()] if isinstance(state, ShardedTensor) else state


def _schema(config: dict[str, dict[str, Any]]) -> Schema:
    translated = config.get("id_table", {}).get("kind") == "collisionless"
    encoding: Any = "raw" if translated else "vocabulary"
    return Schema(
        name="criteo",
        dense=tuple(DenseField(f"I{number}") for number in range(DENSE_FIELDS)),
        sparse=tuple(SparseField(f"C{n}", 0 if translated else ROWS, encoding=encoding) for n in range(FIELDS)),
        splits={},
    )


@torch.library.custom_op("fake_training::lookup", mutates_args=())
def _lookup(indices: Tensor, offsets: Tensor, bags: int, columns: int) -> Tensor:
    raise NotImplementedError  # it only ever runs on fake tensors, by the function below


@_lookup.register_fake
def _(indices: Tensor, offsets: Tensor, bags: int, columns: int) -> Tensor:
    return torch.empty(bags, columns, device=indices.device)


class _FusedUpdate(torch.autograd.Function):
    """Stands for the operator of FBGEMM's lookup; its backward, the fused update, does nothing."""

    @staticmethod
    def forward(_: Any, indices: Tensor, offsets: Tensor, bags: int, columns: int, __: Tensor) -> Tensor:
        output: Tensor = torch.ops.fake_training.lookup(indices, offsets, bags, columns)
        return output

    @staticmethod
    def backward(*_: Any) -> tuple[None, ...]:
        return (None,) * 5


def _look_up(module: Any, indices: Tensor, offsets: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stands for the forward of FBGEMM's lookup."""
    bags = (offsets.numel() - 1) // len(module.feature_table_map)
    anchor = torch.empty(0, requires_grad=True)
    output: Tensor = _FusedUpdate.apply(indices, offsets, bags, module.total_D, anchor)
    return output


_ADAM = torch.library.Library("aten", "IMPL", "Meta")
_ADAM.impl("_fused_adam_.tensor_lr", lambda *_, **__: None)  # torch has none for fake tensors


class _Replicated(nn.Module):
    """Stands for DistributedDataParallel, whose buckets need the gradients' memory; leaves out their all-reduce."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(*_: Any, **__: Any) -> None:
        pass


def _model_on_cuda(*arguments: Any, **settings: Any) -> nn.Module:
    """The network, with its parameters on the device from the start: CPU tensors cannot become fake ones."""
    with (
        torch.device("cuda", torch.cuda.current_device()),
        patch.object(nn.init, "trunc_normal_", lambda weight, **_: weight),
    ):  # draws until all values fit
        return build_model(*arguments, **settings)


def _stay(module: nn.Module, device: torch.device) -> nn.Module:
    """Stands for moving a module, whose parameters are on the device already."""
    assert device.type == "cuda"
    assert not any(tensor.is_cpu for tensor in (*module.parameters(), *module.buffers()))
    return module


def _new_ids(tensor: Tensor) -> np.ndarray:
    """Stands for the ids of a batch, which a copy from the device cannot have."""
    return _RANDOM.integers(0, 1 << 40, tuple(tensor.shape))


@contextmanager
def _stubs() -> Iterator[None]:
    with ExitStack() as stack:
        for module in (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen):
            stack.enter_context(patch.object(module, "forward", _look_up))
        # The checks of the first batches read values.
        stack.enter_context(patch.object(embeddingbag, "validate_keyed_jagged_tensor", lambda *_: True))
        stack.enter_context(patch.object(UpdateCheck, "of_forward", lambda *_: None))
        for module in (model_parallel, embeddingbag):
            stack.enter_context(patch.object(module, "DistributedDataParallel", _Replicated))
        stack.enter_context(patch.object(build, "build_model", _model_on_cuda))
        stack.enter_context(patch.object(nn.Module, "to", _stay))
        stack.enter_context(patch.object(FakeTensor, "numpy", _new_ids, create=True))
        yield
