"""Settings of a benchmark, and the cases that they ask for."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch

from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.models import ModelConfig, require_model
from cowrec.sparse_opt import PRESETS, AdamConfig, ReferenceCowClip
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.config.sections import ClipConfig, OptimizerConfig, TrainConfig

from .steady_state import Case

EPOCH_SAMPLES = 41_256_555
"""Samples of Criteo's training split as published: nine tenths of 45,840,617."""
_BASE_BATCH_SIZE = 1024
_MOST_STEPS, _LEAST_STEPS, _MOST_SAMPLES = 256, 8, 1 << 20
"""Limits on the steps of a combination, so that their batches fit into memory."""


@dataclass(frozen=True)
class Bench:
    """Settings of a benchmark; each combination of modes, clips, precisions, batch sizes and spacings is one line.

    Attributes:
        modes: values of optimizer.absent_rows.
        clips: "on" and "off".
        precisions: values of train.precision.
        batch_sizes: samples per step.
        model: name of the network.
        max_rows: most rows of a table; None for Criteo's full vocabulary.
        spacings: distances of two ids' rows; tables are that many times larger.
        epoch_share: share of an epoch after which the measurement starts.
        seconds: time to measure each combination; at least 5 steps.
        device: "cpu" or "cuda".

    Raises:
        ValueError: a value that is unknown, out of range or repeated.
    """

    modes: Sequence[str] = ("replay", "lazy", "dense")
    batch_sizes: Sequence[int] = (1024, 8192, 65536)
    model: str = "deepfm"
    max_rows: int | None = None
    spacings: Sequence[int] = (1,)
    epoch_share: float = 0.9
    seconds: float = 20.0
    clips: Sequence[str] = ("on",)
    precisions: Sequence[str] = ("float32",)
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_model(ModelConfig(name=self.model))
        adam, train = get_type_hints(AdamConfig), get_type_hints(TrainConfig)
        for flag, names, known in (
            ("absent-rows", self.modes, get_args(adam["absent_rows"])),
            ("clip", self.clips, ("on", "off")),
            ("precision", self.precisions, get_args(train["precision"])),
            ("device", [self.device], ("cpu", "cuda")),
        ):
            for name in names:
                if name not in known:
                    raise ValueError(f"--{flag} {name!r} is not known; known: {', '.join(known)}")
        listed: tuple[tuple[str, Sequence[Any]], ...] = (
            ("absent-rows", self.modes),
            ("clip", self.clips),
            ("precision", self.precisions),
            ("batch-sizes", self.batch_sizes),
            ("spacing", self.spacings),
        )
        for flag, values in listed:
            if not values or len(set(values)) < len(values):
                raise ValueError(f"--{flag} needs one value or several different ones, got {values}")
        for flag, value, fits, what in (
            ("batch-sizes", min(self.batch_sizes), min(self.batch_sizes) >= 1, "at least 1"),
            ("spacing", min(self.spacings), min(self.spacings) >= 1, "at least 1"),
            ("rows", self.max_rows, self.max_rows is None or self.max_rows >= 2, "full or at least 2"),
            ("epoch-share", self.epoch_share, 0 < self.epoch_share <= 40, "above 0 and at most 40"),
            ("seconds", self.seconds, 0 <= self.seconds < inf, "at least 0"),
        ):
            if not fits:
                raise ValueError(f"--{flag} must be {what}, got {value}")
        if self.device == "cpu" and "tf32" in self.precisions:
            raise ValueError("--precision tf32 exists on CUDA only; add --device cuda, or measure float32 or bfloat16")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda, but torch sees no GPU; measure with --device cpu or check the driver")

    @property
    def samples(self) -> int:
        """Samples of the stream before the measurement starts: complete steps of the largest batch."""
        largest = max(self.batch_sizes)
        return max(round(self.epoch_share * EPOCH_SAMPLES / largest), 1) * largest


def criteo_config(
    model: str, batch_size: int, mode: str, clip: str = "on", precision: str = "float32", device: str = "cpu"
) -> RunConfig:
    """The published settings for Criteo, as in trainer/configs/criteo.toml, at a batch size."""
    preset = PRESETS["criteo"](_BASE_BATCH_SIZE)
    return RunConfig(
        model=ModelConfig(name=model),
        train=TrainConfig(
            batch_size=batch_size,
            epochs=preset.epochs,
            device=device,  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
        ),
        optimizer=OptimizerConfig(
            base_batch_size=_BASE_BATCH_SIZE,
            scaling="cowclip",
            **dataclasses.asdict(preset.hyperparameters),
            warmup_epochs=preset.warmup_epochs,
            adam_epsilon="keras",
            embedding_init_std=preset.embedding_init_std,
            absent_rows=mode,  # type: ignore[arg-type]
        ),
        clip=ClipConfig(ReferenceCowClip.name, **dataclasses.asdict(preset.clip))
        if clip == "on"
        else ClipConfig("none"),
    )


def cases(settings: Bench, ids: CriteoIds, last_samples: Path) -> Iterator[Case]:
    """The combinations, batch size by batch size, so that results to compare are measured close together."""
    variants = (settings.spacings, settings.precisions, settings.modes, settings.clips)
    for batch_size, spacing, precision, mode, clip in product(settings.batch_sizes, *variants):
        steps = min(max(_MOST_SAMPLES // batch_size, _LEAST_STEPS), _MOST_STEPS)
        yield Case(
            criteo_config(settings.model, batch_size, mode, clip, precision, settings.device),
            ids,
            spacing,
            EPOCH_SAMPLES,
            settings.samples,
            last_samples,
            steps,
            settings.seconds,
        )
