"""Checks, before anything is started, that the settings of a run, its data and its processes fit each other.

A section of the configuration checks itself. Rules of several sections, the data or the processes are here. Rules that
need the built network are in ``check_network`` of build.py.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.dataset.schema import TIME
from cowrec.errors import UserError
from cowrec.names import hint
from cowrec.sparse_opt import NoClip
from cowrec.sparse_opt.id_tables.config import TIME_LIMIT

from ..config.run import RunConfig
from ..config.sections import seconds
from ..runtime.processes import Process
from .run_plan import (
    BY_ROWS,
    FOUR_COLUMNS,
    Scaled,
    TableSpec,
    chosen_kinds,
    embedding_tables,
    reaches_all,
    require_tables,
    shown_name,
    table_specs,
)


def check_run(config: RunConfig, schema: Schema, process: Process, *, stream: bool = False) -> None:
    """Checks that a run can start; all processes decide alike.

    ``config`` has a batch size, rates and L2, see :func:`with_defaults`. A ``stream`` has the fields of the data set,
    and no splits and epochs.

    Raises UserError: two settings exclude each other, or one does not suit the data or the processes.
    """
    check_settings(config)
    check_scaled_decay(config)
    _check_device(config, process)
    tables = table_specs(schema, config)
    check_tables(config, schema, tables)
    bags = embedding_tables(schema, tables)
    require_tables("optimizer.embedding_lr_factors", config.optimizer.embedding_lr_factors, bags)
    check_sharding(config, bags, process)
    _check_fused_updates(config, schema)
    _check_labels(config, schema)
    _check_id_tables(config, schema, tables)
    if stream and config.train.accumulation > 1:
        given = f"train.accumulation = {config.train.accumulation}"
        raise UserError(f"{given} is for data sets, not for streams; add --set train.accumulation=1")
    if not stream:
        if config.train.average and any(spec.ids.kind == "collisionless" for spec in tables):
            raise UserError(
                "train.average = true does not work with collisionless id tables: a row that passes to another id would"
                ' have a mean over both; leave it out, or set id_table.kind = "rows"'
            )
        _check_splits(config, schema)
        _check_times(config, schema, tables)


def check_settings(config: RunConfig) -> None:
    """Raises UserError for settings that exclude each other, whatever the data and the processes are."""
    optimizer, clip = config.optimizer, config.clip
    if optimizer.embedding == "fbgemm_cowclip" and clip.rule != NoClip.name:
        raise UserError(
            f'optimizer.embedding = "fbgemm_cowclip" does its own clipping, not clip.rule = {clip.rule!r};'
            ' set clip.rule = "none", or optimizer.embedding = "rowwise_adagrad"'
        )
    replays = optimizer.embedding == "adam" and optimizer.absent_rows in (None, "replay")
    if replays and clip.build().scope != "row":
        raise UserError(
            f"clip.rule = {clip.rule!r} needs the norm of every row at every step, but optimizer.absent_rows ="
            " 'replay' computes absent rows later; set it to 'lazy' (rows of the batch) or 'dense' (all rows)"
        )
    if config.train.patience and config.checkpoint.keep_best == "none":
        raise UserError(
            f"train.patience = {config.train.patience} needs the best epoch's checkpoint; set checkpoint.keep_best to"
            ' "logloss" or "auc", which patience then looks at'
        )


def check_scaled_decay(config: RunConfig) -> None:
    """Raises UserError if weight decay would take more than a whole weight in a step."""
    optimizer, size, scaled = config.optimizer, config.train.batch_size, Scaled.of(config).hyperparameters
    for key, of_step in (
        ("weight_decay", scaled.embedding_lr * scaled.weight_decay),
        ("dense_weight_decay", scaled.dense_lr * scaled.dense_weight_decay),
    ):
        if of_step > 1:
            given = getattr(optimizer, key)
            raise UserError(
                f"optimizer.{key} = {given:g} takes {of_step:.3g} of each weight in a step, its learning rate times it"
                f" scaled from batch {optimizer.base_batch_size:,} to {size:,}, which turns its sign; set it to"
                f" {0.99 * given / of_step:.3g} or less, or make train.batch_size smaller"
            )


def _check_device(config: RunConfig, process: Process) -> None:
    if process.device.type == "cuda":
        return
    if config.optimizer.embedding == "fbgemm_adam":
        raise UserError('optimizer.embedding = "fbgemm_adam" exists on CUDA only; on CPU use "adam"')
    if config.train.precision == "tf32":
        raise UserError(
            'train.precision = "tf32" exists on CUDA only; on CPU set train.precision = "float32" or "bfloat16"'
        )


def check_tables(config: RunConfig, schema: Schema, tables: Sequence[TableSpec]) -> None:
    """Raises UserError unless the fields of each table can share it, and their ids give its rows."""
    fields = [field.name for field in schema.sparse]
    widths = dict(zip(fields, config.model.widths(fields), strict=True))
    for spec in tables:
        name, names = shown_name(spec.name), [field.name for field in spec.fields]
        for field in spec.fields:
            if spec.ids.kind == "rows" and field.encoding == "raw":
                raise UserError(
                    f'field {field.name!r} has raw ids, but id_table.kind = "rows" takes row numbers; set it to'
                    ' "collisionless" or "hash", or prepare the data without raw_ids'
                )
            if field.pooling != spec.fields[0].pooling:
                raise UserError(
                    f"fields {names[0]!r} and {field.name!r} share table {name!r}, but one is pooled by"
                    f" {spec.fields[0].pooling}, the other by {field.pooling}; give each its own table"
                )
            if widths[field.name] != spec.embedding_dim:
                raise UserError(
                    f"fields {names[0]!r} and {field.name!r} share table {name!r}, but their embeddings are"
                    f" {spec.embedding_dim} and {widths[field.name]} wide; give both one width in model.embedding_dims"
                )
        if spec.ids.kind == "rows" and len(names) > 1:
            raise UserError(
                f"table {name!r} is shared by {', '.join(names)}, whose row numbers mean different ids; set its kind to"
                ' "collisionless" or "hash", or give each field its own table'
            )


def check_sharding(config: RunConfig, bags: Sequence[EmbeddingBagConfig], process: Process) -> None:
    """Raises UserError unless each table can be sharded as `[sharding]` says."""
    require_tables("sharding.tables", config.sharding.tables, bags)
    if config.sharding.memory != "device" and process.device.type != "cuda":
        raise UserError(
            f'sharding.memory = "{config.sharding.memory}" exists on CUDA only; on CPU, where tables are in host memory'
            " anyway, leave it out"
        )
    kinds, optimizer = chosen_kinds(config, bags, process), config.optimizer.embedding
    tables = {table.name: table for table in bags}
    for name, kind in kinds.items():
        if kind == "data_parallel" and optimizer != "adam":
            raise UserError(
                f'table {name!r} is to be data-parallel, but optimizer.embedding = "{optimizer}" is fused into the'
                ' lookup of sharded tables; set optimizer.embedding = "adam", or another kind in [sharding]'
            )
        if kind == "column_wise" and optimizer in ("rowwise_adagrad", "fbgemm_cowclip"):
            raise UserError(
                f'table {name!r} is to be column-wise, but optimizer.embedding = "{optimizer}" keeps one number for a'
                " row, which each shard of its columns would keep separately; choose another optimizer or kind"
            )
        columns = tables[name].embedding_dim
        if kind == "column_wise" and process.world_size > 1 and columns < 2 * FOUR_COLUMNS:
            raise UserError(
                f"table {name!r} is to be column-wise, but its {columns} columns cannot be split into shards of"
                f" {FOUR_COLUMNS} or more; raise model.embedding_dim, or the field's width in model.embedding_dims, or"
                " choose another kind in [sharding]"
            )
    _check_mixed_means(tables, kinds)
    _check_ranks_without_rows(tables, kinds, process)


def _check_mixed_means(tables: Mapping[str, EmbeddingBagConfig], kinds: Mapping[str, str]) -> None:
    """Refuses a mix that TorchRec 1.8.0 gets wrong: with a row-wise mean it divides the other tables' bags as well."""
    means = [name for name, kind in kinds.items() if kind in BY_ROWS and tables[name].pooling == PoolingType.MEAN]
    others = [name for name, kind in kinds.items() if kind not in BY_ROWS]
    if means and others:
        raise UserError(
            f"field {means[0]!r} is pooled by the mean and sharded by rows; TorchRec then computes tables that are not,"
            f" such as {others[0]!r}, wrongly; shard all tables by rows, or {means[0]!r} in another way"
        )


def _check_ranks_without_rows(
    tables: Mapping[str, EmbeddingBagConfig], kinds: Mapping[str, str], process: Process
) -> None:
    """Refuses plans in which a rank has no row of a group of tables; FBGEMM would fail with an unrelated error."""
    for pooling in (PoolingType.SUM, PoolingType.MEAN):
        rows = [t.num_embeddings for t in tables.values() if kinds[t.name] == "row_wise" and t.pooling == pooling]
        if rows and not any(reaches_all(count, process.world_size) for count in rows):
            raise UserError(
                f"row-wise tables of {max(rows)} rows or fewer leave one of {process.world_size} processes without any;"
                ' shard them "table_wise", or in fewer processes'
            )
    for table in tables.values():
        if kinds[table.name] == "table_row_wise" and not reaches_all(table.num_embeddings, process.local_world_size):
            raise UserError(
                f"table {table.name!r} has too few rows ({table.num_embeddings}) for the {process.local_world_size}"
                ' processes of a machine; shard it "table_wise"'
            )


def _check_fused_updates(config: RunConfig, schema: Schema) -> None:
    """Refuses what FBGEMM's fused optimizers, which update tables in every backward pass, cannot do."""
    optimizer, l2 = config.optimizer.embedding, Scaled.of(config).hyperparameters.l2
    if optimizer == "adam":
        return
    if config.clip.rule == NoClip.name and l2 == 0:
        if config.train.accumulation > 1:
            raise UserError(
                f"train.accumulation = {config.train.accumulation} cannot add up gradients of optimizer.embedding ="
                f' "{optimizer}" without a clip and L2, which FBGEMM applies in each pass; set optimizer.embedding ='
                ' "adam", or a clip'
            )
        return
    several = [name for name in schema.lists if name not in schema.sequences]
    if several:
        raise UserError(
            f'optimizer.embedding = "{optimizer}" can neither clip the embedding apart from the wide weight nor give'
            f" each row its L2 where samples have several ids (field {several[0]!r}); set optimizer.embedding ="
            ' "adam", or clip.rule = "none" and optimizer.l2 = 0'
        )


def _check_labels(config: RunConfig, schema: Schema) -> None:
    weights = config.train.task_weights
    for name, weight in weights.items():
        if name not in schema.labels:
            raise UserError(
                f"train.task_weights.{name} = {weight:g}: the data have no label {name!r}; {hint(name, schema.labels)}"
            )
    if weights and len(schema.labels) == 1:
        raise UserError(
            f"train.task_weights = {weights} weighs labels against each other, but the data have one; leave it out"
        )


def _check_id_tables(config: RunConfig, schema: Schema, tables: Sequence[TableSpec]) -> None:
    collisionless = [spec for spec in tables if spec.ids.kind == "collisionless"]
    if collisionless and config.train.accumulation > 1:
        raise UserError(
            f"train.accumulation = {config.train.accumulation} does not work with collisionless id tables, whose rows"
            ' may pass to other ids within a step; set train.accumulation = 1, or id_table.kind = "rows"'
        )
    for spec in collisionless:
        by_time = [key for key in ("expire_after", "window") if getattr(spec.ids, key)]
        if by_time and not schema.timed:
            raise UserError(
                f"id_table.{by_time[0]} of table {spec.name!r} goes by the time of samples, which the data do not have;"
                f" prepare them with a time column, or leave {by_time[0]} out"
            )


def _check_splits(config: RunConfig, schema: Schema) -> None:
    train, has_split = config.train, "validation" in schema.splits
    for split in ("train", "test", *(["validation"] if has_split else [])):
        require_labels(schema, split, Path(config.data.dir))
    if has_split and train.validation_fraction:
        raise UserError(
            f"train.validation_fraction = {train.validation_fraction} takes samples from the training split, but"
            f" {config.data.dir} has a validation split, which is used; set train.validation_fraction = 0"
        )
    if train.patience and not (has_split or train.validation_fraction):
        raise UserError(
            f"train.patience = {train.patience} needs validation samples; prepare the data with a validation split, or"
            " set train.validation_fraction, for example to 0.1"
        )
    rows = schema.split("train").rows
    validation_rows = round(rows * train.validation_fraction)
    if train.validation_fraction and not 0 < validation_rows < rows:
        raise UserError(
            f"train.validation_fraction = {train.validation_fraction} of {rows:,} training samples is"
            f" {validation_rows:,}; choose one that leaves samples on both sides"
        )


def require_labels(schema: Schema, name: str, data_dir: Path) -> None:
    split = schema.split(name)
    if not split.rows:
        raise UserError(f"the {name} split of {data_dir} has no samples; prepare it with another split")
    if not split.labelled:
        raise UserError(f"the {name} split of {data_dir} has no labels: it can be predicted, not evaluated")


def _check_times(config: RunConfig, schema: Schema, tables: Sequence[TableSpec]) -> None:
    """Refuses sample times that id tables do not take, and times in the future, by the shards' statistics.

    After a time in the future all ids of earlier samples would expire. Shards that cannot be read, or are still in an
    object store, are reported when they are trained on.
    """
    import pyarrow as pa  # which a step on a GPU does without
    import pyarrow.parquet as pq

    from cowrec.data_pipeline.dataset.shards import shard_path

    collisionless = [spec.ids for spec in tables if spec.ids.kind == "collisionless"]
    if not schema.timed or not collisionless:
        return
    ahead = seconds(config.online.ahead, "online.ahead")
    newest = time.time() + ahead if ahead and any(ids.expire_after or ids.window for ids in collisionless) else inf
    for number in range(len(schema.split("train").shards)):
        path, bounds = shard_path(Path(config.data.dir), "train", number), list[int]()
        with suppress(OSError, pa.ArrowException):
            metadata = pq.read_metadata(path)
            for group in map(metadata.row_group, range(metadata.num_row_groups)):
                for column in map(group.column, range(group.num_columns)):
                    if column.path_in_schema == TIME and column.statistics and column.statistics.has_min_max:
                        bounds += [column.statistics.min, column.statistics.max]
        if bounds and not 0 <= min(bounds) <= max(bounds) < TIME_LIMIT:
            raise UserError(
                f"{path} has sample times from {min(bounds)} to {max(bounds)}, and id tables take Unix seconds in"
                " [0, 2^32), the years 1970 to 2106; prepare the data again without such samples"
            )
        if bounds and max(bounds) > newest:
            raise UserError(
                f"{path} has a sample time of {datetime.fromtimestamp(max(bounds), UTC):%Y-%m-%d %H:%M}, more than"
                f" online.ahead = {config.online.ahead!r} ahead of this machine's clock: all that was seen before"
                " would be long past; prepare the data again without such samples, or raise online.ahead"
            )
