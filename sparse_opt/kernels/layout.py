"""Arguments that the row kernels share: the layout of a lookup, the limits of its tables, and Adam's state.

The tuples hold torch tensors, or for numba the numpy arrays on the same memory that :func:`to_numpy` makes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cowrec.errors import UserError

from ..algorithm.adam import AdamConstants, AdamScalars, FtrlConstants

_MOST_SIZES = 64
"""Batch sizes whose blocks a lookup keeps."""
REST_INTERVAL = 32
"""Rows may come to rest after steps that are multiples of this number (see numba_replay.py)."""


class LookupLayout(NamedTuple):
    """Offsets of a lookup's tables in its weights; int64, on its device."""

    rows: Tensor  # rows of each table, [tables]
    dim: Tensor  # columns of each table, [tables]
    start: Tensor  # offset of each table's first weight in the flat weights, [tables]
    first_row: Tensor  # index of each table's first row among the rows of all tables, [tables]
    max_dim: int  # columns of the widest table
    size: int  # elements of the flat weights
    tables: int  # number of tables
    num_rows: int  # rows of all tables


class Blocks(NamedTuple):
    """S blocks of neighbouring bags, of a feature or of a feature and a rank, whose outputs are equally far apart."""

    table: Tensor  # table of each block, [S]
    first_block: Tensor  # first block of each table, and S, [tables + 1]
    first_bag: Tensor  # first bag of each block, and the number of bags, [S + 1]
    address: Tensor  # offset of the output of each block's first bag in the output of the lookup, in elements, [S]
    stride: Tensor  # elements from the output of a bag to that of the next, [S]


class LookupBags(NamedTuple):
    """Ids of one forward pass of a lookup."""

    indices: Tensor  # row of each id in its table, int [nnz]
    offsets: Tensor  # offset of each bag in ``indices``, block by block, int [bags + 1]; in sequences every id is a bag
    blocks: Blocks  # blocks of the bags
    size: int  # elements of the output


class BagsOfLookup:
    """Finds where the bags of a lookup's forward passes have their outputs.

    ``feature_table`` has the table of each feature, [T]; features of a table are neighbours. The tables of a sequence
    (not pooled) have equally many columns.
    """

    def __init__(
        self, feature_table: Sequence[int], dims: Sequence[int], device: torch.device, *, is_sequence: bool = False
    ):
        self._tables, self._num_tables = np.array(feature_table), len(dims)
        self._dims, self._device, self.is_sequence = np.array(dims)[self._tables], device, is_sequence
        self._pooled: dict[int, tuple[Blocks, int]] = {}

    def of(self, inputs: Mapping[str, Any]) -> LookupBags:
        """Makes the bags of a forward pass from the keyword arguments of FBGEMM's forward."""
        if inputs.get("vbe_output") is not None:
            raise UserError(
                "under a variable batch size per feature, tables that are looked up separately write into one output,"
                " whose gradient cannot be told apart; give all tables of the collection the same pooling, data type"
                " and fused_params, or one collection for each"
            )
        indices, offsets = inputs["indices"], inputs["offsets"]
        if self.is_sequence:
            return self._sequences(indices, offsets)
        if (sizes := inputs.get("batch_size_per_feature_per_rank")) is not None:
            # FBGEMM's output has the bags of the first rank, feature by feature, then those of the next.
            return LookupBags(indices, offsets, *self._blocks_of_ranks(np.array(sizes, np.int64)))
        return LookupBags(indices, offsets, *self._pooled_blocks((len(offsets) - 1) // len(self._dims)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Blocks of all batch sizes so far; they must live as long as a CUDA graph is replayed."""
        return tuple(tensor for blocks, _ in self._pooled.values() for tensor in blocks)

    def _pooled_blocks(self, size: int) -> tuple[Blocks, int]:
        """Returns the blocks of batches of ``size`` samples and the elements of the output, made once for a size."""
        if size not in self._pooled:
            if len(self._pooled) == _MOST_SIZES:
                self._pooled.clear()
            features, width = len(self._dims), int(self._dims.sum())
            address, stride = self._dims.cumsum() - self._dims, np.full(features, width)
            blocks = self._blocks(self._tables, np.arange(features + 1) * size, address, stride)
            self._pooled[size] = blocks, size * width
        return self._pooled[size]

    def _blocks_of_ranks(self, sizes: np.ndarray) -> tuple[Blocks, int]:
        elements = sizes * self._dims[:, None]
        ends = elements.T.cumsum().reshape(elements.T.shape).T
        first_bag = np.concatenate([[0], sizes.ravel().cumsum()])
        tables, dims = (np.repeat(of_features, sizes.shape[1]) for of_features in (self._tables, self._dims))
        return self._blocks(tables, first_bag, (ends - elements).ravel(), dims), int(elements.sum())

    def _sequences(self, indices: Tensor, offsets: Tensor) -> LookupBags:
        """Makes the bags of sequences, where every id is a bag; the features' first bags stay on the device."""
        size, dim = (len(offsets) - 1) // len(self._dims), int(self._dims[0])
        first_bag = (
            offsets[::size].long().contiguous() if size else offsets.new_zeros(len(self._dims) + 1, dtype=torch.int64)
        )
        blocks = self._pooled_blocks(0)[0]._replace(
            first_bag=first_bag, address=first_bag[:-1] * dim, stride=torch.full_like(first_bag[:-1], dim)
        )
        of_ids = torch.arange(indices.numel() + 1, device=indices.device)
        return LookupBags(indices, of_ids, blocks, indices.numel() * dim)

    def _blocks(self, tables: np.ndarray, first_bag: np.ndarray, address: np.ndarray, stride: np.ndarray) -> Blocks:
        first_block = np.searchsorted(tables, np.arange(self._num_tables + 1))
        packed = torch.from_numpy(np.concatenate([tables, first_block, first_bag, address, stride]))
        if self._device.type == "cuda":
            packed = packed.pin_memory().to(self._device, non_blocking=True)
        blocks = len(tables)
        return Blocks(*packed.split([blocks, self._num_tables + 1, blocks + 1, blocks, blocks]))


class LookupIds(NamedTuple):
    """Ids of one lookup, sorted by row. The forward pass finds them for the backward pass too."""

    address: Tensor  # offset of the output of each id's bag in the lookup's output, int [nnz]
    order: Tensor  # index of each id in order of the rows, int64 [nnz]; a row's ids stay in the order of the batch
    row: Tensor  # row of each id in that order, among the rows of all tables, int [nnz]
    begin: Tensor  # offset in that order of each distinct row's first id, then nnz, int [nnz + 1]


@dataclass(frozen=True)
class LookupBackward:
    """Inputs of one backward pass of a lookup."""

    bags: LookupBags  # ids of the forward pass, nnz in all
    id_weights: Tensor | None  # factor of each id in its bag's sum, float [nnz]; None for ones
    # gradient of the output, float: [B, sum D] of pooled rows, [nnz, D] of sequences, flat under a variable batch size
    output_grad: Tensor
    ids: LookupIds | None = None  # rows of the ids, if the forward pass has found them


class TableClips(NamedTuple):
    """Clip limits of a lookup's tables, each [tables]."""

    columns: Tensor  # leading columns that are measured and clipped, int64
    r: Tensor  # as in RowLimit, float32
    floor: Tensor  # as in RowLimit, float32
    per_occurrence: Tensor  # as in RowLimit, bool


class AdamState(NamedTuple):
    """Weights and moments of a lookup's tables, flat, in the same order; the moments are float32.

    ``exp_avg_sq`` of a weight under FTRL is the sum of its squared gradients, and its ``exp_avg`` stays 0.
    """

    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class StepScalars(NamedTuple):
    """:class:`AdamScalars` of steps 1, 2, ..., float32 [at least the steps so far]."""

    step_sizes: Tensor
    denominator_scales: Tensor
    decays: Tensor


class DeviceSteps(NamedTuple):
    """Steps of a lookup on the device, so that kernels need no argument that changes from step to step."""

    # latest step, which rows take or catch up to: the number of steps taken, and one more during a step, int32 [1]
    taken: Tensor
    # last step that each row took, int32 [rows of all tables]; ``~t`` (negative) for a row that came to rest in step t.
    # Empty where rows are not replayed
    last_step: Tensor
    step_sizes: Tensor  # as in StepScalars
    denominator_scales: Tensor  # as in StepScalars
    decays: Tensor  # as in StepScalars
    lr_factors: Tensor  # factor of each table's learning rate, float32 [tables]
    log_beta2: Tensor  # logarithm of beta2, float64 [1]
    adam_columns: Tensor  # leading columns of each table that are under Adam, and not under FTRL, int64 [tables]


class RowResults(NamedTuple):
    """Clip statistics of the distinct rows of a backward pass."""

    ratio: Tensor  # ``||g|| / limit`` of each row, float32 [nnz]
    table: Tensor  # table of each row, int [nnz]; -1 in the padding


class RestThresholds(NamedTuple):
    """Thresholds of an element at rest (see replay.py)."""

    lr: float  # least learning rate for ``motion``, to be multiplied by the table's factor
    weight: float  # largest weight
    motion: float  # largest product of first moment and learning rate


class AdamRows(NamedTuple):
    """Adam on the rows of a lookup, as the back ends take it."""

    state: AdamState  # weights and moments, updated in place
    constants: AdamConstants
    thresholds: RestThresholds
    steps: DeviceSteps  # ``last_step`` is updated in place
    step: int  # latest step, which rows take or catch up to
    log_beta2: float  # as in DeviceSteps
    clips_absent: bool  # whether the L2 gradient of an absent row may exceed the row's limit
    ftrl: FtrlConstants | None  # settings of the columns under FTRL; None without such columns

    @property
    def replays(self) -> bool:
        return self.steps.last_step.numel() > 0

    @property
    def scalars(self) -> AdamScalars:
        """Scalars of the latest step, float32 [] on the device."""
        of_steps: Any = (self.steps.step_sizes, self.steps.denominator_scales, self.steps.decays)
        return AdamScalars(*(values[self.step - 1] for values in of_steps))


class StaleRows(NamedTuple):
    """Distinct rows that are behind, each [n]."""

    table: Tensor  # table of each row
    start: Tensor  # offset of each row's first element in the flat weights
    row: Tensor  # index of each row among the rows of all tables
    last: Tensor  # last step that each row took


def to_numpy(values: Any) -> Any:
    """Converts the CPU tensors of a named tuple to numpy arrays on the same memory."""
    return values._make(value.numpy() if isinstance(value, Tensor) else value for value in values)


def to_float32(values: Any) -> Any:
    return values._make(map(np.float32, values))
