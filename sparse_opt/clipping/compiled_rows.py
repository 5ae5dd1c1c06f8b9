"""Compiled CPU path of a clipped lookup: sums a backward pass into row gradients and runs a numba kernel on them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from cowrec.sparse_opt.kernels import cpu_rows
from cowrec.sparse_opt.kernels.cpu_rows import Bags, DistinctRows, Ratios, bags_of
from cowrec.sparse_opt.kernels.layout import LookupLayout, to_numpy
from cowrec.sparse_opt.kernels.profiling import profiled
from cowrec.sparse_opt.kernels.threads import balanced_groups, in_threads
from cowrec.sparse_opt.tbe.lookup import LookupBackward, TbeLookup, raise_bad_id

from .statistics import ClipStatistics
from .table_limits import TableLimits

ROW_GRADIENTS = "row_gradients"
"""Name in torch's profiler of the first part of the work on rows, within the update of the embeddings."""
_NO_WEIGHTS = np.empty(0, np.float32)
_WORK_OF_ROW = 4
"""Ids that take as long as one distinct row."""


@dataclass(frozen=True)
class CompiledSums:
    """Row gradients of a backward pass: distinct rows of groups of tables, one group for each thread."""

    bags: Bags
    groups: list[tuple[np.ndarray, DistinctRows]]


class CompiledRows:
    """Numba kernels on the rows of one lookup of float32 weights, on as many threads as torch uses."""

    def __init__(self, lookup: TbeLookup, layout: LookupLayout, limits: TableLimits, statistics: ClipStatistics):
        self._lookup, self._statistics = lookup, statistics
        self._layout, self._clips = to_numpy(layout), to_numpy(limits.clips)

    def sum_rows(self, backward: LookupBackward) -> CompiledSums:
        """Sums the output gradient over the occurrences of each distinct row.

        Raises:
            ValueError: an id is outside its table.
        """
        bags = bags_of(backward.bags)
        # A distinct row costs several times what an id does, and a table has about as many in every step.
        groups = balanced_groups(bags.begins[1:] - bags.begins[:-1] + _WORK_OF_ROW * self._statistics.latest_rows)
        with profiled(ROW_GRADIENTS):
            id_weights = _NO_WEIGHTS if backward.id_weights is None else backward.id_weights.float().numpy()
            output_grad = backward.output_grad.contiguous().view(-1).numpy()
            common = (self._layout, bags, id_weights, output_grad)
            bad, sums = zip(*in_threads([partial(cpu_rows.sum_rows, group, *common) for group in groups]), strict=True)
            raise_bad_id(self._lookup, bad, bags.begins, bags.indices)
        return CompiledSums(bags, list(zip(groups, sums, strict=True)))

    def run(self, kernel: Callable[..., None], sums: CompiledSums, *arguments: Any) -> None:
        """Runs a kernel of cpu_rows.py or cpu_adam.py on the summed rows, and records its ratios."""
        bags = sums.bags
        ratios = Ratios(np.empty(len(bags.indices), np.float32), np.zeros(len(bags.begins) - 1, np.int64))
        common = (self._layout, bags, self._clips, ratios, *arguments)
        in_threads([partial(kernel, group, rows, *common) for group, rows in sums.groups])
        self._statistics.record_compiled(ratios, bags.begins)
