"""The sections of a run's configuration that belong to the trainer, each a frozen dataclass that checks itself."""

import dataclasses
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from cowrec.errors import SettingError, UserError
from cowrec.names import hint, require, require_at_least, require_known
from cowrec.sparse_opt import CLIP_RULES, SCALING_RULES, ClipRule, NoClip

AUTO_BATCH = -1
"""`train.batch_size = "auto"`."""
OnNonfinite = Literal["stop", "skip"]
"""Treatment of a batch that would make the model's state non-finite."""


@dataclass(frozen=True)
class DataConfig:
    """`[data]`: where batches come from.

    Attributes:
        dir: a prepared data set; `--data` overrides it.
        resident: keep the samples of each epoch on the device: "yes", "no", or "auto" (if they need at most half of the
            memory that the model leaves; so does "yes" for samples that are measured).
        window_rows: number of samples that are shuffled together, and in memory together while streaming.
    """

    dir: str = ""
    resident: Literal["auto", "yes", "no"] = "auto"
    window_rows: int = 1 << 20

    def __post_init__(self) -> None:
        require("data.window_rows", self.window_rows, self.window_rows >= 1, "a positive number of rows")


@dataclass(frozen=True)
class TrainConfig:
    """`[train]`: how long, how large, where.

    Attributes:
        batch_size: samples per step over all processes. 0: by the number of training samples, the largest power of two
            with at least 100 full steps in an epoch, but from 64 to 512. "auto" (or -1): the largest power of two with
            which the run has 200 steps, but from 64 to 65,536. Both are optimizer.base_batch_size online.
        eval_batch_size: samples per batch at evaluation.
        accumulation: number of parts of each global batch that a process takes one after the other, before the one step
            and clip over all of them: less memory for activations, the same results up to rounding. Not with
            collisionless id tables, nor online.
        epochs: passes over the training set; at most, with `patience`.
        validation_fraction: share of the training split, its last samples in the stored order, that is measured after
            each epoch instead of trained on, for data without a validation split; 0: none.
        patience: epochs without a better validation quality, that of checkpoint.keep_best, after which training ends.
            0: never.
        seed: seed of initial values and shuffling.
        device: "auto" is CUDA on a machine with a GPU, else the CPU.
        log_every: steps between two lines of metrics, and between two checks that the loss is finite.
        log_seconds: seconds between two lines about the progress of the run, which come with metrics. 0: no lines.
        warm_start: folder of an earlier run whose weights to start from; rows are matched by their ids.
        timeout_seconds: time after which a process that keeps the others waiting counts as hung, which ends the run.
        loss: loss of a sample: "bce", the binary cross-entropy; "focal", in which well predicted samples count less; or
            "module:function" for a loss of your own, (logits, label) -> loss of each sample; see docs/models.md.
        task_weights: weight of the loss of each of several labels, by its name, as a table; 1 for those not listed.
        loss_options: options of the loss, as a table: gamma and alpha of "focal", or those of your function.
        trackers: trackers of experiments that get the metrics too: "mlflow", "wandb" or both; see docs/train.md.
        precision: precision of the network's hidden layers. "tf32" (CUDA only) rounds the factors of matrix products,
            "bfloat16" their results too; weights, logits, loss, moments and tables stay float32.
        cuda_graph: on CUDA with one process, launch each step as one captured CUDA graph, where the run allows it: one
            id in each field, optimizer.embedding = "adam", and not optimizer.absent_rows = "dense". Results do not
            depend on it.
    """

    batch_size: int = 0
    eval_batch_size: int = 16384
    accumulation: int = 1
    epochs: int = 2
    validation_fraction: float = 0.0
    patience: int = 0
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    log_every: int = 50
    log_seconds: float = 30.0
    warm_start: str = ""
    timeout_seconds: float = 600.0
    loss: str = "bce"
    loss_options: dict[str, Any] = field(default_factory=dict)
    trackers: tuple[Literal["mlflow", "wandb"], ...] = ()
    task_weights: dict[str, float] = field(default_factory=dict)
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    cuda_graph: bool = True

    def __post_init__(self) -> None:
        require_at_least("train", self, "log_seconds patience")
        is_size = isinstance(self.batch_size, int) and self.batch_size >= AUTO_BATCH
        require("train.batch_size", self.batch_size, is_size, f'at least 0, or "auto", in Python {AUTO_BATCH}')
        require_at_least("train", self, "eval_batch_size epochs log_every", 1)
        timeout = self.timeout_seconds
        require("train.timeout_seconds", timeout, 1 <= timeout <= 1e9, "from 1 to 10^9, 31 years")
        for name, weight in self.task_weights.items():
            require(f"train.task_weights.{name}", weight, 0 <= weight < inf, "at least 0 and finite")
        fraction = self.validation_fraction
        require("train.validation_fraction", fraction, 0 <= fraction < 1, "at least 0 and below 1")
        require(
            "train.accumulation",
            self.accumulation,
            1 <= self.accumulation <= (self.batch_size if self.batch_size > 0 else inf),
            f"from 1 to train.batch_size{f' = {self.batch_size}' if self.batch_size > 0 else ''}",
            "train.batch_size",
        )
        require("train.seed", self.seed, 0 <= self.seed < 1 << 63, "at least 0 and below 2^63")


@dataclass(frozen=True)
class EvaluateConfig:
    """`[evaluate]`: what is measured beside the quality of the validation samples and the test split.

    Attributes:
        by_id_counts: also measure thirds of the test samples by how often their ids occur in training, whose ids are
            then read once more at the start.
    """

    by_id_counts: bool = False


@dataclass(frozen=True)
class CheckpointConfig:
    """`[checkpoint]`: when the run's state is saved, and which checkpoints are kept.

    Attributes:
        every_steps: steps between two checkpoints within an epoch; 0: only the one after each epoch.
        keep_last: number of latest checkpoints to keep.
        keep_best: also keep the checkpoint after the epoch with the best "auc" or "logloss" of the validation samples,
            or of the test split where there are none. The report and later commands are of that epoch.
    """

    every_steps: int = 0
    keep_last: int = 2
    keep_best: Literal["none", "auc", "logloss"] = "none"

    def __post_init__(self) -> None:
        require_at_least("checkpoint", self, "every_steps")
        require_at_least("checkpoint", self, "keep_last", 1)


ShardingKind = Literal["table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel"]


@dataclass(frozen=True)
class ShardingConfig:
    """`[sharding]`: how tables are sharded over processes; results do not depend on it.

    Attributes:
        plan: the kind of all tables. "table_wise": a table is on one process. "row_wise": its rows are split over all
            processes. "column_wise": its columns are split, into shards whose width is a multiple of four.
            "table_row_wise": its rows are split over the processes of one machine. "data_parallel": every process has a
            copy, for small tables. "auto": on CUDA the choice of TorchRec's planner; on CPU row-wise for a table of
            more than half of a process's share of all bytes, else table-wise.
        tables: the kind of single tables, by the name of their field; takes precedence over the plan.
        memory: memory for tables and moments on CUDA: the "device"'s, or for larger tables the host's as unified memory
            ("uvm"). Data-parallel tables stay on the device.
    """

    plan: Literal["auto", "table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel"] = "auto"
    tables: dict[str, ShardingKind] = field(default_factory=dict)
    memory: Literal["device", "uvm"] = "device"


LrDecay = Literal["none", "linear", "cosine"] | float


@dataclass(frozen=True)
class OptimizerConfig:
    """`[optimizer]`: hyperparameters at a base batch size, and the rule that scales them to another.

    The defaults are for data that nothing is known about; the CowClip paper's values are in trainer/configs.

    Attributes:
        embedding: optimizer of the tables. "adam" is cowrec's Adam with coupled L2, on CPU and CUDA; the others are
            FBGEMM's fused ones ("fbgemm_adam" on CUDA only), with clip and L2 applied to the gradients of the batch's
            rows; every field then needs exactly one id per sample. "fbgemm_cowclip" is row-wise Adagrad with FBGEMM's
            COWCLIP mode, which differs from the paper: the limit of a row is ``steps * max(||w||, 1e-5)``, where steps
            counts the steps so far in which the row appeared; Adagrad accumulates the unclipped gradient; norms are of
            complete rows, the wide weight included.
        absent_rows: for "adam", the update of rows without an id in the batch. "replay", the default, is the published
            algorithm: L2 and momentum move every row at every step; a row's steps are computed when it is next needed.
            "dense" computes the same at once, at the cost of the whole table. "lazy" skips these steps.
        base_batch_size: the batch size of embedding_lr, dense_lr, l2, betas and eps.
        scaling: the rule that scales these values to train.batch_size; "none" keeps them. "half_life", the default,
            keeps the quality of the base batch; "cowclip" is the published rule.
        embedding_lr, dense_lr, l2: values at the base batch size. embedding_lr is by default 2e-3, and Adam's with more
            than 2,000,000 samples in the training split 2e-3 * sqrt(2,000,000 / samples), for base batch 1,024. l2 is
            on embeddings, wide weights and the linear kernel; by default 20 * (train.epochs - 1, at most 2) / (samples
            of the training split), between 1e-6 and 1e-2, and 1e-6 for a stream.
        embedding_lr_factors: factors of the learning rate of single tables, embeddings and wide weights, by the name of
            their field, or of the table that fields share, such as `{ city = 0.5 }`; 0 leaves a table as it is.
        weight_decay: decoupled weight decay of the tables (AdamW), embeddings and wide weights: each step multiplies
            all rows, with optimizer.absent_rows = "lazy" those of the batch, by ``1 - lr * weight_decay``. It is not
            clipped. Needs optimizer.embedding = "adam".
        dense_weight_decay: the same for all parameters of the network, biases included. Both are values at the base
            batch size; the scaling rules keep the decay of a sample.
        cross_l2: coefficient of the squares of the parameters of cross layers, CIN and AutoInt; not scaled.
        wide: optimizer of the wide weights. "ftrl" is FTRL-Proximal (McMahan et al. 2013) without L1: a weight's own
            rate falls as its id occurs. L2, weight decay and lr_decay do not apply to it. It suits ids that keep
            coming, as online. Needs optimizer.embedding = "adam".
        wide_alpha: rate of FTRL at every batch size: a weight's first step is ``wide_alpha * g / (1 + |g|)``, where g
            is its gradient of the sum of the batch's losses.
        warmup_epochs: epochs over which the dense learning rate rises linearly from 1e-8.
        lr_decay: how both learning rates fall. "linear" and "cosine": to 0 over train.epochs, in a straight line or
            half a wave. A number of epochs: to a tenth after every so many epochs. "none": they stay, as published. By
            default "linear" from 100,000 training samples and 100 steps on for Adam, if neither embedding_lr nor
            train.patience is set; else "none". Neither this nor the warm-up has an effect online.
        betas, eps, adam_epsilon: Adam's values, dense and embedding, betas and eps at the base batch size;
            `adam_epsilon` selects the position of eps in the formula ("torch" or "keras").
        embedding_init_std: standard deviation of the tables' initial values; wide weights start at 0.
    """

    embedding: Literal["adam", "rowwise_adagrad", "adagrad", "sgd", "fbgemm_adam", "fbgemm_cowclip"] = "adam"
    absent_rows: Literal["replay", "dense", "lazy"] | None = None
    base_batch_size: int = 1024
    scaling: str = "half_life"
    embedding_lr: float | None = None
    dense_lr: float = 1e-3
    l2: float | None = None
    embedding_lr_factors: dict[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    dense_weight_decay: float = 0.0
    wide: Literal["adam", "ftrl"] = "adam"
    wide_alpha: float = 0.05
    cross_l2: float = 0.0
    warmup_epochs: float = 0.0
    lr_decay: LrDecay | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    adam_epsilon: Literal["torch", "keras"] = "torch"
    embedding_init_std: float = 1e-2

    @property
    def rates_follow_epochs(self) -> bool:
        """Whether learning rates depend on the number of epochs of the run."""
        return self.lr_decay in ("linear", "cosine")

    def __post_init__(self) -> None:
        require_at_least("optimizer", self, "base_batch_size", 1)
        require_known("optimizer.scaling", self.scaling, SCALING_RULES)
        require_at_least("optimizer", self, "embedding_lr dense_lr l2 weight_decay dense_weight_decay cross_l2")
        require_at_least("optimizer", self, "warmup_epochs embedding_init_std")
        for table, factor in self.embedding_lr_factors.items():
            key = f"optimizer.embedding_lr_factors.{table}"
            require(key, factor, 0 <= factor < inf, "at least 0 and finite")
        if isinstance(self.lr_decay, int | float):
            require("optimizer.lr_decay", self.lr_decay, 0 < self.lr_decay < inf, "a word or above 0 and finite")
        require("optimizer.wide_alpha", self.wide_alpha, 0 < self.wide_alpha < inf, "above 0 and finite")
        require("optimizer.eps", self.eps, 0 < self.eps < inf, "above 0")
        require("optimizer.betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)")
        if self.embedding != "adam" and self.absent_rows not in (None, "lazy"):
            raise SettingError(
                f'optimizer.absent_rows = "{self.absent_rows}" needs optimizer.embedding = "adam", got'
                f" {self.embedding!r}: FBGEMM's fused optimizers move the rows of the batch alone; leave it out or"
                " change the optimizer",
                "optimizer.absent_rows",
                "optimizer.embedding",
            )
        if self.wide != "ftrl" and self.wide_alpha != OptimizerConfig.wide_alpha:
            raise SettingError(
                f'optimizer.wide_alpha = {self.wide_alpha} has no meaning for optimizer.wide = "{self.wide}"; set that'
                ' to "ftrl", or leave the rate out',
                "optimizer.wide_alpha",
                "optimizer.wide",
            )
        if self.embedding != "adam" and self.wide == "ftrl":
            raise SettingError(
                f'optimizer.wide = "ftrl" needs optimizer.embedding = "adam", got {self.embedding!r}: FBGEMM\'s fused'
                " optimizers update the wide weight with its row; leave it out or change the optimizer",
                "optimizer.wide",
                "optimizer.embedding",
            )
        if self.embedding != "adam" and self.weight_decay:
            raise SettingError(
                f'optimizer.weight_decay = {self.weight_decay} needs optimizer.embedding = "adam", got'
                f" {self.embedding!r}; use optimizer.l2, or change the optimizer",
                "optimizer.weight_decay",
                "optimizer.embedding",
            )


@dataclass(frozen=True)
class ClipConfig:
    """`[clip]`: the rule for the embedding rows; it accepts its own values only, and "none" ignores all values.

    Attributes:
        rule: one of the clip rules. "field", "adaptive_field" and "global" take the norm over the batch's rows, or over
            all rows with optimizer.absent_rows = "dense"; they cannot be combined with "replay".
        r, zeta, bound, max_norm: values of the rule at optimizer.base_batch_size; optimizer.scaling scales them to
            train.batch_size. max_norm is the threshold of "constant", "field" and "global".
    """

    rule: str = "cowclip"
    r: float | None = None
    zeta: float | None = None
    bound: float | None = None
    max_norm: float | None = None

    def __post_init__(self) -> None:
        require_known("clip.rule", self.rule, CLIP_RULES)
        self.build()

    def build(self) -> ClipRule:
        if self.rule == NoClip.name:  # so that the one override clip.rule=none turns any run's clip off
            return NoClip()
        kind: Any = CLIP_RULES[self.rule]
        values = {key: value for key, value in dataclasses.asdict(self).items() if key != "rule"}
        given = {key: value for key, value in values.items() if value is not None}
        defaults = {key.name: key.default for key in dataclasses.fields(kind)}
        for key, value in given.items():
            if key not in defaults:
                takes = f"it takes {', '.join(sorted(defaults)) or 'no values'}"
                message = f"clip.{key} = {value} has no meaning for clip.rule = {self.rule!r}; {takes}"
                raise SettingError(message, f"clip.{key}", "clip.rule")
        for key, default in defaults.items():
            if default is dataclasses.MISSING and key not in given:
                raise SettingError(f"clip.rule = {self.rule!r} needs clip.{key}", "clip.rule")
        rule: ClipRule = kind(**given)
        return rule


@dataclass(frozen=True)
class OnlineConfig:
    """`[online]`; values such as "90s", "12h" or "30d" are sample time, keys in seconds are wall-clock time.

    Attributes:
        lateness: sample time to wait for older samples, so that samples can be put in order.
        late: treatment of a sample that arrives even later: leave it out ("drop"), or train on it on arrival ("train");
            it is counted in both cases.
        duplicates_window: number of latest samples whose `sample_id` is remembered; a repeated sample is left out.
        ahead: a sample whose time is further ahead of this machine's clock is malformed, since it would make all others
            late and expire ids; so is a data set with one, on a local disk, under id_table.expire_after or window.
            Empty: no limit.
        max_wait_seconds: time without a new sample after which a partial batch is trained on; 0: never.
        window: sample time over which progressive AUC, logloss and calibration are computed.
        snapshot_seconds: time between two checkpoints.
        on_nonfinite: at a batch whose loss or gradient is not finite, or so large that moments would overflow: "skip"
            it and save its samples in the run's folder `quarantine`; or "stop". Ten such batches in a row end the run.
        report_seconds: time between two reports of what arrived, with warnings of samples that were left out.
        max_malformed_share: largest share of malformed samples among the last 1,000 and those that arrive; 1: any.
        on_malformed: beyond that share, "wait", which takes no further sample, keeps the position and asks again every
            ten seconds, or "stop", which ends the run.
        malformed_file_bytes: size at which `malformed.jsonl`, the run's file of malformed samples, becomes
            `malformed.jsonl.1`, and what was that is removed; 0: no limit.
        damaged_files: at a file of the source that cannot be read, "stop", or "skip" it with a warning.
        metrics_port: port on which Prometheus reads the metrics of the run; 0: none.
        metrics_file_bytes: size at which `metrics.jsonl` replaces `metrics.jsonl.1`; 0: no limit.
        metrics_host: address to listen on; by default the loopback address, which other machines cannot reach.
        publish_seconds: time between two publications of rows.
        dense_seconds: time between two publications of the dense weights.
        keep_full_versions: number of full versions that a publication keeps, with the deltas after the oldest of them,
            to which `cowrec versions --republish` can go back.
    """

    lateness: str = ""
    late: Literal["drop", "train"] = "drop"
    duplicates_window: int = 1 << 18
    ahead: str = "1d"
    max_wait_seconds: float = 5.0
    window: str = "1h"
    snapshot_seconds: float = 60.0
    on_nonfinite: OnNonfinite = "skip"
    report_seconds: float = 60.0
    max_malformed_share: float = 1.0
    on_malformed: Literal["wait", "stop"] = "wait"
    malformed_file_bytes: int = 64 << 20
    damaged_files: Literal["stop", "skip"] = "stop"
    metrics_port: int = 0
    metrics_file_bytes: int = 64 << 20
    metrics_host: str = "127.0.0.1"
    publish_seconds: float = 5.0
    dense_seconds: float = 60.0
    keep_full_versions: int = 2

    def __post_init__(self) -> None:
        for key in ("lateness", "ahead", "window"):
            seconds(getattr(self, key), f"online.{key}")
        require("online.window", self.window, self.window != "", 'a time such as "1h"')
        require("online.metrics_port", self.metrics_port, 0 <= self.metrics_port < 1 << 16, "between 0 and 65535")
        share = self.max_malformed_share
        require("online.max_malformed_share", share, 0 <= share <= 1, "between 0 and 1")
        require_at_least("online", self, "malformed_file_bytes")
        require_at_least("online", self, "duplicates_window metrics_file_bytes max_wait_seconds snapshot_seconds")
        require_at_least("online", self, "report_seconds publish_seconds dense_seconds")
        if self.keep_full_versions < 2:
            raise SettingError(
                f"online.keep_full_versions must be at least 2, got {self.keep_full_versions}: a server that is behind"
                " needs the last but one",
                "online.keep_full_versions",
            )


IdKind = Literal["rows", "hash", "collisionless"]
AdmissionKind = Literal["none", "count", "probabilistic"]
WhenFull = Literal["oldest", "least_frequent", "refuse"]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class TableIds:
    """`[id_table.tables.NAME]`: the settings of one table that differ from `[id_table]`, and the fields that share it.

    Attributes:
        fields: fields that share the table and its capacity; by default the field of the table's name. Equal ids of two
            fields are two ids.

    The other attributes are those of :class:`IdConfig`.
    """

    fields: tuple[str, ...] = ()
    kind: IdKind | None = None
    capacity: int | None = None
    when_full: WhenFull | None = None
    admission: AdmissionKind | None = None
    threshold: int | None = None
    window: str | None = None
    expire_after: str | None = None


@dataclass(frozen=True)
class IdConfig:
    """`[id_table]`: settings of all tables; `[id_table.tables.NAME]` overrides them for one table.

    Attributes:
        kind: "rows" uses the row numbers of the data; "hash" maps an id to row ``hash(id) % capacity``, which several
            ids may share; "collisionless" gives every id its own row until the id is evicted or expires.
        capacity: rows for ids in a table, without the two reserved rows.
        when_full: ids that a full collisionless table evicts: those not seen for longest ("oldest"), those seen least
            often ("least_frequent"), or none ("refuse": new ids use the row of unknown ids).
        admission: when a new id gets a row: at once ("none"), once it has been counted `threshold` times within
            `window` ("count"), or at each occurrence with Monolith's probability 1 - 0.05^(1 / threshold)
            ("probabilistic"). Until then it uses the row of unknown ids.
        threshold: see `admission`; at most 65,535.
        window: sample time after which a count expires on a stream, such as "7d"; empty: never.
        expire_after: sample time after which an id that was not seen is unknown, such as "30d", and loses its row on a
            stream; empty: never.
        tables: settings of single tables, by the name of their field, or by any name for fields that share a table.
    """

    kind: IdKind = "rows"
    capacity: int = 1_000_000
    when_full: WhenFull = "oldest"
    admission: AdmissionKind = "none"
    threshold: int = 1
    window: str = ""
    expire_after: str = ""
    tables: dict[str, TableIds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("", *self.tables):
            own = self.of_table(name)
            key = f"id_table.tables.{name}" if name else "id_table"
            require_at_least(key, own, "capacity threshold", 1)
            require(f"{key}.capacity", own.capacity, own.capacity < 1 << 31, "below 2^31")
            require(f"{key}.threshold", own.threshold, own.threshold < 1 << 16, "below 2^16")
            for time in ("window", "expire_after"):
                seconds(getattr(own, time), f"{key}.{time}")
            if own.window and own.admission != "count":
                raise SettingError(
                    f'{key}.window = {own.window!r} has no meaning for {key}.admission = "{own.admission}"; set that to'
                    ' "count" or leave window out',
                    f"{key}.window",
                    f"{key}.admission",
                )
            if own.kind != "collisionless":
                _refuse_without_meaning(key, self.tables[name] if name else self, own.kind)
            elif own.threshold > 1 and own.admission == "none":
                raise SettingError(
                    f'{key}.threshold = {own.threshold} has no meaning for {key}.admission = "none"; set that to'
                    ' "count" or "probabilistic", or leave threshold out',
                    f"{key}.threshold",
                    f"{key}.admission",
                )

    def of_table(self, name: str) -> "IdConfig":
        own = copy(self)  # without the checks, which call this
        given = vars(self.tables[name]) if name in self.tables else {}
        vars(own).update(
            {key: value for key, value in given.items() if key != "fields" and value is not None}, tables={}
        )
        return own

    def table_fields(self, known: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Returns the fields of each table, in the order of their first field.

        Raises UserError for a table with an unknown field, or a field in two tables.
        """
        table_of: dict[str, str] = {}
        for table, own in self.tables.items():
            for name in own.fields or (table,):
                key = f"id_table.tables.{table}"
                if name not in known:
                    meant = hint(name, known, "sparse fields")
                    remedy = "" if own.fields else f" (fields that share a table are listed in {key}.fields)"
                    raise UserError(f"{key} names {name!r}, which is not a sparse field; {meant}{remedy}")
                if name in table_of:
                    raise UserError(f"{key} and id_table.tables.{table_of[name]} both name field {name!r}; drop one")
                table_of[name] = table
        found: dict[str, tuple[str, ...]] = {}
        for name in known:
            table = table_of.get(name, name)
            found[table] = (*found.get(table, ()), name)
        return found


def seconds(text: str, key: str) -> int:
    """Converts a time such as "90s", "30m", "12h", "30d" or "4w"; "" is 0. Raises SettingError for another text."""
    if not text:
        return 0
    found = re.fullmatch(r"([1-9][0-9]*)\s*([smhdw])", text)
    if not found:
        message = f'{key} must be a whole number and a unit of s, m, h, d, w, such as "30d"; got {text!r}'
        raise SettingError(message, key)
    return int(found[1]) * _SECONDS[found[2]]


def _refuse_without_meaning(key: str, given: IdConfig | TableIds, kind: str) -> None:
    """Raises SettingError for settings that have no effect on tables of a kind, nor on single tables of other kinds."""
    tables = given.tables.values() if isinstance(given, IdConfig) else ()
    kinds = {kind, *(table.kind for table in tables if table.kind)}
    unused = () if "collisionless" in kinds else ("when_full", "admission", "threshold", "window", "expire_after")
    for name in (*unused, *["capacity"] * (kinds == {"rows"})):
        value = getattr(given, name)
        if value not in (None, getattr(IdConfig, name)):
            other = '"hash" or "collisionless"' if name == "capacity" else '"collisionless"'
            raise SettingError(
                f'{key}.{name} = {value!r} has no meaning for {key}.kind = "{kind}"; set it to {other} or leave {name}'
                " out",
                f"{key}.{name}",
                f"{key}.kind",
            )
