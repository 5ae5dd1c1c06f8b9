"""The CUDA kernels are bit-identical to the CPU kernels: in Triton's interpreter, and compiled where there is a GPU."""

import os
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from cowrec.sparse_opt import AdamConfig, ConstantClip, CowClip, EmbeddingAdam, attach_cowclip
from cowrec.sparse_opt.algorithm.adam import adam_constants
from cowrec.sparse_opt.kernels.layout import (
    AdamState,
    DecayThresholds,
    DeviceSteps,
    LastSteps,
    LookupLayout,
    StaleRows,
    TableClips,
    to_float32,
    to_numpy,
)
from cowrec.sparse_opt.kernels.numba_replay import replay_clipped_rows, replay_rows
from cowrec.sparse_opt.optim.replay import StepHistory
from sharded_case import Case, moments, process_group, run_triton, sharded_model, train_step

pytest.importorskip("triton", reason="Triton is not installed")

CASES = {
    "paper": AdamConfig(lr=1e-3, l2=1e-4, eps=1e-7, adam_epsilon="keras"),
    "torch": AdamConfig(lr=1e-3, l2=1e-4, eps=1e-6),
    "no L2": AdamConfig(lr=1e-2),
    "decay": AdamConfig(lr=1e-2, weight_decay=1.0),
    "decay and L2": AdamConfig(lr=1e-3, l2=1e-4, eps=1e-6, weight_decay=0.5),
}
LR_FACTOR = 0.7
ROWS, DIM = 45, 12


def test_interpreted() -> None:
    """Runs in a subprocess, because Triton reads TRITON_INTERPRET when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = [sys.executable, __file__]
    done = subprocess.run(script, env=environment, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"] * (2 * len(CASES) + len(TRAININGS) + len(FUSED))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_compiled(case: str, clipped: bool) -> None:
    compare(CASES[case], clipped, torch.device("cuda"), steps=330)


def compare(config: AdamConfig, clipped: bool, device: torch.device, *, steps: int) -> None:
    """Replays rows that missed 0 to all steps with both kernels; some are zero, some decay on the way."""
    from cowrec.sparse_opt.kernels.triton_replay import distinct_begins, replay_rows_on_device

    rng = np.random.default_rng(0)
    weights = (rng.normal(0, 1, (ROWS, DIM)) * 10.0 ** rng.uniform(-9, 0, (ROWS, 1))).astype(np.float32)
    weights[::9] = 0
    arrays = [weights, (weights * 1e-3).astype(np.float32), (weights**2 * 1e-3).astype(np.float32)]
    state = AdamState(*(torch.from_numpy(each.ravel()) for each in arrays))
    last = np.sort(rng.integers(0, steps + 1, ROWS)).astype(np.int32)
    last[:5], last[-3:] = 0, steps
    progress = LastSteps(torch.from_numpy(last), steps, 0.0)
    constants = adam_constants(config)
    thresholds = DecayThresholds(config.lr, 1e-11, 1e-11 * config.eps * constants.one_minus_beta1)
    history = StepHistory(config, torch.device("cpu"))
    history.replace(config.lr * np.linspace(0.2, 1, steps))
    row = torch.arange(ROWS)
    rows = StaleRows(torch.zeros_like(row), row * DIM, row, progress.last_step.clone())
    one = torch.ones(1, dtype=torch.int64)
    layout = LookupLayout(one * ROWS, one * DIM, one - 1, one - 1, DIM, ROWS * DIM, 1, ROWS)
    clips = TableClips(torch.tensor([10]), torch.tensor([1e-5]), torch.tensor([1e-9]), torch.tensor([True]))

    def copied(values: Any, to: torch.device) -> Any:
        return values._make(each.clone().to(to) if isinstance(each, torch.Tensor) else each for each in values)

    on_cpu, progress_on_cpu = copied(state, torch.device("cpu")), copied(progress, torch.device("cpu"))
    behind = StaleRows(*(each[rows.last < steps] for each in rows))
    tuples = map(to_numpy, (behind, on_cpu, progress_on_cpu, history.schedule))
    arguments = (0, 1, DIM, np.float32(LR_FACTOR), *tuples, to_float32(constants), to_float32(thresholds))
    if clipped:
        replay_clipped_rows(*arguments, to_numpy(clips))
    else:
        replay_rows(*arguments)

    taken, log_beta2 = torch.tensor([steps], dtype=torch.int32), torch.zeros(1, dtype=torch.float64)
    on_steps = DeviceSteps(taken, progress.last_step, *history.schedule, torch.tensor([LR_FACTOR]), log_beta2)
    layout, clips, on_device, on_steps, row = (
        copied(each, device) if isinstance(each, tuple) else each.to(device)
        for each in (layout, clips, state, on_steps, row)
    )
    replay_rows_on_device(
        row, distinct_begins(row), layout, clips if clipped else None, on_device, None, on_steps, constants, thresholds
    )
    assert (progress_on_cpu.last_step < 0).any(), "no row decayed"
    np.testing.assert_array_equal(on_steps.last_step.cpu().numpy(), progress_on_cpu.last_step.numpy())
    for got, expected in zip(on_device, on_cpu, strict=True):
        np.testing.assert_array_equal(got.cpu().numpy(), expected.numpy())


def compare_training(absent_rows: str, **clip: Any) -> None:
    """Trains with the kernels of either back end: batches with repeated and no ids, tables of several features."""

    def train(uses_triton: bool) -> list[torch.Tensor]:
        case = Case(rows=(20, 5, 60), batch=8, steps=12)
        drawn = case.draw()
        model = sharded_model(case, drawn["tables"])
        config = AdamConfig(lr=1e-3, l2=1e-2, weight_decay=0.1, absent_rows=absent_rows)
        optimizer = EmbeddingAdam(model, config, clip_columns=6, lr_factors={"t0": 0.3, "t2": 3.0}, **clip)
        for adam in optimizer.lookups if uses_triton else ():
            run_triton(adam.clipped)
        for bags, targets in drawn["steps"]:
            train_step(case, model, bags, targets, 0, case.batch)
        optimizer.flush()
        state = [*model.state_dict().values(), *moments(optimizer).values()]
        optimizer.remove()
        return [each.local_shards()[0].tensor for each in state if isinstance(each, ShardedTensor)]

    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, folder):
        for got, expected in zip(train(True), train(False), strict=True):
            np.testing.assert_array_equal(got.numpy(), expected.numpy())


def compare_fused(max_ids: int, **clip: Any) -> None:
    """Clips a fused optimizer's gradients with the kernels of either back end."""

    def train(uses_triton: bool) -> list[torch.Tensor]:
        case = Case(rows=(20, 5, 60), batch=16, steps=3, max_ids=max_ids, optimizer="rowwise_adagrad")
        drawn = case.draw()
        model = sharded_model(case, drawn["tables"])
        handle = attach_cowclip(model, CowClip(), **clip)
        for clipped in handle._lookups if uses_triton else ():
            run_triton(clipped)
        for bags, targets in drawn["steps"]:
            train_step(case, model, bags, targets, 0, case.batch)
        stats = [[each.rows, each.clipped, each.median_ratio] for _, each in sorted(handle.stats().items())]
        handle.remove()
        tables = [each for each in model.state_dict().values() if isinstance(each, ShardedTensor)]
        return [torch.tensor(stats), *(each.local_shards()[0].tensor for each in tables)]

    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, folder):
        for got, expected in zip(train(True), train(False), strict=True):
            np.testing.assert_array_equal(got.numpy(), expected.numpy())


FUSED = (
    {"max_ids": 4},
    {"max_ids": 1, "single_id_bags": True, "l2": 1e-3, "clip_columns": 6, "exclude": ["t1"]},
)
TRAININGS = (
    {"absent_rows": "replay", "rule": CowClip()},
    {"absent_rows": "lazy", "rule": CowClip(), "exclude": ["t1"]},
    {"absent_rows": "lazy", "rule": ConstantClip(1e-6)},
)


if __name__ == "__main__":
    from cowrec.sparse_opt.kernels import triton_replay, triton_rows

    # The interpreter takes as long for a small program as for a large one.
    triton_replay.ELEMENTS = triton_rows.ELEMENTS = 512
    triton_rows.BLOCK, triton_rows.IDS = 4, 2  # small, so that rows of small batches fill blocks of ids
    for training in TRAININGS:
        compare_training(**training)
        print("equal")
    for fused in FUSED:
        compare_fused(**fused)
        print("equal")
    for each in CASES.values():
        for with_clip in (False, True):
            compare(each, with_clip, torch.device("cpu"), steps=40)
            print("equal")
