"""Drifting samples as raw tables with text ids, as logs and streams have them, and as a data set of raw ids."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.data_pipeline.dataset.schema import (
    LABEL,
    TIME,
    TRUE_LOGIT,
    DenseField,
    Schema,
    SparseField,
    library_versions,
)
from cowrec.data_pipeline.dataset.writer import SHARD_ROWS, ShardWriter, new_folder
from cowrec.data_pipeline.encoding.vocabulary import raw_ids
from cowrec.data_pipeline.parallel import ordered_map
from cowrec.data_pipeline.raw.labels import RawLabel
from cowrec.data_pipeline.raw.layouts import Layout, RawField

from .drifting import DAY, DriftConfig, DriftDraw, DriftingModel
from .metrics import best_quality

NAME = "drifting"
SAMPLE_ID = "sample_id"
WINDOWS_FILE = "windows.jsonl"
CHUNK_ROWS = 1 << 16


def synthesize_drifting(
    output: str | os.PathLike[str],
    config: DriftConfig | None = None,
    *,
    test_rows: int = 100_000,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Schema:
    """Writes a data set of drifting samples with raw ids and times: `config.rows` for training, the next for testing.

    `windows.jsonl` in the same folder holds the result of `best_by_window` over both splits.

    Args:
        output: a new or empty folder.
        config: settings of the drifting model.
        test_rows: number of test samples after the training samples; at least 1.
        overwrite: replaces an existing data set.
        progress: called with the number of samples just written.

    Returns:
        The schema; `best` has the quality of the true probabilities on the test split.

    Raises:
        ValueError: `output` is not empty.
        OSError: the disk is full.
    """
    config = config or DriftConfig()
    if test_rows < 1:
        raise ValueError(f"test_rows must be at least 1, got {test_rows}")
    schema = _schema(config)
    with new_folder(output, overwrite=overwrite) as folder:
        splits = {}
        for name, first, rows in (("train", 0, config.rows), ("test", config.rows, test_rows)):
            writer = ShardWriter(folder, name, schema, SHARD_ROWS)
            for table in _tables(config, first, rows, CHUNK_ROWS, true_logits=True):
                writer.write(_with_raw_ids(table, schema))
                if progress is not None:
                    progress(table.num_rows)
            splits[name] = writer.close()
        (best,) = best_by_window(config, config.rows, test_rows, window_seconds=1 << 62)
        windows = best_by_window(config, 0, config.rows + test_rows)
        (folder / WINDOWS_FILE).write_text("".join(json.dumps(_json(line)) + "\n" for line in windows))
        known = not np.isnan(best["auc"])
        names = ("auc", "logloss", "expected_auc", "expected_logloss")
        quality = {each: best[each] for each in names} if known else None
        schema = dataclasses.replace(schema, splits=splits, best=quality)
        schema.save(folder)
    return schema


def drift_config(data_dir: str | os.PathLike[str]) -> DriftConfig:
    """Reads the configuration from a data set of `synthesize_drifting`.

    Raises:
        ValueError: the data set has another origin.
    """
    schema = Schema.load(data_dir)
    if schema.name != NAME:
        raise ValueError(
            f"{data_dir} must be a drifting data set, got {schema.name!r}; create one with cowrec synthesize --days"
        )
    settings = schema.settings["drift"]
    lists = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
    return DriftConfig(**{**settings, **lists})


def drifting_tables(config: DriftConfig, first_row: int, rows: int, chunk_rows: int = CHUNK_ROWS) -> Iterator[pa.Table]:
    """Yields samples [first_row, first_row + rows) as raw tables in time order, `chunk_rows` per table.

    Columns: sample_id (its number), time (Unix seconds), label, I1..IN (float32), C1..CF (text: "core_17", or
    "born_1234" for a short-lived id).
    """
    return _tables(config, first_row, rows, chunk_rows)


def _tables(
    config: DriftConfig, first_row: int, rows: int, chunk_rows: int, *, true_logits: bool = False
) -> Iterator[pa.Table]:
    model = DriftingModel.of(config)
    stop = first_row + rows

    def table(first: int) -> pa.Table:
        draw = model.draw(first, min(chunk_rows, stop - first))
        raw = raw_table(draw, first)
        return raw.append_column(TRUE_LOGIT, pa.array(draw.logits.astype(np.float32))) if true_logits else raw

    return ordered_map(table, range(first_row, stop, chunk_rows))


def raw_table(draw: DriftDraw, first_row: int) -> pa.Table:
    """Converts a draw to raw samples; see `drifting_tables`."""
    columns: dict[str, Any] = {
        SAMPLE_ID: np.arange(first_row, first_row + len(draw.labels)),
        TIME: draw.times,
        LABEL: draw.labels,
    }
    columns |= {f"I{n + 1}": values for n, values in enumerate(draw.dense)}
    columns |= {f"C{f + 1}": id_text(ids) for f, ids in enumerate(draw.ids)}
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def id_text(ids: np.ndarray) -> pa.Array:
    """Converts one field's ids of `DriftDraw.ids`, int64 [R], to text."""
    number = pa.array(np.where(ids < 0, -1 - ids, ids)).cast(pa.string())
    kind = pc.if_else(pa.array(ids < 0), "born", "core")
    return pc.binary_join_element_wise(kind, number, "_")


def best_by_window(config: DriftConfig, first_row: int, rows: int, window_seconds: int = DAY) -> list[dict[str, float]]:
    """Computes the best possible quality in each window of sample time; 17 bytes of memory per sample.

    Returns:
        For each window with samples: its first second (`time`, start + k * window_seconds), `samples`, `ctr`, and the
        `auc` and `logloss` of the true probabilities with their expectations, `expected_auc` and `expected_logloss`.
        The AUC of a window with a single class is NaN.
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
            **best_quality(logits[first:stop], labels[first:stop]),
        }
        for first, stop in zip(firsts.tolist(), [*firsts[1:].tolist(), rows], strict=True)
    ]


def _json(line: dict[str, float]) -> dict[str, float | None]:
    return {name: None if np.isnan(value) else value for name, value in line.items()}


def _schema(config: DriftConfig) -> Schema:
    numbers, ids = [f"I{n + 1}" for n in range(config.num_dense)], [f"C{f + 1}" for f in range(config.fields)]
    fields = [RawField(name, "numeric") for name in numbers] + [RawField(name, "categorical") for name in ids]
    layout = Layout(NAME, ",", "", True, (), (RawLabel(),), tuple(fields), time=TIME)
    settings = {"layout": dataclasses.asdict(layout), "drift": dataclasses.asdict(config)}
    return Schema(
        NAME,
        tuple(DenseField(name, source=name) for name in numbers),
        tuple(SparseField(name, 0, encoding="raw", source=name) for name in ids),
        {},
        timed=True,
        true_logits=True,
        settings=json.loads(json.dumps(settings)),
        versions=library_versions(),
    )


def _with_raw_ids(table: pa.Table, schema: Schema) -> pa.Table:
    for field in schema.sparse:
        index = table.schema.get_field_index(field.name)
        text = table[field.name].combine_chunks()
        table = table.set_column(index, field.name, pa.array(raw_ids(text)))
    return table
