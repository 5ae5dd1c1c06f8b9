"""Absence of the rows of a batch: the steps since each row's previous lookup, which a replaying optimizer catches up.

F tables, S samples, B samples per step.
"""

from dataclasses import dataclass

import numba
import numpy as np

_BINS = 32


@dataclass(frozen=True)
class Absence:
    """Steps since the previous lookup (reuse distance) of the rows of some steps; a row counts once in each step.

    Attributes:
        seen: rows per sample whose previous lookup was [2^k, 2^(k+1)) steps earlier, by 2^k; 1 is the step before.
        never_seen: rows per sample without a previous lookup.
        missed_row_steps: steps per sample that these rows missed; rows never seen missed all steps from the first on.
    """

    seen: dict[int, float]
    never_seen: float
    missed_row_steps: float


def last_steps(last_samples: np.ndarray, batch_size: int, steps: int) -> np.ndarray:
    """The step (from 1) of each row's last sample (from 1, 0 for none) in a stream of ``steps`` steps: int32."""
    return np.minimum(-(-last_samples.astype(np.int32) // np.int32(batch_size)), np.int32(steps))


def measure_absence(rows: np.ndarray, tables: list[np.ndarray], batch_size: int, step: int, skip: int) -> Absence:
    """Measures the absence of the rows that the steps after ``step`` look up.

    Args:
        rows: rows of the samples after ``step``, int32 [F, S], S a multiple of ``batch_size``.
        tables: for each table the last step of its rows, 0 for rows never seen, int32 [rows]; updated in place.
        batch_size: B.
        step: steps taken before.
        skip: steps to take before the measurement starts.
    """
    seen, sums = np.zeros(_BINS, np.int64), np.zeros(2, np.int64)
    for table_rows, last in zip(rows, tables, strict=True):
        _take_steps(table_rows, last, batch_size, step, skip * batch_size, seen, sums)
    samples = rows.shape[1] - skip * batch_size
    found = {1 << int(k): float(seen[k] / samples) for k in np.flatnonzero(seen)}
    return Absence(found, *(sums / samples).tolist())


@numba.njit(nogil=True, cache=True)
def _take_steps(
    rows: np.ndarray, last: np.ndarray, batch_size: int, step: int, skip: int, seen: np.ndarray, sums: np.ndarray
) -> None:
    for i in range(len(rows)):
        now = step + 1 + i // batch_size
        before, last[rows[i]] = last[rows[i]], now
        if before == now or i < skip:
            continue
        sums[1] += now - 1 - before
        if before == 0:
            sums[0] += 1
            continue
        k = 0
        while (now - before) >> (k + 1):
            k += 1
        seen[k] += 1
