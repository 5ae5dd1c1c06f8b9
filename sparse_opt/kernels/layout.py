"""Arguments that the row kernels share: the geometry of a lookup, the limits of its tables, and Adam's state.

The tuples hold torch tensors, or numpy arrays on the same memory for numba; :func:`to_numpy` converts them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..algorithm.adam import AdamConstants, AdamScalars, FtrlConstants

DECAY_INTERVAL = 32
"""Rows are checked for decay after steps that are multiples of it (see numba_replay.py)."""


class LookupLayout(NamedTuple):
    """Offsets of a lookup's tables in its weights; int64, on its device.

    Attributes:
        rows: rows of each table, [tables].
        dim: columns of each table, [tables].
        start: offset of each table's first weight in the flat weights, [tables].
        first_row: index of each table's first row among the rows of all tables, [tables].
        max_dim: columns of the widest table.
        size: elements of the flat weights.
        tables: number of tables.
        num_rows: rows of all tables.
    """

    rows: Tensor
    dim: Tensor
    start: Tensor
    first_row: Tensor
    max_dim: int
    size: int
    tables: int
    num_rows: int


class Blocks(NamedTuple):
    """Blocks of neighbouring bags whose outputs are equally far apart: S blocks, those of a table neighbours; int64.

    A block has the bags of a feature; under a variable batch size, those of a feature and a rank.

    Attributes:
        table: table of each block, [S].
        first_block: first block of each table, and S, [tables + 1].
        first_bag: first bag of each block, and the number of bags, [S + 1].
        address: offset of the output of each block's first bag in the output of the lookup, in elements, [S].
        stride: elements from the output of a bag to that of the next, [S].
    """

    table: Tensor
    first_block: Tensor
    first_bag: Tensor
    address: Tensor
    stride: Tensor


class LookupBags(NamedTuple):
    """Ids of one forward pass of a lookup.

    Attributes:
        indices: row of each id in its table, int [nnz].
        offsets: offset of each bag in ``indices``, block by block, int [bags + 1]; in sequences every id is a bag.
        blocks: blocks of the bags.
        size: elements of the output.
    """

    indices: Tensor
    offsets: Tensor
    blocks: Blocks
    size: int


class LookupIds(NamedTuple):
    """Ids of one lookup, sorted by row; found once, for the forward and the backward pass.

    Attributes:
        address: offset of the output of each id's bag in the lookup's output, int [nnz].
        order: index of each id in order of the rows, int64 [nnz]; a row's ids stay in the order of the batch.
        row: row of each id in that order, among the rows of all tables, int [nnz].
        begin: offset in that order of each distinct row's first id, then nnz, int [nnz + 1].
    """

    address: Tensor
    order: Tensor
    row: Tensor
    begin: Tensor


@dataclass(frozen=True)
class LookupBackward:
    """Inputs of one backward pass of a lookup.

    Attributes:
        bags: ids of the forward pass, nnz in all.
        id_weights: factor of each id in its bag's sum, float [nnz]; None for ones.
        output_grad: gradient of the lookup's output, float; [B, sum D] of pooled rows, [nnz, D] of sequences, flat
            under a variable batch size.
        ids: rows of the ids, if the forward pass has found them already.
    """

    bags: LookupBags
    id_weights: Tensor | None
    output_grad: Tensor
    ids: LookupIds | None = None


class TableClips(NamedTuple):
    """Clip limits of a lookup's tables, each [tables].

    Attributes:
        columns: leading columns that are measured and clipped, int64.
        r, floor: as in :class:`RowLimit`, float32.
        per_occurrence: as in :class:`RowLimit`, bool.
    """

    columns: Tensor
    r: Tensor
    floor: Tensor
    per_occurrence: Tensor


class AdamState(NamedTuple):
    """Weights and moments of a lookup's tables, flat, in the same order; the moments in float32.

    ``exp_avg_sq`` of a weight under FTRL is its sum of squared gradients, and ``exp_avg`` stays 0.
    """

    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Schedule(NamedTuple):
    """:class:`AdamScalars` of steps 1, 2, ..., float32 [at least the steps so far]."""

    step_sizes: Tensor
    denominator_scales: Tensor
    decays: Tensor


class DeviceSteps(NamedTuple):
    """Steps of a lookup as the kernels read them, so that nothing of them is an argument that changes.

    Attributes:
        taken: steps taken, including one that is being taken, int32 [1]: rows take that step, or are brought to it.
        last_step: last step that each row took, int32 [rows of all tables]; ``~t`` (negative) for a row that decayed in
            step t. Empty where rows are not replayed.
        step_sizes, denominator_scales, decays: as in :class:`Schedule`.
        lr_factors: factor of each table's learning rate, float32 [tables].
        log_beta2: logarithm of the decay of the second moment, float64 [1].
        adam_columns: leading columns of each table that are under Adam and catch up; others are under FTRL; int64
            [tables].
    """

    taken: Tensor
    last_step: Tensor
    step_sizes: Tensor
    denominator_scales: Tensor
    decays: Tensor
    lr_factors: Tensor
    log_beta2: Tensor
    adam_columns: Tensor


class RowResults(NamedTuple):
    """Clip statistics of the distinct rows of a backward pass.

    Attributes:
        ratio: ``||g|| / limit`` of each row, float32 [nnz].
        table: its table, int [nnz]; -1 in the padding.
    """

    ratio: Tensor
    table: Tensor


class DecayThresholds(NamedTuple):
    """Thresholds below which an element has decayed (see replay.py).

    Attributes:
        lr: the configured learning rate; a first moment is judged by it or by the step's, if larger, each times the
            table's factor.
        weight: largest weight.
        motion: largest product of first moment and learning rate.
    """

    lr: float
    weight: float
    motion: float


class AdamRows(NamedTuple):
    """Adam on the rows of a lookup, as the back ends take it.

    Attributes:
        state: weights and moments, updated in place.
        constants: the settings.
        thresholds: of decayed rows; those of no row where rows are not replayed.
        steps: the steps; ``last_step`` is updated in place, and empty where rows are not replayed.
        step: the latest step: it is being taken, or rows are brought to it.
        scalars: of that step.
        log_beta2: as in :class:`DeviceSteps`.
        clips_absent: whether L2's gradient of an absent row may exceed the row's limit.
        ftrl: settings of the columns under FTRL; None if there are none.
    """

    state: AdamState
    constants: AdamConstants
    thresholds: DecayThresholds
    steps: DeviceSteps
    step: int
    scalars: AdamScalars
    log_beta2: float
    clips_absent: bool
    ftrl: FtrlConstants | None

    @property
    def replays(self) -> bool:
        """True if rows are replayed."""
        return self.steps.last_step.numel() > 0


class StaleRows(NamedTuple):
    """Distinct rows to be brought up to date, each [n].

    Attributes:
        table: their tables.
        start: offset of each row's first element in the flat weights.
        row: index of each row among the rows of all tables.
        last: step that each took last.
    """

    table: Tensor
    start: Tensor
    row: Tensor
    last: Tensor


def to_numpy(values: Any) -> Any:
    """Converts the CPU tensors of a named tuple to numpy arrays on the same memory."""
    return values._make(value.numpy() if isinstance(value, Tensor) else value for value in values)


def to_float32(values: Any) -> Any:
    """Converts the numbers of a named tuple to numpy.float32."""
    return values._make(map(np.float32, values))
