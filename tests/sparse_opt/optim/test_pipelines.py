"""TorchRec's pipelines and torch.compile train as the plain loop does, with the clip and with EmbeddingAdam."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import (
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip
from sharded_case import Case, batch_of, gather_tables, sharded_model

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
CPU = torch.device("cpu")
CASE = Case(rows=(60, 5), features=(("a",), ("b", "c")), batch=8, dim=4, steps=12)
RULE = CowClip(r=0.5, zeta=1e-3)
ADAM = AdamConfig(lr=1e-2, l2=1e-3, eps=1e-6)
MODES = ("attach", "lazy", "replay")


@dataclass
class Samples(Pipelineable):
    ids: KeyedJaggedTensor
    target: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Samples":
        return self

    def record_stream(self, stream: Any) -> None: ...

    def pin_memory(self) -> "Samples":
        return self


class Network(nn.Module):
    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc, self.weight = ebc, nn.Parameter(torch.ones(CASE.dim * len(CASE.keys)))

    def forward(self, batch: Samples) -> tuple[Tensor, Tensor]:
        return self.loss(self.ebc(batch.ids), batch)

    def loss(self, pooled: Any, batch: Samples) -> tuple[Tensor, Tensor]:
        by_key = pooled.to_dict()
        outputs = (torch.cat([by_key[key] for key in CASE.keys], 1) * self.weight * batch.target).sum(1)
        return outputs.mean(), outputs.detach()


@pytest.fixture
def streams_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets pipelines that take the device to be CUDA run in sequence."""
    monkeypatch.setattr(torch, "get_device_module", lambda _=None: torch.cpu)
    for each in (KeyedJaggedTensor, Tensor):
        monkeypatch.setattr(each, "record_stream", lambda *_: None)


def started(mode: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, attached, and the network's optimizer."""
    model = plain_model()
    return model, attach(model, mode)


def plain_model() -> nn.Module:
    model = sharded_model(CASE, CASE.draw()["tables"])
    model._dmp_wrapped_module = Network(model.module["ebc"])
    return model


def attach(model: nn.Module, mode: str) -> torch.optim.Optimizer:
    """Attaches; returns the network's optimizer."""
    if mode == "attach":
        attach_cowclip(model, RULE)
    else:
        EmbeddingAdam(model, replace(ADAM, absent_rows=mode), RULE)
    return torch.optim.SGD([model.module.weight], lr=1e-2)


def batches() -> list[Samples]:
    return [
        Samples(batch_of(CASE, bags, 0, CASE.batch), torch.cat([torch.from_numpy(target[key]) for key in CASE.keys], 1))
        for bags, target in CASE.draw()["steps"]
    ]


Trained = tuple[list[Tensor], nn.Module]


def plain_loop(mode: str) -> Trained:
    model, optimizer = started(mode)
    outputs = []
    for batch in batches():
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        optimizer.step()
        outputs.append(output)
    return outputs, model


def loop_one_lookup_ahead(mode: str) -> Trained:
    """Looks the next batch up before the backward of the present one."""
    model, optimizer = started(mode)
    outputs, network = [], model.module
    pooled = network.ebc(batches()[0].ids).wait()
    for batch, following in pairwise([*batches(), None]):
        now, pooled = pooled, network.ebc(following.ids).wait() if following else None
        optimizer.zero_grad()
        loss, output = network.loss(now, batch)
        loss.backward()
        optimizer.step()
        outputs.append(output)
    return outputs, model


def run(pipeline: Any) -> list[Tensor]:
    source, outputs = iter(batches()), []
    while True:
        try:
            outputs.append(pipeline.progress(source))
        except StopIteration:
            return outputs


def assert_same(got: Trained, expected: Trained) -> None:
    assert len(got[0]) == len(expected[0]) == CASE.steps
    assert all(torch.equal(one, other) for one, other in zip(got[0], expected[0], strict=True))
    tables = [gather_tables(CASE, model) for _, model in (got, expected)]
    for one, other, initial in zip(*tables, CASE.draw()["tables"], strict=True):
        np.testing.assert_array_equal(one, other)
        assert abs(one - initial).max() > 1e-3


PIPELINES: dict[str, Callable[..., Any]] = {"base": TrainPipelineBase, "sparse": TrainPipelineSparseDist}


@pytest.mark.parametrize("mode", [*MODES, "dense"])
@pytest.mark.usefixtures("streams_on_cpu")
def test_semi_synchronous_training_equals_a_loop_that_looks_up_ahead(mode: str) -> None:
    """Rows of the next batch miss a step between their forward and their backward; replay takes it in the latter."""
    model, optimizer = started(mode)
    pipeline = TrainPipelineSemiSync(model, optimizer, CPU, start_batch=0)
    assert_same((run(pipeline), model), loop_one_lookup_ahead("dense" if mode == "replay" else mode))


@pytest.mark.parametrize("mode", [pytest.param("attach", marks=pytest.mark.thorough), "replay"])
def test_a_compiled_model_trains_as_without(mode: str) -> None:
    """Lookups run outside of the compiled graph, also of one that was compiled and traced before attaching."""
    model = plain_model()
    compiled, outputs = torch.compile(model, backend="eager"), []
    with torch.no_grad():
        compiled(batches()[0])
    optimizer = attach(model, mode)
    for batch in batches()[:2]:
        optimizer.zero_grad()
        loss, output = compiled(batch)
        loss.backward()
        optimizer.step()
        outputs.append(output)
    torch._dynamo.reset()
    assert all(torch.equal(*pair) for pair in zip(outputs, plain_loop(mode)[0][:2], strict=True))
