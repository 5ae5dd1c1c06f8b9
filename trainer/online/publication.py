"""Publication of an online run: rows that changed every few seconds, the dense weights less often.

n rows, m deleted ids, P stored width of a table.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import RESERVED_ROWS, Schema
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.export.export import TrainedTable, dense_weights, trained_table, write_export
from cowrec.trainer.publishing.blob import Change, TableChange
from cowrec.trainer.publishing.dirty_rows import DirtyRows, current_rows
from cowrec.trainer.publishing.publisher import Publisher
from cowrec.trainer.publishing.target import open_target
from cowrec.trainer.runs.run_dir import VOCABULARY
from cowrec.trainer.sharded_model.tables import TableSpec, table_specs
from cowrec.trainer.training.state import TrainState

BASE = "base"
"""Folder in a run with the export that readers of its publications start from."""


class OnlinePublication:
    """Publishes the changes of a training state and writes the export that readers start from.

    Args:
        url: of the target.
        config: of the run.
        schema: of the data.
        state: its model is published.
        run_dir: receives the export, unless it has one.
        say: receives a warning when publications begin to fail.

    Raises:
        ValueError: the target does not work.
    """

    def __init__(
        self,
        url: str,
        config: RunConfig,
        schema: Schema,
        state: TrainState,
        run_dir: Path,
        say: Callable[[str], None],
    ):
        self._config, self._state, self._say = config.online, state, say
        self._specs = table_specs(schema, config)
        self._dirty = DirtyRows(self._specs, [field.name for field in schema.sparse])
        self._known = {spec.name: KnownIds(spec) for spec in self._specs if spec.ids.kind == "collisionless"}
        self._rows_due = self._dense_due = 0.0
        self._step = self._dense_step = -1
        """Steps after which rows, and the network, were published last."""
        self._failing = False
        self._version, self._written_at = 0, time.monotonic()
        self._publisher = Publisher(open_target(url, publishing=True))
        if not (run_dir / BASE).exists():
            dense, tables = dense_weights(state.model), (self._table(spec) for spec in self._specs)
            write_export(
                run_dir / BASE, config.model, schema, Path(config.data.dir) / VOCABULARY, dense, tables, step=0
            )

    @property
    def is_due(self) -> bool:
        """True if it is time for the next publication."""
        return time.monotonic() >= self._rows_due

    def mark(self, rows: KeyedJaggedTensor) -> None:
        """Marks the rows of a translated batch that was trained on, and the rows that its translation freed."""
        self._dirty.mark(rows)
        if self._state.id_tables:
            for name, freed in self._state.id_tables.freed().items():
                self._known[name].free(freed)

    def publish(self, step: int, sample_time: int | None, *, with_dense: bool = False) -> None:
        """Publishes all changes, if there are any since the last call that did.

        ``step`` and ``sample_time`` are those of the last batch, if there was one.
        """
        self._note_version()
        now, full = time.monotonic(), self._publisher.wants_full
        with_dense = with_dense or full or now >= self._dense_due
        self._rows_due = now + self._config.publish_seconds
        if not full and step == (self._dense_step if with_dense else self._step):
            return
        self._step = step
        dense: dict[str, Any] = {}
        if with_dense:
            self._dense_due, self._dense_step = now + self._config.dense_seconds, step
            dense = {name: value.clone().numpy() for name, value in dense_weights(self._state.model).items()}
        dirty = self._dirty.take()
        changed = {spec.name: self._changed(spec, dirty[spec.name]) for spec in self._specs}
        everything = None
        if full:
            complete = {spec.name: _as_change(self._table(spec)) for spec in self._specs}
            everything = Change(step, sample_time, complete, dense)
        self._publisher.publish(Change(step, sample_time, changed, dense), everything)

    def close(self) -> None:
        """Waits briefly for pending publications."""
        self._publisher.close()
        self._note_version()

    def readings(self) -> dict[str, float]:
        """Failures, and seconds since a version was last written, as far as :meth:`publish` has noticed."""
        failures = self._publisher.counters()["failures"]
        return {"publication_failures": failures, "seconds_since_publication": time.monotonic() - self._written_at}

    def _note_version(self) -> None:
        counters = self._publisher.counters()
        if counters["version"] != self._version:
            self._version, self._written_at = counters["version"], time.monotonic()
        error = counters["error"]
        if error and not self._failing:
            self._say(f"warning: publishing fails ({error}); changes are kept and published later")
        self._failing = bool(error)

    def _changed(self, spec: TableSpec, rows: Tensor) -> TableChange:
        """Collects the dirty rows of a table and the ids that were deleted from it."""
        if spec.name not in self._known:
            return TableChange(rows.numpy(), self._weights(spec, rows).numpy())
        tables = self._state.id_tables
        assert tables is not None
        ids, features, has_id = tables.ids_of(spec.name, rows.numpy())
        reserved = rows.numpy() < RESERVED_ROWS
        ids, features = np.where(reserved, rows.numpy(), ids), np.where(reserved, 0, features)
        kept = has_id | reserved
        rows, ids, features = rows[torch.from_numpy(kept)], ids[kept], features[kept]
        deleted, deleted_features = self._known[spec.name].update(rows.numpy(), ids, features)
        feature_columns = (features, deleted_features) if len(spec.fields) > 1 else (None, None)
        return TableChange(ids, self._weights(spec, rows).numpy(), deleted, *feature_columns)

    def _table(self, spec: TableSpec) -> TrainedTable:
        return trained_table(spec, self._state.id_tables, partial(self._weights, spec))

    def _weights(self, spec: TableSpec, rows: Tensor) -> Tensor:
        return current_rows(self._state.model, self._state.adam, spec.name, rows)


class KnownIds:
    """Ids by which readers know the rows of a collisionless table, and those of these ids that were deleted.

    Args:
        spec: the table.
    """

    def __init__(self, spec: TableSpec):
        self._ids = np.zeros(spec.num_embeddings, np.int64)  # 0: none
        self._features = np.zeros(spec.num_embeddings, np.uint16)
        self._deleted: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

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
        self._ids[rows], self._features[rows] = ids, features
        deleted = [np.empty(0, int)] * 2
        if self._deleted:
            deleted = [np.concatenate(each) for each in zip(*self._deleted, strict=True)]
        self._deleted = []
        # An id may have come back since, in another row.
        back = np.isin(_keys(*deleted), _keys(ids, features))
        return deleted[0][~back], deleted[1][~back]


def _keys(ids: NDArray[np.int64], features: NDArray[np.int64]) -> NDArray[Any]:
    """Pairs of feature and id, comparable as one value."""
    keys = np.empty(len(ids), [("feature", np.int64), ("id", np.int64)])
    keys["feature"], keys["id"] = features, ids
    return keys


def _as_change(table: TrainedTable) -> TableChange:
    """Change that consists of all rows of a table."""
    ids = torch.arange(len(table.rows)) if table.ids is None else table.ids
    feature_columns = (None, None) if table.feature is None else (table.feature.numpy(), np.empty(0, np.int64))
    return TableChange(ids.numpy(), table.rows.numpy(), np.empty(0, np.int64), *feature_columns)
