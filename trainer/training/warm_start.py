"""The warm start of a run: the weights of an earlier one, matched by the ids that rows stand for."""

import logging
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from cowrec.data_pipeline import Schema, SparseField
from cowrec.data_pipeline.dataset.schema import RESERVED_ROWS, vocabulary_file
from cowrec.errors import UserError
from cowrec.models.registry import all_options

from ..config.run import with_values
from ..runs.local_copy import local_copy
from ..runs.run_dir import CONFIG, JOURNAL
from ..sharded_model.build import dense_tensors, gathered_table, local_shards, tables_of
from ..sharded_model.run_plan import TableSpec
from .saved_run import run_of, trained_state
from .state import TrainState

logger = logging.getLogger(__name__)


def warm_start(state: TrainState, *, timed: bool) -> None:
    """Copies the weights of an earlier run's newest checkpoint; ids that it did not have keep their initial values.

    Ids are matched by their strings in the vocabularies. Collisionless tables are copied with their ids. Moments and
    schedules start over. Both models are in memory meanwhile. All processes call together.

    Args:
        state: state of this run, whose ``train.warm_start`` is the folder of the earlier one; changed in place.
        timed: whether this run's samples have times.

    Raises:
        UserError: the folder is not a run, the fields, labels, share of negatives or network differ, or ids cannot be
            matched.
    """
    config, schema, process = state.plan.config, state.plan.schema, state.plan.process
    source = local_copy(config.train.warm_start, "run")
    earlier_config, earlier = run_of(source)
    _require_same_fields(source, earlier, schema)
    # The precision is a setting of the process, and stays that of this run.
    train, sharding = {"precision": config.train.precision}, {"memory": config.sharding.memory}
    earlier_config = with_values(earlier_config, train=train, sharding=sharding)
    old, _ = trained_state(source, (earlier_config, earlier), process)
    specs, earlier_specs = state.plan.tables, old.plan.tables
    _require_same_tables(source, earlier_specs, specs)
    if state.id_tables and (earlier.timed or (source / JOURNAL).exists()) != timed:
        without, found = ("out", "") if timed else ("", "out")
        raise _mismatch(
            source,
            f"was trained on samples with{without} times, which its id tables count by, and these samples are"
            f" with{found} times, as those of a stream always are; prepare the data of cowrec train with a time column",
        )
    _copy_network(source, old, state)
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


def _mismatch(source: Path, text: str) -> UserError:
    return UserError(f"train.warm_start = {str(source)!r} {text}")


def _copy_network(source: Path, old: TrainState, state: TrainState) -> None:
    """Copies the dense weights. Raises UserError for another network."""
    before, now = old.plan.config.model, state.plan.config.model
    if ":" not in before.name + now.name:  # the module of the user's own network may have moved
        settings: list[dict[str, Any]] = [{"model.name": before.name}, {"model.name": now.name}]
        if before.name == now.name:
            settings = [{f"model.options.{k}": v for k, v in all_options(model).items()} for model in (before, now)]
        for key, value in settings[1].items():
            if settings[0][key] != value:
                text = f"is another network: {key} is {settings[0][key]!r} there, and {value!r} here"
                raise _mismatch(source, text)
    old_dense, new_dense = dense_tensors(old.model), dense_tensors(state.model)
    if more := sorted(old_dense.keys() - new_dense.keys()):
        raise _mismatch(source, f"is another network: it has {more[0]} too")
    with torch.no_grad():
        for name, parameter in new_dense.items():
            if name not in old_dense or old_dense[name].shape != parameter.shape:
                raise _mismatch(source, f"is another network: {name} differs")
            parameter.copy_(old_dense[name])


def _require_same_tables(source: Path, earlier: Sequence[TableSpec], now: Sequence[TableSpec]) -> None:
    """Raises UserError if ids get their rows in another way, or rows have another width."""
    for old, new in zip(earlier, now, strict=False):
        if old.name == new.name and old.embedding_dim != new.embedding_dim:
            raise _mismatch(
                source,
                f"has embeddings of width {old.embedding_dim} in table {old.name!r}, not {new.embedding_dim}; use the"
                f" widths of {source / CONFIG}",
            )
        by_rows = old.ids.kind == new.ids.kind == "rows"
        one, other = ([spec.name, *(field.name for field in spec.fields)] for spec in (old, new))
        if one != other or not (by_rows or old.ids == new.ids):
            text = f"gives the ids of table {old.name!r} rows in another way; use the [id_table] of {source / CONFIG}"
            raise _mismatch(source, text)


def _require_same_fields(source: Path, earlier: Schema, schema: Schema) -> None:
    """Raises UserError if the weights are of other inputs; ranges of numbers and vocabularies may be others."""
    for kind, keys in (("dense", "transform"), ("sparse", "kind pooling bucketed max_length shares along")):
        before, now = ({field.name: field for field in getattr(fields, kind)} for fields in (earlier, schema))
        if list(before) != list(now):
            different = sorted(before.keys() ^ now.keys()) or list(now)
            raise _mismatch(source, f"has other fields ({', '.join(different)})")
        for name, key in product(now, keys.split()):
            one, other = getattr(before[name], key), getattr(now[name], key)
            if one != other:
                raise _mismatch(
                    source,
                    f"was trained on a field {name!r} with {key} = {one!r}, and these data have {other!r}, which means"
                    " something else; prepare both alike",
                )
    # A single label may be another one: its task then starts from the earlier one's weights.
    labels = ("labels",) if (len(earlier.labels), len(schema.labels)) != (1, 1) else ()
    for name in (*labels, "negative_fraction"):
        one, other = getattr(earlier, name), getattr(schema, name)
        if one != other:
            raise _mismatch(
                source,
                f"was trained on data with {name} = {one}, and these data have {other}, for which its weights predict"
                " something else; prepare both alike",
            )


def _earlier_rows(field: SparseField, earlier: SparseField, source: Path, data_dir: Path) -> Tensor:
    """Finds the earlier row of the id of each row of a field's table, int64 [rows]; -1 for new ids."""
    if field.encoding != "vocabulary" or earlier.encoding != "vocabulary":
        if (field.encoding, field.num_embeddings) != (earlier.encoding, earlier.num_embeddings):
            raise UserError(
                f"train.warm_start = {str(source)!r}: field {field.name!r} had {earlier.num_embeddings} rows by"
                f" {earlier.encoding}, now {field.num_embeddings} by {field.encoding}; only vocabularies may grow"
            )
        return torch.arange(field.num_embeddings)
    files = (vocabulary_file(folder, field.name) for folder in (source, data_dir))
    old, new = (pq.read_table(file, columns=["value"])["value"].combine_chunks() for file in files)
    index = pc.fill_null(pc.index_in(new, value_set=old), -1).to_numpy().astype(np.int64)
    rows = np.where(index >= 0, index + RESERVED_ROWS, -1)
    return torch.from_numpy(np.concatenate([np.arange(RESERVED_ROWS), rows]))


def _fill(table: ShardedTensor | Tensor, earlier: Tensor, rows: Tensor) -> None:
    for shard, (row, column) in local_shards(table):
        wanted = rows[row : row + len(shard)].to(earlier.device)
        known = (wanted >= 0).nonzero().flatten()
        shard[known] = earlier[wanted[known], column : column + shard.shape[1]]
