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

AUTO = -1
""""auto" as `train.batch_size` and as `train.epochs`."""
OnNonfinite = Literal["stop", "skip"]
"""Treatment of a batch that would make the model's state non-finite."""


@dataclass(frozen=True)
class DataConfig:
    """`[data]`: the data set and how it is read.

    Attributes:
        dir: folder of the prepared data set; `--data` overrides it.
        resident: whether the device keeps the samples that each epoch trains on or measures: "yes", "no", or "auto".
            "auto" keeps them if they need at most half of the memory that the model leaves. "yes" always keeps the
            training samples, and applies that limit to the measured samples alone.
        window_rows: number of samples that are shuffled together, and that are in memory together while streaming.
    """

    dir: str = ""
    resident: Literal["auto", "yes", "no"] = "auto"
    window_rows: int = 1 << 20

    def __post_init__(self) -> None:
        require("data.window_rows", self.window_rows, self.window_rows >= 1, "a positive number of rows")


@dataclass(frozen=True)
class TrainConfig:
    """`[train]`: batch size, length, device, loss and precision of a run.

    Attributes:
        batch_size: number of samples in a step, over all processes. 0: the largest power of two with at least 100 full
            steps in an epoch, but from 64 to 512. "auto" (or -1): the largest power of two, up to 65,536, with at least
            200 steps in an epoch, but at least the default. Online, both mean optimizer.base_batch_size.
        eval_batch_size: number of samples in a batch of an evaluation, over all processes.
        accumulation: number of parts of each global batch. A process takes the parts one after the other, each with its
            forward and backward pass. One step and one clip over all parts follow. Activations need less memory, and
            results are the same up to rounding. Not with collisionless id tables, nor online.
        epochs: number of passes over the training samples; with `patience`, the largest number. "auto" (or -1), the
            default, trains as long as the quality of the validation samples improves. It stands for 50 epochs. Where
            `patience` and checkpoint.keep_best have their defaults, they are then 100 steps in epochs, from 1 to 4, and
            "logloss". "auto" stands for 2 epochs without validation samples or `average`, and in `cowrec tune`.
        average: whether the running mean of the weights is measured, kept and exported, instead of the last weights. In
            the mean, the later of eight states of each epoch count more; see docs/train.md. Not with collisionless id
            tables. The default is true up to 2,000,000 training samples, but false with collisionless id tables,
            unified memory or an lr_decay, and online.
        validation_fraction: share of the training split that is kept out of training and measured after each epoch, for
            data without a validation split. These are the last samples in the stored order. 0: none.
        patience: number of epochs without a better validation quality after which training ends; checkpoint.keep_best
            names the measure of that quality. 0: training never ends early.
        seed: seed of the initial values and of shuffling.
        device: "auto" is CUDA on a machine with a GPU, and otherwise the CPU.
        log_every: number of steps between two lines of metrics, and between two checks that the loss is finite.
        log_seconds: seconds between two lines about the progress of the run. A line comes with the next metrics, after
            `log_every` steps. 0: no lines.
        warm_start: folder of an earlier run whose weights the run starts from. Rows are matched by the ids that they
            stand for.
        timeout_seconds: seconds after which a process that keeps the others waiting counts as hung, which ends the run.
        loss: loss of a sample: "bce" is the binary cross-entropy. "focal" gives less weight to samples that are
            predicted well already. "module:function" is a loss of your own, (logits, label) -> loss of each sample; see
            docs/models.md. AUC and logloss are measured for every loss.
        task_weights: weights of the losses of several labels, a table by the name of the label. Labels that are not
            listed have weight 1.
        loss_options: options of the loss, a table: gamma and alpha of "focal", or those of your function.
        trackers: trackers of experiments that receive the metrics too: "mlflow", "wandb" or both. Server, project and
            credentials come from the environment variables of their libraries; see docs/train.md.
        precision: precision of the hidden layers. "tf32" (CUDA only) rounds the factors of matrix products. "bfloat16"
            rounds their results too. Weights, logits, loss, moments and tables stay float32.
        cuda_graph: whether each step is launched as a captured CUDA graph on CUDA with one process. The run must have
            one id in each field, optimizer.embedding = "adam", and another optimizer.absent_rows than "dense". Results
            do not depend on the graph.
    """

    batch_size: int = 0
    eval_batch_size: int = 16384
    accumulation: int = 1
    epochs: int = AUTO
    average: bool | None = None
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
        epochs = self.epochs
        require("train.epochs", epochs, epochs == AUTO or epochs >= 1, f'at least 1, or "auto", in Python {AUTO}')
        is_size = isinstance(self.batch_size, int) and self.batch_size >= AUTO
        require("train.batch_size", self.batch_size, is_size, f'at least 0, or "auto", in Python {AUTO}')
        require_at_least("train", self, "eval_batch_size log_every", 1)
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
    """`[evaluate]`: measures beside the quality of the validation samples and of the test split.

    Attributes:
        by_id_counts: whether thirds of the test samples are measured too, by how often their ids occur in training.
            This reads the ids of the training split once more at the start, one field at a time.
    """

    by_id_counts: bool = False


@dataclass(frozen=True)
class CheckpointConfig:
    """`[checkpoint]`: when the state of the run is saved, and which checkpoints are kept.

    Attributes:
        every_steps: number of steps between two checkpoints within an epoch. 0: only the checkpoint after each epoch.
        keep_last: number of latest checkpoints that are kept.
        keep_best: measure by which the checkpoint of the best epoch is kept as well: "auc" or "logloss" of the
            validation samples, or of the test split if there are none. The report and later commands then use this
            epoch. "none": no such checkpoint is kept.
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
    """`[sharding]`: how tables are split over processes; results do not depend on it.

    Attributes:
        plan: kind of all tables. "table_wise": a table is on one process. "row_wise": the rows of a table are split
            over all processes. "column_wise": the columns of a table are split, into shards whose width is a multiple
            of four. "table_row_wise": the rows of a table are split over the processes of one machine. "data_parallel":
            every process has a copy, for small tables. "auto": on CUDA the choice of TorchRec's planner; on CPU
            row_wise for a table larger than half of a process's share of all bytes, and table_wise for all others.
        tables: kinds of single tables, by the name of their field; they take precedence over the plan.
        memory: memory for tables and moments on CUDA: that of the "device", or unified memory of the host ("uvm") for
            larger tables, which the GPU accesses over the bus. Data-parallel tables stay on the device.
    """

    plan: Literal["auto", "table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel"] = "auto"
    tables: dict[str, ShardingKind] = field(default_factory=dict)
    memory: Literal["device", "uvm"] = "device"


LrDecay = Literal["none", "linear", "cosine"] | float


@dataclass(frozen=True)
class OptimizerConfig:
    """`[optimizer]`: learning rates, L2 and other values at a base batch size, and the rule that scales them.

    The defaults are for any data. The values of the CowClip paper are in trainer/configs.

    Attributes:
        embedding: optimizer of the tables. "adam" is cowrec's Adam with L2 in the gradient, on CPU and CUDA. The others
            are FBGEMM's fused optimizers ("fbgemm_adam" on CUDA only). Under them, clip and L2 apply to the rows of the
            batch, and every field needs exactly one id in each sample. "fbgemm_cowclip" is row-wise Adagrad with
            FBGEMM's COWCLIP mode, which differs from the paper. There the limit of a row is
            ``steps * max(||w||, 1e-5)`` under every scaling rule, where steps counts the steps in which the row
            appeared so far. Adagrad accumulates the unclipped gradient, and norms and scales are those of complete rows
            with the wide weight.
        absent_rows: treatment of absent rows under "adam". A row is absent if its id does not occur in the batch. In
            the algorithm of the paper, L2 and momentum move every row at every step. "replay", the default, computes
            this algorithm: a row takes the steps that it missed when it is next needed. "dense" computes the same at
            once, at the cost of the whole table. "lazy" skips the missed steps.
        base_batch_size: batch size at which embedding_lr, dense_lr, l2, betas and eps were chosen.
        scaling: rule that converts these values to train.batch_size; "none" keeps them. "half_life" is the default, and
            "cowclip" is the rule of the CowClip paper. docs/large_batch.md compares the rules.
        embedding_lr, dense_lr, l2: learning rates of tables and network, and coefficient of L2, at the base batch size.
            embedding_lr is by default 2e-3 at batch 1,024; Adam's with more than 2,000,000 training samples is 2e-3 *
            sqrt(2,000,000 / samples). l2 applies to embeddings, wide weights and the linear part of the dense features.
            It is by default 20 * (train.epochs, at most 4) / (training samples), without train.average 20 *
            (train.epochs - 1, at most 2) / (training samples), between 1e-6 and 1e-2, and 1e-6 for a stream.
        embedding_lr_factors: factors of the learning rate of single tables, embeddings and wide weights, such as
            `{ city = 0.5 }`, by the name of their field, or of the table that fields share. 0 freezes a table. Scaling,
            warm-up and lr_decay of embedding_lr come before the factor.
        weight_decay: decoupled weight decay of the tables (AdamW), embeddings and wide weights. Each step also
            multiplies all rows by ``1 - lr * weight_decay``; with optimizer.absent_rows = "lazy", only the rows of the
            batch. The decay is not part of the gradient and is not clipped. Needs optimizer.embedding = "adam".
        dense_weight_decay: decoupled weight decay of all parameters of the network, biases included. Both decays are
            values at the base batch size. The scaling rules keep the decay for each sample.
        cross_l2: coefficient of the squares of the parameters of cross layers, CIN and AutoInt; not scaled.
        wide: optimizer of the wide weights. "ftrl" is FTRL-Proximal (McMahan et al. 2013) without L1, which is Adagrad:
            the rate of a weight falls as its id occurs. L2, weight decay and lr_decay do not apply to it. It suits ids
            that keep arriving, as online. Needs optimizer.embedding = "adam".
        wide_alpha: learning rate of FTRL at every batch size. The first step of a weight is
            ``wide_alpha * g / (1 + |g|)``, where g is the gradient of the sum of the batch's losses.
        warmup_epochs: number of epochs over which the learning rate of the network rises linearly from 1e-8.
        lr_decay: how both learning rates fall. "linear" and "cosine": to 0 over train.epochs, in a straight line or
            half a cosine wave. A number: to a tenth after every so many epochs. "none": they stay constant, as in the
            paper. The default is "linear" for Adam from 100,000 training samples and 100 steps on, if neither
            embedding_lr nor train.patience is set, and otherwise "none". A stream has no epochs, so decay and warm-up
            have no effect online.
        betas, eps, adam_epsilon: values of Adam, for the network and for the tables. betas and eps are values at the
            base batch size. `adam_epsilon` selects the position of eps in the formula ("torch" or "keras").
        embedding_init_std: standard deviation of the initial values of the tables. Wide weights start at 0.
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
        if self.wide != "ftrl" and self.wide_alpha != OptimizerConfig.wide_alpha:
            raise SettingError(
                f'optimizer.wide_alpha = {self.wide_alpha} has no meaning for optimizer.wide = "{self.wide}"; set that'
                ' to "ftrl", or leave the rate out',
                "optimizer.wide_alpha",
                "optimizer.wide",
            )
        fused, remedy = "FBGEMM's fused optimizers", "leave it out or change the optimizer"
        for key, is_set, why in (
            ("absent_rows", self.absent_rows not in (None, "lazy"), f": {fused} move the batch's rows alone; {remedy}"),
            ("wide", self.wide == "ftrl", f": {fused} update the wide weight with its row; {remedy}"),
            ("weight_decay", self.weight_decay > 0, "; use optimizer.l2, or change the optimizer"),
        ):
            if is_set and self.embedding != "adam":
                raise SettingError(
                    f'optimizer.{key} = {getattr(self, key)!r} needs optimizer.embedding = "adam", got'
                    f" {self.embedding!r}{why}",
                    f"optimizer.{key}",
                    "optimizer.embedding",
                )


@dataclass(frozen=True)
class ClipConfig:
    """`[clip]`: the rule that bounds the gradients of embedding rows.

    Attributes:
        rule: clip rule. "field", "adaptive_field" and "global" take the norm over the rows of the batch, or over all
            rows with optimizer.absent_rows = "dense". They cannot be combined with "replay".
        r, zeta, bound, max_norm: values of the rule at optimizer.base_batch_size, which optimizer.scaling converts to
            train.batch_size. r is the share of a row's weight norm that one occurrence may move, and zeta the floor of
            that limit. bound belongs to "cowclip_reference", whose form of the limit is in docs/algorithm.md. max_norm
            is the threshold of "constant", "field" and "global".
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
    """`[online]`: training on a stream. Values such as "90s" or "30d" are sample time; `_seconds` are wall-clock time.

    Attributes:
        lateness: sample time to wait for older samples, so that samples can be put in order.
        late: treatment of a sample that arrives even later: "drop" leaves it out, and "train" trains on it on arrival.
            The sample is counted in both cases.
        duplicates_window: number of latest samples whose `sample_id` is remembered. A repeated sample is left out.
        ahead: largest time by which a sample may be ahead of this machine's clock. A sample beyond it is malformed,
            because it would make all others late and expire ids. A data set on a local disk with such a sample is
            refused under id_table.expire_after or window. Empty: no limit.
        max_wait_seconds: seconds without a new sample after which a partial batch is trained on; 0: never.
        window: sample time over which progressive AUC, logloss and calibration are computed.
        snapshot_seconds: seconds between two checkpoints.
        on_nonfinite: what happens at a batch whose loss or gradient is not finite, or so large that moments would
            overflow. "skip" leaves the batch out and saves its samples in the folder `quarantine` of the run. "stop"
            ends the run. Ten such batches in a row always end the run.
        report_seconds: seconds between two reports of what arrived, also while nothing is trained on. The report warns
            of samples that were left out.
        on_lost_samples: what a resumed run does if the source no longer has samples that the journal refers to. "stop"
            ends the run. "continue" goes on with those that are there, and counts the others.
        max_malformed_share: largest share of malformed samples among the last 1,000 samples and those that arrive; 1:
            any share.
        on_malformed: what happens beyond that share. "wait" takes no further sample, keeps the position and looks again
            every ten seconds. "stop" ends the run.
        malformed_file_bytes: size in bytes at which `malformed.jsonl`, the run's file of malformed samples, is renamed
            to `malformed.jsonl.1`, which replaces the previous one; 0: no limit.
        file_order: order in which files of a source are read. "time" is that of their modification times. "name" is
            that of their names, which a copy of the folder repeats exactly.
        file_grace_seconds: seconds since a file of the source was last written to, in which an unreadable file is
            waited for.
        damaged_files: what happens at a file of the source that cannot be read after that: "stop" ends the run, and
            "skip" leaves the file out with a warning.
        metrics_port: port on which Prometheus reads the metrics of the run; 0: none.
        metrics_file_bytes: size in bytes at which `metrics.jsonl` is renamed to `metrics.jsonl.1`, which replaces the
            previous one; 0: no limit.
        metrics_host: address of that port; by default the loopback address, which other machines cannot reach.
        publish_seconds: seconds between two publications of rows.
        dense_seconds: seconds between two publications of the dense weights.
        keep_full_versions: number of full versions that a publication keeps, with the deltas after the oldest of them.
            `cowrec versions --republish` goes back to any of these.
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
    on_lost_samples: Literal["stop", "continue"] = "stop"
    max_malformed_share: float = 1.0
    on_malformed: Literal["wait", "stop"] = "wait"
    malformed_file_bytes: int = 64 << 20
    file_order: Literal["time", "name"] = "time"
    file_grace_seconds: float = 30.0
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
        require_at_least("online", self, "malformed_file_bytes file_grace_seconds")
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
        kind: how ids become rows. "rows": the ids of the data are row numbers. "hash": an id has row
            ``hash(id) % capacity``, which several ids may share. "collisionless": every id has a row of its own until
            the id is evicted or expires.
        capacity: number of rows for ids in a table, without the two reserved rows.
        when_full: ids that a full collisionless table evicts: "oldest" evicts the ids that were not seen for longest,
            and "least_frequent" those that were seen least often. "refuse" evicts none; new ids then use the row of
            unknown ids.
        admission: when a new id gets a row. "none": at once. "count": once it was counted `threshold` times within
            `window`. "probabilistic": at each occurrence with Monolith's probability 1 - 0.05^(1 / threshold). Until
            then the id uses the row of unknown ids.
        threshold: number of occurrences that `admission` takes, at most 65,535.
        window: sample time after which a count of admission expires on a stream, such as "7d"; empty: never.
        expire_after: sample time without an occurrence after which an id is unknown, such as "30d". On a stream the id
            then loses its row. Empty: never.
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
