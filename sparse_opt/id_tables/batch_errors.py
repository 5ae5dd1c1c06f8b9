"""Checks of the arrays that id tables are given; each returns an error message, or "" for none."""

import numpy as np

TIME_LIMIT = 1 << 32


def id_error(ids: np.ndarray, splits: np.ndarray, features: int) -> str:
    if ids.dtype != np.int64 or ids.ndim != 1 or not ids.flags.c_contiguous:
        return f"ids must be contiguous int64 [V], got {ids.dtype} {list(ids.shape)}"
    if len(ids) >= 1 << 31:
        return f"a batch must have fewer than 2^31 ids, got {len(ids)}; split it"
    if splits.dtype != np.int64 or splits.shape != (features + 1,):
        return f"splits must be int64 [{features + 1}], got {splits.dtype} {list(splits.shape)}"
    if splits[0] != 0 or splits[-1] != len(ids) or (np.diff(splits) < 0).any():
        return f"splits must rise from 0 to the number of ids, {len(ids)}, got {splits.tolist()}"
    return ""


def time_error(times: np.ndarray | None, ids: np.ndarray, timed: bool | None) -> str:
    """Checks the times of a batch; ``timed`` tells whether earlier batches had times, None if there were none."""
    if timed is not None and timed != (times is not None):
        return "samples must have times in every batch or in none, got a batch " + (
            "without times after batches with times" if timed else "with times after batches without"
        )
    if times is None:
        return ""
    if times.dtype != np.int64 or times.shape != ids.shape:
        return f"times must be int64 {list(ids.shape)}, one per id, got {times.dtype} {list(times.shape)}"
    if len(times) and not 0 <= times.min() <= times.max() < TIME_LIMIT:
        return f"times must be seconds in [0, 2^32), got {times.min()} to {times.max()}; drop such samples"
    return ""
