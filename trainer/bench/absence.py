"""How long the rows of a batch have been absent: the gaps that a replaying optimizer has to bridge.

F tables, S samples, B samples per step.
"""

from dataclasses import dataclass

import numba
import numpy as np

_BINS = 32


@dataclass(frozen=True)
class Gaps:
    """Gaps of the rows looked up in some steps; a row counts once in each step that has its id.

    Attributes:
        seen: rows per sample whose latest step lies in [2^k, 2^(k+1)) steps back, by 2^k; 1 is the step before.
        never_seen: rows per sample that no step before had.
        missed_row_steps: steps per sample that these rows missed, from the first step on for rows never seen.
    """

    seen: dict[int, float]
    never_seen: float
    missed_row_steps: float


def last_steps(last_samples: np.ndarray, batch_size: int, steps: int) -> np.ndarray:
    """The step, from 1, that has each row's last sample (from 1, 0 for none) of a stream of ``steps`` steps: int32."""
    return np.minimum(-(-last_samples.astype(np.int32) // np.int32(batch_size)), np.int32(steps))


def measure_gaps(rows: np.ndarray, tables: list[np.ndarray], batch_size: int, step: int, skip: int) -> Gaps:
    """Gaps of the steps after step ``step``.

    Args:
        rows: rows that the samples after it look up, int32 [F, S], S a multiple of ``batch_size``.
        tables: for each table the last step of its rows, 0 for rows never seen, int32 [rows]; they are brought up to
            date.
        batch_size: B.
        step: steps taken before.
        skip: steps that are taken, but not measured.
    """
    seen, sums = np.zeros(_BINS, np.int64), np.zeros(2, np.int64)
    for of_table, last in zip(rows, tables, strict=True):
        _take_steps(of_table, last, batch_size, step, skip * batch_size, seen, sums)
    samples = rows.shape[1] - skip * batch_size
    found = {1 << int(k): float(seen[k] / samples) for k in np.flatnonzero(seen)}
    return Gaps(found, *(sums / samples).tolist())


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
        place = 0
        while (now - before) >> (place + 1):
            place += 1
        seen[place] += 1
