"""Progressive quality: quality of the predictions made before training on each sample, by windows of sample time."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import feather
from torch import Tensor

from cowrec.trainer.measures.quality import measure
from cowrec.trainer.measures.samples import Samples

_FILE = "window.arrow"


@dataclass(frozen=True)
class WindowQuality:
    """Quality of the predictions of one window.

    Attributes:
        start: first second of the window, Unix time.
        samples: number of samples.
        auc: area under the ROC curve, exact; NaN if there is one class only.
        logloss: mean binary cross-entropy, in nats.
        calibration: mean prediction / mean label; NaN without a click.
        ctr: mean label.
    """

    start: int
    samples: int
    auc: float
    logloss: float
    calibration: float
    ctr: float

    def __str__(self) -> str:
        return (
            f"{datetime.fromtimestamp(self.start, UTC):%Y-%m-%d %H:%M}  {self.samples:,} samples  progressive AUC"
            f" {self.auc:.4f}  logloss {self.logloss:.4f}  calibration {self.calibration:.3f}"
        )

    def plain(self) -> dict[str, Any]:
        """Fields by name."""
        return asdict(self)


class ProgressiveQuality:
    """Collects predictions and computes a window's quality once a sample of a later window arrives.

    A sample that arrives after its window was closed counts in the open window.

    Args:
        window: length in seconds.
    """

    def __init__(self, window: int):
        self._window = window
        self._open: int | None = None
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor, times: Tensor) -> Iterator[WindowQuality]:
        """Adds a batch's logits, labels and times, each [B]; yields the windows that it closes."""
        logits, labels = logits.detach().cpu().double(), labels.detach().cpu()
        windows = torch.div(times.cpu(), self._window, rounding_mode="floor")
        if self._open is not None:
            windows = windows.clamp_min(self._open)
        for window in windows.unique().tolist():
            if self._open is not None and window > self._open and not self.is_empty:
                yield self.close()
            self._open = window
            self._logits.append(logits[windows == window])
            self._labels.append(labels[windows == window])

    def close(self) -> WindowQuality:
        """Closes the open window, which has samples, and computes its quality."""
        assert self._open is not None
        logits, labels = torch.cat(self._logits), torch.cat(self._labels)
        self._logits, self._labels = [], []
        quality = measure(Samples(logits, labels))
        return WindowQuality(
            self._open * self._window, quality.rows, quality.auc, quality.logloss, quality.calibration, quality.ctr
        )

    @property
    def is_empty(self) -> bool:
        """True if the open window has no samples."""
        return not self._logits

    def freeze(self) -> "FrozenWindow":
        """Captures the open window, to be saved later."""
        return FrozenWindow(self._open, list(self._logits), list(self._labels))

    def load(self, folder: Path) -> None:
        """Restores what :meth:`FrozenWindow.save` wrote."""
        table = feather.read_table(folder / _FILE, memory_map=False)
        start = int(table.schema.metadata[b"open"])
        self._open = None if start < 0 else start
        numbers = [torch.from_numpy(table[name].to_numpy().copy()) for name in ("logit", "label")]
        self._logits, self._labels = ([each] if len(each) else [] for each in numbers)


@dataclass(frozen=True)
class FrozenWindow:
    """Snapshot of an open window; its tensors are never written to."""

    open: int | None
    logits: list[Tensor]
    labels: list[Tensor]

    def save(self, folder: Path) -> None:
        """Writes the window into a checkpoint's folder."""
        parts = [torch.cat(each).numpy() if each else np.empty(0) for each in (self.logits, self.labels)]
        table = pa.table({"logit": parts[0].astype(np.float64), "label": parts[1].astype(np.float32)})
        start = -1 if self.open is None else self.open
        feather.write_feather(table.replace_schema_metadata({"open": str(start)}), folder / _FILE, compression="zstd")
