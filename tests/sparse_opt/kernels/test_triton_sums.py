"""The CUDA kernels that find, sum and clip the rows of a batch equal plain loops: interpreted by Triton, and on a GPU.

The tables have several widths and features, bags have none to many ids, and a frequent row fills many blocks of ids.
"""

import os
import subprocess
import sys
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import AdamConfig, adam_constants
from cowrec.sparse_opt.algorithm.clip import clip_scales, cowclip_limits
from cowrec.sparse_opt.kernels.layout import (
    AdamState,
    DecayThresholds,
    DeviceSteps,
    LookupBags,
    LookupLayout,
    RowCache,
    TableClips,
)
from cowrec.sparse_opt.kernels.torch_rows import LookupIds, count_ids, find_rows, row_sums
from cowrec.sparse_opt.optim.replay import StepHistory
from cowrec.sparse_opt.tbe.lookup import BagsOfLookup

pytest.importorskip("triton", reason="Triton is not installed")

R, ZETA = 0.5, 1e-4
WEIGHTED = (False, True)


class Problem(NamedTuple):
    """Lookup with its ids and the gradient of its output."""

    layout: LookupLayout
    weights: Tensor
    bags: LookupBags
    id_weights: Tensor | None
    output_grad: Tensor


def test_interpreted() -> None:
    """Runs in a subprocess, because Triton reads TRITON_INTERPRET when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = [sys.executable, __file__]
    done = subprocess.run(script, env=environment, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["equal"] * (len(WEIGHTED) + 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("weighted", WEIGHTED)
def test_compiled(weighted: bool) -> None:
    compare(weighted, 4096, torch.device("cuda"))
    compare_cached(64, torch.device("cuda"))


def draw(weighted: bool, batch: int, device: torch.device) -> Problem:
    rng = np.random.default_rng(weighted)
    rows, dims, feature_table = np.array([40, 7, 900]), np.array([5, 1, 12]), np.array([0, 1, 2, 2])
    lengths = rng.integers(0, 5, (4, batch))
    per_feature = []
    for table, counts in zip(feature_table, lengths, strict=True):
        ids = np.minimum(rng.zipf(1.5, counts.sum()) - 1, rows[table] - 1)
        per_feature.append(ids)
    indices = np.concatenate(per_feature)
    width = int(dims[feature_table].sum())

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    layout = LookupLayout(
        rows=tensor(rows),
        dim=tensor(dims),
        start=tensor(np.cumsum([0, *(rows * dims)[:-1]])),
        first_row=tensor(np.cumsum([0, *rows[:-1]])),
        max_dim=12,
        size=int((rows * dims).sum()),
        tables=3,
        num_rows=int(rows.sum()),
    )
    return Problem(
        layout,
        tensor(rng.normal(0, 1e-2, layout.size).astype(np.float32)),
        BagsOfLookup(feature_table, dims, device).of(
            {"indices": tensor(indices), "offsets": tensor(np.concatenate([[0], lengths.ravel().cumsum()]))}
        ),
        tensor(rng.uniform(0.5, 2, len(indices)).astype(np.float32)) if weighted else None,
        tensor((rng.normal(size=(batch, width)) * 10 ** rng.uniform(-3, 1, (batch, 1))).astype(np.float32)),
    )


def compare(weighted: bool, batch: int, device: torch.device) -> None:
    from cowrec.sparse_opt.kernels.triton_rows import BLOCK, DeviceRows, find_rows_on_device

    problem = draw(weighted, batch, device)
    layout, on_cpu = problem.layout, draw(weighted, batch, torch.device("cpu"))
    expected = find_rows(on_cpu.layout, on_cpu.bags)
    outside = torch.zeros(3, dtype=torch.int64, device=device)
    ids = find_rows_on_device(layout, problem.bags, outside)
    assert_equal_ids(ids, expected)
    assert not outside.any()
    assert expected.begin.diff().max() > 3 * BLOCK, "no row fills blocks of ids"

    rows = DeviceRows(layout, ids, problem.id_weights, problem.output_grad)
    counts = count_ids(expected)
    sums = looped_sums(on_cpu, expected)
    got = rows.sums().cpu()
    # float64 sums of float32 numbers in another order
    torch.testing.assert_close(got, sums, rtol=1e-13, atol=1e-13)
    in_torch = row_sums(on_cpu.layout, expected, on_cpu.id_weights, on_cpu.output_grad)
    torch.testing.assert_close(got[counts.real], in_torch.sums[counts.real], rtol=1e-13, atol=1e-13)

    columns = torch.tensor([4, 1, 12], device=device)
    clips = TableClips(
        columns,
        torch.full((3,), R, device=device),
        torch.full((3,), ZETA, device=device),
        torch.ones(3, dtype=torch.bool, device=device),
    )
    of_rows, results = rows.factors(clips, problem.weights)
    factors = looped_factors(on_cpu, expected, got, columns.tolist())
    torch.testing.assert_close(of_rows.cpu()[counts.real], factors, rtol=1e-6, atol=0)
    assert (factors < 1).any()
    assert (factors == 1).any()
    np.testing.assert_array_equal(rows.of_ids(of_rows).cpu(), of_rows.cpu()[counts.slot])

    updated, clipped = (torch.zeros(3, dtype=torch.int64, device=device) for _ in range(2))
    rows.count(results, updated, clipped)
    table = in_torch.table.where(counts.real, -1)
    np.testing.assert_array_equal(results.table.cpu(), table)
    np.testing.assert_array_equal(updated.cpu(), table[counts.real].bincount(minlength=3))
    np.testing.assert_array_equal(clipped.cpu(), table[counts.real][factors < 1].bincount(minlength=3))
    again = DeviceRows(layout, ids, problem.id_weights, problem.output_grad).sums().cpu()
    np.testing.assert_array_equal(again, got)


def compare_cached(batch: int, device: torch.device) -> None:
    """Rows in FBGEMM's cache are read and written there: what is behind the cache is never read and stays."""
    from cowrec.sparse_opt.kernels.triton_replay import replay_rows_on_device
    from cowrec.sparse_opt.kernels.triton_rows import DeviceRows, find_rows_on_device

    problem, config = draw(True, batch, device), AdamConfig(lr=1e-2, l2=1e-3)
    layout, constants = problem.layout, adam_constants(config)
    ids = find_rows_on_device(layout, problem.bags, torch.zeros_like(layout.rows))
    history = StepHistory(config, device)
    history.prepare(40, config.lr)
    history.replace(np.full(40, config.lr))
    clips = TableClips(layout.dim, *(torch.full((3,), each, device=device) for each in (R, ZETA, True)))
    elements = elements_of(layout)
    # Every second row is cached, in an order of its own, in wider rows.
    cached = torch.arange(0, layout.num_rows, 2, device=device)
    location = torch.full((layout.num_rows,), -1, dtype=torch.int32, device=device)
    location[cached] = torch.arange(len(cached), dtype=torch.int32, device=device).flip(0)

    def train(is_cached: bool) -> tuple[Tensor, ...]:
        state = AdamState(problem.weights.clone(), *(torch.full_like(problem.weights, 1e-3) for _ in range(2)))
        last = torch.arange(layout.num_rows, dtype=torch.int32, device=device) % 40
        taken = torch.tensor([39], dtype=torch.int32, device=device)
        lr_factors, log_beta2 = torch.ones(3, device=device), torch.zeros(1, dtype=torch.float64, device=device)
        steps = DeviceSteps(taken, last, *history.schedule, lr_factors, log_beta2)
        cache = None
        if is_cached:
            cache = RowCache(location[ids.row.long()], torch.zeros(len(cached), 16, device=device), 16)
            for row in cached.tolist():
                cache.weights[location[row], : len(elements[row])] = state.weights[elements[row]]
                state.weights[elements[row]] = torch.nan
        thresholds = DecayThresholds(config.lr, 1e-11, 1e-20)
        replay_rows_on_device(ids.row, ids.begin, layout, None, state, cache, steps, constants, thresholds)
        taken.add_(1)
        rows = DeviceRows(layout, ids, problem.id_weights, problem.output_grad, cache)
        rows.update(clips, state, steps, constants, replays=True)
        factors, _ = rows.factors(clips, state.weights)
        if cache:
            for row in cached.tolist():
                assert state.weights[elements[row]].isnan().all()
                state.weights[elements[row]] = cache.weights[location[row], : len(elements[row])]
        return *state, last, factors[ids.begin[:-1] < len(ids.row)]

    for got, expected in zip(train(True), train(False), strict=True):
        np.testing.assert_array_equal(got.cpu(), expected.cpu())


def elements_of(layout: LookupLayout) -> list[list[int]]:
    """Elements of each row of all tables in the flat weights."""
    ends = [
        [start + dim * row for row in range(rows + 1)]
        for rows, dim, start in zip(layout.rows.tolist(), layout.dim.tolist(), layout.start.tolist(), strict=True)
    ]
    return [list(range(*pair)) for table in ends for pair in pairwise(table)]


def assert_equal_ids(got: LookupIds, expected: LookupIds) -> None:
    for name, value in expected._asdict().items():
        np.testing.assert_array_equal(getattr(got, name).cpu(), value, name)


def looped_sums(problem: Problem, ids: LookupIds) -> Tensor:
    """Sums each id's gradient at its row, one id after the other."""
    sums = torch.zeros(len(ids.row), problem.layout.max_dim, dtype=torch.float64)
    slot = count_ids(ids).slot
    batch, features, first = len(problem.output_grad), (0, 1, 2, 2), np.cumsum([0, 5, 1, 12])
    for bag, (begin, end) in enumerate(pairwise(problem.bags.offsets.tolist())):
        feature, sample = divmod(bag, batch)
        dim = int(problem.layout.dim[features[feature]])
        grad = problem.output_grad[sample, first[feature] : first[feature] + dim].double()
        for i in range(begin, end):
            sums[slot[i], :dim] += grad * (1.0 if problem.id_weights is None else float(problem.id_weights[i]))
    return sums


def looped_factors(problem: Problem, ids: LookupIds, sums: Tensor, columns: list[int]) -> Tensor:
    """Computes each distinct row's clip factor by the public functions of the algorithm."""
    layout, factors = problem.layout, []
    for u, begin in enumerate(ids.begin[ids.begin < len(ids.row)].tolist()):
        table = int(torch.searchsorted(layout.first_row, ids.row[begin], right=True)) - 1
        start = int(layout.start[table] + (ids.row[begin] - layout.first_row[table]) * layout.dim[table])
        weight = problem.weights[start : start + columns[table]][None]
        limits = cowclip_limits(weight, ids.begin[u + 1 : u + 2] - begin, r=R, zeta=ZETA)
        factors.append(clip_scales(sums[u : u + 1, : columns[table]].float(), limits))
    return torch.cat(factors)


def compare_outside() -> None:
    """Ids outside their tables are counted, and row 0 stands for them; so do ids outside all bags."""
    from cowrec.sparse_opt.kernels.triton_rows import find_rows_on_device

    problem = draw(False, 32, torch.device("cpu"))
    indices, offsets = problem.bags.indices.clone(), problem.bags.offsets
    ends = offsets[32::32]
    for position, value in ((0, -1), (int(ends[0]), 7), (len(indices) - 1, 900), (len(indices) - 2, 1 << 40)):
        indices[position] = value
    outside = torch.zeros(3, dtype=torch.int64)
    ids = find_rows_on_device(problem.layout, problem.bags._replace(indices=indices), outside)
    assert outside.tolist() == [1, 1, 2]
    indices[[0, int(ends[0]), -1, -2]] = 0
    expected = find_rows(problem.layout, problem.bags._replace(indices=indices))
    assert_equal_ids(ids, expected)
    # Ids after the last bag belong to it, as in FBGEMM, and need not be neighbours in memory.
    strided = problem.bags._replace(indices=torch.stack([indices, indices + 1], dim=1)[:, 0], offsets=offsets.clone())
    strided.offsets[-1] -= 1
    assert_equal_ids(find_rows_on_device(problem.layout, strided, outside), expected)
    strided.offsets[:] = strided.offsets.flip(0)  # no rows outside the tables
    rows = find_rows_on_device(problem.layout, strided, outside).row
    assert (rows >= 0).all()
    assert (rows < problem.layout.num_rows).all()


if __name__ == "__main__":
    for with_weights in WEIGHTED:
        compare(with_weights, 128, torch.device("cpu"))
        print("equal")
    compare_outside()
    print("equal")
    compare_cached(24, torch.device("cpu"))
    print("equal")
