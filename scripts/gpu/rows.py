"""Lookups with all that their row kernels read, and back ends that take their steps: Triton, torch, and numba.

:class:`PlainRows` is the oracle: torch_rows.py, and the missed steps of absent rows one after the other. Sizes: U
distinct rows, D the widest table.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cowrec.data_pipeline.splitmix import GOLDEN, splitmix
from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.sparse_opt import AdamConfig, EmbeddingAdam
from cowrec.sparse_opt.algorithm.adam import AdamScalars, adam_constants, adam_element
from cowrec.sparse_opt.algorithm.clip import RowLimit
from cowrec.sparse_opt.kernels.layout import (
    REST_INTERVAL,
    AdamRows,
    AdamState,
    BagsOfLookup,
    DeviceSteps,
    LookupBackward,
    LookupBags,
    LookupIds,
    LookupLayout,
    TableClips,
)
from cowrec.sparse_opt.kernels.torch_rows import RowSums, exact_root, find_rows, is_behind, row_sums, tables_of_rows
from cowrec.sparse_opt.lookups.row_backends import NumbaRows, RowBackend, TorchRows, TritonRows
from cowrec.sparse_opt.lookups.statistics import ClipStatistics
from cowrec.sparse_opt.optim.replay import StepHistory, log_beta2, rest_thresholds
from cowrec.trainer.bench.criteo import last_steps

CONFIG = AdamConfig(lr=1e-3, l2=1e-4, eps=1e-7, adam_epsilon="keras", absent_rows="replay")
LIMIT = RowLimit(1.0, 1e-5, per_occurrence=True)
SMALL_TABLES = ((1000, 12), (7, 1), (300, 40), (60, 4))
"""Rows and columns; one row is wider than a warp, one has a single column."""


@dataclass
class Problem:
    """A lookup whose tables have one feature each, and what its steps read and write.

    Attributes:
        last_step: as in :class:`DeviceSteps`.
        step: steps taken.
        batches: ids and output gradients of the steps to take.
    """

    layout: LookupLayout
    state: AdamState
    last_step: Tensor
    step: int
    batches: list[tuple[LookupBags, Tensor]]

    def digest(self) -> str:
        """Hash of the weights, the moments and the last steps."""
        digest = hashlib.sha256()
        for each in (*self.state, self.last_step):
            digest.update(each.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def copy(self) -> "Problem":
        """The same problem with state of its own."""
        state = AdamState(*(each.clone() for each in self.state))
        return Problem(self.layout, state, self.last_step.clone(), self.step, self.batches)


def small_problem(device: torch.device, steps: int = 4, batch: int = 32) -> Problem:
    """Tables of several widths, bags of none to three ids, and rows that missed up to 96 steps or are at rest.

    The last column of a table is padding. A fifth of the rows decays before the absence of some neighbours begins.
    All numbers are hashes and exact in float32, so that they are the same on every machine.
    """
    rows, dims = np.array(SMALL_TABLES).T
    width_of_row = np.repeat(dims, rows)
    layout = _layout(rows, dims, device)
    draws = iter(range(1 << 20))

    def uniform(*sizes: int) -> np.ndarray:
        """Multiples of 2^-24 in [0, 1)."""
        count = int(np.prod(sizes))
        bits = splitmix(np.full(count, next(draws), np.uint64) * GOLDEN + splitmix(np.arange(count, dtype=np.uint64)))
        return ((bits >> np.uint64(40)).astype(np.float64) * 2.0**-24).reshape(sizes)

    def powers(size: int) -> np.ndarray:
        found: np.ndarray = 2.0 ** -np.floor(20 * uniform(size))
        return found

    weights = (2 * uniform(layout.size) - 1) * powers(layout.size)
    weights *= np.repeat(np.where(uniform(layout.num_rows) < 0.2, 2.0**-40, 1.0), width_of_row)
    weights[np.cumsum(width_of_row)[width_of_row > 1] - 1] = 0
    state = [weights, weights * powers(layout.size) * 2.0**-8, weights**2 * 2.0**-10]
    last = np.floor(97 * uniform(layout.num_rows)).astype(np.int32)
    last = np.where(uniform(layout.num_rows) < 0.1, ~(last // REST_INTERVAL * REST_INTERVAL), last)
    bags = BagsOfLookup(range(len(rows)), dims.tolist(), device)
    batches = []
    for _ in range(steps):
        lengths = np.floor(4 * uniform(len(rows), batch)).astype(np.int64)
        # The cube of a uniform number makes small ids frequent.
        ids = [np.floor(count * uniform(each.sum()) ** 3) for count, each in zip(rows, lengths, strict=True)]
        inputs = {
            "indices": torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(device),
            "offsets": torch.from_numpy(np.concatenate([[0], lengths.ravel().cumsum()])).to(device),
        }
        grad = (2 * uniform(batch, int(dims.sum())) - 1) * powers(batch)[:, None]
        grad[:, np.cumsum(dims)[dims > 1] - 1] = 0
        batches.append((bags.of(inputs), torch.from_numpy(grad.astype(np.float32)).to(device)))
    arrays = (torch.from_numpy(each.astype(np.float32)).to(device) for each in state)
    return Problem(layout, AdamState(*arrays), torch.from_numpy(last).to(device), 96, batches)


def criteo_problem(device: torch.device, batch: int, steps: int, max_rows: int | None) -> Problem:
    """Tables of Criteo's shape after ``steps`` steps of its stream of ids, and a batch of the next."""
    ids, dim = CriteoIds(max_rows=max_rows), 12
    layout = _layout(ids.table_rows, np.full(len(ids.table_rows), dim), device)
    last = last_steps(ids.last_samples(steps * batch), batch, steps)
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.randn(layout.size, generator=generator, device=device).mul_(1e-2)
    state = AdamState(weights, weights * 1e-4, torch.full_like(weights, 1e-10))
    bags = BagsOfLookup(range(layout.tables), [dim] * layout.tables, device)
    indices = torch.from_numpy(ids.rows(steps * batch, batch)).flatten().to(device)
    inputs = bags.of({"indices": indices, "offsets": torch.arange(len(indices) + 1, device=device)})
    grad = torch.randn(batch, layout.tables * dim, generator=generator, device=device).mul_(1e-4)
    return Problem(layout, state, torch.from_numpy(last).to(device), steps, [(inputs, grad)])


def _layout(rows: np.ndarray, dims: np.ndarray, device: torch.device) -> LookupLayout:
    elements = rows.astype(np.int64) * dims
    numbers: Any = (rows, dims, elements.cumsum() - elements, rows.cumsum() - rows)
    tensors: Any = [torch.from_numpy(each.astype(np.int64)).to(device) for each in numbers]
    totals = (int(dims.max()), int(elements.sum()), len(rows), int(rows.sum()))
    return LookupLayout._make([*tensors, *totals])


def steps(problem: Problem, kind: str) -> Iterator[int]:
    """Takes the problem's steps in place with a back end, "triton", "torch" or "numba"; yields their numbers.

    The learning rate falls, so that a step with the scalars of another leaves other bits.
    """
    layout, device = problem.layout, problem.last_step.device
    lookup: Any = SimpleNamespace(
        flat_weights=lambda: problem.state.weights,
        shards=range(layout.tables),
        is_replicated=False,
        num_ranks=1,
        splits_rows=False,
        raise_bad_id=lambda *_: None,
    )
    ones = torch.ones(layout.tables, device=device)
    clips = TableClips(layout.dim, LIMIT.r * ones, LIMIT.floor * ones, ones.bool())
    limits: Any = SimpleNamespace(clips=clips, scope="row")
    statistics = ClipStatistics(lookup)
    made = (lookup, layout, limits, statistics)
    backend: RowBackend
    if kind == "torch":
        plain: Any = PlainRows(layout)
        backend = TorchRows(*made, None, plain)
    else:
        backend = TritonRows(*made) if kind == "triton" else NumbaRows(*made)
    history = StepHistory(CONFIG, device)
    history.replace(falling_rate(np.arange(1, problem.step + 1)))
    thresholds = rest_thresholds(CONFIG, 1.0, [LIMIT] * layout.tables)
    log_decay = torch.tensor([log_beta2(CONFIG)], dtype=torch.float64, device=device)

    def adam() -> AdamRows:
        taken = torch.tensor([problem.step], dtype=torch.int32, device=device)
        on_device = DeviceSteps(taken, problem.last_step, *history.step_scalars, ones, log_decay, layout.dim)
        numbers = (problem.step, log_beta2(CONFIG), False, None)
        return AdamRows(problem.state, adam_constants(CONFIG), thresholds, on_device, *numbers)

    for bags, grad in problem.batches:
        history.prepare(problem.step + 1, falling_rate(problem.step + 1))
        ids = backend.catch_up(bags, adam())
        problem.step += 1
        backend.update(LookupBackward(bags, None, grad, ids), adam())
        yield problem.step


def falling_rate(step: Any) -> Any:
    """Learning rate of a step, from 1, or of each of several."""
    return CONFIG.lr / (1 + step / 1024)


class PlainRows:
    """The rows of a lookup in plain torch: the part of a back end that :class:`TorchRows` leaves to its device."""

    is_capturable = False

    def __init__(self, layout: LookupLayout):
        self._layout = layout

    def find_rows(self, bags: LookupBags) -> LookupIds:
        return find_rows(self._layout, bags)

    def sum_rows(self, backward: LookupBackward) -> RowSums:
        ids = backward.ids or self.find_rows(backward.bags)
        return row_sums(self._layout, ids, backward.id_weights, backward.output_grad)

    def catch_up(self, bags: LookupBags, adam: AdamRows) -> None:
        rows = self.find_rows(bags).row.unique().long()
        self.replay(rows[is_behind(adam.steps.last_step[rows], adam.step)], adam)

    def replay(self, rows: Tensor, adam: AdamRows) -> None:
        """Takes the missed steps of rows one by one; see numba_replay.py for the rule of elements at rest."""
        if not len(rows):
            return
        table = tables_of_rows(self._layout, rows)
        dim = self._layout.dim[table][:, None]
        start = self._layout.start[table] + (rows - self._layout.first_row[table]) * dim[:, 0]
        column = torch.arange(self._layout.max_dim, device=rows.device)
        inside = column < dim
        element = torch.where(inside, start[:, None] + column, start[:, None])
        values = [torch.where(inside, each[element], 0) for each in adam.state]
        last = adam.steps.last_step[rows]
        schedule = torch.stack([adam.steps.step_sizes, adam.steps.denominator_scales, adam.steps.decays])
        moving, thresholds = torch.ones_like(last, dtype=torch.bool), adam.thresholds
        for now, scalars in enumerate(schedule[:, : adam.step].t().tolist()):
            active = (moving & (last <= now))[:, None]
            gradient = adam.constants.twice_l2 * values[0]
            numbers = (gradient, adam.constants, AdamScalars(*scalars), exact_root, torch.div)
            stepped: Any = adam_element(*values, *numbers)  # type: ignore[call-arg]
            values = [torch.where(active, new, old) for new, old in zip(stepped, values, strict=True)]
            if (now + 1) % REST_INTERVAL == 0:
                weight, first, second = values
                lr = max(thresholds.lr, scalars[0])
                decayed = active & (first.abs() * lr <= thresholds.motion) & (weight.abs() <= thresholds.weight)
                values = [torch.where(decayed, 0, weight), torch.where(decayed, 0, first), second]
                ended = active[:, 0] & ~torch.stack(values[:2]).any(0).any(1)
                last, moving = torch.where(ended, ~(now + 1), last), moving & ~ended
        adam.steps.last_step[rows] = torch.where(moving, adam.step, last)
        for flat, value in zip(adam.state, values, strict=True):
            flat[element] = torch.where(inside, value, value[:, :1])


def trained_values(model: nn.Module, adam: EmbeddingAdam) -> list[Tensor]:
    """Copies of the network's weights, and of the tables' weights and moments, brought up to date."""
    adam.flush()
    tables = [each for lookup in adam.lookups for each in lookup.state]
    return [each.detach().clone() for each in (*model.parameters(), *tables)]
