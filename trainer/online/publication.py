"""What an online run publishes, and when: the rows that it has touched every few seconds, the dense weights less often.

n rows, m ids that are gone, P stored width of a table.
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
from cowrec.trainer.publishing.dirty_rows import TouchedRows, current_rows
from cowrec.trainer.publishing.publisher import Publisher
from cowrec.trainer.publishing.target import open_target
from cowrec.trainer.runs.run_dir import VOCABULARY
from cowrec.trainer.sharded_model.tables import TableSpec, table_specs
from cowrec.trainer.training.state import TrainState

BASE = "base"
"""Folder of a run: the export that a reader of its publications starts from."""


class OnlinePublication:
    """Hands a state's changes to a publisher, and writes the export that its readers start from.

    Args:
        url: of the target.
        config: of the run.
        schema: of the data.
        state: what is published.
        run_dir: gets the export, unless it has one.
        say: told of publications that fail, once for each stretch of failures.

    Raises:
        ValueError: a target that does not work.
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
        self._specs = table_specs(schema, config.id_table)
        self._touched = TouchedRows(self._specs, [field.name for field in schema.sparse])
        self._known = {spec.name: KnownIds(spec) for spec in self._specs if spec.ids.kind == "collisionless"}
        self._rows_due = self._dense_due = 0.0
        self._failing = False
        self._publisher = Publisher(open_target(url, publishing=True))
        if not (run_dir / BASE).exists():
            dense, tables = dense_weights(state.model), (self._table(spec) for spec in self._specs)
            write_export(
                run_dir / BASE, config.model, schema, Path(config.data.dir) / VOCABULARY, dense, tables, step=0
            )

    @property
    def is_due(self) -> bool:
        """It is time for the next publication."""
        return time.monotonic() >= self._rows_due

    def mark(self, rows: KeyedJaggedTensor) -> None:
        """Takes note of the rows of a batch that was trained on, and of those that were freed for it."""
        self._touched.mark(rows)
        if self._state.id_tables:
            for name, freed in self._state.id_tables.freed().items():
                self._known[name].free(freed)

    def publish(self, step: int, sample_time: int | None, *, with_dense: bool = False) -> None:
        """Hands over what has changed; ``step`` and ``sample_time`` are those of the last batch, if there was one."""
        self._tell_failures()
        now, full = time.monotonic(), self._publisher.wants_full
        with_dense = with_dense or full or now >= self._dense_due
        self._rows_due = now + self._config.publish_seconds
        dense: dict[str, Any] = {}
        if with_dense:
            self._dense_due = now + self._config.dense_seconds
            dense = {name: value.clone().numpy() for name, value in dense_weights(self._state.model).items()}
        touched = self._touched.take()
        changed = {spec.name: self._changed(spec, touched[spec.name]) for spec in self._specs}
        everything = None
        if full:
            whole = {spec.name: _as_change(self._table(spec)) for spec in self._specs}
            everything = Change(step, sample_time, whole, dense)
        self._publisher.publish(Change(step, sample_time, changed, dense), everything)

    def close(self) -> None:
        """Waits a moment for what is due."""
        self._publisher.close()
        self._tell_failures()

    def _tell_failures(self) -> None:
        error = self._publisher.counters()["error"]
        if error and not self._failing:
            self._say(f"warning: publishing fails ({error}); what is due stays due")
        self._failing = bool(error)

    def _changed(self, spec: TableSpec, rows: Tensor) -> TableChange:
        """The touched rows of a table, and the ids that have none any more."""
        if spec.name not in self._known:
            return TableChange(rows.numpy(), self._weights(spec, rows).numpy())
        tables = self._state.id_tables
        assert tables is not None
        ids, features, lives = tables.ids_of(spec.name, rows.numpy())
        reserved = rows.numpy() < RESERVED_ROWS
        ids, features = np.where(reserved, rows.numpy(), ids), np.where(reserved, 0, features)
        kept = lives | reserved
        rows, ids, features = rows[torch.from_numpy(kept)], ids[kept], features[kept]
        gone, gone_features = self._known[spec.name].take(rows.numpy(), ids, features)
        of_features = (features, gone_features) if len(spec.fields) > 1 else (None, None)
        return TableChange(ids, self._weights(spec, rows).numpy(), gone, *of_features)

    def _table(self, spec: TableSpec) -> TrainedTable:
        return trained_table(spec, self._state.id_tables, partial(self._weights, spec))

    def _weights(self, spec: TableSpec, rows: Tensor) -> Tensor:
        return current_rows(self._state.model, self._state.adam, spec.name, rows)


class KnownIds:
    """The id that readers know for each row of a collisionless table, and those of them that are gone.

    Args:
        spec: the table.
    """

    def __init__(self, spec: TableSpec):
        self._ids = np.zeros(spec.num_embeddings, np.int64)  # 0: none
        self._features = np.zeros(spec.num_embeddings, np.uint16)
        self._gone: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []

    def free(self, rows: NDArray[np.int64]) -> None:
        """Takes note of rows whose ids are gone."""
        known = rows[self._ids[rows] != 0]
        if len(known):
            self._gone.append((self._ids[known], self._features[known].astype(np.int64)))
            self._ids[known] = 0

    def take(
        self, rows: NDArray[np.int64], ids: NDArray[np.int64], features: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Readers will know these rows by these ids; returns the ids that are gone and their features, [m]."""
        self.free(rows[(self._ids[rows] != ids) | (self._features[rows] != features)])
        self._ids[rows], self._features[rows] = ids, features
        gone = (
            [np.concatenate(each) for each in zip(*self._gone, strict=True)] if self._gone else [np.empty(0, int)] * 2
        )
        self._gone = []
        # An id may have come back since, on another row.
        back = np.isin(_keys(*gone), _keys(ids, features))
        return gone[0][~back], gone[1][~back]


def _keys(ids: NDArray[np.int64], features: NDArray[np.int64]) -> NDArray[Any]:
    keys = np.empty(len(ids), [("feature", np.int64), ("id", np.int64)])
    keys["feature"], keys["id"] = features, ids
    return keys


def _as_change(table: TrainedTable) -> TableChange:
    """All rows of a table."""
    ids = torch.arange(len(table.rows)) if table.ids is None else table.ids
    of_features = (None, None) if table.feature is None else (table.feature.numpy(), np.empty(0, np.int64))
    return TableChange(ids.numpy(), table.rows.numpy(), np.empty(0, np.int64), *of_features)
