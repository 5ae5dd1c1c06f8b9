"""The sections of a run's configuration that belong to the trainer, each a frozen dataclass that checks itself."""

import dataclasses
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from cowrec.sparse_opt import CLIP_RULES, SCALING_RULES, ClipRule, NoClip

from .nearest_name import require_known


@dataclass(frozen=True)
class DataConfig:
    """`[data]`: where batches come from.

    Attributes:
        dir: a prepared data set; `--data` overrides it.
        resident: keep the training set on the device: "yes", "no", or "auto" (if it needs at most half of the memory
            that the model leaves).
        window_rows: samples shuffled together, and in memory together while streaming.
    """

    dir: str = ""
    resident: Literal["auto", "yes", "no"] = "auto"
    window_rows: int = 1 << 20

    def __post_init__(self) -> None:
        _require("data.window_rows", self.window_rows, self.window_rows >= 1, "a positive number of rows")


@dataclass(frozen=True)
class TrainConfig:
    """`[train]`: how long, how large, where.

    Attributes:
        batch_size: samples per step over all processes.
        eval_batch_size: the same at evaluation.
        batch_ramp: steps at each of optimizer.base_batch_size, twice that, four times that and so on, while below
            batch_size, with which the run begins, each with the scaled values of its batch size; needs
            optimizer.embedding = "adam". 0: every step has batch_size.
        epochs: passes over the training set; at most, with `patience`.
        validation_fraction: share of the training split, its last samples in the stored order, that is kept out of
            training and measured after each epoch; 0: none.
        patience: epochs without a better validation quality, that of checkpoint.keep_best, after which training ends;
            report and later commands then use the best epoch. 0: never.
        seed: seed of initial values and shuffling.
        device: "auto" is CUDA on a machine with a GPU, else the CPU.
        drop_last: leave out the short last batch of an epoch.
        log_every: steps between two lines of metrics, and between two checks that the loss is finite.
        warm_start: folder of an earlier run whose weights to start from; rows are matched by the ids they stand for.
        timeout_seconds: time after which a process that keeps the others waiting counts as hung, which ends the run.
        precision: precision of the network's hidden layers. "tf32" (CUDA only) rounds the factors of matrix products,
            "bfloat16" their results too; weights, logits, loss, moments and tables stay float32.
        cuda_graph: on CUDA with one process, launch each step at once, as a captured CUDA graph, where the run allows
            it: one id in each field, optimizer.embedding = "adam", and neither optimizer.absent_rows = "dense" nor
            sharding.memory = "uvm_caching". Results do not depend on it.
    """

    batch_size: int = 1024
    eval_batch_size: int = 16384
    batch_ramp: int = 0
    epochs: int = 10
    validation_fraction: float = 0.0
    patience: int = 0
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    drop_last: bool = False
    log_every: int = 50
    warm_start: str = ""
    timeout_seconds: float = 600.0
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    cuda_graph: bool = True

    def __post_init__(self) -> None:
        for key in ("batch_size", "eval_batch_size", "epochs", "log_every"):
            _require(f"train.{key}", getattr(self, key), getattr(self, key) >= 1, "at least 1")
        _require(
            "train.timeout_seconds", self.timeout_seconds, 1 <= self.timeout_seconds < inf, "at least 1 and finite"
        )
        fraction = self.validation_fraction
        _require("train.validation_fraction", fraction, 0 <= fraction < 1, "at least 0 and below 1")
        _require("train.batch_ramp", self.batch_ramp, self.batch_ramp >= 0, "at least 0")
        _require("train.patience", self.patience, self.patience >= 0, "at least 0")
        _require("train.seed", self.seed, 0 <= self.seed < 1 << 63, "at least 0 and below 2^63")


@dataclass(frozen=True)
class EvaluateConfig:
    """`[evaluate]`: what is measured after each epoch, beside AUC and logloss of the test split.

    Attributes:
        by_id_counts: also measure thirds of the test samples by how often their ids occur in training; reads the ids of
            the training split once more at the start, one field at a time.
        train_rows: training samples to measure as well: the same random sample each time, kept in memory; reads the
            training split once more at the start. 0: none.
    """

    by_id_counts: bool = False
    train_rows: int = 0

    def __post_init__(self) -> None:
        _require("evaluate.train_rows", self.train_rows, self.train_rows >= 0, "at least 0")


@dataclass(frozen=True)
class CheckpointConfig:
    """`[checkpoint]`: when the run's state is saved, and which checkpoints are kept.

    Attributes:
        every_steps: steps between two checkpoints within an epoch; 0: only the one after each epoch.
        keep_last: number of latest checkpoints to keep.
        keep_best: also keep the checkpoint after the epoch with the best "auc" or "logloss" of the validation samples,
            or of the test split where train.validation_fraction = 0.
        asynchronous: train while a checkpoint is written, which needs memory for a copy of tables and moments.
    """

    every_steps: int = 0
    keep_last: int = 2
    keep_best: Literal["none", "auc", "logloss"] = "none"
    asynchronous: bool = True

    def __post_init__(self) -> None:
        _require("checkpoint.every_steps", self.every_steps, self.every_steps >= 0, "at least 0")
        _require("checkpoint.keep_last", self.keep_last, self.keep_last >= 1, "at least 1")


@dataclass(frozen=True)
class OptimizerConfig:
    """`[optimizer]`: hyperparameters at a base batch size, and the rule that scales them to another.

    Attributes:
        embedding: optimizer of the tables. "adam" is cowrec's Adam with coupled L2, on CPU and CUDA; the others are
            FBGEMM's fused ones ("fbgemm_adam" on CUDA only), with clip and L2 applied to the gradients of the batch's
            rows; every field then needs exactly one id per sample. "fbgemm_cowclip" is row-wise Adagrad with FBGEMM's
            COWCLIP mode, which differs from the paper: it counts the steps in which a row appeared, decayed or
            cumulative, instead of its occurrences in the batch; Adagrad accumulates the unclipped gradient; norms and
            scales are of complete rows, the wide weight included.
        absent_rows: for "adam", the update of rows without an id in the batch. "replay", the default, is the published
            algorithm: L2 and momentum move every row at every step; a row's steps are computed when it is next needed.
            "dense" computes the same at once, at the cost of the whole table. "lazy" skips these steps.
        base_batch_size: the batch size of embedding_lr, dense_lr, l2, betas and eps.
        scaling: the rule that scales these values to train.batch_size; "none" keeps them. "half_life", the default,
            keeps the quality of the base batch; "cowclip" is the published rule.
        embedding_lr, dense_lr, l2: values at the base batch size. l2 is on embeddings, wide weights and the linear
            kernel.
        cross_l2: coefficient of the squares of the cross layers' parameters; not scaled.
        warmup_epochs: epochs over which the dense learning rate rises linearly from 1e-8.
        lr_decay: "linear": both learning rates fall linearly to 0 over train.epochs, which often improves the last
            quality at every batch size; a stream has no end, so that it has no effect online. "none": they stay, as
            published.
        betas, eps, adam_epsilon: Adam's values, dense and embedding, betas and eps at the base batch size;
            `adam_epsilon` selects the position of eps in the formula ("torch" or "keras").
        embedding_init_std: standard deviation of the tables' initial values; wide weights start at 0.
        weight_norm_coefficient, lower_bound: for "fbgemm_cowclip", whose limit of a row is
            ``counter * max(weight_norm_coefficient * ||w||, lower_bound)``; no scaling rule changes them.
        counter_halflife: for "fbgemm_cowclip": steps after which a row's appearance counts half; -1: every appearance
            counts fully; 0: only the present one counts.
    """

    embedding: Literal["adam", "rowwise_adagrad", "adagrad", "sgd", "fbgemm_adam", "fbgemm_cowclip"] = "adam"
    absent_rows: Literal["replay", "dense", "lazy"] | None = None
    base_batch_size: int = 1024
    scaling: str = "half_life"
    embedding_lr: float = 1e-4
    dense_lr: float = 8e-4
    l2: float = 1e-5
    cross_l2: float = 0.0
    warmup_epochs: float = 1.0
    lr_decay: Literal["none", "linear"] = "none"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    adam_epsilon: Literal["torch", "keras"] = "torch"
    embedding_init_std: float = 1e-2
    weight_norm_coefficient: float = 1.0
    lower_bound: float = 1e-5
    counter_halflife: int = -1

    def __post_init__(self) -> None:
        _require("optimizer.base_batch_size", self.base_batch_size, self.base_batch_size >= 1, "at least 1")
        require_known("optimizer.scaling", self.scaling, SCALING_RULES)
        for key in (
            *("embedding_lr", "dense_lr", "l2", "cross_l2", "warmup_epochs", "embedding_init_std"),
            *("weight_norm_coefficient", "lower_bound"),
        ):
            value = getattr(self, key)
            _require(f"optimizer.{key}", value, 0 <= value < inf, "at least 0 and finite")
        _require("optimizer.eps", self.eps, 0 < self.eps < inf, "above 0")
        _require("optimizer.betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)")
        if self.embedding != "adam" and self.absent_rows not in (None, "lazy"):
            raise ValueError(
                f'optimizer.absent_rows = "{self.absent_rows}" needs optimizer.embedding = "adam", got'
                f" {self.embedding!r}: FBGEMM's fused optimizers move the rows of the batch alone; leave it out or"
                " change the optimizer"
            )
        _require("optimizer.counter_halflife", self.counter_halflife, self.counter_halflife >= -1, "at least -1")


@dataclass(frozen=True)
class ClipConfig:
    """`[clip]`: the rule for the embedding rows.

    A rule accepts its own values only; "none" ignores all values.

    Attributes:
        rule: one of the clip rules. "field", "adaptive_field" and "global" take the norm over the batch's rows, or over
            all rows with optimizer.absent_rows = "dense"; they cannot be combined with "replay".
        r, zeta, bound, max_norm: values of the rule at optimizer.base_batch_size; optimizer.scaling scales them to
            train.batch_size. max_norm is the threshold of "constant", "field" and "global".
        histogram: count rows by ``||g|| / limit``, in the steps after which metrics are written, into the report's
            `clip_histogram`.
    """

    rule: str = "cowclip"
    r: float | None = None
    zeta: float | None = None
    bound: float | None = None
    max_norm: float | None = None
    histogram: bool = False

    def __post_init__(self) -> None:
        require_known("clip.rule", self.rule, CLIP_RULES)
        self.build()

    def build(self) -> ClipRule:
        if self.rule == NoClip.name:  # so that the one override clip.rule=none turns any run's clip off
            return NoClip()
        kind: Any = CLIP_RULES[self.rule]
        values = {key: value for key, value in dataclasses.asdict(self).items() if key not in ("rule", "histogram")}
        given = {key: value for key, value in values.items() if value is not None}
        known = {each.name for each in dataclasses.fields(kind)}
        for key, value in given.items():
            if key not in known:
                takes = f"it takes {', '.join(sorted(known))}" if known else "it takes no values"
                raise ValueError(f"clip.{key} = {value} has no meaning for clip.rule = {self.rule!r}; {takes}")
        for each in dataclasses.fields(kind):
            if each.default is dataclasses.MISSING and each.name not in given:
                raise ValueError(f"clip.rule = {self.rule!r} needs clip.{each.name}")
        return kind(**given)


ShardingKind = Literal["table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel"]


@dataclass(frozen=True)
class ShardingConfig:
    """`[sharding]`: how tables are sharded over processes; results do not depend on it.

    Attributes:
        plan: the kind of all tables. "table_wise": a table is on one process. "row_wise": its rows are split over all
            processes. "column_wise": its columns are, into shards whose width is a multiple of four. "table_row_wise":
            its rows are split over the processes of one machine. "data_parallel": every process has a copy, for small
            tables. "auto": on CUDA the choice of TorchRec's planner; on CPU row-wise for a table of more than half of a
            process's share of all bytes, else table-wise.
        tables: the kind of single tables, by the name of their field; takes precedence over the plan.
        memory: memory for tables and moments on CUDA: the "device"'s, or for larger tables the host's as unified memory
            ("uvm"), which the GPU accesses over the bus, or the host's with a cache of weights on the device
            ("uvm_caching"; a fifth of the rows, FBGEMM's default). Data-parallel tables stay on the device.
    """

    plan: Literal["auto", "table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel"] = "auto"
    tables: dict[str, ShardingKind] = field(default_factory=dict)
    memory: Literal["device", "uvm", "uvm_caching"] = "device"


def _require(key: str, value: Any, fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"{key} must be {what}, got {value!r}")
