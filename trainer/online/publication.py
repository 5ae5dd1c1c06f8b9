"""Publication of an online run: rows that changed every few seconds, the dense weights less often.

What changed is brought together on the first process between two steps, which then writes it while training continues.
Sizes: n rows, m deleted ids, P stored width of a table.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from enum import Flag
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import RESERVED_ROWS

from ..export.export import TrainedTable, dense_weights, rows_and_ids, trained_table, write_export
from ..export.manifest import TableManifest, fingerprint
from ..publishing.blob import Change, TableChange, row_keys
from ..publishing.publisher import Publisher
from ..publishing.target import open_target
from ..runs.run_dir import VOCABULARY
from ..runtime.processes import CHUNK, Peers, Process, from_first, on_first
from ..sharded_model.build import local_shards, tables_of
from ..sharded_model.run_plan import TableSpec
from ..training.state import TrainState

BASE = "base"
"""Folder in a run with the export that readers of its publications start from."""


class Due(Flag):
    """What is to be published."""

    NOTHING = 0
    ROWS = 1
    DENSE = 2
    EVERYTHING = 4


class OnlinePublication:
    """Publishes the changes of a training state and writes the export that readers start from.

    All processes call each method together, unless it says otherwise. The first one writes. ``run_dir`` receives the
    export, unless it has one.

    Raises ValueError: the target does not work; OSError: the export cannot be written.
    """

    def __init__(self, url: str, state: TrainState, run_dir: Path) -> None:
        config, schema, process = state.plan.config, state.plan.schema, state.plan.process
        self._config, self._state, self._specs = config.online, state, state.plan.tables
        self._dirty = DirtyRows(self._specs, schema.keys)
        self._known = {spec.name: KnownIds(spec) for spec in self._specs if spec.ids.kind == "collisionless"}
        self._peers = Peers(process)
        self._rows_due = self._dense_due = 0.0
        self._step = self._dense_step = -1
        """Steps after which rows, and the network, were published last."""
        self._publisher: Publisher | None = None

        def open_publisher() -> None:
            tables = {
                spec.name: TableManifest(
                    tuple(field.name for field in spec.fields),
                    spec.num_embeddings,
                    spec.ids.kind == "collisionless",
                    max_error=0.0,
                )
                for spec in self._specs
            }
            of_data = fingerprint(Path(config.data.dir), config.model, tables)
            target = open_target(url, publishing=True)
            self._publisher = Publisher(target, of_data, keep_full=config.online.keep_full_versions)

        on_first(process, open_publisher)
        if not from_first(process, (run_dir / BASE).exists):
            self._export(run_dir / BASE, process)

    def _export(self, folder: Path, process: Process) -> None:
        plan, dense = self._state.plan, dense_weights(self._state.model)
        tables = (self._complete(spec) for spec in self._specs)

        def write() -> None:
            vocabulary = Path(plan.config.data.dir) / VOCABULARY
            try:
                write_export(folder, plan.config.model, plan.schema, vocabulary, dense, tables, step=0)
            finally:
                deque(tables, 0)  # the other processes send all tables, also if writing fails

        if not process.is_first:
            deque(tables, 0)
        on_first(process, write)

    def due(self, *, last: bool = False) -> Due:
        """What it is time to publish; everything at the end of the stream. On the first process."""
        assert self._publisher is not None
        now, full = time.monotonic(), self._publisher.wants_full
        if not last and (now < self._rows_due or self._publisher.is_behind):
            return Due.NOTHING
        due = Due.ROWS | Due.EVERYTHING if full else Due.ROWS
        return due | Due.DENSE if last or full or now >= self._dense_due else due

    def mark(self, rows: KeyedJaggedTensor) -> None:
        """Marks the rows of a translated batch that was trained on, and the rows that its translation freed."""
        self._dirty.mark(rows)
        if self._state.id_tables:
            for name, freed in self._state.id_tables.freed().items():
                self._known[name].free(freed)

    def publish(self, due: Due, step: int, sample_time: int | None) -> None:
        """Publishes what is due, if there are changes since the last call that did.

        ``step`` and ``sample_time`` are those of the last batch, if there was one; the time on the first process.
        """
        now, with_dense, full = time.monotonic(), Due.DENSE in due, Due.EVERYTHING in due
        self._rows_due = now + self._config.publish_seconds
        if not full and step == (self._dense_step if with_dense else self._step):
            return
        self._step = step
        dense: dict[str, Any] = {}
        if with_dense:
            self._dense_due, self._dense_step = now + self._config.dense_seconds, step
            dense = {name: value.clone().numpy() for name, value in dense_weights(self._state.model).items()}
        dirty = self._dirty.take(self._peers)
        ids = {name: self._ids(name, dirty[name]) for name in self._known}
        rows = self._rows(dirty)
        everything = {spec.name: self._complete(spec) for spec in self._specs} if full else None
        if self._publisher:
            change = partial(Change, step, sample_time, dense=dense)
            of = {spec.name: _table_change(spec, dirty[spec.name], rows[spec.name], ids) for spec in self._specs}
            whole = {name: _as_change(table) for name, table in everything.items()} if everything else None
            self._publisher.publish(change(tables=of), change(tables=whole) if whole else None)

    def close(self) -> None:
        if self._publisher:
            self._publisher.close()

    def readings(self) -> dict[str, float]:
        """Failures, and seconds since a version was last written, or since the start; on the first process."""
        assert self._publisher is not None
        counters = self._publisher.counters()
        return {"publication_failures": counters["failures"], "seconds_since_publication": counters["seconds"]}

    def _ids(self, name: str, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Dirty rows of a table that have ids, with their ids and the numbers of their fields, and what was deleted.

        Returns int64 [3, n], the rows ascending, and ids and fields, int64 [2, m]; on the first process those of all.
        """
        assert self._state.id_tables is not None
        expired = self._state.id_tables.expired_rows(name)  # an export leaves them out too
        self._known[name].free(expired)
        ids, features, has_id = self._state.id_tables.ids_of(name, rows.numpy())
        has_id &= ~np.isin(rows.numpy(), expired)
        reserved = (rows.numpy() < RESERVED_ROWS) & self._peers.is_first
        ids, features = np.where(reserved, rows.numpy(), ids), np.where(reserved, 0, features)
        kept = has_id | reserved
        own = (rows.numpy()[kept], ids[kept], features[kept])
        deleted = self._known[name].update(*own)
        columns, gone = (
            self._peers.columns_on_first(torch.from_numpy(np.stack(columns))) for columns in (own, deleted)
        )
        return columns[:, columns[0].argsort()], gone

    def _complete(self, spec: TableSpec) -> TrainedTable:
        """All rows of a table that belong to ids; on the other processes the result has no meaning."""
        if spec.name in self._known:
            assert self._state.id_tables is not None
            own = rows_and_ids(spec, self._state.id_tables, reserved=self._peers.is_first)
            self._known[spec.name].set(*own.numpy())
            chunks = self._peers.all_columns(own)
        else:
            numbers = torch.arange(spec.num_embeddings)[None]
            chunks = iter(numbers.split(CHUNK if self._peers.count > 1 else spec.num_embeddings, 1))
        rows, columns = [], []
        for chunk in chunks:
            rows.append(self._rows({spec.name: chunk[0]})[spec.name])
            columns += [chunk] * (self._peers.is_first and spec.name in self._known)
        joined = rows[0] if len(rows) == 1 else torch.cat(rows)
        return trained_table(spec, joined, torch.cat(columns, 1) if columns else None)

    def _rows(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies rows of tables, after the updates of absent rows that are still to be applied to them.

        ``wanted`` has distinct rows, int64 [n], the same on all processes. The result is float32 [n, P] of each table
        on the first process, [0, P] on the others.
        """
        adam, model, found = self._state.adam, self._state.model, dict[str, Tensor]()
        if adam:
            for name, rows in wanted.items():
                adam.catch_up(name, rows)
        with adam.as_stored() if adam else nullcontext():
            tables = tables_of(model)
        for name, rows in wanted.items():
            own = torch.zeros(len(rows), tables[name].size(1))
            if isinstance(tables[name], ShardedTensor) or self._peers.is_first:
                for shard, (row, column) in local_shards(tables[name]):
                    held = ((rows >= row) & (rows < row + len(shard))).nonzero().flatten()
                    for index in held.split(CHUNK):  # a second copy of a complete table would not fit everywhere
                        values = shard[(rows[index] - row).to(shard.device)]
                        own[index, column : column + shard.shape[1]] = values.float().cpu()
            found[name] = self._peers.joined(own)
        return found


def _table_change(
    spec: TableSpec, dirty: Tensor, rows: Tensor, ids: Mapping[str, tuple[Tensor, Tensor]]
) -> TableChange:
    """Change of a table: its dirty rows, with weights, float32 [n, P], and with ids if it is collisionless."""
    if spec.name not in ids:
        return TableChange(dirty.numpy(), rows.numpy())
    columns, deleted = (column.numpy() for column in ids[spec.name])
    if columns.shape[1] < len(dirty):
        rows = rows[torch.searchsorted(dirty, torch.from_numpy(columns[0]).contiguous())]
    features = (columns[2], deleted[1]) if len(spec.fields) > 1 else (None, None)
    return TableChange(columns[1], rows.numpy(), deleted[0], *features)


def _as_change(table: TrainedTable) -> TableChange:
    """Change that consists of all rows of a table."""
    ids = torch.arange(len(table.rows)) if table.ids is None else table.ids
    feature_columns = (None, None) if table.feature is None else (table.feature.numpy(), np.empty(0, np.int64))
    return TableChange(ids.numpy(), table.rows.numpy(), np.empty(0, np.int64), *feature_columns)


class KnownIds:
    """Ids by which readers know the rows of a collisionless table, and those of these ids that were deleted.

    Each of several processes keeps those of the rows whose ids it holds.
    """

    def __init__(self, spec: TableSpec):
        self._ids = np.zeros(spec.num_embeddings, np.int64)  # 0: none
        self._features = np.zeros(spec.num_embeddings, np.uint16)
        self._deleted: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def set(self, rows: NDArray[np.int64], ids: NDArray[np.int64], features: NDArray[np.int64]) -> None:
        """Notes the ids of rows that readers get with a complete model, [n]."""
        self._ids[rows], self._features[rows] = ids, features

    def free(self, rows: NDArray[np.int64]) -> None:
        """Notes rows whose ids were deleted."""
        known = rows[self._ids[rows] != 0]
        if len(known):
            self._deleted.append((self._ids[known], self._features[known].astype(np.int64)))
            self._ids[known] = 0

    def update(
        self, rows: NDArray[np.int64], ids: NDArray[np.int64], features: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sets the ids by which readers will know these rows; returns the deleted ids and their features, [m]."""
        self.free(rows[(self._ids[rows] != ids) | (self._features[rows] != features)])
        self.set(rows, ids, features)
        if not self._deleted:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        deleted = [np.concatenate(arrays) for arrays in zip(*self._deleted, strict=True)]
        self._deleted = []
        # An id may have come back since, in another row.
        back = np.isin(row_keys(*deleted), row_keys(ids, features))
        return deleted[0][~back], deleted[1][~back]


class DirtyRows:
    """One flag per row of all tables, set when a batch of this process uses the row."""

    def __init__(self, specs: Sequence[TableSpec], keys: Sequence[str]):
        self._specs = list(specs)
        first, firsts = 0, dict[str, int]()
        for spec in specs:
            firsts |= dict.fromkeys(spec.keys, first)
            first += spec.num_embeddings
        self._first_of_key = torch.tensor([firsts[key] for key in keys])
        self._dirty = torch.zeros(first, dtype=torch.bool)

    def mark(self, rows: KeyedJaggedTensor) -> None:
        """Marks the rows of a batch. Waits for the device if they are on one."""
        counts = torch.tensor(rows.length_per_key())
        self._dirty[rows.values().cpu() + torch.repeat_interleave(self._first_of_key, counts)] = True

    def take(self, peers: Peers) -> dict[str, Tensor]:
        """Returns the rows of each table that some process has marked, int64 [n], ascending, and clears all flags.

        All processes call together and get the same rows. Reserved rows count as marked, since updates of absent rows
        move them too, and they have no ids that occur.
        """
        found, first = {}, 0
        for chunk in peers.all_columns(self._dirty.nonzero().T):
            self._dirty[chunk[0]] = True
        for spec in self._specs:
            dirty = self._dirty[first : first + spec.num_embeddings]
            dirty[:RESERVED_ROWS] = True
            found[spec.name] = dirty.nonzero().flatten()
            dirty.zero_()
            first += spec.num_embeddings
        return found
