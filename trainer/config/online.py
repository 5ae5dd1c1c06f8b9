"""The `[online]` section: training on samples as they arrive."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from .id_table import seconds


@dataclass(frozen=True)
class OnlineConfig:
    """`[online]`; times of samples are such as "90s", "12h" or "30d", seconds are the wall clock's.

    Attributes:
        lateness: how long a sample is waited for that may be older than others, by the samples' own time.
        late: what becomes of a sample that is later still: it is left out ("drop"), or trained on when it comes
            ("train"); either way it is counted.
        duplicates_window: the latest so many samples' `sample_id` are remembered, and a repeated one is left out.
        ahead: a sample whose time is later than this machine's clock by more is malformed, since it would make all
            others late and expire ids; empty: none is.
        most_waiting: samples that are held for their order at a time.
        max_wait_seconds: a batch that is not full is trained on after so long without a new sample; 0: never.
        warmup_steps: over which the dense learning rate rises; a stream has no epochs, so that optimizer.warmup_epochs
            has no effect.
        window: time of samples over which progressive AUC, logloss and calibration are taken.
        snapshot_seconds: between two checkpoints.
        publish_seconds: between two publications of rows.
        dense_seconds: between two publications of the dense weights.
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
    publish_seconds: float = 5.0
    dense_seconds: float = 60.0

    def __post_init__(self) -> None:
        for key in ("lateness", "ahead", "window"):
            seconds(getattr(self, key), f"online.{key}")
        if not self.window:
            raise ValueError('online.window must be a time such as "1h", got an empty one')
        if self.most_waiting < 1:
            raise ValueError(f"online.most_waiting must be at least 1, got {self.most_waiting}")
        for key in ("duplicates_window", "warmup_steps"):
            if getattr(self, key) < 0:
                raise ValueError(f"online.{key} must be at least 0, got {getattr(self, key)}")
        for key in ("max_wait_seconds", "snapshot_seconds", "publish_seconds", "dense_seconds"):
            if not 0 <= getattr(self, key) < inf:
                raise ValueError(f"online.{key} must be at least 0 and finite, got {getattr(self, key)}")
