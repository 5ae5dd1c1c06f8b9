"""Warm start: initialization from an earlier run of the same network, whose vocabularies may have grown since."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from cowrec.data_pipeline import Schema, SparseField
from cowrec.data_pipeline.dataset.schema import RESERVED_ROWS
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runs.run_dir import CONFIG, VOCABULARY
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.build import dense_tensors
from cowrec.trainer.sharded_model.tables import TableSpec, gathered_table, local_shards, table_specs, tables_of

from .saved_run import run_of, trained_state
from .state import TrainState

logger = logging.getLogger(__name__)


def warm_start(config: RunConfig, schema: Schema, state: TrainState, process: Process) -> None:
    """Copies the weights of an earlier run's newest checkpoint; ids that it did not have keep their initial values.

    Ids are matched by their strings in the vocabularies. Collisionless tables are copied with their ids. Moments and
    schedules start over. Both models are in memory meanwhile. All processes call together.

    Args:
        config: of this run; ``train.warm_start`` is the folder of the earlier run.
        schema: of this run's data.
        state: of this run; changed in place.
        process: this process.

    Raises:
        ValueError: the folder is not a run, the fields or the network differ, or ids cannot be matched.
    """
    source = Path(config.train.warm_start)
    earlier_config, earlier = run_of(source)
    _require_same_fields(source, earlier, schema)
    specs, earlier_specs = table_specs(schema, config), table_specs(earlier, earlier_config)
    _require_same_tables(source, earlier_specs, specs)
    old, _ = trained_state(source, process)
    with torch.no_grad():
        old_dense = dense_tensors(old.model)
        for name, parameter in dense_tensors(state.model).items():
            if name not in old_dense or old_dense[name].shape != parameter.shape:
                raise ValueError(f"train.warm_start = {str(source)!r} is another network: {name} differs")
            parameter.copy_(old_dense[name])
    old_tables, new_tables = tables_of(old.model), tables_of(state.model)
    kept = 0
    for spec, earlier_spec in zip(specs, earlier_specs, strict=True):
        rows = torch.arange(spec.num_embeddings)
        if spec.ids.kind == "rows":
            rows = _earlier_rows(spec.fields[0], earlier_spec.fields[0], source, Path(config.data.dir))
        kept += int((rows >= RESERVED_ROWS).sum())
        _fill(new_tables[spec.name], gathered_table(old_tables[spec.name], process), rows)
    if state.id_tables and old.id_tables:
        state.id_tables.load_state_dict(old.id_tables.state_dict())
    if process.is_first:
        total = sum(spec.num_embeddings - RESERVED_ROWS for spec in specs)
        logger.info(f"warm start from {source}: {kept:,} of {total:,} rows copied")


def _require_same_tables(source: Path, earlier: Sequence[TableSpec], now: Sequence[TableSpec]) -> None:
    """Raises ValueError if ids get their rows in another way, or rows have another width."""
    for old, new in zip(earlier, now, strict=False):
        if old.name == new.name and old.embedding_dim != new.embedding_dim:
            raise ValueError(
                f"train.warm_start = {str(source)!r} has embeddings of width {old.embedding_dim} in table {old.name!r},"
                f" not {new.embedding_dim}; use the widths of {source / CONFIG}"
            )
        by_rows = old.ids.kind == new.ids.kind == "rows"
        names = [[field.name for field in each.fields] for each in (old, new)]
        if (old.name, *names[:1]) != (new.name, *names[1:]) or not (by_rows or old.ids == new.ids):
            raise ValueError(
                f"train.warm_start = {str(source)!r} gives the ids of table {old.name!r} rows in another way; use the"
                f" [id_table] of {source / CONFIG}"
            )


def _require_same_fields(source: Path, earlier: Schema, schema: Schema) -> None:
    for kind in ("dense", "sparse"):
        before, now = ([field.name for field in getattr(each, kind)] for each in (earlier, schema))
        if before != now:
            different = sorted(set(before) ^ set(now)) or now
            raise ValueError(f"train.warm_start = {str(source)!r} has other fields ({', '.join(different)})")


def _earlier_rows(field: SparseField, earlier: SparseField, source: Path, data_dir: Path) -> Tensor:
    """Earlier row of the id of each row of a field's table, int64 [rows]; -1 for new ids."""
    if field.encoding != "vocabulary" or earlier.encoding != "vocabulary":
        if (field.encoding, field.num_embeddings) != (earlier.encoding, earlier.num_embeddings):
            raise ValueError(
                f"train.warm_start = {str(source)!r}: field {field.name!r} had {earlier.num_embeddings} rows by"
                f" {earlier.encoding}, now {field.num_embeddings} by {field.encoding}; only vocabularies may grow"
            )
        return torch.arange(field.num_embeddings)
    file = Path(VOCABULARY) / f"{field.name}.parquet"
    old, new = (
        pq.read_table(folder / file, columns=["value"])["value"].combine_chunks() for folder in (source, data_dir)
    )
    index = pc.fill_null(pc.index_in(new, value_set=old), -1).to_numpy().astype(np.int64)
    rows = np.where(index >= 0, index + RESERVED_ROWS, -1)
    return torch.from_numpy(np.concatenate([np.arange(RESERVED_ROWS), rows]))


def _fill(table: ShardedTensor | Tensor, earlier: Tensor, rows: Tensor) -> None:
    """Copies the known rows of an earlier table into this rank's shards."""
    for shard, (row, column) in local_shards(table):
        wanted = rows[row : row + len(shard)].to(earlier.device)
        known = (wanted >= 0).nonzero().flatten()
        shard[known] = earlier[wanted[known], column : column + shard.shape[1]]
