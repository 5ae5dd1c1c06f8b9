"""The curves of runs, from the metrics that they write while they train."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from cowrec.data_pipeline.files import read_lines

from .text_table import aligned


@dataclass(frozen=True)
class RunCurves:
    """What a run has written so far.

    Attributes:
        name: of the run, for legends.
        steps: lines of kind "train" of its ``metrics.jsonl``.
        epochs: lines of kind "eval"; where the test split was measured at the end, with its measures.
    """

    name: str
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]

    @staticmethod
    def read(name: str, metrics: Path) -> "RunCurves":
        """Reads a run's ``metrics.jsonl``, and what was renamed when it was full.

        Raises:
            ValueError: the run has no metrics yet, or they are damaged.
        """
        try:
            lines = [json.loads(line) for line in read_lines(metrics)]
        except FileNotFoundError:
            raise ValueError(f"{metrics} does not exist; pass the --run-dir of a cowrec train") from None
        except ValueError as error:
            raise ValueError(f"{metrics} is damaged: {error}") from None
        of_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("train", "eval", "test")}
        if not of_kind["train"]:
            raise ValueError(f"{metrics} has no training step yet; wait for the run's first metrics")
        tested = {line["epoch"]: line for line in of_kind["test"]}
        epochs = [tested.get(line["epoch"], {}) | line for line in of_kind["eval"]]
        return RunCurves(name, of_kind["train"], epochs)

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps, and the values of a key of the training lines; NaN where a line has none."""
        return _column(self.steps, "step"), _column(self.steps, key)

    def by_epoch(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Epochs, counted from 1, that have a measure, and its values."""
        values = _column(self.epochs, key)
        known = ~np.isnan(values)
        return _column(self.epochs, "epoch")[known] + 1, values[known]

    def epochs_of(self, steps: np.ndarray) -> np.ndarray:
        """The time of steps in epochs; in steps where no epoch is complete."""
        if not self.epochs:
            return steps
        ends, epochs = _column(self.epochs, "step"), _column(self.epochs, "epoch") + 1
        ends, epochs = np.append(0, ends), np.append(0, epochs)
        later = epochs[-1] + (steps - ends[-1]) * (epochs[-1] - epochs[-2]) / (ends[-1] - ends[-2])
        return np.where(steps > ends[-1], later, np.interp(steps, ends, epochs))


def curves_table(runs: Sequence[RunCurves]) -> str:
    """The last epoch of each run and its best AUC and logloss of the test split, a line each."""
    rows = [["run", "epochs", "AUC", "best", "logloss", "best", "calibration", "samples/s"]]
    for run in runs:
        (_, auc), (_, logloss), (_, calibration) = (run.by_epoch(key) for key in ("auc", "logloss", "calibration"))
        speed = run.series("samples_per_second")[1][1:]  # in the first step kernels are compiled
        rows.append(
            [
                run.name,
                str(len(run.epochs)),
                *(_number(each, ".4f") for each in (_last(auc), auc.max(initial=-np.inf))),
                *(_number(each, ".4f") for each in (_last(logloss), logloss.min(initial=np.inf))),
                _number(_last(calibration), ".3f"),
                _number(float(np.median(speed)) if len(speed) else nan, ",.0f"),
            ]
        )
    return aligned(rows)


def _column(lines: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([nan if line.get(key) is None else line[key] for line in lines], float)


def _last(values: np.ndarray) -> float:
    return float(values[-1]) if len(values) else nan


def _number(value: float, how: str) -> str:
    return f"{value:{how}}" if np.isfinite(value) else "-"
