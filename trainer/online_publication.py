"""What an online run publishes, and when: the rows that it has touched every few seconds, the dense weights less often.

n rows, P stored width of a table.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import IdTables

from .assembly import row_ids_of
from .export import TrainedTable, dense_weights
from .learner import Learner
from .online_config import OnlineConfig
from .publication import Publisher
from .publication_blob import Change, TableChange
from .publication_target import open_target
from .tables import TableSpec
from .touched_rows import TouchedRows, current_rows


class OnlinePublication:
    """Hands a learner's changes to a publisher.

    Args:
        url: of the target.
        config: how often.
        specs: the tables.
        fields: of the batches, in their order.
        learner: what is published.
        say: told of publications that fail, once for each stretch of failures.

    Raises:
        ValueError: a target that does not work.
    """

    def __init__(
        self,
        url: str,
        config: OnlineConfig,
        specs: Sequence[TableSpec],
        fields: Sequence[str],
        learner: Learner,
        say: Callable[[str], None],
    ):
        self._config, self._specs, self._learner, self._say = config, list(specs), learner, say
        ids = row_ids_of(learner.model)
        self._tables = ids.tables if ids else None
        self._touched = TouchedRows(specs, fields)
        self._published = {spec.name: PublishedIds(spec) for spec in specs if spec.ids.kind == "collisionless"}
        self._rows_due = self._dense_due = 0.0
        self._failing = False
        self._publisher = Publisher(open_target(url, publishing=True))

    def mark(self, rows: KeyedJaggedTensor) -> None:
        """Takes note of the rows of a batch that was trained on, and of those that were freed for it."""
        self._touched.mark(rows)
        if self._tables:
            for name, freed in self._tables.freed().items():
                self._published[name].free(freed)

    def publish_if_due(self, step: int, sample_time: int, *, now: bool = False) -> None:
        """Hands over what has changed, where it is time; ``step`` and ``sample_time`` are those of the last batch."""
        moment = time.monotonic()
        if moment < self._rows_due and not now:
            return
        self._tell_failures()
        with_dense = now or moment >= self._dense_due
        self._rows_due = moment + self._config.publish_seconds
        if with_dense:
            self._dense_due = moment + self._config.dense_seconds
        dense = self._dense() if with_dense or self._publisher.wants_full else {}
        touched = self._touched.take()
        change = Change(step, sample_time, {each.name: self._changed(each, touched[each.name]) for each in self._specs}, dense)
        everything = None
        if self._publisher.wants_full:
            everything = Change(step, sample_time, {each.name: self._whole(each) for each in self._specs}, dense)
        self._publisher.publish(change, everything)

    def close(self) -> None:
        """Waits a moment for what is due."""
        self._publisher.close()
        self._tell_failures()

    def _tell_failures(self) -> None:
        error = self._publisher.counters()["error"]
        if error and not self._failing:
            self._say(f"warning: publishing fails ({error}); what is due stays due")
        self._failing = bool(error)

    def _dense(self) -> dict[str, NDArray[np.float32]]:
        return {name: value.clone().numpy() for name, value in dense_weights(self._learner.model).items()}

    def _changed(self, spec: TableSpec, rows: torch.Tensor) -> TableChange:
        """The touched rows of a table, and the ids that have none any more."""
        if spec.name not in self._published:
            return TableChange(rows.numpy(), self._weights(spec, rows))
        assert self._tables is not None
        ids, features, lives = ids_of_rows(self._tables, spec.name, rows.numpy())
        rows, ids, features = rows[torch.from_numpy(lives)], ids[lives], features[lives]
        gone, gone_features = self._published[spec.name].take(rows.numpy(), ids, features)
        shared = len(spec.fields) > 1
        return TableChange(
            ids, self._weights(spec, rows), gone, features if shared else None, gone_features if shared else None
        )

    def _whole(self, spec: TableSpec) -> TableChange:
        table = trained_table(spec, self._learner, self._tables)
        ids = np.arange(spec.num_embeddings) if table.ids is None else table.ids.numpy()
        feature = None if table.feature is None else table.feature.numpy()
        no_features = None if feature is None else np.empty(0, np.int64)
        return TableChange(ids, table.rows.numpy(), feature=feature, gone_feature=no_features)

    def _weights(self, spec: TableSpec, rows: torch.Tensor) -> NDArray[np.float32]:
        return current_rows(self._learner.model, self._learner.adam, spec.name, rows).numpy()


class PublishedIds:
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
        gone = [np.concatenate(each) for each in zip(*self._gone, strict=True)] if self._gone else [np.empty(0, int)] * 2
        self._gone = []
        # An id may have come back since, on another row.
        back = np.isin(_keys(*gone), _keys(ids, features))
        return gone[0][~back], gone[1][~back]


def _keys(ids: NDArray[np.int64], features: NDArray[np.int64]) -> NDArray[Any]:
    keys = np.empty(len(ids), [("feature", np.int64), ("id", np.int64)])
    keys["feature"], keys["id"] = features, ids
    return keys


def trained_table(spec: TableSpec, learner: Learner, tables: IdTables | None) -> TrainedTable:
    """All of a table that ids have, in one process."""
    features = tuple(field.name for field in spec.fields)
    if spec.ids.kind != "collisionless":
        rows = torch.arange(spec.num_embeddings)
        return TrainedTable(spec.name, features, current_rows(learner.model, learner.adam, spec.name, rows))
    assert tables is not None
    entries = tables.entries(spec.name)
    reserved = np.arange(2)
    rows = torch.from_numpy(np.concatenate([reserved, entries.row]))
    ids = torch.from_numpy(np.concatenate([reserved, entries.id]))
    feature = torch.from_numpy(np.concatenate([np.zeros(2, np.int64), entries.feature]).astype(np.int64))
    weights = current_rows(learner.model, learner.adam, spec.name, rows)
    return TrainedTable(spec.name, features, weights, ids, feature if len(features) > 1 else None)


def ids_of_rows(
    tables: IdTables, table: str, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Id and feature of each row, int64 [n], and whether it has one; the reserved rows are their own ids."""
    ids, features, lives = tables.ids_of(table, rows)
    reserved = rows < 2
    return np.where(reserved, rows, ids), np.where(reserved, 0, features), lives | reserved
