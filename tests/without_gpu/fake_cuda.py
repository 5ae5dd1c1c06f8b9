"""CUDA tensors without data where there is no GPU, beside ordinary CPU tensors, and a process group without peers.

Fake tensors have shapes, types and devices but no values: code that waits for a value raises an error, and so do
operators on tensors of several devices. :func:`run_with_guard` makes backward passes possible.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec.distributed import collective_utils, dist_data
from torchrec.distributed.planner import planners
from torchrec.sparse import jagged_tensor

from cowrec.trainer.sharded_model.step import SequentialSteps
from cowrec.trainer.training import state
from device_watch import site


def build_guard(compiler: str) -> Path:
    """Compiles the library for the installed torch, once: it is kept in the folder ``build``."""
    from torch.utils.cpp_extension import include_paths, library_paths

    source = Path(__file__).with_name("fake_cuda_guard.cpp")
    key = hashlib.sha256(f"{torch.__version__} {compiler} ".encode() + source.read_bytes()).hexdigest()[:16]
    kept = Path(__file__).parents[2] / "build" / f"fake_cuda_guard_{key}.so"
    if kept.exists():
        return kept
    kept.parent.mkdir(exist_ok=True)
    library = kept.with_suffix(f".{os.getpid()}.partial")
    command = [compiler, "-shared", "-fPIC", "-std=c++20", "-w", str(source)]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-o", str(library)]
    command += [f"-I{path}" for path in include_paths()]
    command += [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True, timeout=3600)
    return library.replace(kept)


def run_with_guard(library: Path, module: str, input: str) -> str:
    """Runs ``main()`` of a module in a process that has loaded the library; returns what it printed.

    torch looks for hooks of CUDA once, when it is imported.
    """
    launch = (
        "import ctypes, sys; guard = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL); import torch;"
        f" guard.register_guard(); import {module}; {module}.main()"
    )
    # TorchRec's planner decides between equal plans by the order of a set.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", launch, str(library)]
    done = subprocess.run(
        command, env=environment, input=input, capture_output=True, text=True, timeout=3600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class _FakeTensorMode(FakeTensorMode):
    avoid_device_init = True  # although torch.cuda.is_available()


class _FakeOnCuda(TorchDispatchMode):
    """Makes tensors on CUDA fake ones; CPU tensors keep their data, so that the host's own work runs as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = _FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(_is_on_cuda(leaf) for leaf in tree_leaves((args, kwargs))):
            with self._fake:
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_on_cuda(value: Any) -> bool:
    return isinstance(value, FakeTensor) or (isinstance(value, torch.device) and value.type == "cuda")


def _storage(tensor: FakeTensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity


@contextmanager
def fake_cuda(index: int) -> Iterator[None]:
    """Makes tensors on CUDA fake ones, and answers questions about the devices; ``index`` is the current one."""
    only_lifts = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        # torch.tensor(..., device=CUDA) otherwise copies to the device out of the mode's sight.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, only_lifts)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        answers = {
            "_lazy_init": None,
            "is_available": True,
            "is_initialized": True,
            "manual_seed_all": None,
            "device_count": 8,
            "current_device": index,
            "set_device": None,
            "is_current_stream_capturing": False,
            "get_device_name": "fake",
            "get_device_properties": SimpleNamespace(total_memory=80 << 30, warp_size=32),
            "current_stream": torch.Stream(stream_id=0, device_index=index, device_type=1),
        }
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        stack.enter_context(patch.object(FakeTensor, "record_stream", lambda *_: None, create=True))
        # The address of its memory, which does not exist: tensors that share it have the same.
        stack.enter_context(patch.object(FakeTensor, "data_ptr", _storage, create=True))
        stack.enter_context(patch.object(torch.Tensor, "pin_memory", lambda tensor, *_: tensor))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda _: None))
        stack.enter_context(_FakeOnCuda())
        yield


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """A default process group whose collectives return at once, without having exchanged anything."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


_IDS_OF_A_KEY = 256


@contextmanager
def sizes_of_peers(waits: list[str]) -> Iterator[None]:
    """Makes peers that do as this process does; appends what reads sizes from the device to ``waits``.

    TorchRec's pipeline, which overlaps the exchange of ids with the step before, needs streams. The pipeline of one
    process replaces it; it makes the same calls one after the other.
    """
    connect = dist_data.KJTAllToAllSplitsAwaitable.__init__

    def exchange(self: Any, *arguments: Any, **settings: Any) -> None:
        connect(self, *arguments, **settings)
        kept = [*(splits[self._pg.rank()] for splits in self._input_splits), self._input.stride()]

        def receive() -> list[list[int]]:
            waits.append("sizes that the peers send")
            return [[size] * self._workers for size in kept]

        self._splits_awaitable._wait_impl = receive

    def read(tensor: Tensor) -> Tensor:
        waits.append(site(outside="torchrec.sparse."))
        return torch.full(tensor.shape, _IDS_OF_A_KEY)

    def invoke(pg: Any, rank: int, func: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        return func(*arguments, **settings)

    def pipeline(model: Any, optimizer: Any, process: Any, **_: Any) -> SequentialSteps:
        return SequentialSteps(model, optimizer, process.device)

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist_data.KJTAllToAllSplitsAwaitable, "__init__", exchange))
        for module in (dist_data, jagged_tensor):
            stack.enter_context(patch.object(module, "_cuda_to_cpu_safe", read, create=True))
        stack.enter_context(patch.object(FakeTensor, "tolist", lambda tensor: read(tensor).tolist()))
        # What one process computes for all: every process computes it, for a broadcast brings nothing.
        for module in (collective_utils, planners):
            stack.enter_context(patch.object(module, "invoke_on_rank_and_broadcast_result", invoke))
        stack.enter_context(patch.object(state, "pipeline_of", pipeline))
        yield
