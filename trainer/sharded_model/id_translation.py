"""From a batch's ids to rows of the embedding tables, where the data's ids are not rows already.

B samples, F fields, V ids of a batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import RESERVED_ROWS, Batch, Schema
from cowrec.sparse_opt import Admission, IdTableConfig, IdTables, RowInitializer, hashed_ids
from cowrec.trainer.config.id_table import seconds
from cowrec.trainer.runtime.processes import Process

from .tables import TableSpec


class RowIds:
    """Rows of the ids of a run's tables; ids of "rows" tables stay as they are.

    Ids are admitted, given rows and expired in training alone. All processes call together.

    Args:
        schema: of the data.
        specs: its tables.
        process: this process.
        seed: of chance in admission.

    Attributes:
        tables: the collisionless ones, None where there are none.
        births: makes the rows of new ids in the model; set before training.
        latest: what the latest call returned.

    Raises:
        ValueError: an expiry or window by sample time where the data have none.
    """

    def __init__(self, schema: Schema, specs: Sequence[TableSpec], process: Process, seed: int):
        self.births: RowInitializer | None = None
        self.latest: KeyedJaggedTensor
        self._fields = [field.name for field in schema.sparse]
        self._buckets = {
            field.name: (spec.ids.capacity, place)
            for spec in specs
            for place, field in enumerate(spec.fields)
            if spec.ids.kind == "hash"
        }
        self._collisionless = {spec.name: id_table(spec) for spec in specs if spec.ids.kind == "collisionless"}
        self.tables: IdTables | None = None
        if self._collisionless:
            _require_times(schema, self._collisionless)
            group = dist.new_group(backend="gloo", timeout=process.timeout) if process.world_size > 1 else None
            self.tables = IdTables(self._collisionless, self._fields, seed=seed, group=group)

    @property
    def table_names(self) -> list[str]:
        """Of the collisionless tables, as :attr:`NewRows.table` numbers them."""
        return list(self._collisionless)

    def __call__(self, batch: Batch, *, training: bool) -> KeyedJaggedTensor:
        """The batch's ids with rows in their place. Waits for the device where the batch is on one."""
        sparse = batch.sparse
        counts = np.array(sparse.length_per_key(), np.int64)
        splits = np.concatenate([[0], np.cumsum(counts)])
        ids = sparse.values().cpu().numpy().astype(np.int64)
        for place, name in enumerate(self._fields):
            if name in self._buckets:
                part = slice(splits[place], splits[place + 1])
                ids[part] = bucket_rows(ids[part], *self._buckets[name])
        if self.tables and training:
            assert self.births is not None
            ids, births = self.tables.assign(ids, splits, _times(batch, len(counts)))
            self.births.reset(births)
        elif self.tables:
            ids = self.tables.rows_of(ids, splits)
        rows = torch.from_numpy(ids).to(torch.int32).to(sparse.values().device)
        self.latest = KeyedJaggedTensor(
            sparse.keys(),
            rows,
            sparse.weights_or_none(),
            sparse.lengths(),
            sparse.offsets(),
            stride=sparse.stride(),
            length_per_key=sparse.length_per_key(),
        )
        return self.latest


def row_ids(schema: Schema, specs: Sequence[TableSpec], process: Process, seed: int) -> RowIds | None:
    """The run's, None where all its tables take the data's row numbers."""
    return RowIds(schema, specs, process, seed) if any(spec.ids.kind != "rows" for spec in specs) else None


def id_table(spec: TableSpec) -> IdTableConfig:
    """The id table of a collisionless embedding table."""
    key, ids = f"id_table ({spec.name})", spec.ids
    counted = {}
    if ids.admission == "count":
        counted = {"window": seconds(ids.window, key), "counters": ids.counters}
    return IdTableConfig(
        capacity=ids.capacity,
        features=tuple(field.name for field in spec.fields),
        when_full=ids.when_full,
        admission=Admission(ids.admission, ids.threshold, **counted),
        expire_after=seconds(ids.expire_after, key),
    )


def bucket_rows(ids: np.ndarray, buckets: int, place: int) -> np.ndarray:
    """Rows of ids under hashing, int64 [n] of int64 [n]; the reserved ids keep theirs.

    ``place`` is the field's among those of its table, in which equal ids of two fields fall differently.
    """
    rows = RESERVED_ROWS + (hashed_ids(ids, place) % np.uint64(buckets)).astype(np.int64)
    return np.where((ids >= 0) & (ids < RESERVED_ROWS), ids, rows)


def _times(batch: Batch, fields: int) -> np.ndarray | None:
    """Sample time of each id, int64 [V]; None where the data have none."""
    if batch.time is None:
        return None
    lengths = batch.sparse.lengths().cpu().view(fields, -1)
    time = torch.zeros(lengths.shape[1], dtype=torch.int64)
    time[: len(batch.time)] = batch.time.cpu()  # rows of padding behind have no ids
    times: Tensor = torch.repeat_interleave(time.repeat(fields), lengths.flatten().long())
    return times.numpy()


def _require_times(schema: Schema, tables: dict[str, IdTableConfig]) -> None:
    for name, table in tables.items():
        if (table.expire_after or table.admission.window) and not schema.timed:
            key = "expire_after" if table.expire_after else "window"
            raise ValueError(
                f"id_table.{key} of table {name!r} goes by the time of samples, which the data do not have; prepare"
                f" them with a time column, or leave {key} out"
            )
