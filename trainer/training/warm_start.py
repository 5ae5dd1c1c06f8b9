"""Warm start: tables and dense weights of an earlier run, in a model of the same network over a grown vocabulary."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

from cowrec.data_pipeline import Schema, SparseField
from cowrec.data_pipeline.dataset.schema import RESERVED_ROWS
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runs.run_dir import CONFIG, VOCABULARY
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.build import dense_parameters, row_ids_of
from cowrec.trainer.sharded_model.tables import TableSpec, table_specs, tables_of, whole_table

from .saved_run import run_of, trained_model


def warm_start(config: RunConfig, run_dir: Path, schema: Schema, model: nn.Module, process: Process) -> None:
    """Takes over the weights of a run's newest checkpoint; ids that it did not know keep their initial values.

    Ids are matched by what they stand for, the strings in the vocabularies; collisionless tables are taken over with
    their ids, as they are. Moments and schedules start anew. The earlier model is in memory meanwhile. All processes
    call together.

    Args:
        config: of this run; ``train.warm_start`` is the folder of the earlier one.
        run_dir: folder of this one, with its vocabularies.
        schema: of this run's data.
        model: this run's, sharded; changed in place.
        process: this process.

    Raises:
        ValueError: a folder that is no run, other fields or another network, or ids that cannot be matched.
    """
    source = Path(config.train.warm_start)
    earlier_config, earlier = run_of(source)
    _require_same_fields(source, earlier, schema)
    specs, earlier_specs = table_specs(schema, config.id_table), table_specs(earlier, earlier_config.id_table)
    _require_same_tables(source, earlier_specs, specs)
    old, _ = trained_model(source, process)
    with torch.no_grad():
        theirs = dense_parameters(old)
        for name, mine in dense_parameters(model).items():
            if name not in theirs or theirs[name].shape != mine.shape:
                raise ValueError(f"train.warm_start = {str(source)!r} is another network: {name} differs")
            mine.copy_(theirs[name])
    old_tables, new_tables = tables_of(old), tables_of(model)
    kept = 0
    for spec, of_earlier in zip(specs, earlier_specs, strict=True):
        rows = torch.arange(spec.num_embeddings)
        if spec.ids.kind == "rows":
            rows = _earlier_rows(spec.fields[0], of_earlier.fields[0], source, run_dir)
        kept += int((rows >= RESERVED_ROWS).sum())
        _fill(new_tables[spec.name], whole_table(old_tables[spec.name], process), rows)
    ids, earlier_ids = row_ids_of(model), row_ids_of(old)
    if ids and ids.tables and earlier_ids and earlier_ids.tables:
        ids.tables.load_state_dict(earlier_ids.tables.state_dict())
    if process.is_first:
        rows_in_all = sum(spec.num_embeddings - RESERVED_ROWS for spec in specs)
        print(f"warm start from {source}: {kept:,} of {rows_in_all:,} rows taken over", file=sys.stderr)


def _require_same_tables(source: Path, earlier: Sequence[TableSpec], now: Sequence[TableSpec]) -> None:
    """Raises ValueError where ids are given rows in another way."""
    for old, new in zip(earlier, now, strict=False):
        by_rows = old.ids.kind == new.ids.kind == "rows"
        names = [[field.name for field in each.fields] for each in (old, new)]
        if (old.name, *names[:1]) != (new.name, *names[1:]) or not (by_rows or old.ids == new.ids):
            raise ValueError(
                f"train.warm_start = {str(source)!r} gives the ids of table {old.name!r} rows in another way; take over"
                f" the [id_table] of {source / CONFIG}"
            )


def _require_same_fields(source: Path, earlier: Schema, schema: Schema) -> None:
    for kind in ("dense", "sparse"):
        before, now = ([field.name for field in getattr(each, kind)] for each in (earlier, schema))
        if before != now:
            different = sorted(set(before) ^ set(now)) or now
            raise ValueError(f"train.warm_start = {str(source)!r} has other fields ({', '.join(different)})")


def _earlier_rows(field: SparseField, earlier: SparseField, source: Path, run_dir: Path) -> Tensor:
    """For each row of a field's table the row that its id had, int64 [rows], -1 for ids that had none."""
    if field.encoding != "vocabulary" or earlier.encoding != "vocabulary":
        if (field.encoding, field.num_embeddings) != (earlier.encoding, earlier.num_embeddings):
            raise ValueError(
                f"train.warm_start = {str(source)!r}: field {field.name!r} had {earlier.num_embeddings} rows by"
                f" {earlier.encoding}, now {field.num_embeddings} by {field.encoding}; only vocabularies may grow"
            )
        return torch.arange(field.num_embeddings)
    file = Path(VOCABULARY) / f"{field.name}.parquet"
    old, new = (
        pq.read_table(folder / file, columns=["value"])["value"].combine_chunks() for folder in (source, run_dir)
    )
    places = pc.fill_null(pc.index_in(new, value_set=old), -1).to_numpy().astype(np.int64)
    rows = np.where(places >= 0, places + RESERVED_ROWS, -1)
    return torch.from_numpy(np.concatenate([np.arange(RESERVED_ROWS), rows]))


def _fill(table: ShardedTensor | Tensor, earlier: Tensor, rows: Tensor) -> None:
    parts = [(table.detach(), [0, 0])]
    if isinstance(table, ShardedTensor):
        parts = [(shard.tensor, shard.metadata.shard_offsets) for shard in table.local_shards()]
    for part, (row, column) in parts:
        of_part = rows[row : row + len(part)].to(earlier.device)
        known = (of_part >= 0).nonzero().flatten()
        part[known] = earlier[of_part[known], column : column + part.shape[1]]
