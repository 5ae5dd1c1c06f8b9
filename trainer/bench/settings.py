"""Settings of a benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import get_args, get_type_hints

import torch

from cowrec.errors import UserError
from cowrec.models import ModelConfig, require_model
from cowrec.names import require, require_choices
from cowrec.sparse_opt import AdamConfig

from ..config.run import RunConfig, load_config, with_values
from ..config.sections import TrainConfig

EPOCH_SAMPLES = 41_256_555
"""Samples of Criteo's training split as published: nine tenths of 45,840,617."""
_CRITEO = Path(__file__).parents[1] / "configs" / "criteo.toml"


@dataclass(frozen=True)
class Bench:
    """Settings of a benchmark, which the flags of `cowrec bench` describe.

    Each combination of modes, clips, precisions and batch sizes is one line. ``max_rows`` of None is Criteo's full
    vocabulary.

    Raises:
        ValueError: a value that is unknown, out of range or repeated.
    """

    modes: Sequence[str] = ("replay", "lazy", "dense")
    batch_sizes: Sequence[int] = (1024, 8192, 65536)
    model: str = "deepfm"
    max_rows: int | None = None
    epoch_share: float = 0.9
    seconds: float = 20.0
    clips: Sequence[str] = ("on",)
    precisions: Sequence[str] = ("float32",)
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_model(ModelConfig(name=self.model))
        modes, precisions = get_type_hints(AdamConfig)["absent_rows"], get_type_hints(TrainConfig)["precision"]
        require_choices("--absent-rows", self.modes, get_args(modes))
        require_choices("--clip", self.clips, ("on", "off"))
        require_choices("--precision", self.precisions, get_args(precisions))
        require_choices("--device", [self.device], ("cpu", "cuda"))
        require_choices("--batch-sizes", self.batch_sizes, self.batch_sizes)
        require("--batch-sizes", min(self.batch_sizes), min(self.batch_sizes) >= 1, "at least 1")
        require("--rows", self.max_rows, self.max_rows is None or self.max_rows >= 2, "full or at least 2")
        require("--epoch-share", self.epoch_share, 0 < self.epoch_share <= 40, "above 0 and at most 40")
        require("--seconds", self.seconds, 0 <= self.seconds < inf, "at least 0")
        if self.device == "cpu" and "tf32" in self.precisions:
            raise UserError("--precision tf32 exists on CUDA only; add --device cuda, or measure float32 or bfloat16")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda, but torch sees no GPU; measure with --device cpu or check the driver")

    @property
    def samples(self) -> int:
        """Samples of the stream before the measurement starts: complete steps of the largest batch."""
        largest = max(self.batch_sizes)
        return max(round(self.epoch_share * EPOCH_SAMPLES / largest), 1) * largest


def criteo_config(
    model: str, batch_size: int, mode: str, clip: str = "on", precision: str = "float32", device: str = "cpu"
) -> RunConfig:
    """The published settings for Criteo, those of trainer/configs/criteo.toml, at a batch size."""
    train = {"batch_size": batch_size, "device": device, "precision": precision}
    published = load_config(_CRITEO)
    rule = {"rule": published.clip.rule if clip == "on" else "none"}
    return with_values(published, model={"name": model}, train=train, optimizer={"absent_rows": mode}, clip=rule)
