"""The `[online]` section: training on samples as they arrive."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from .id_table import seconds
from .sections import OnNonfinite


@dataclass(frozen=True)
class OnlineConfig:
    """`[online]`; values such as "90s", "12h" or "30d" are sample time, keys in seconds are wall-clock time.

    Attributes:
        lateness: sample time to wait for older samples, so that samples can be put in order.
        late: treatment of a sample that arrives even later: leave it out ("drop"), or train on it on arrival ("train");
            it is counted in both cases.
        duplicates_window: number of latest samples whose `sample_id` is remembered; a repeated sample is left out.
        ahead: a sample whose time is further ahead of this machine's clock is malformed, since it would make all others
            late and expire ids; empty: no limit.
        most_waiting: most samples to hold while they are put in order.
        max_wait_seconds: time without a new sample after which a partial batch is trained on; 0: never.
        warmup_steps: steps over which the dense learning rate rises; a stream has no epochs, so that
            optimizer.warmup_epochs has no effect.
        window: sample time over which progressive AUC, logloss and calibration are computed.
        snapshot_seconds: time between two checkpoints.
        on_nonfinite: at a batch whose loss or gradient is not finite, or so large that moments would overflow: "skip"
            it, which saves its samples in the run's folder `quarantine`; or "stop". Ten such batches in a row end the
            run.
        report_seconds: time between two reports of what arrived, also while nothing is trained on; samples that were
            left out are warned of.
        damaged_files: at a file of the source that cannot be read, "stop", or "skip" it with a warning.
        metrics_port: port on which Prometheus reads the metrics of the run; 0: none.
        metrics_file_bytes: size at which `metrics.jsonl` becomes `metrics.jsonl.1`, and what was that is removed; 0: no
            limit.
        metrics_host: address to listen on; by default the loopback address, which other machines cannot reach.
        publish_seconds: time between two publications of rows.
        dense_seconds: time between two publications of the dense weights.
        keep_full_versions: full versions that a publication keeps, with the deltas after the oldest of them; servers
            can be pinned to any of these.
    """

    lateness: str = ""
    late: Literal["drop", "train"] = "drop"
    duplicates_window: int = 1 << 18
    ahead: str = "1d"
    most_waiting: int = 1 << 20
    max_wait_seconds: float = 5.0
    warmup_steps: int = 0
    window: str = "1h"
    snapshot_seconds: float = 60.0
    on_nonfinite: OnNonfinite = "skip"
    report_seconds: float = 60.0
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
        if not self.window:
            raise ValueError('online.window must be a time such as "1h", got an empty text')
        if self.most_waiting < 1:
            raise ValueError(f"online.most_waiting must be at least 1, got {self.most_waiting}")
        if not 0 <= self.metrics_port < 1 << 16:
            raise ValueError(f"online.metrics_port must be between 0 and 65535, got {self.metrics_port}")
        for key in ("duplicates_window", "warmup_steps", "metrics_file_bytes"):
            if getattr(self, key) < 0:
                raise ValueError(f"online.{key} must be at least 0, got {getattr(self, key)}")
        if self.keep_full_versions < 2:
            raise ValueError(
                f"online.keep_full_versions must be at least 2, got {self.keep_full_versions}: a server that is behind"
                " needs the last but one"
            )
        for key in ("max_wait_seconds", "snapshot_seconds", "report_seconds", "publish_seconds", "dense_seconds"):
            if not 0 <= getattr(self, key) < inf:
                raise ValueError(f"online.{key} must be at least 0 and finite, got {getattr(self, key)}")
