"""What a run derives from its configuration, its data and its processes: once, before anything is built.

Of the batch size it is the scaled hyperparameters and the clip, of the steps the schedule of the learning rates, of the
fields the tables, of the processes the kind of sharding of each table.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, cos, floor, pi
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.reading.order import GlobalBatches
from cowrec.sparse_opt import ClipRule, FtrlConfig, Hyperparameters, scale_clip, scale_hyperparameters
from cowrec.sparse_opt.algorithm.scaling import EmbeddingOptimizer

from ..config.run import RunConfig
from ..config.sections import LrDecay, OptimizerConfig
from ..runtime.processes import Process
from .sharding import chosen_kinds
from .tables import TableSpec, embedding_tables, table_specs

_WARMUP_START = 1e-8
TABLE_OPTIMIZERS: dict[str, tuple[EmbeddingOptimizer, EmbOptimType]] = {
    "adam": ("adam", EmbOptimType.EXACT_SGD),  # never runs: EmbeddingAdam replaces its update
    "sgd": ("sgd", EmbOptimType.EXACT_SGD),
    "adagrad": ("adagrad", EmbOptimType.EXACT_ADAGRAD),
    "rowwise_adagrad": ("adagrad", EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    "fbgemm_adam": ("adam", EmbOptimType.ADAM),
    "fbgemm_cowclip": ("adagrad", EmbOptimType.EXACT_ROWWISE_ADAGRAD),
}
"""How each optimizer of the tables remembers its gradients, for the scaling rules, and the fused one of its lookups."""


@dataclass(frozen=True)
class Scaled:
    """What the scaling rule makes of a configuration's base values at a batch size.

    FTRL's values are for every batch size; see :class:`FtrlConfig`.
    """

    hyperparameters: Hyperparameters
    clip: ClipRule
    wide: FtrlConfig | None

    @classmethod
    def of(cls, config: RunConfig) -> "Scaled":
        """Scales to the batch size of the run."""
        optimizer = config.optimizer
        assert optimizer.l2 is not None, "with_defaults has not been called"
        assert optimizer.embedding_lr is not None, "with_defaults has not been called"
        names = [each.name for each in dataclasses.fields(Hyperparameters)]  # which are keys of [optimizer]
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
    """All that is known of a run before its model is built; every part of it takes what it needs from here.

    Attributes:
        config: with a batch size and L2, see :func:`with_defaults`.
        schema: of its batches.
        process: this process; the plan is the same on all.
        tables: in the order of their first fields.
        bags: the same tables as TorchRec describes them.
        kinds: kind of sharding of each table; "auto" where TorchRec's planner decides.
        train_rows: samples of the training split that are trained on; the others are for validation.
        epoch_steps: steps of an epoch.
        steps: of the whole run.
        schedule: learning rates by step.
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

        Args:
            schema: of the run's data; without a training split the run has no epochs.
            schedule: by default that of epochs of the data set; a stream has none.
            bags: by default those of the schema's fields.

        Raises:
            UserError: `[id_table]` names a field that there is not.
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

    @property
    def is_collisionless(self) -> bool:
        """Whether tables give rows to ids as they come."""
        return any(spec.ids.kind == "collisionless" for spec in self.tables)

    def describe(self) -> dict[str, Any]:
        """Model, batch size, clip and scaled hyperparameters, as saved with a run."""
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
        warmup_steps: steps over which the network's rate rises linearly from 1e-8, as in the CowClip reference:
            ``1e-8 + (lr - 1e-8) * min(k, W) / W``.
        decay: how both rates fall.
        decay_steps: T: steps of the whole run for "linear", ``1 - k / T``, and for "cosine",
            ``(1 + cos(pi * k / T)) / 2`` (arXiv 1608.03983, equation 5, without restarts); steps between two falls for
            a number of epochs, of which each is to a tenth: ``0.1 ** floor(k / T)``.
    """

    warmup_steps: float = 0
    decay: LrDecay = "none"
    decay_steps: float = 1

    @classmethod
    def of_epochs(cls, config: OptimizerConfig, epoch_steps: int, total_steps: int) -> "LrSchedule":
        """The schedule of a run over epochs, whose steps are counted as in :class:`RunPlan`."""
        decay = config.lr_decay or "none"
        steps = total_steps if isinstance(decay, str) else decay * epoch_steps
        return cls(ceil(config.warmup_epochs * epoch_steps - 1e-9), decay, steps)

    def embedding_lr(self, values: Hyperparameters, step: int) -> float:
        return values.embedding_lr * self._left(step)

    def dense_lr(self, values: Hyperparameters, step: int) -> float:
        lr, steps = values.dense_lr, self.warmup_steps
        if steps:
            start = min(_WARMUP_START, lr)  # a rate of 0 stays 0
            lr = start + (lr - start) * min(step, steps) / steps
        return lr * self._left(step)

    def _left(self, step: int) -> float:
        """Share of the rate that the decay leaves to a step."""
        if self.decay == "none":
            return 1.0
        if not isinstance(self.decay, str):
            return 0.1 ** floor(step / self.decay_steps + 1e-9)  # 0.7 epochs of 10 steps are 7.000000000000001
        share = min(step / self.decay_steps, 1.0)
        return 1 - share if self.decay == "linear" else (1 + cos(pi * share)) / 2
