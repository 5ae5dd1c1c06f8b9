"""Id translation: replaces a batch's ids by rows of the tables. B samples, F keys of fields, V ids of a batch."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch
from cowrec.sparse_opt import (
    Admission,
    EmbeddingAdam,
    IdTableConfig,
    IdTables,
    RowInitializer,
    id_bucket_rows,
)

from ..config.sections import seconds
from .run_plan import RunPlan, TableSpec


class IdTranslation:
    """Translates the ids of a run's batches; ids of tables of kind "rows" are rows already.

    Ids get rows and expire in :meth:`training` only, once for each batch and in the order of the steps. With id tables
    (kind "collisionless") a batch must be translated between the step before and its own step:

    * A checkpoint holds the tables after its step. If the next batch had been translated, a resumed run would count
      that batch twice.
    * An expired id that comes back keeps its row. The batch before may still look up the row, which must not change.
    * The optimizer's state of a new row begins at the current step. A row initialized early would take part in the
      dense update or the decay of the step before.

    Runs with id tables therefore use a pipeline that does not read ahead; see :func:`pipeline_of`. Hashed ids and
    :meth:`lookup` have no state and may be translated ahead.

    All processes make the same calls together. ``adam`` is None where FBGEMM's fused optimizer trains the tables.

    ``tables`` are the id tables, None without collisionless tables. ``translates`` tells whether the ids of some table
    are not rows already; otherwise batches stay as they are.
    """

    def __init__(self, plan: RunPlan, model: nn.Module, adam: EmbeddingAdam | None) -> None:
        config, schema, process, specs = plan.config, plan.schema, plan.process, plan.tables
        self._fields = [field.vocabulary for field in schema.sparse for _ in field.keys]
        self._buckets = {
            field.name: (spec.ids.capacity, index)
            for spec in specs
            for index, field in enumerate(spec.fields)
            if spec.ids.kind == "hash"
        }
        self.translates = any(spec.ids.kind != "rows" for spec in specs)
        self._row_init: RowInitializer | None = None
        self.tables: IdTables | None = None
        configs = {spec.name: id_table(spec) for spec in specs if spec.ids.kind == "collisionless"}
        if configs:
            group: Any = dist.new_group(backend="gloo", timeout=process.timeout) if process.world_size > 1 else None
            self.tables = IdTables(configs, self._fields, seed=config.train.seed, group=group)
            self._row_init = RowInitializer(
                model,
                adam,
                list(configs),
                columns=[spec.embedding_dim for spec in specs if spec.name in configs],
                std=config.optimizer.embedding_init_std,
                seed=config.train.seed,
            )

    def training(self, batch: Batch, *, in_order: bool = True) -> Batch:
        """Translates a batch that is about to be trained on; new ids get rows, which are initialized in the model.

        ``in_order`` tells whether samples come in the order of their times; see :class:`IdTables`.
        """
        if not self.tables:
            return self.lookup(batch)
        ids, splits = self._flat_ids(batch.sparse)
        rows, new_rows = self.tables.assign(ids, splits, _times(batch, len(self._fields)), in_order=in_order)
        assert self._row_init is not None
        self._row_init.reset(new_rows)
        return _with_rows(batch, rows)

    def lookup(self, batch: Batch) -> Batch:
        """Translates a batch without changing anything; unknown and expired ids become OUT_OF_VOCABULARY."""
        if not self.translates:
            return batch
        ids, splits = self._flat_ids(batch.sparse)
        return _with_rows(batch, self.tables.rows_of(ids, splits) if self.tables else ids)

    def _flat_ids(self, sparse: KeyedJaggedTensor) -> tuple[np.ndarray, np.ndarray]:
        """Flattens ids, [V], hashed ones as rows, and the first of each key, [F + 1]; int64. Waits for the device."""
        splits = np.concatenate([[0], np.cumsum(np.array(sparse.length_per_key(), np.int64))])
        ids = sparse.values().cpu().numpy().astype(np.int64)
        for field, name in enumerate(self._fields):
            if name in self._buckets:
                part = slice(splits[field], splits[field + 1])
                ids[part] = id_bucket_rows(ids[part], *self._buckets[name])
        return ids, splits


def id_table(spec: TableSpec) -> IdTableConfig:
    key, ids = f"id_table ({spec.name})", spec.ids
    counted = {}
    if ids.admission == "count":
        # Far more ids are counted than admitted: 16 bytes of counters for each row.
        counted = {"window": seconds(ids.window, key), "counters": max(1 << 20, 8 * ids.capacity)}
    return IdTableConfig(
        capacity=ids.capacity,
        features=tuple(field.name for field in spec.fields),
        when_full=ids.when_full,
        admission=Admission(ids.admission, ids.threshold, **counted),
        expire_after=seconds(ids.expire_after, key),
    )


def _with_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """Replaces the values of a batch's sparse fields by rows, int64 [V]."""
    sparse = batch.sparse
    translated = KeyedJaggedTensor(
        sparse.keys(),
        torch.from_numpy(rows).to(torch.int32).to(sparse.values().device),
        sparse.weights_or_none(),
        sparse.lengths(),
        sparse.offsets(),
        stride=sparse.stride(),
        length_per_key=sparse.length_per_key(),
    )
    return replace(batch, sparse=translated)


def _times(batch: Batch, fields: int) -> np.ndarray | None:
    """Returns the sample time of each id, int64 [V]; None where the data have none."""
    if batch.time is None:
        return None
    lengths = batch.sparse.lengths().cpu().view(fields, -1)
    time = torch.zeros(lengths.shape[1], dtype=torch.int64)
    time[: len(batch.time)] = batch.time.cpu()  # samples of padding come last and have no ids
    times: Tensor = torch.repeat_interleave(time.repeat(fields), lengths.flatten().long())
    return times.numpy()
