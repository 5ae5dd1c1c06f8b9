"""pytest plugin that runs pipelines for CUDA on CPU, for ``pytest_plugins = ["streams_on_cpu"]`` in a test module."""

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class StreamOnCpu(torch.cpu.Stream):
    """A stream that knows its device, as those of CUDA do; TorchRec 1.9 asks for it."""

    device = torch.device("cpu")


@pytest.fixture
def streams_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets pipelines that take the device to be CUDA run in sequence."""
    monkeypatch.setattr(torch, "get_device_module", lambda _=None: torch.cpu)
    monkeypatch.setattr(torch.cpu, "_current_stream", StreamOnCpu())
    for kind in (KeyedJaggedTensor, Tensor):
        monkeypatch.setattr(kind, "record_stream", lambda *_: None)
