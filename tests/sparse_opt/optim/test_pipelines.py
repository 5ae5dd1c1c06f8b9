"""TorchRec's pipelines and torch.compile train as the plain loop does, with the clip and with EmbeddingAdam."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil
from torchrec.distributed.train_pipeline.train_pipelines import StagedTrainPipeline, TrainPipelineSemiSync

from adam_case import ADAM, RULE, SMALL
from cowrec.sparse_opt import EmbeddingAdam, attach_cowclip
from random_problems.drawing import small_problem
from random_problems.training import assert_equal, batches_of, sharded_model, state_of
from streams_on_cpu import StreamOnCpu

pytest_plugins = ["one_group", "streams_on_cpu"]
pytestmark = pytest.mark.usefixtures("group")
CPU = torch.device("cpu")
CASE = small_problem(**SMALL, steps=12)
MODES = ("attach", "lazy", "replay")


class Network(nn.Module):
    """Mean over the samples of sum(target * weight * output)."""

    def __init__(self, c0: nn.Module) -> None:
        super().__init__()
        self.c0, self.weight = c0, nn.Parameter(torch.ones(SMALL["dim"]))

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.loss(self.c0(batch.ids0), batch)

    def loss(self, pooled: Any, batch: Any) -> tuple[Tensor, Tensor]:
        outputs = sum(pooled[key] * self.weight * batch.targets[f"c0 {key}"] for key in "abc")
        return outputs.sum(1).mean(), outputs.detach()


def plain_model() -> nn.Module:
    model = sharded_model(CASE)
    model._dmp_wrapped_module = Network(model.module.c0)
    return model


def attach(model: nn.Module, mode: str) -> torch.optim.Optimizer:
    """Attaches; returns the network's optimizer."""
    if mode == "attach":
        attach_cowclip(model, RULE)
    else:
        EmbeddingAdam(model, replace(ADAM, absent_rows=mode), RULE)
    return torch.optim.SGD([model.module.weight], lr=1e-2)


def started(mode: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, attached, and the network's optimizer."""
    model = plain_model()
    return model, attach(model, mode)


def batches() -> list[Any]:
    return [batch for (batch,) in batches_of(CASE)]


def loop(model: Callable[[Any], Any], optimizer: torch.optim.Optimizer, source: Iterable[Any]) -> list[Tensor]:
    """Trains plainly; returns the outputs."""
    outputs = []
    for batch in source:
        optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        optimizer.step()
        outputs.append(output)
    return outputs


def loop_one_lookup_ahead(mode: str) -> tuple[list[Tensor], nn.Module]:
    """Looks the next batch up before the backward of the present one."""
    model, optimizer = started(mode)
    outputs, network = [], model.module
    pooled = network.c0(batches()[0].ids0).wait()
    for batch, following in pairwise([*batches(), None]):
        now, pooled = pooled, network.c0(following.ids0).wait() if following else None
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


def assert_trains_as(model: nn.Module, outputs: list[Tensor], expected: list[Tensor], other: nn.Module) -> None:
    """Equal outputs and tables, which moved."""
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
    tables = state_of(model)
    assert_equal(tables, state_of(other))
    for t, initial in enumerate(CASE.initial()[0]):
        assert abs(tables[f"c0.t{t}"] - initial).max() > 1e-3


@pytest.mark.parametrize("mode", [*MODES, "dense"])
@pytest.mark.usefixtures("streams_on_cpu")
def test_semi_synchronous_training_equals_a_loop_that_looks_up_ahead(mode: str) -> None:
    """Rows of the next batch miss a step between their forward and their backward; replay takes it in the latter."""
    model, optimizer = started(mode)
    outputs = run(TrainPipelineSemiSync(model, optimizer, CPU, start_batch=0))
    assert_trains_as(model, outputs, *loop_one_lookup_ahead("dense" if mode == "replay" else mode))


@pytest.mark.usefixtures("streams_on_cpu")
def test_a_pipeline_goes_on_from_weights_that_were_written_in_place() -> None:
    """As a plain loop does: steps that rows had missed do not move them, though the pipeline looks up first."""
    tables = []
    for train in (run, loop):
        model, optimizer = started("replay")
        state = model.state_dict()
        parts = [tensor.local_shards()[0].tensor for tensor in state.values() if hasattr(tensor, "local_shards")]
        saved = [shard.clone() for shard in parts]
        loop(model, optimizer, batches()[:6])
        for part, earlier in zip(parts, saved, strict=True):
            part.copy_(earlier)
        model.load_state_dict(state)
        network = torch.optim.SGD([model.module.weight], lr=0)
        if train is loop:
            loop(model, network, batches()[:1])
        else:
            TrainPipelineSemiSync(model, network, CPU, start_batch=0).progress(iter(batches()[:1]))
        tables.append(state_of(model))
    assert_equal(*tables)


@pytest.mark.parametrize("mode", [*MODES, "dense"])
@pytest.mark.parametrize("last", ["distribution", "prefetch", "embedding_lookup"])
@pytest.mark.usefixtures("streams_on_cpu")
def test_a_staged_pipeline_trains_as_the_loop_whose_lookups_it_makes(mode: str, last: str) -> None:
    """A pipeline whose last stage looks up is one lookup ahead; distributing and prefetching change nothing."""
    model, optimizer = started(mode)
    stream = StreamOnCpu()
    ahead = SparseDataDistUtil(model, stream, **({} if last == "distribution" else {f"{last}_stream": stream}))
    stages = [
        PipelineStage("copy", lambda batch: batch, stream),
        PipelineStage("distribution", ahead.start_sparse_data_dist, stream, ahead.wait_sdd_fill_callback),
    ]
    if last == "prefetch":
        stages.append(PipelineStage(last, ahead.prefetch, stream, ahead.load_prefetch))
    elif last == "embedding_lookup":
        stages.append(PipelineStage(last, ahead.start_embedding_lookup, stream))
    pipeline = StagedTrainPipeline(stages, compute_stream=stream)
    source = iter(batches())
    outputs = loop(model, optimizer, iter(lambda: pipeline.progress(source), None))
    if last == "embedding_lookup":
        expected, other = loop_one_lookup_ahead("dense" if mode == "replay" else mode)
    else:
        other, optimizer = started(mode)
        expected = loop(other, optimizer, batches())
    assert_trains_as(model, outputs, expected, other)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["attach", "replay"])
def test_a_compiled_model_trains_as_without(mode: str) -> None:
    """Lookups run outside of the compiled graph, also of one that was compiled and traced before attaching."""
    model = plain_model()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(batches()[0])
    outputs = loop(compiled, attach(model, mode), batches()[:2])
    torch._dynamo.reset()
    assert all(torch.equal(*pair) for pair in zip(outputs, loop(*started(mode), batches()[:2]), strict=True))
