"""CUDA kernels that clip the gradients of a batch's rows and take their Adam step, in one pass over the rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import AdamConstants

from .layout import AdamState, DeviceSteps, LookupLayout, RowCache, RowResults, TableClips
from .torch_rows import LookupIds
from .triton_shared import (
    clip_factors,
    divide,
    halvings,
    programs,
    root,
    scalars_of_rows,
    step_of_element,
    warps,
    weights_at,
)
from .triton_sums import OutputGrad, load_rows, row_sums, sum_blocks, sum_rows

BLOCK = 64
"""Neighbouring ids of a block."""
IDS, MOST_ELEMENTS = 8, 2048
"""Ids of each row that a program adds at a time, and their elements; fewer ids of wide rows."""
ELEMENTS = 32
"""Elements of a program's rows, unless one row has more."""
_COUNTED = 512


@triton.jit
def _clip(w, g, inside, occurrences, table, exists, clips, column):
    """Returns each row's clip factor, ``||g|| / limit``, and the columns that they are for."""
    measured = inside & (column[None, :] < tl.load(clips.columns + table, mask=exists, other=0)[:, None])
    r = tl.load(clips.r + table, mask=exists, other=0.0)
    floor = tl.load(clips.floor + table, mask=exists, other=0.0)
    counts = tl.load(clips.per_occurrence + table, mask=exists, other=0) != 0
    factor, ratio = clip_factors(w, g, measured, r, floor, tl.where(counts, occurrences, 1).to(tl.float32))
    return factor, ratio, measured


@triton.jit(do_not_specialize=["count"])
def _update(
    ids, count, output, layout, partial, cache, clips, state, steps, results, constants,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr, WEIGHTED: tl.constexpr,
    REPLAYS: tl.constexpr, BLOCK: tl.constexpr, IDS: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    step = tl.load(steps.taken)
    block = tl.program_id(0)
    while tl.load(ids.begin + tl.minimum(block * ROWS, count)) < count:
        u, exists, begin, end, row, table, dim, start = load_rows(ids, count, block, layout, ROWS, HALVINGS)
        inside = exists[:, None] & (column[None, :] < dim[:, None])
        element = start[:, None] + column[None, :]
        weights = weights_at(state.weights, element, cache, begin, exists, column, CACHED)
        w = tl.load(weights, mask=inside, other=0.0)
        m = tl.load(state.exp_avg + element, mask=inside, other=0.0)
        v = tl.load(state.exp_avg_sq + element, mask=inside, other=0.0)
        if REPLAYS:
            last = tl.load(steps.last_step + row, mask=exists, other=step)
            missed = tl.where(last < 0, step - 1 - (-last - 1), 0)
            decay = tl.exp(missed.to(tl.float64) * tl.load(steps.log_beta2)).to(tl.float32)
            v = tl.where((missed > 0)[:, None], v * decay[:, None], v)
            tl.store(steps.last_step + row, step + tl.zeros_like(last), mask=exists)
        sums = row_sums(begin, end, ids, output, layout, partial, column, dim, ROWS, COLUMNS, WEIGHTED, BLOCK, IDS)
        g = sums.to(tl.float32) + constants.twice_l2 * w
        factor, ratio, measured = _clip(w, g, inside, end - begin, table, exists, clips, column)
        g = tl.where(measured, g * factor[:, None], g)
        tl.store(results.ratio + u, ratio, mask=exists)
        tl.store(results.table + u, table.to(tl.int32), mask=exists)
        scalars = scalars_of_rows(steps, step - 1, tl.load(steps.lr_factors + table, mask=exists, other=0.0))
        w, m, v = step_of_element(w, m, v, g, constants, scalars, root, divide)
        tl.store(weights, w, mask=inside)
        tl.store(state.exp_avg + element, m, mask=inside)
        tl.store(state.exp_avg_sq + element, v, mask=inside)
        block += tl.num_programs(0)


@triton.jit(do_not_specialize=["count"])
def _clip_rows(
    ids, count, output, layout, partial, cache, clips, weights, results, out, twice_l2,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALVINGS: tl.constexpr, WEIGHTED: tl.constexpr,
    WRITES: tl.constexpr, BLOCK: tl.constexpr, IDS: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    block = tl.program_id(0)
    while tl.load(ids.begin + tl.minimum(block * ROWS, count)) < count:
        u, exists, begin, end, _, table, dim, start = load_rows(ids, count, block, layout, ROWS, HALVINGS)
        inside = exists[:, None] & (column[None, :] < dim[:, None])
        element = start[:, None] + column[None, :]
        pointers = weights_at(weights, element, cache, begin, exists, column, CACHED)
        w = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        sums = row_sums(begin, end, ids, output, layout, partial, column, dim, ROWS, COLUMNS, WEIGHTED, BLOCK, IDS)
        g = sums.to(tl.float32)
        if WRITES:
            g += twice_l2 * w
        factor, ratio, measured = _clip(w, g, inside, end - begin, table, exists, clips, column)
        tl.store(results.ratio + u, ratio, mask=exists)
        tl.store(results.table + u, table.to(tl.int32), mask=exists)
        if WRITES:
            g = tl.where(measured, g * factor[:, None], g)
            first = tl.load(ids.order + begin, mask=exists, other=0)
            address = tl.load(ids.address + first, mask=exists, other=0).to(tl.int64)
            tl.store(out + address[:, None] + column[None, :], g, mask=inside)
        else:
            tl.store(out + u, factor, mask=exists)
        block += tl.num_programs(0)


@triton.jit(do_not_specialize=["count"])
def _count(begin, count, results, rows, clipped, ROWS: tl.constexpr):
    u = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = tl.load(begin + u, mask=u < count, other=count) < count
    table = tl.load(results.table + u, mask=exists, other=-1)
    is_clipped = tl.load(results.ratio + u, mask=exists, other=0.0) > 1.0
    tl.store(results.table + u, table, mask=u < count)
    # Rows are sorted by table, so a block has few of them.
    now = tl.min(tl.where(exists, table, 2147483647))
    last = tl.max(table)
    while now <= last:
        here = table == now
        tl.atomic_add(rows + now, tl.sum(here.to(tl.int64)))
        tl.atomic_add(clipped + now, tl.sum((here & is_clipped).to(tl.int64)))
        now = tl.min(tl.where(exists & (table > now), table, 2147483647))


class DeviceRows:
    """Distinct rows of a backward pass on CUDA, their gradients still unsummed; launches the kernels on them.

    Args:
        layout: geometry of the lookup.
        ids: its ids, at least one.
        id_weights: factor of each id in its bag's sum, float [nnz]; None for ones.
        output_grad: gradient of the lookup's output, float, of any shape.
        cache: FBGEMM's cache of the rows; None if there is none.

    Attributes:
        ids: its ids.
    """

    def __init__(
        self,
        layout: LookupLayout,
        ids: LookupIds,
        id_weights: Tensor | None,
        output_grad: Tensor,
        cache: RowCache | None = None,
    ):
        grad = output_grad.contiguous()
        self.ids, self._layout, self._count, self._cache = ids, layout, len(ids.row), cache
        self._output = OutputGrad(grad, grad if id_weights is None else id_weights.contiguous())
        columns = triton.next_power_of_2(layout.max_dim)
        shared = {"COLUMNS": columns, "HALVINGS": halvings(len(layout.dim)), "WEIGHTED": id_weights is not None}
        ids_at_once = max(1, min(IDS, MOST_ELEMENTS // columns))
        shared |= {"BLOCK": BLOCK, "IDS": ids_at_once, "enable_fp_fusion": False}
        rows = max(1, ELEMENTS // columns)
        self._grid = programs(self._count, rows)
        self._options = {**shared, "ROWS": rows, "num_warps": warps(rows * ids_at_once * columns)}
        blocks = self._count // BLOCK
        self._partial = torch.empty(max(blocks, 1), layout.max_dim, dtype=torch.float64, device=grad.device)
        if blocks:
            arguments = (ids, self._count, self._output, layout, self._partial)
            sum_blocks[(blocks,)](*arguments, num_warps=warps(ids_at_once * columns), **shared)

    def update(
        self, clips: TableClips, state: AdamState, steps: DeviceSteps, constants: AdamConstants, *, replays: bool
    ) -> RowResults:
        """Adds L2, clips and takes the Adam step ``steps.taken`` on the rows, in place; weights float32.

        Under replay, the rows' last steps are written, and decayed rows catch up the decay of their second moments.
        """
        results = self._results()
        arguments = (*self._arguments, self._cache or state, clips, state, steps, results, constants)
        _update[self._grid](*arguments, REPLAYS=replays, CACHED=self._cache is not None, **self._options)
        return results

    def factors(self, clips: TableClips, weights: Tensor) -> tuple[Tensor, RowResults]:
        """Computes the clip factor of each distinct row, float32 [nnz], from the lookup's flat weights."""
        factors = torch.empty(self._count, device=self.ids.row.device)
        return factors, self._clip_into(factors, clips, weights)

    def written(self, clips: TableClips, weights: Tensor, twice_l2: float) -> tuple[Tensor, RowResults]:
        """Computes an output gradient whose sum over each row's ids is ``clip(g + twice_l2 * w)``.

        It has the row's gradient at its first id and zeros at the others; bags hold at most one id.
        """
        written = torch.zeros_like(self._output.grad)
        return written, self._clip_into(written, clips, weights, twice_l2, writes=True)

    def sums(self) -> Tensor:
        """Sums the gradient of each distinct row, float64 [nnz, D], zero in the padding and beyond a row's columns."""
        sums = torch.zeros(self._count, self._layout.max_dim, dtype=torch.float64, device=self._output.grad.device)
        sum_rows[self._grid](*self._arguments, sums, **self._options)
        return sums

    def of_ids(self, values: Tensor) -> Tensor:
        """Copies a value of each distinct row, [nnz], to the row's ids in the order of the batch, [nnz]."""
        counts = self.ids.begin.diff()
        in_order = torch.repeat_interleave(values, counts, output_size=self._count)
        return torch.empty_like(values).scatter_(0, self.ids.order, in_order)

    def count(self, results: RowResults, rows: Tensor, clipped: Tensor) -> None:
        """Adds the numbers of rows and of clipped rows of each table, int64 [tables], in place."""
        grid = (triton.cdiv(self._count, _COUNTED),)
        _count[grid](self.ids.begin, self._count, results, rows, clipped, ROWS=_COUNTED, enable_fp_fusion=False)

    def _clip_into(
        self, out: Tensor, clips: TableClips, weights: Tensor, twice_l2: float = 0.0, *, writes: bool = False
    ) -> RowResults:
        results, cached = self._results(), self._cache is not None
        arguments = (*self._arguments, self._cache or clips, clips, weights, results, out, twice_l2)
        _clip_rows[self._grid](*arguments, WRITES=writes, CACHED=cached, **self._options)
        return results

    @property
    def _arguments(self) -> tuple:
        return self.ids, self._count, self._output, self._layout, self._partial

    def _results(self) -> RowResults:
        device = self.ids.row.device
        return RowResults(
            torch.empty(self._count, device=device), torch.empty(self._count, dtype=torch.int32, device=device)
        )
