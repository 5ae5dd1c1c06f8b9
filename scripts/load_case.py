"""Model and traffic of a load test: an export of a given size, requests, and a publisher that keeps changing it.

`on_other_cores` and `wait_until` are for its server.

Ids are those of drifting samples; weights are random, since they cost the same as trained ones.
"""

import json
import multiprocessing
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.dataset.schema import RESERVED_ROWS
from cowrec.data_pipeline.encoding.encoder import raw_ids
from cowrec.data_pipeline.synthetic.drifting import (
    DriftConfig,
    DriftingModel,
    drifting_tables,
    id_text,
    synthesize_drifting,
)
from cowrec.models import ModelConfig, build_network, physical_dim
from cowrec.trainer.export.export import TrainedTable, write_export
from cowrec.trainer.publishing.blob import Change, TableChange
from cowrec.trainer.publishing.publisher import PublicationConfig, Publisher
from cowrec.trainer.publishing.target import open_target

CONFIG = DriftConfig(rows=4_000_000, days=60.0)
MODEL = ModelConfig(name="deepfm", embedding_dim=10, hidden=(400, 400, 400))


def make_export(config: DriftConfig, folder: Path) -> int:
    """Exports a model with the ids of `folder/data` to `folder/export`; returns the number of ids with a row."""
    synthesize_drifting(folder / "data", config, test_rows=1)
    schema = Schema.load(folder / "data")
    draw = DriftingModel.of(config).draw(0, config.rows)
    tables = [_table(field.name, ids) for field, ids in zip(schema.sparse, draw.ids, strict=True)]
    network = build_network(MODEL, [field.name for field in schema.sparse], len(schema.dense))
    dense = {name: each.detach() for name, each in network.state_dict().items()}
    write_export(
        folder / "export", MODEL, schema, folder / "data" / "vocabulary", dense, tables, step=0, sample_time=_now()
    )
    return sum(len(table.rows) for table in tables)


def bodies(config: DriftConfig, count: int, samples: int) -> list[bytes]:
    """Returns JSON bodies of requests for the samples after those of the export: one sample, or a list of several."""
    wanted = range(config.rows, config.rows + count * samples)
    rows: list[dict[str, object]] = []
    for table in drifting_tables(config, wanted.start, len(wanted)):
        rows += table.drop_columns(["label", "time", "sample_id"]).to_pylist()
    if samples == 1:
        return [json.dumps(row).encode() for row in rows]
    return [json.dumps(rows[start : start + samples]).encode() for start in range(0, len(rows), samples)]


@contextmanager
def publishing(config: DriftConfig, folder: Path, rows: int, seconds: float) -> Iterator[None]:
    """Runs a process that publishes the export and then deltas, as in training, to `folder/published`.

    Args:
        config: settings of the samples.
        folder: folder of `make_export`.
        rows: maximum rows per delta.
        seconds: interval between deltas.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    process = context.Process(target=_publish, args=(config, folder, rows, seconds, stop))
    process.start()
    try:
        yield
    finally:
        stop.set()
        process.join()


def wait_until(port: int, condition: Callable[[Any], bool], seconds: float = 120.0) -> None:
    """Waits until a server's health satisfies the condition."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            if condition(json.load(answer)):
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"the server on port {port} was not ready within {seconds:g} s")
        time.sleep(0.1)


@contextmanager
def on_other_cores(taken: int) -> Iterator[set[int]]:
    """Yields the first ``taken`` cores, for a server, while this process runs on the others.

    All are shared if there are not more.
    """
    cores = sorted(os.sched_getaffinity(0))
    others = cores[taken:] or cores
    os.sched_setaffinity(0, others)
    try:
        yield set(cores[:taken]) if others != cores else set(cores)
    finally:
        os.sched_setaffinity(0, cores)


def _table(name: str, ids: np.ndarray) -> TrainedTable:
    raw = np.r_[range(RESERVED_ROWS), raw_ids(id_text(np.unique(ids)))]
    rows = torch.randn(len(raw), physical_dim(MODEL.embedding_dim)) * 0.01
    return TrainedTable(name, (name,), rows, torch.from_numpy(raw))


def _now() -> int:
    return int(time.time())


def _publish(config: DriftConfig, folder: Path, rows: int, seconds: float, stop: Event) -> None:
    model, rng = DriftingModel.of(config), np.random.default_rng(0)
    each, first = rows // config.fields, config.rows
    last_ids = [np.empty(0, np.int64)] * config.fields
    never = PublicationConfig(compact_after=1 << 40, compact_bytes=1 << 60)
    with Publisher(open_target(str(folder / "published"), publishing=True), never) as publisher:
        export = _exported(folder / "export")
        publisher.publish(export, export)
        del export
        publisher.finish(60)
        due = time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            draw, tables = model.draw(first, 4 * each), {}
            first += 4 * each
            for field, ids in enumerate(draw.ids):
                written = raw_ids(id_text(np.unique(ids)[:each]))
                weights = rng.standard_normal((len(written), physical_dim(MODEL.embedding_dim)), np.float32)
                # Ids of the last delta that are absent from this one are deleted.
                deleted = np.setdiff1d(last_ids[field], written)
                tables[f"C{field + 1}"] = TableChange(written, weights * np.float32(0.01), deleted)
                last_ids[field] = written
            publisher.publish(Change(first, _now(), tables))
            due += seconds


def _exported(export: Path) -> Change:
    stored = {file.stem: load_file(file) for file in sorted((export / "tables").iterdir())}
    tables = {name: TableChange(each["ids"].numpy(), each["rows"].numpy()) for name, each in stored.items()}
    dense = {name: each.numpy() for name, each in load_file(export / "dense.safetensors").items()}
    return Change(0, _now(), tables, dense)
