"""Histograms of gradient norm over limit, which show how often and by how much a clip binds.

T tables.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cowrec.trainer.runtime.processes import Process

BINS_PER_DECADE = 4
EDGES = 10.0 ** (np.arange(-8 * BINS_PER_DECADE, 2 * BINS_PER_DECADE + 1) / BINS_PER_DECADE)
"""Edges of the bins, from 1e-8 to 100; the first and last bin also count what is beyond them. A row is clipped above
1."""


class RatioHistogram:
    """Counts rows by their ``||g|| / limit`` over all processes, in the steps in which :meth:`add` is called.

    Args:
        ratios: returns the ratios of the latest step of this process's tables.
        tables: names of the tables of all processes.
        process: this process.
    """

    def __init__(self, ratios: Callable[[], Mapping[str, Tensor]], tables: Sequence[str], process: Process) -> None:
        self._ratios, self._tables, self._process = ratios, tables, process
        self._counts = np.zeros((len(tables), len(EDGES) - 1), np.int64)

    def add(self) -> None:
        """Counts the rows of the latest step. Waits for the device."""
        for name, ratios in self._ratios().items():
            within = np.clip(ratios.double().numpy(), EDGES[0], EDGES[-1])
            self._counts[self._tables.index(name)] += np.histogram(within, EDGES)[0]

    def total(self) -> dict[str, Any]:
        """The edges of the bins, and the rows in each bin by table. All processes call together."""
        counts = torch.from_numpy(self._counts).to(self._process.device, copy=True)
        if self._process.world_size > 1:
            dist.all_reduce(counts)
        return {"edges": EDGES.tolist(), "fields": dict(zip(self._tables, counts.cpu().tolist(), strict=True))}
