"""Steps under capture are bit-identical to steps one after another, whatever comes between them.

There is no CUDA graph on CPU. Its stand-in takes the recorded step anew on the same tensors, with the host's numbers
as they were at the capture, so that a number that is not read from tensors would be out of date. The tables' optimizer
runs its CUDA kernels in Triton's interpreter. torch's own graph runs where there is a GPU: :func:`test_on_a_gpu`.
"""

import dataclasses
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from cowrec.data_pipeline import Batch, DenseField, Schema, SparseField
from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from cowrec.sparse_opt.optim.embedding_adam import GraphedSteps
from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.config.sections import CheckpointConfig
from cowrec.trainer.runs.checkpoint import Checkpoints, Progress
from cowrec.trainer.runs.local_copy import RunPlace
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.sharded_model.run_plan import LrSchedule, RunPlan
from cowrec.trainer.sharded_model.step import (
    WARMUP_STEPS,
    CapturedSteps,
    CaptureFailed,
    CudaGraphCapture,
    Output,
    TakeStep,
    why_not_captured,
)
from cowrec.trainer.training.state import TrainState
from random_problems.training import run_on
from trainer_cases import config_file, tensors

BATCH = 8
ROWS = (40, 7, 60)
SCHEMA = Schema(
    name="small",
    dense=(DenseField("price"), DenseField("age")),
    sparse=tuple(SparseField(f"C{n}", rows) for n, rows in enumerate(ROWS)),
    splits={},
)
SIZES = (*[BATCH] * 6, 3, BATCH, BATCH, 1, *[BATCH] * 6)
EVALUATED_AFTER = (5, 8)
SAVED_AFTER, LR_CHANGED_AFTER = 7, 9
RESUMED = slice(3 * (SAVED_AFTER + 1) + 6, None)
"""Results after the checkpoint: three of each step, and six of each evaluation."""
CASES = (('optimizer.absent_rows="lazy"', 'model.name="dcnv2"'), ('optimizer.adam_epsilon="keras"',))


def config_of(*overrides: str) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        return load_config(config_file(Path(folder)), [f"train.batch_size={BATCH}", *overrides])


def batch(seed: int, size: int = BATCH, device: str = "cpu") -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = [(torch.rand(size, generator=generator).square() * rows).int() for rows in ROWS]
    dense, label = torch.rand(size, 2, generator=generator), torch.rand(size, generator=generator).round()
    return SampleBlock(dense, label, torch.stack(ids, dim=1), {}).batch(SCHEMA, size).to(torch.device(device))


class Graph(CudaGraphCapture):
    """Stand-in for CUDA graphs of a run's steps; counts the captures and the replays."""

    def __init__(self, state: TrainState) -> None:
        assert state.adam
        self.adam, self.dense = state.adam, state.dense_optimizer
        self.warm_ups = self.captures = self.replays = 0

    def warm_up(self, step: TakeStep) -> Output:
        self.warm_ups += 1
        return step()

    def capture(self, step: TakeStep) -> TakeStep:
        self.captures += 1
        frozen, outputs = self._host_numbers(), []

        def replay() -> Output:
            self.replays += 1
            now = self._host_numbers()
            set_numbers(frozen)
            try:
                for kept, new in zip(outputs, new_outputs := step(), strict=False):
                    kept.copy_(new)
            finally:
                set_numbers(now)
            outputs[:] = outputs or new_outputs
            loss, logits, label = outputs
            return loss, logits, label

        return replay

    def _host_numbers(self) -> list[tuple[Any, str, Any]]:
        history = self.adam.collections[0].history
        own = [(history, name) for name in ("_steps", "_scheduled", "_scheduled_lr")]
        own += [
            (self.dense, "_hyperparameters"),
            (self.adam, "lr"),
            *((lookup, "_step") for lookup in self.adam.lookups),
        ]
        return [(of, name, getattr(of, name)) for of, name in own]


def set_numbers(numbers: list[tuple[Any, str, Any]]) -> None:
    for of, name, value in numbers:
        setattr(of, name, value)


def captured(state: TrainState, capture: CudaGraphCapture, device: str = "cpu") -> TrainState:
    """Lets the steps of a run be captured, and its tables run their CUDA kernels."""
    assert state.adam
    for lookup in state.adam.lookups:
        run_on("triton", lookup.wrapped)
    assert GraphedSteps(state.adam).are_possible
    parts = state.model, state.dense_optimizer, state.adam
    state.pipeline = CapturedSteps(*parts, torch.device(device), BATCH, capture=capture)
    return state


def train(state: TrainState, steps: range, checkpoints: Checkpoints | None = None, device: str = "cpu") -> list[Tensor]:
    """Takes steps, evaluates and saves between them; returns their results."""
    results: list[Tensor] = []
    state.pipeline.reset()
    for number in steps:
        loss, logits, label, *_ = state.step(iter([batch(number, SIZES[number], device)]))
        results += [loss, logits, label]
        if number == LR_CHANGED_AFTER and state.adam:
            state.adam.lr *= 0.5
        if number in EVALUATED_AFTER:
            results += evaluate(state, device)
        if number == SAVED_AFTER and checkpoints:
            state.save(checkpoints, Progress(state.steps))
    return results


def evaluate(state: TrainState, device: str) -> list[Tensor]:
    state.model.eval()
    state.pipeline.reset()
    with torch.no_grad():
        results = [tensor for size in (BATCH, 5) for tensor in state.pipeline.progress(iter([batch(99, size, device)]))]
    state.model.train()
    return results


def everything(state: TrainState) -> dict[str, Tensor]:
    """All state of a run except for FBGEMM's count of forward passes."""
    found = tensors({key: value for key, value in state._everything().items() if key != "iterations"})
    for key, value in found.items():
        found[key] = (value.local_shards()[0].tensor if isinstance(value, ShardedTensor) else value).detach().clone()
    return found


def assert_equal(got: Any, expected: Any) -> None:
    one, other = (list(state.values()) if isinstance(state, dict) else state for state in (got, expected))
    assert len(one) == len(other) > 0
    assert all(map(torch.equal, one, other))


def compare(case: tuple[str, ...], process: Process) -> None:
    """Compares a trajectory under capture with sequential steps, and again after it resumed from its checkpoint."""
    everywhere, place = range(len(SIZES)), RunPlace(Path(tempfile.mkdtemp()), resume=True)
    sequential, state, fresh = (
        TrainState(RunPlan.of(config_of(*case), SCHEMA, process, schedule=LrSchedule(10))) for _ in range(3)
    )
    expected, end = train(sequential, everywhere), everything(sequential)
    checkpoints = Checkpoints(place, CheckpointConfig(), process)
    graph = Graph(state)
    captured(state, graph)
    assert_equal(train(state, everywhere, checkpoints), expected)
    checkpoints.finish()
    assert state.captured
    assert graph.captures > 1, "the schedule of the steps has grown, so the step was to be captured again"
    assert graph.warm_ups == WARMUP_STEPS + graph.captures - 1, "a step without a graph comes before each capture"
    assert graph.replays == SIZES.count(BATCH) - graph.warm_ups
    assert_equal(everything(state), end)
    assert captured(fresh, Graph(fresh)).resume(checkpoints)
    assert_equal(train(fresh, range(SAVED_AFTER + 1, len(SIZES))), expected[RESUMED])
    assert fresh.captured
    assert_equal(everything(fresh), end)


@pytest.mark.thorough
@pytest.mark.parametrize("case", [0, 1])
def test_interpreted(case: int) -> None:
    """Runs in a subprocess, because Triton reads TRITON_INTERPRET when it is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, __file__, str(case)], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with process_group("cpu") as process:
        yield process


class Failing(Graph):
    """Stand-in whose captures fail."""

    def capture(self, step: TakeStep) -> TakeStep:
        self.captures += 1
        raise CaptureFailed("operation not permitted")


def test_a_failed_capture_loses_no_step(process: Process, caplog: pytest.LogCaptureFixture) -> None:
    everywhere = range(len(SIZES))
    sequential, state = (TrainState(RunPlan.of(config_of(), SCHEMA, process, schedule=LrSchedule())) for _ in range(2))
    expected = train(sequential, everywhere)
    assert state.adam
    graph = Failing(state)
    state.pipeline = CapturedSteps(state.model, state.dense_optimizer, state.adam, process.device, BATCH, capture=graph)
    with caplog.at_level(logging.WARNING):
        assert_equal(train(state, everywhere), expected)
    assert_equal(everything(state), everything(sequential))
    assert (graph.captures, state.captured) == (1, False)
    (message,) = (record.getMessage() for record in caplog.records if record.name.startswith("cowrec"))
    assert message.endswith("cannot be captured as a CUDA graph, which makes it slower: operation not permitted")


REASONS = {
    "": "",
    "train.cuda_graph=false": "train.cuda_graph = false",
    "optimizer.absent_rows=dense": 'optimizer.absent_rows = "dense" with clip.rule = "cowclip"',
    "optimizer.embedding=sgd": 'optimizer.embedding = "sgd" counts its steps on the host',
    'sharding.tables={C0="column_wise"}': "column-wise tables are joined by TorchRec",
    "id_table.kind=collisionless id_table.capacity=64": "id tables give ids their rows between steps",
}


@pytest.mark.parametrize("overrides", REASONS)
def test_reasons(overrides: str, process: Process) -> None:
    config, why = config_of(*overrides.split()), REASONS[overrides]
    state = TrainState(RunPlan.of(config, SCHEMA, process, schedule=LrSchedule()))
    assert state.why_not_captured == (why if "cuda_graph" in why else "CUDA graphs exist on CUDA only")
    for lookup in state.adam.lookups if state.adam else ():
        run_on("triton", lookup.wrapped)
    cuda = dataclasses.replace(process, device=torch.device("cuda"))
    lists = dataclasses.replace(SCHEMA, sparse=(*SCHEMA.sparse, SparseField("tags", 9, kind="multi")))

    def found(schema: Schema = SCHEMA, of: Process = cuda) -> str:
        return why_not_captured(RunPlan.of(config, schema, of), state.model, state.embedding_optimizer)

    assert found() == why
    if not why:
        assert found(lists) == "the number of ids of field 'tags' varies"
        several = found(of=dataclasses.replace(cuda, world_size=2))
        assert several == "the sizes of the exchange between processes vary"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: tuple[str, ...]) -> None:
    """Compares captured with uncaptured steps, both on CUDA, and with those that resume from a checkpoint."""
    with process_group("cuda") as process:
        one, other, fresh = (
            TrainState(RunPlan.of(config_of(*case, f"train.cuda_graph={on}", 'train.device="cuda"'), SCHEMA, process))
            for on in ("true", "false", "true")
        )
        place = RunPlace(Path(tempfile.mkdtemp()), resume=True)
        checkpoints = Checkpoints(place, CheckpointConfig(), process)
        found = train(one, range(len(SIZES)), checkpoints, device="cuda")
        checkpoints.finish()
        assert_equal(found, train(other, range(len(SIZES)), device="cuda"))
        assert [one.captured, other.captured] == [True, False]
        assert_equal(everything(one), everything(other))
        assert fresh.resume(checkpoints)
        assert_equal(train(fresh, range(SAVED_AFTER + 1, len(SIZES)), device="cuda"), found[RESUMED])
        assert_equal(everything(fresh), everything(one))


if __name__ == "__main__":
    from cowrec.sparse_opt.kernels import triton_replay, triton_rows
    from cowrec.sparse_opt.optim import replay

    # The interpreter takes as long for a small program as for a large one.
    triton_replay.ELEMENTS = triton_rows.ELEMENTS = 512
    triton_rows.BLOCK, triton_rows.IDS = 4, 2
    triton_rows.GROUP, triton_rows.LEAST_BLOCKS = 2, 2
    replay._AHEAD = 3  # so that the schedule of the steps grows while they are captured
    with process_group("cpu") as only:
        compare(CASES[int(sys.argv[1])], only)
    print("equal")
