"""Statistics of the clip in training: the share of clipped rows and the limits' distance. P processes, T tables."""

from collections.abc import Callable, Mapping, Sequence
from math import inf, nan
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cowrec.sparse_opt import TableStats

from ..runtime.processes import Process

HARDLY_ANY = 1e-4
"""Share of clipped rows below which the clip counts as without effect."""


def clip_remark(statistics: Mapping[str, Any] | None) -> str | None:
    """Returns a sentence for a run whose clip had no effect, or almost none; None for others, and without a clip."""
    if not statistics or not statistics["rows"] or statistics["clipped_share"] >= HARDLY_ANY:
        return None
    share = f"{100 * statistics['clipped_share']:.2g}"
    effect = "no effect" if statistics["clipped_share"] == 0 else "almost no effect"
    return (
        f"the clip had {effect}: {share} % of {statistics['rows']:,} row updates were clipped; lower clip.r or"
        ' clip.max_norm tenfold against overfitting, or set clip.rule = "none" to save its cost'
    )


class ClipWatch:
    """Reader of the clip's statistics over all processes, since the last reading and since the beginning.

    A reading is ``{"rows", "clipped_share", "limit_to_norm", "fields": {table: {the same three}}}``:

    * rows: rows that had a gradient; a row counts once in each step that has its id.
    * clipped_share: share of these rows whose gradient exceeded its limit; NaN without rows.
    * limit_to_norm: limit / ||g|| of the median row of the latest step; below 1 if most rows were clipped. Over several
      tables or processes it is the median of their medians, weighted by their rows.

    Args:
        stats: returns the statistics of this process's tables since training began.
        tables: names that readings use, by the names of the tables in the model.
    """

    def __init__(self, stats: Callable[[], Mapping[str, TableStats]], tables: Mapping[str, str], process: Process):
        self._stats, self._process = stats, process
        self._tables, self._shown = list(tables), list(tables.values())
        self._latest = np.zeros((process.world_size, len(tables), 3))
        self._before = np.zeros((1, len(tables), 3))  # counts of the run before it was interrupted

    def read(self) -> dict[str, Any]:
        """Returns the statistics since the last call. Waits for the device. All processes call together."""
        before, self._latest = self._latest, self._gathered()
        since = self._latest.copy()
        since[..., :2] -= before[..., :2]
        return _reading(since, self._shown)

    def total(self) -> dict[str, Any]:
        """Returns the statistics from the beginning to the last :meth:`read`."""
        return _reading(np.concatenate([self._latest, self._before]), self._shown)

    def counts(self) -> dict[str, list[int]]:
        """Returns rows and clipped rows of each table until now, for a checkpoint. Calls and waits are as in `read`."""
        sums = np.concatenate([self._gathered(), self._before])[..., :2].sum(0).astype(int).tolist()
        return dict(zip(self._tables, sums, strict=True))

    def add_earlier(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Adds :meth:`counts` of the run before it was interrupted."""
        for index, table in enumerate(self._tables):
            if table in counts:
                self._before[0, index] = *counts[table], nan

    def _gathered(self) -> np.ndarray:
        """Gathers rows, clipped rows and median norm to limit, float64 [P, T, 3]; zeros if a process has no rows."""
        own = np.zeros((len(self._tables), 3))
        for name, table in self._stats().items():
            if table.rows:
                own[self._tables.index(name)] = table.rows, round(table.clipped_share * table.rows), table.median_ratio
        if self._process.world_size == 1:
            return own[None]
        sent = torch.from_numpy(own).to(self._process.device)
        gathered = [torch.empty_like(sent) for _ in range(self._process.world_size)]
        dist.all_gather(gathered, sent)
        return torch.stack(gathered).cpu().numpy()


def _reading(counts: np.ndarray, tables: Sequence[str]) -> dict[str, Any]:
    fields = {name: _summary(counts[:, index]) for index, name in enumerate(tables)}
    return {**_summary(counts.reshape(-1, 3)), "fields": fields}


def _summary(counts: np.ndarray) -> dict[str, float]:
    rows, clipped, ratio = counts.T
    total = int(rows.sum())
    norm_to_limit = _weighted_median(ratio[~np.isnan(ratio)], rows[~np.isnan(ratio)])
    return {
        "rows": total,
        "clipped_share": clipped.sum().item() / total if total else nan,
        "limit_to_norm": 1 / norm_to_limit if norm_to_limit else inf,
    }


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    """Returns the least value up to which the weights are at least half of all; NaN without weight."""
    if not weights.any():
        return nan
    order = np.argsort(values)
    reached = weights[order].cumsum()
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
