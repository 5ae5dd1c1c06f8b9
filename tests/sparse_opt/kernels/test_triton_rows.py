"""The CUDA kernel gives the CPU kernel's bits: by Triton's interpreter everywhere, compiled where there is a GPU."""

import os
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from cowrec.sparse_opt import AdamConfig, ConstantClip, CowClip, EmbeddingAdam
from cowrec.sparse_opt.algorithm.adam import adam_constants
from cowrec.sparse_opt.kernels.cpu_replay import replay_clipped_rows, replay_rows
from cowrec.sparse_opt.optim.replay import StepHistory
from sharded_case import Case, process_group, sharded_model, train_step

pytest.importorskip("triton", reason="Triton is not installed")

CASES = {
    "paper": AdamConfig(lr=1e-3, l2=1e-4, eps=1e-7, adam_epsilon="keras"),
    "torch": AdamConfig(lr=1e-3, l2=1e-4, eps=1e-6),
    "no L2": AdamConfig(lr=1e-2),
}
STEPS, ROWS, DIM = 330, 45, 12


def test_interpreted() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = [sys.executable, __file__]
    done = subprocess.run(script, env=environment, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"] * (2 * len(CASES) + len(TRAININGS))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_compiled(case: str, clipped: bool) -> None:
    compare(CASES[case], clipped, torch.device("cuda"))


def compare(config: AdamConfig, clipped: bool, device: torch.device) -> None:
    """Both kernels on rows of two widths with gaps from 0 to all steps, some at zero, some dying on the way."""
    from cowrec.sparse_opt.kernels.triton_rows import replay_rows_on_device

    rng = np.random.default_rng(0)
    weights = (rng.normal(0, 1, (ROWS, DIM)) * 10.0 ** rng.uniform(-9, 0, (ROWS, 1))).astype(np.float32)
    weights[::9] = 0
    state = [weights, (weights * 1e-3).astype(np.float32), (weights**2 * 1e-3).astype(np.float32)]
    lasts = np.sort(rng.integers(0, STEPS + 1, ROWS)).astype(np.int32)
    lasts[:5], lasts[-3:] = 0, STEPS
    constants = adam_constants(config)
    scalars = (*vars(constants).values(), config.lr, 1e-11, 1e-11 * config.eps * constants.rest1)
    history = StepHistory(config, torch.device("cpu"))
    history.replace(config.lr * np.linspace(0.2, 1, STEPS))
    places, starts = np.arange(ROWS), np.arange(ROWS) * DIM
    limits = (np.full(ROWS, 10), np.full(ROWS, 1e-5, np.float32), np.full(ROWS, 1e-9, np.float32), np.full(ROWS, True))

    on_cpu = [each.copy().ravel() for each in state]
    last_on_cpu = lasts.copy()
    behind = lasts < STEPS
    common = (DIM, starts[behind], places[behind], lasts[behind], *on_cpu, last_on_cpu, STEPS)
    numbers = (history.step_sizes.numpy(), history.denominator_scales.numpy(), *map(np.float32, scalars))
    if clipped:
        replay_clipped_rows(0, 1, np.arange(ROWS)[behind], *limits, *common, *numbers)
    else:
        replay_rows(0, 1, *common, *numbers)

    def there(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(device)

    on_device, last_on_device = [there(each.ravel()) for each in state], there(lasts)
    replay_rows_on_device(
        *(there(starts), there(places), there(lasts), there(np.full(ROWS, DIM)), DIM),
        *(*on_device, last_on_device, STEPS),
        *(history.step_sizes.to(device), history.denominator_scales.to(device), scalars),
        limits=[there(each) for each in limits] if clipped else None,
    )
    assert (last_on_cpu < 0).any(), "no row came to rest"
    np.testing.assert_array_equal(last_on_device.cpu().numpy(), last_on_cpu)
    for mine, expected in zip(on_device, on_cpu, strict=True):
        np.testing.assert_array_equal(mine.cpu().numpy(), expected)


def compare_training(absent_rows: str, **clip: Any) -> None:
    """Training with either back end's kernels: batches with repeated and no ids, tables of several features."""

    def train(uses_triton: bool) -> list[torch.Tensor]:
        case = Case(rows=(20, 5, 60), batch=8, steps=40)
        drawn = case.draw()
        model = sharded_model(case, drawn["tables"])
        config = AdamConfig(lr=1e-3, l2=1e-2, absent_rows=absent_rows)
        optimizer = EmbeddingAdam(model, config, clip_columns=6, **clip)
        for tables in optimizer._tables:
            tables.uses_triton = uses_triton
            if tables.replay:
                tables.replay.uses_triton = uses_triton
        for bags, targets in drawn["steps"]:
            train_step(case, model, bags, targets, 0, case.batch)
        optimizer.flush()
        state = [*model.state_dict().values(), *optimizer.state_dict().values()]
        optimizer.remove()
        return [each.local_shards()[0].tensor for each in state if isinstance(each, ShardedTensor)]

    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, folder):
        for mine, expected in zip(train(True), train(False), strict=True):
            np.testing.assert_array_equal(mine.numpy(), expected.numpy())


TRAININGS = (
    {"absent_rows": "replay", "rule": CowClip()},
    {"absent_rows": "lazy", "rule": CowClip(), "exclude": ["t1"]},
    {"absent_rows": "lazy", "rule": ConstantClip(1e-6)},
)


if __name__ == "__main__":
    for training in TRAININGS:
        compare_training(**training)
        print("equal")
    for each in CASES.values():
        for with_clip in (False, True):
            compare(each, with_clip, torch.device("cpu"))
            print("equal")
