"""Drifting samples as tables: raw ones with text ids, as a log or a stream has them, and a data set of raw ids."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .drifting import DAY, DriftConfig, DriftDraw, DriftingModel
from .parallel import ordered_map
from .ranking import exact_auc, exact_logloss
from .schema import LABEL

TIME = "time"
SAMPLE_ID = "sample_id"
CHUNK_ROWS = 1 << 16


def drifting_tables(config: DriftConfig, first_row: int, rows: int, chunk_rows: int = CHUNK_ROWS) -> Iterator[pa.Table]:
    """Rows [first_row, first_row + rows) as raw samples, in the order of time, `chunk_rows` to a table.

    Columns: sample_id (the row's number), time (Unix seconds), label, I1..IN (float32), C1..CF (text such as "core_17"
    or "born_1234").
    """
    model = DriftingModel.of(config)
    stop = first_row + rows

    def table(first: int) -> pa.Table:
        return raw_table(model.draw(first, min(chunk_rows, stop - first)), first)

    return ordered_map(table, range(first_row, stop, chunk_rows))


def raw_table(draw: DriftDraw, first_row: int) -> pa.Table:
    """The rows of a draw as raw samples; see `drifting_tables`."""
    columns: dict[str, Any] = {
        SAMPLE_ID: np.arange(first_row, first_row + len(draw.labels)),
        TIME: draw.times,
        LABEL: draw.labels,
    }
    columns |= {f"I{n + 1}": values for n, values in enumerate(draw.dense)}
    columns |= {f"C{f + 1}": id_text(ids) for f, ids in enumerate(draw.ids)}
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def id_text(ids: np.ndarray) -> pa.Array:
    """The raw ids of one field as text, from `DriftDraw.ids`, int64 [R]."""
    number = pa.array(np.where(ids < 0, -1 - ids, ids)).cast(pa.string())
    kind = pc.if_else(pa.array(ids < 0), "born", "core")
    return pc.binary_join_element_wise(kind, number, "_")


def best_by_window(config: DriftConfig, first_row: int, rows: int, window_seconds: int = DAY) -> list[dict[str, float]]:
    """How good predictions can be at all in each window of sample time; 17 bytes of memory a row.

    Returns:
        For each window of [start + k * window_seconds, ...) with samples: its first second (`time`), `samples`, `ctr`,
        and the `auc` and `logloss` of the true probabilities. The AUC of a window of one class is NaN.
    """
    model = DriftingModel.of(config)
    logits, labels, times = np.empty(rows), np.empty(rows, bool), np.empty(rows, np.int64)
    for start in range(0, rows, CHUNK_ROWS):
        draw = model.draw(first_row + start, min(CHUNK_ROWS, rows - start))
        here = slice(start, start + len(draw.labels))
        logits[here], labels[here], times[here] = draw.logits, draw.labels > 0, draw.times
    window = (times - config.start) // window_seconds
    firsts = np.flatnonzero(np.diff(window, prepend=-1))
    return [
        {
            "time": int(config.start + window[first] * window_seconds),
            "samples": stop - first,
            "ctr": float(labels[first:stop].mean()),
            "auc": exact_auc(logits[first:stop], labels[first:stop]),
            "logloss": exact_logloss(logits[first:stop], labels[first:stop]),
        }
        for first, stop in zip(firsts.tolist(), [*firsts[1:].tolist(), rows], strict=True)
    ]
