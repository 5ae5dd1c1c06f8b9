"""What a run derives from its configuration, its data and its processes: once, before anything is built.

It is the tables of the fields, the kind of sharding of each table, the hyperparameters and the clip scaled to the batch
size, and the learning rates by step.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, cos, floor, pi
from typing import Any, TypeVar
from urllib.parse import unquote

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from cowrec.data_pipeline import RESERVED_ROWS, Schema, SparseField
from cowrec.data_pipeline.dataset.schema import escaped_name
from cowrec.data_pipeline.reading.order import GlobalBatches
from cowrec.errors import UserError
from cowrec.models import physical_dim
from cowrec.names import hint
from cowrec.sparse_opt import ClipRule, FtrlConfig, Hyperparameters, rows_for, scale_clip, scale_hyperparameters
from cowrec.sparse_opt.algorithm.scaling import EmbeddingOptimizer

from ..config.run import RunConfig
from ..config.sections import IdConfig, LrDecay, OptimizerConfig
from ..runtime.processes import Process

_WARMUP_START = 1e-8
TABLE_OPTIMIZERS: dict[str, tuple[EmbeddingOptimizer, EmbOptimType]] = {
    "adam": ("adam", EmbOptimType.EXACT_SGD),  # never runs: EmbeddingAdam replaces its update
    "sgd": ("sgd", EmbOptimType.EXACT_SGD),
    "adagrad": ("adagrad", EmbOptimType.EXACT_ADAGRAD),
    "rowwise_adagrad": ("adagrad", EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    "fbgemm_adam": ("adam", EmbOptimType.ADAM),
    "fbgemm_cowclip": ("adagrad", EmbOptimType.EXACT_ROWWISE_ADAGRAD),
}
"""Family of each optimizer of the tables, for the scaling rules, and the fused optimizer of its lookups."""
BY_ROWS = ("row_wise", "table_row_wise")
FOUR_COLUMNS = 4
"""Shards of a table's columns have a multiple of this width in FBGEMM."""
_TAKEN = frozenset(dir(nn.ModuleDict()))
Value = TypeVar("Value")


@dataclass(frozen=True)
class TableSpec:
    """Specification of one embedding table, from the data, `[id_table]` and `[model]`.

    Attributes:
        name: name in the model, see :func:`table_name`.
        fields: fields whose ids the table holds; equal ids of two fields are two rows.
        keys: keys that are looked up in it: those of the fields, and of sequences that share one of them.
        ids: its `[id_table]` settings.
        num_embeddings: number of rows, including the reserved rows.
        embedding_dim: width of its embeddings, without the wide weight.
    """

    name: str
    fields: tuple[SparseField, ...]
    keys: tuple[str, ...]
    ids: IdConfig
    num_embeddings: int
    embedding_dim: int


@dataclass(frozen=True)
class Scaled:
    """Hyperparameters and clip of a configuration, scaled to its batch size; FTRL's values are not scaled."""

    hyperparameters: Hyperparameters
    clip: ClipRule
    wide: FtrlConfig | None

    @classmethod
    def of(cls, config: RunConfig) -> "Scaled":
        optimizer = config.optimizer
        assert None not in (optimizer.l2, optimizer.embedding_lr), "with_defaults has not been called"
        names = [field.name for field in dataclasses.fields(Hyperparameters)]  # which are keys of [optimizer]
        base = Hyperparameters(**{name: getattr(optimizer, name) for name in names})
        sizes: dict[str, Any] = {
            "base_batch_size": optimizer.base_batch_size,
            "batch_size": config.train.batch_size,
            "rule": optimizer.scaling,
        }
        wide = FtrlConfig(optimizer.wide_alpha, batch_size=sizes["batch_size"])
        scaled = scale_hyperparameters(base, embedding=TABLE_OPTIMIZERS[optimizer.embedding][0], **sizes)
        return cls(scaled, scale_clip(config.clip.build(), **sizes), wide if optimizer.wide == "ftrl" else None)


@dataclass(frozen=True)
class RunPlan:
    """All that is known of a run before its model is built.

    Attributes:
        config: configuration with a batch size, rates and L2, see :func:`with_defaults`.
        schema: schema of its batches.
        process: this process; the plan is the same on all.
        tables: tables in the order of their first fields.
        bags: the same tables as TorchRec describes them.
        kinds: kind of sharding of each table; "auto" where TorchRec's planner decides.
        train_rows: number of samples that are trained on; the others of the training split are for validation.
        epoch_steps, steps: number of steps of an epoch, and of the whole run.
        scaled: values at the batch size of the run.
    """

    config: RunConfig
    schema: Schema
    process: Process
    tables: tuple[TableSpec, ...]
    bags: tuple[EmbeddingBagConfig, ...]
    kinds: Mapping[str, str]
    train_rows: int
    epoch_steps: int
    steps: int
    schedule: "LrSchedule"
    scaled: Scaled

    @classmethod
    def of(
        cls,
        config: RunConfig,
        schema: Schema,
        process: Process,
        *,
        schedule: "LrSchedule | None" = None,
        bags: Sequence[EmbeddingBagConfig] | None = None,
    ) -> "RunPlan":
        """Derives the plan of settings that :func:`check_run` admits.

        Without a training split the run has no epochs. ``schedule`` is by default the schedule over the epochs of the
        data set. ``bags`` are by default the tables of the schema's fields.

        Raises UserError: `[id_table]` names an unknown field.
        """
        tables = tuple(table_specs(schema, config))
        bags = tuple(embedding_tables(schema, tables) if bags is None else bags)
        rows = schema.splits["train"].rows if "train" in schema.splits else 0
        train_rows = rows - round(rows * config.train.validation_fraction)
        epoch_steps = len(GlobalBatches(train_rows, config.train.batch_size))
        steps = epoch_steps * config.train.epochs
        schedule = schedule or LrSchedule.of_epochs(config.optimizer, epoch_steps, steps)
        return cls(
            config,
            schema,
            process,
            tables,
            bags,
            chosen_kinds(config, bags, process),
            train_rows,
            epoch_steps,
            steps,
            schedule,
            Scaled.of(config),
        )

    def describe(self) -> dict[str, Any]:
        """Returns model, batch size, clip and scaled hyperparameters, as they are saved with a run."""
        clip: Any = self.scaled.clip
        return {
            "model": self.config.model.name,
            "batch_size": self.config.train.batch_size,
            "scaling": self.config.optimizer.scaling,
            "clip": self.config.clip.rule,
            "clip_values": dataclasses.asdict(clip),
            **dataclasses.asdict(self.scaled.hyperparameters),
        }


@dataclass(frozen=True)
class LrSchedule:
    """Learning rates by step, counted from 0, as multiples of the scaled rates.

    Attributes:
        warmup_steps: W, steps over which the network's rate rises linearly, as in the CowClip reference:
            ``1e-8 + (lr - 1e-8) * min(k, W) / W``.
        decay_steps: T, steps of the whole run for "linear", ``1 - k / T``, and for "cosine",
            ``(1 + cos(pi * k / T)) / 2`` (arXiv 1608.03983, equation 5, without restarts). Where lr_decay is a number
            of epochs, T is their steps, and the share is ``0.1 ** floor(k / T)``.
    """

    warmup_steps: float = 0
    lr_decay: LrDecay = "none"
    decay_steps: float = 1

    @classmethod
    def of_epochs(cls, config: OptimizerConfig, epoch_steps: int, total_steps: int) -> "LrSchedule":
        lr_decay = config.lr_decay or "none"
        steps = total_steps if isinstance(lr_decay, str) else lr_decay * epoch_steps
        return cls(ceil(config.warmup_epochs * epoch_steps - 1e-9), lr_decay, steps)

    def embedding_lr(self, values: Hyperparameters, step: int) -> float:
        return values.embedding_lr * self._left(step)

    def dense_lr(self, values: Hyperparameters, step: int) -> float:
        lr, steps = values.dense_lr, self.warmup_steps
        if steps:
            start = min(_WARMUP_START, lr)  # a rate of 0 stays 0
            lr = start + (lr - start) * min(step, steps) / steps
        return lr * self._left(step)

    def _left(self, step: int) -> float:
        if self.lr_decay == "none":
            return 1.0
        if not isinstance(self.lr_decay, str):
            return 0.1 ** floor(step / self.decay_steps + 1e-9)  # 0.7 epochs of 10 steps are 7.000000000000001
        share = min(step / self.decay_steps, 1.0)
        return 1 - share if self.lr_decay == "linear" else (1 + cos(pi * share)) / 2


def table_specs(schema: Schema, config: RunConfig) -> list[TableSpec]:
    """Lists the tables of a run, in the order of their first fields. Raises UserError for an unknown table or field."""
    by_name = {field.name: field for field in schema.sparse}
    own = [field.name for field in schema.sparse if not field.shares]  # a history has the table of what it shares
    widths, specs = dict(zip(by_name, config.model.widths(list(by_name)), strict=True)), []
    for name, names in config.id_table.table_fields(own).items():
        fields, ids = tuple(by_name[field] for field in names), config.id_table.of_table(name)
        keys = tuple(key for field in schema.sparse if field.vocabulary in names for key in field.keys)
        specs.append(TableSpec(table_name(name), fields, keys, ids, _rows(fields, ids), widths[names[0]]))
    return specs


def _rows(fields: Sequence[SparseField], ids: IdConfig) -> int:
    if ids.kind == "rows":
        return fields[0].num_embeddings
    if ids.kind == "hash":
        return RESERVED_ROWS + ids.capacity
    return rows_for(ids.capacity)


def embedding_tables(schema: Schema, specs: Sequence[TableSpec]) -> list[EmbeddingBagConfig]:
    """Makes a TorchRec table for each spec, wide enough for the embedding and the wide weight."""
    return [
        EmbeddingBagConfig(
            name=spec.name,
            num_embeddings=spec.num_embeddings,
            embedding_dim=physical_dim(spec.embedding_dim),
            feature_names=list(spec.keys),
            # A weighted collection only sums; the reader then gives a mean-pooled field's ids the weight 1/length.
            pooling=(
                PoolingType.MEAN if spec.fields[0].pooling == "mean" and not schema.is_weighted else PoolingType.SUM
            ),
        )
        for spec in specs
    ]


def require_tables(key: str, names: Iterable[str], tables: Sequence[EmbeddingBagConfig]) -> None:
    """Raises UserError, with the nearest name, for a name under a key that is not that of a table."""
    of_model = {table.name: shown_name(table.name) for table in tables}
    for name in names:
        if table_name(name) not in of_model:
            known = list(of_model.values())
            raise UserError(f"{key} names {name!r}, which is not a sparse field; {hint(name, known, 'sparse fields')}")


def table_name(name: str) -> str:
    """Returns the name in the model of a field's table; it is no name that torch's modules have, such as ``type``."""
    return f"%{ord(name[0]):02X}{name[1:]}" if name in _TAKEN else escaped_name(name)


def shown_name(table: str) -> str:
    """Returns the name of a table as the schema or the run's configuration has it; a very long one is cut."""
    return "" if table == escaped_name("") else unquote(table)


def by_table(settings: Mapping[str, Value]) -> dict[str, Value]:
    """Renames the keys of settings to the tables' names in the model."""
    return {table_name(name): value for name, value in settings.items()}


def chosen_kinds(config: RunConfig, tables: Sequence[EmbeddingBagConfig], process: Process) -> dict[str, str]:
    """Chooses the kind of each table; "auto" on several GPUs for tables that the planner decides on."""
    sharding, names = config.sharding, [table.name for table in tables]
    if sharding.plan != "auto":
        kinds = dict.fromkeys(names, str(sharding.plan))
    elif process.device.type == "cuda" and process.world_size > 1:
        kinds = dict.fromkeys(names, "auto")
    else:
        kinds = _balanced_kinds(tables, process)
    return kinds | by_table(sharding.tables)


def _balanced_kinds(tables: Sequence[EmbeddingBagConfig], process: Process) -> dict[str, str]:
    """Chooses row-wise for tables above half of a rank's even share of all bytes, table-wise for the others.

    All are table-wise if one is pooled by the mean, since TorchRec computes a mix wrongly.
    """
    share = sum(table_bytes(table) for table in tables) / process.world_size
    means = any(table.pooling == PoolingType.MEAN for table in tables)

    def kind(table: EmbeddingBagConfig) -> str:
        unsplit = means or table_bytes(table) <= share / 2 or not reaches_all(table.num_embeddings, process.world_size)
        return "table_wise" if unsplit or process.world_size == 1 else "row_wise"

    return {table.name: kind(table) for table in tables}


def reaches_all(rows: int, ranks: int) -> bool:
    """Tells whether equal blocks of rows leave rows to the last rank."""
    return -(-rows // ranks) * (ranks - 1) < rows


def table_bytes(table: EmbeddingBagConfig) -> int:
    return int(4 * table.num_embeddings * table.embedding_dim)
