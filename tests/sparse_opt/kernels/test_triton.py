"""The CUDA kernels are bit-identical to the CPU kernels: in Triton's interpreter, and compiled where there is a GPU."""

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cowrec.sparse_opt import AdamConfig
from cowrec.sparse_opt.algorithm.adam import adam_constants
from cowrec.sparse_opt.kernels.layout import (
    AdamState,
    BagsOfLookup,
    DeviceSteps,
    LookupBags,
    LookupLayout,
    RestThresholds,
    StaleRows,
    TableClips,
    to_float32,
    to_numpy,
)
from cowrec.sparse_opt.kernels.numba_replay import replay_clipped_rows, replay_rows
from cowrec.sparse_opt.kernels.torch_rows import LookupIds, find_rows
from cowrec.sparse_opt.optim.replay import StepHistory
from process_groups import process_group
from random_problems import drawing, training
from random_problems.drawing import Collection, Table

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from cowrec.sparse_opt.kernels.triton_rows import divide, root

CASES = {
    "paper": AdamConfig(lr=1e-3, l2=1e-4, eps=1e-7, adam_epsilon="keras"),
    "torch": AdamConfig(lr=1e-3, l2=1e-4, eps=1e-6),
    "no L2": AdamConfig(lr=1e-2),
    "no L2, factor 0": AdamConfig(lr=1e-2),
    "decay": AdamConfig(lr=1e-2, weight_decay=1.0),
    "decay and L2": AdamConfig(lr=1e-3, l2=1e-4, eps=1e-6, weight_decay=0.5),
}
FIRST = ("paper", "decay and L2")
LR_FACTORS = {case: 0.0 if "factor 0" in case else 0.7 for case in CASES}
ROWS, DIM = 45, 12
R, ZETA = 0.5, 1e-4
TABLES = (Table(20, 8, ("a",)), Table(5, 4, ("b",)), Table(60, 12, ("c", "d")))
COWCLIP = ("cowclip", {"r": R, "zeta": ZETA})
FTRL: dict[str, Any] = {"wide": (0.1, 1.0), "lr_factors": ((0, 2, 0.3),)}
FUSED: dict[str, Any] = {"optimizer": "rowwise_adagrad", "rule": COWCLIP, "exclude": ((0, 1),)}
IDS, BATCHES = Collection(TABLES, weighted=True, max_ids=4), Collection(TABLES, max_ids=4, variable_batch=True)
SEQUENCES = Collection(tuple(Table(rows, 8, (name,)) for rows, name in ((20, "a"), (60, "b"))), sequence=True)
TRAININGS = [
    drawing.Problem((collection,), steps=4, pass_size=16, **settings)
    for collection, settings in (
        (IDS, {"optimizer": "replay", "rule": COWCLIP, "l2": 1e-2, "weight_decay": 0.1, "clip_columns": 3} | FTRL),
        (BATCHES, {"optimizer": "lazy", "rule": COWCLIP, "exclude": ((0, 1),), "lr_factors": ((0, 0, 0.3),)}),
        (SEQUENCES, {"optimizer": "replay", "rule": ("constant", {"max_norm": 1e-6}), "idle": (0,)}),
        (IDS, FUSED),
        (Collection(TABLES, max_ids=1), FUSED | {"single_id_bags": True, "l2": 1e-3, "clip_columns": 3}),
    )
]


@pytest.mark.parametrize("cases", ["|".join(FIRST), pytest.param("|".join(CASES), marks=pytest.mark.thorough)])
def test_interpreted(cases: str) -> None:
    """Runs in a subprocess, because Triton reads TRITON_INTERPRET when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = [sys.executable, __file__, cases]
    done = subprocess.run(script, env=environment, check=False, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"] * (2 * len(cases.split("|")) + len(TRAININGS) + 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_compiled(case: str, clipped: bool) -> None:
    compare_replay(case, clipped, torch.device("cuda"), steps=330)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_arithmetic() -> None:
    compare_arithmetic(torch.device("cuda"))


@triton.jit
def _root_and_divide(
    numerators: tl.tensor,
    denominators: tl.tensor,
    roots: tl.tensor,
    quotients: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numerator = tl.load(numerators + i, mask=i < count, other=0.0)
    tl.store(roots + i, root(numerator), mask=i < count)
    tl.store(quotients + i, divide(numerator, tl.load(denominators + i, mask=i < count, other=1.0)), mask=i < count)


def compare_arithmetic(device: torch.device) -> None:
    """Roots and quotients are numpy's, also of zeros, subnormal numbers, infinities and what is no number."""
    rng = np.random.default_rng(0)
    special = np.array([0.0, -0.0, 1e-45, 1e-40, 1.2e-38, 7e-31, 8e-31, 1.0, 3e38, np.inf, np.nan], np.float32)
    drawn = (10.0 ** rng.uniform(-45, 38, 4000)).astype(np.float32)
    numerators = np.concatenate([special, -special, drawn, -drawn])
    denominators = np.concatenate([np.repeat(1e-7, 2 * len(special)), 10.0 ** rng.uniform(-12, 6, 8000)])
    denominators = denominators.astype(np.float32)
    given = [torch.from_numpy(tensor).to(device) for tensor in (numerators, denominators)]
    found = [torch.empty_like(tensor) for tensor in given]
    _root_and_divide[(triton.cdiv(len(numerators), 1024),)](*given, *found, len(numerators), BLOCK=1024)
    with np.errstate(all="ignore"):
        expected = np.sqrt(numerators), numerators / denominators
    for got, right in zip(found, expected, strict=True):
        number = ~np.isnan(right)
        np.testing.assert_array_equal(np.isnan(got.cpu().numpy()), ~number)
        np.testing.assert_array_equal(got.cpu().numpy()[number].view(np.int32), right[number].view(np.int32))


def compare_replay(case: str, clipped: bool, device: torch.device, *, steps: int) -> None:
    """Replays rows that missed 0 to all steps with both kernels; some are zero, some come to rest on the way.

    A column is padding. A program takes early rows together with late ones, whose absence begins after the others have
    come to rest.
    """
    rng = np.random.default_rng(0)
    weights = (rng.normal(0, 1, (ROWS, DIM)) * 10.0 ** rng.uniform(-9, 0, (ROWS, 1))).astype(np.float32)
    weights[::9], weights[1::3], weights[:, -1] = 0, 1e-14, 0
    last = np.sort(rng.integers(0, steps + 1, ROWS)).astype(np.int32)
    last[:5], last[-3:] = 0, steps
    row = torch.arange(ROWS)
    early_with_late = torch.stack([row, row.flip(0)], dim=1).flatten()[:ROWS]
    compare_rows(case, clipped, device, weights, last, early_with_late, steps)


def compare_rows(
    case: str,
    clipped: bool,
    device: torch.device,
    weights: np.ndarray,
    last: np.ndarray,
    order: torch.Tensor,
    steps: int,
) -> None:
    """Replays rows with both kernels, on the device in an order; their last steps ascend, and at least one decays."""
    from cowrec.sparse_opt.kernels.triton_replay import distinct_begins, replay_rows_on_device

    config, lr_factor, rows = CASES[case], LR_FACTORS[case], len(weights)
    arrays = [weights, (weights * 1e-3).astype(np.float32), (weights**2 * 1e-3).astype(np.float32)]
    state = AdamState(*(torch.from_numpy(array.ravel()) for array in arrays))
    constants = adam_constants(config)
    thresholds = RestThresholds(config.lr, 1e-11, 1e-11 * config.eps * constants.one_minus_beta1)
    history = StepHistory(config, torch.device("cpu"))
    history.replace(config.lr * np.linspace(1, 0.2, steps))
    row = torch.arange(rows)
    stale = StaleRows(torch.zeros_like(row), row * DIM, row, torch.from_numpy(last.copy()))
    one = torch.ones(1, dtype=torch.int64)
    taken, log_beta2 = torch.tensor([steps], dtype=torch.int32), torch.zeros(1, dtype=torch.float64)
    numbers = (*history.step_scalars, torch.tensor([lr_factor]), log_beta2, one * DIM)
    on_steps = DeviceSteps(taken, torch.from_numpy(last), *numbers)
    layout = LookupLayout(one * rows, one * DIM, one - 1, one - 1, DIM, rows * DIM, 1, rows)
    clips = TableClips(torch.tensor([10]), torch.tensor([1e-5]), torch.tensor([1e-9]), torch.tensor([True]))

    def copied(values: Any, to: torch.device) -> Any:
        return values._make(value.clone().to(to) if isinstance(value, torch.Tensor) else value for value in values)

    on_cpu, steps_on_cpu = copied(state, torch.device("cpu")), copied(on_steps, torch.device("cpu"))
    behind = StaleRows(*(column[stale.last < steps] for column in stale))
    tuples = map(to_numpy, (behind, on_cpu, steps_on_cpu))
    arguments = (0, 1, DIM, np.float32(lr_factor), *tuples, to_float32(constants), to_float32(thresholds))
    if clipped:
        replay_clipped_rows(*arguments, to_numpy(clips))
    else:
        replay_rows(*arguments)

    layout, clips, on_device, on_steps, order = (
        copied(tensor, device) if isinstance(tensor, tuple) else tensor.to(device)
        for tensor in (layout, clips, state, on_steps, order)
    )
    replay_rows_on_device(
        order, distinct_begins(order), layout, clips if clipped else None, on_device, on_steps, constants, thresholds
    )
    assert (steps_on_cpu.last_step < 0).any(), "no row is at rest"
    np.testing.assert_array_equal(on_steps.last_step.cpu().numpy(), steps_on_cpu.last_step.numpy())
    for got, expected in zip(on_device, on_cpu, strict=True):
        np.testing.assert_array_equal(got.cpu().numpy().view(np.int32), expected.numpy().view(np.int32))


def compare_turns() -> None:
    """A program takes no turn between the steps of its rows, and no root of a number for which roots are slow.

    The first row decays in step 32, and the second has missed the last 19 of 320: they are taken in the same 32 turns.
    A column is padding.
    """
    from cowrec.sparse_opt.kernels import triton_replay

    turns, least, step_of_element = 0, np.inf, triton_replay.step_of_element

    def step(*arguments: Any) -> Any:
        nonlocal turns
        turns += 1
        return step_of_element(*arguments)

    def measured_root(value: Any) -> Any:
        nonlocal least
        least = min(least, value.handle.data.min())
        return root(value)

    triton_replay.step_of_element, triton_replay.root, triton_replay.ELEMENTS = step, measured_root, 32
    weights = np.array([[1e-12], [1e-2]], np.float32) * np.ones((1, DIM), np.float32)
    weights[:, -1] = 0
    last = np.array([0, 301], np.int32)
    compare_rows("paper", False, torch.device("cpu"), weights, last, torch.arange(2), steps=320)
    assert turns == 32, turns
    assert least > 2.0**-101, least


def compare_training(problem: drawing.Problem) -> None:
    """Trains with the kernels of either back end."""
    got, expected = (training.train(replace(problem, backend=backend)) for backend in ("triton", "compiled"))
    assert got.stats == expected.stats
    for key, value in expected.state.items():
        np.testing.assert_array_equal(got.state[key], value, err_msg=key)


def draw(batch: int) -> tuple[LookupLayout, LookupBags]:
    """Tables of several widths and features, with bags of none to many ids."""
    rng, feature_table = np.random.default_rng(0), np.array([0, 1, 2, 2])
    rows, dims = torch.tensor([40, 7, 900]), torch.tensor([5, 1, 12])
    lengths = rng.integers(0, 5, (len(feature_table), batch))
    counts = zip(rows[feature_table].tolist(), lengths.sum(1), strict=True)
    indices = np.concatenate([np.minimum(rng.zipf(1.5, count) - 1, own - 1) for own, count in counts])
    starts = ((sizes.cumsum(0) - sizes) for sizes in (rows * dims, rows))
    layout = LookupLayout(rows, dims, *starts, 12, int((rows * dims).sum()), len(rows), int(rows.sum()))
    offsets = torch.from_numpy(np.concatenate([[0], lengths.ravel().cumsum()]))
    bags = BagsOfLookup(feature_table, dims.numpy(), torch.device("cpu"))
    return layout, bags.of({"indices": torch.from_numpy(indices), "offsets": offsets})


def compare_outside() -> None:
    """Ids outside their tables are counted, and row 0 stands for them; so do ids outside all bags."""
    from cowrec.sparse_opt.kernels.triton_rows import find_rows_on_device

    layout, bags = draw(32)
    indices, offsets = bags.indices.clone(), bags.offsets
    ends = offsets[32::32]
    for position, value in ((0, -1), (int(ends[0]), 7), (len(indices) - 1, 900), (len(indices) - 2, 1 << 40)):
        indices[position] = value
    outside = torch.zeros(3, dtype=torch.int64)
    ids = find_rows_on_device(layout, bags._replace(indices=indices), outside)
    assert outside.tolist() == [1, 1, 2]
    indices[[0, int(ends[0]), -1, -2]] = 0
    expected = find_rows(layout, bags._replace(indices=indices))
    assert_equal_ids(ids, expected)
    # Ids after the last bag belong to it, as in FBGEMM, and need not be neighbours in memory.
    strided = bags._replace(indices=torch.stack([indices, indices + 1], dim=1)[:, 0], offsets=offsets.clone())
    strided.offsets[-1] -= 1
    assert_equal_ids(find_rows_on_device(layout, strided, outside), expected)
    strided.offsets[:] = strided.offsets.flip(0)  # no rows outside the tables
    rows = find_rows_on_device(layout, strided, outside).row
    assert (rows >= 0).all()
    assert (rows < layout.num_rows).all()


def compare_far() -> None:
    """Rows whose elements are beyond 2^31 are found, replayed and updated as the same rows of a small table.

    The large table is in sparse files, of which only the touched pages exist.
    """
    from cowrec.sparse_opt.kernels.layout import BagsOfLookup
    from cowrec.sparse_opt.kernels.triton_replay import replay_rows_on_device
    from cowrec.sparse_opt.kernels.triton_rows import DeviceRows, find_rows_on_device

    config, rng, near_rows = AdamConfig(lr=1e-2, l2=1e-3), np.random.default_rng(0), 8
    indices = torch.tensor([1, 7, 7, 0, 3, 7])
    values = [torch.from_numpy(rng.normal(0, 1e-3, (near_rows, DIM)).astype(np.float32)) for _ in AdamState._fields]
    output_grad = torch.from_numpy(rng.normal(0, 1, (len(indices), DIM)).astype(np.float32))
    history = StepHistory(config, torch.device("cpu"))
    history.replace(np.full(20, config.lr))
    trained = []
    with tempfile.TemporaryDirectory() as folder:
        for rows in (near_rows, 1 << 28):
            one, first = torch.ones(1, dtype=torch.int64), rows - near_rows
            layout = LookupLayout(one * rows, one * DIM, one - 1, one - 1, DIM, rows * DIM, 1, rows)
            files = [f"{folder}/{name}{rows}" for name in AdamState._fields]
            state = AdamState(*(torch.from_file(file, shared=True, size=rows * DIM) for file in files))
            for tensor, drawn in zip(state, values, strict=True):
                tensor[first * DIM :].view(near_rows, DIM).copy_(drawn.abs())
            last = torch.from_file(f"{folder}/last{rows}", shared=True, size=rows, dtype=torch.int32)
            last[first:] = torch.arange(near_rows)
            taken, log_beta2 = torch.tensor([19], dtype=torch.int32), torch.zeros(1, dtype=torch.float64)
            steps = DeviceSteps(taken, last, *history.step_scalars, torch.ones(1), log_beta2, one * DIM)
            clips = TableClips(one * DIM, torch.tensor([0.5]), torch.tensor([1e-9]), torch.tensor([True]))
            bags = BagsOfLookup([0], [DIM], torch.device("cpu"))
            of_batch = bags.of({"indices": indices + first, "offsets": torch.arange(len(indices) + 1)})
            ids = find_rows_on_device(layout, of_batch, torch.zeros_like(one))
            thresholds, constants = RestThresholds(config.lr, 1e-11, 1e-20), adam_constants(config)
            replay_rows_on_device(ids.row, ids.begin, layout, None, state, steps, constants, thresholds)
            taken.add_(1)
            results = DeviceRows(layout, ids, None, output_grad).update(clips, state, steps, constants, replays=True)
            trained.append([*(flat[first * DIM :].clone() for flat in state), last[first:].clone(), results.ratio[:4]])
    for near, far in zip(*trained, strict=True):
        np.testing.assert_array_equal(far.numpy(), near.numpy())
    assert trained[0][3].tolist() == [20, 20, 2, 20, 4, 5, 6, 20]


def assert_equal_ids(got: LookupIds, expected: LookupIds) -> None:
    for name, value in expected._asdict().items():
        np.testing.assert_array_equal(getattr(got, name).cpu(), value, name)


if __name__ == "__main__":
    from cowrec.sparse_opt.kernels import triton_replay, triton_rows

    # The interpreter takes as long for a small program as for a large one.
    triton_replay.ELEMENTS = triton_rows.ELEMENTS = 512
    triton_rows.BLOCK, triton_rows.IDS = 4, 2  # small, so that rows of small batches fill blocks of ids
    triton_rows.GROUP, triton_rows.LEAST_BLOCKS = 2, 2  # and groups of such blocks
    with tempfile.TemporaryDirectory() as folder, process_group(0, 1, folder):
        for name in TRAININGS:
            compare_training(name)
            print("equal")
    for case in sys.argv[1].split("|"):
        for with_clip in (False, True):
            compare_replay(case, with_clip, torch.device("cpu"), steps=70)
            print("equal")
    compare_outside()
    compare_far()
    compare_arithmetic(torch.device("cpu"))
    compare_turns()
    print("equal\nequal\nequal\nequal")
