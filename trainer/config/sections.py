"""The sections of a run's configuration that belong to the trainer, each a frozen dataclass that checks itself."""

from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from .checks import require

OnNonfinite = Literal["stop", "skip"]
"""What is done about a batch that would make the model's state non-finite."""


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
        require("data.window_rows", self.window_rows, self.window_rows >= 1, "a positive number of rows")


@dataclass(frozen=True)
class TrainConfig:
    """`[train]`: how long, how large, where.

    Attributes:
        batch_size: samples per step over all processes. 0: by the number of training samples, the largest power of two
            with at least 100 steps in an epoch, but from 64 to 512; online optimizer.base_batch_size.
        eval_batch_size: the same at evaluation.
        batch_ramp: steps at each of optimizer.base_batch_size, twice that, four times that and so on, while below
            batch_size, with which the run begins, each with the scaled values of its batch size; needs
            optimizer.embedding = "adam". 0: every step has batch_size.
        accumulation: parts of each global batch that a process takes one after the other, each with its forward and
            backward pass, before the one step and clip over all of them: less memory for activations, the same results
            up to rounding. Not with collisionless id tables, nor online.
        epochs: passes over the training set; at most, with `patience`.
        validation_fraction: share of the training split, its last samples in the stored order, that is kept out of
            training and measured after each epoch, for data without a validation split; 0: none.
        patience: epochs without a better validation quality, that of checkpoint.keep_best, after which training ends.
            0: never.
        seed: seed of initial values and shuffling.
        device: "auto" is CUDA on a machine with a GPU, else the CPU.
        drop_last: leave out the short last batch of an epoch.
        log_every: steps between two lines of metrics, and between two checks that the loss is finite.
        log_seconds: seconds between two lines about the progress of the run, where stderr is no terminal; a line comes
            with the next metrics, after `log_every` steps. 0: no lines.
        warm_start: folder of an earlier run whose weights to start from; rows are matched by the ids they stand for.
        timeout_seconds: time after which a process that keeps the others waiting counts as hung, which ends the run.
        loss: loss of a sample: "bce", the binary cross-entropy; "focal", which counts samples less that are predicted
            well already; or "module:function" for a loss of your own, (logits, label) -> loss of each sample. See
            docs/models.md. AUC and logloss are measured whatever the loss.
        task_weights: weight of the loss of each of several labels, by its name, as a table; 1 for those not listed.
        loss_options: options of the loss, as a table: gamma and alpha of "focal", or those of your function.
        trackers: trackers of experiments that get the metrics too: "mlflow", "wandb" or both. Server, project and
            credentials come from the environment variables of their libraries; see docs/training.md.
        precision: precision of the network's hidden layers. "tf32" (CUDA only) rounds the factors of matrix products,
            "bfloat16" their results too; weights, logits, loss, moments and tables stay float32.
        cuda_graph: on CUDA with one process, launch each step at once, as a captured CUDA graph, where the run allows
            it: one id in each field, optimizer.embedding = "adam", and neither optimizer.absent_rows = "dense" nor
            sharding.memory = "uvm_caching". Results do not depend on it.
        on_nonfinite: at a batch whose loss or gradient is not finite, or so large that moments would overflow: "stop",
            where the loss is checked with the metrics; or "skip" the batch, which is logged: it changes neither weights
            nor moments, and each step then waits for the device. Ten such batches in a row end the run.
    """

    batch_size: int = 0
    eval_batch_size: int = 16384
    batch_ramp: int = 0
    accumulation: int = 1
    epochs: int = 2
    validation_fraction: float = 0.0
    patience: int = 0
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    drop_last: bool = False
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
    on_nonfinite: OnNonfinite = "stop"

    def __post_init__(self) -> None:
        require("train.log_seconds", self.log_seconds, 0 <= self.log_seconds < inf, "at least 0 and finite")
        require("train.batch_size", self.batch_size, self.batch_size >= 0, "at least 0")
        for key in ("eval_batch_size", "epochs", "log_every"):
            require(f"train.{key}", getattr(self, key), getattr(self, key) >= 1, "at least 1")
        require("train.timeout_seconds", self.timeout_seconds, 1 <= self.timeout_seconds < inf, "at least 1 and finite")
        for name, weight in self.task_weights.items():
            require(f"train.task_weights.{name}", weight, 0 <= weight < inf, "at least 0 and finite")
        fraction = self.validation_fraction
        require("train.validation_fraction", fraction, 0 <= fraction < 1, "at least 0 and below 1")
        require(
            "train.accumulation",
            self.accumulation,
            1 <= self.accumulation <= (self.batch_size or inf),
            f"from 1 to train.batch_size{f' = {self.batch_size}' if self.batch_size else ''}",
        )
        require("train.batch_ramp", self.batch_ramp, self.batch_ramp >= 0, "at least 0")
        require("train.patience", self.patience, self.patience >= 0, "at least 0")
        require("train.seed", self.seed, 0 <= self.seed < 1 << 63, "at least 0 and below 2^63")


@dataclass(frozen=True)
class EvaluateConfig:
    """`[evaluate]`: what is measured beside the quality of the validation samples and the test split.

    Attributes:
        by_id_counts: also measure thirds of the test samples by how often their ids occur in training; reads the ids of
            the training split once more at the start, one field at a time.
        train_rows: training samples to measure as well: the same random sample each time, kept in memory; reads the
            training split once more at the start. 0: none.
        logistic_regression_rows: where there are at most so many training samples, what one-hot logistic regression
            reaches on the same samples stands beside the first report; fitted after the first epoch. 0: never.
        main_task: of several labels, the one whose quality is the run's: `auc` and `logloss` are its, and with them
            the best epoch and what groups of samples are measured by. By default the first label.
    """

    by_id_counts: bool = False
    train_rows: int = 0
    logistic_regression_rows: int = 200_000
    main_task: str = ""

    def __post_init__(self) -> None:
        for key in ("train_rows", "logistic_regression_rows"):
            require(f"evaluate.{key}", getattr(self, key), getattr(self, key) >= 0, "at least 0")


@dataclass(frozen=True)
class CheckpointConfig:
    """`[checkpoint]`: when the run's state is saved, and which checkpoints are kept.

    Attributes:
        every_steps: steps between two checkpoints within an epoch; 0: only the one after each epoch.
        keep_last: number of latest checkpoints to keep.
        keep_best: also keep the checkpoint after the epoch with the best "auc" or "logloss" of the validation samples,
            or of the test split where there are none. The report and later commands are of that epoch.
        asynchronous: train while a checkpoint is written, which needs memory for a copy of tables and moments.
    """

    every_steps: int = 0
    keep_last: int = 2
    keep_best: Literal["none", "auc", "logloss"] = "none"
    asynchronous: bool = True

    def __post_init__(self) -> None:
        require("checkpoint.every_steps", self.every_steps, self.every_steps >= 0, "at least 0")
        require("checkpoint.keep_last", self.keep_last, self.keep_last >= 1, "at least 1")


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
