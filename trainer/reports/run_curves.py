"""The curves of runs, from the metrics that they write while they train, as a table and a plot."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from cowrec.data_pipeline.files import read_lines

from .plotting import plt
from .text_table import aligned

FORMATS = ("png", "svg", "pdf")
_SMOOTHED = 40
"""Points of a smoothed curve."""


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


def plot_runs(runs: Sequence[RunCurves], path: Path) -> Path:
    """Draws the runs in one figure, a colour each: loss, quality, learning rates and speed, and calibration."""
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    unit = "epoch" if all(run.epochs for run in runs) else "step"
    for number, run in enumerate(runs):
        color = f"C{number % 10}"
        _draw_losses(axes[0, 0], run, color, unit)
        for axis, measure in ((axes[0, 1], "auc"), (axes[0, 2], "logloss")):
            axis.plot(*run.by_epoch(measure), color=color, marker="o", ms=4)
            axis.plot(*run.by_epoch(f"validation_{measure}"), color=color, marker="o", ms=4, mfc="white", ls="--")
        for key, style in (("dense_lr", "-"), ("embedding_lr", "--")):
            steps, rates = run.series(key)
            axes[1, 0].plot(_times(run, steps, unit), rates, color=color, ls=style)
        steps, speed = run.series("samples_per_second")
        axes[1, 1].plot(*_smoothed(_times(run, steps[1:], unit), speed[1:], np.nanmedian), color=color)
        _draw_calibration(axes[1, 2], run, color)
    _label(axes, runs, unit)
    handles: list[Any] = [Line2D([], [], color=f"C{n % 10}", lw=3, label=run.name) for n, run in enumerate(runs)]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(runs), 4), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _times(run: RunCurves, steps: np.ndarray, unit: str) -> np.ndarray:
    return run.epochs_of(steps) if unit == "epoch" else steps


def _smoothed(times: np.ndarray, values: np.ndarray, how: Any) -> tuple[np.ndarray, np.ndarray]:
    """Means of times and of values in at most as many parts of the curve."""
    known = ~np.isnan(values)
    times, values = times[known], values[known]
    parts = np.array_split(np.arange(len(times)), min(_SMOOTHED, len(times))) if len(times) else []
    return np.array([times[part].mean() for part in parts]), np.array([how(values[part]) for part in parts])


def _draw_losses(axis: Axes, run: RunCurves, color: str, unit: str) -> None:
    """Training losses without the first ones, which would hide the differences between the others."""
    steps, losses = run.series("loss")
    times = _times(run, steps, unit)
    shown = slice(len(losses) // 50 + 1 if len(losses) > 4 else 0, None)
    axis.plot(times[shown], losses[shown], color=color, alpha=0.25, lw=0.8)
    axis.plot(*_smoothed(times[shown], losses[shown], np.mean), color=color)


def _draw_calibration(axis: Axes, run: RunCurves, color: str) -> None:
    """Click rate over mean prediction of the bins of the last epoch."""
    bins = next((line["calibration_bins"] for line in reversed(run.epochs) if "calibration_bins" in line), None)
    if bins:
        axis.plot(bins["prediction"], bins["ctr"], color=color, marker="o", ms=4, lw=1)


def _label(axes: np.ndarray, runs: Sequence[RunCurves], unit: str) -> None:
    several = ("test", "-", "C0"), ("validation", "--", "white")
    validated = any(len(run.by_epoch("validation_auc")[0]) for run in runs)
    titles = (
        "training loss",
        "AUC",
        "logloss",
        "learning rate",
        "training samples per second",
        "calibration at the end",
    )
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set(title=title, xlabel=unit)
        axis.grid(alpha=0.3)
        if not axis.lines or not any(len(line.get_xdata()) for line in axis.lines):
            axis.text(0.5, 0.5, "no complete epoch yet", ha="center", transform=axis.transAxes, color="gray")
            axis.set(xticks=[], yticks=[])
    for axis in axes[0, 1:]:
        axis.set_xlabel("epoch")
        if axis.get_xticks().size:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if validated:
            handles = [
                Line2D([], [], color="gray", ls=ls, marker="o", ms=4, mfc=fill, label=label)
                for label, ls, fill in several
            ]
            axis.legend(handles=handles, frameon=False)
    rates, speed, calibration = axes[1]
    largest = [float(np.nanmax(line.get_ydata())) for line in rates.lines]
    if min(largest) > 0:  # a warm-up begins near 0, which would hide the rest
        rates.set_yscale("log")
        rates.set_ylim(bottom=min(largest) / 1000)
    rates.legend(
        handles=[
            Line2D([], [], color="gray", ls=ls, label=label) for label, ls in (("network", "-"), ("tables", "--"))
        ],
        frameon=False,
    )
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if calibration.lines:
        top = 1.05 * max(np.max(line.get_xydata()) for line in calibration.lines)
        calibration.plot([0, top], [0, top], color="gray", ls=":", zorder=0)
        calibration.set(xlim=(0, top), ylim=(0, top), aspect="equal")
    calibration.set(xlabel="mean prediction, a point for 5 % of the test samples", ylabel="their click rate")


def _column(lines: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([nan if line.get(key) is None else line[key] for line in lines], float)


def _last(values: np.ndarray) -> float:
    return float(values[-1]) if len(values) else nan


def _number(value: float, how: str) -> str:
    return f"{value:{how}}" if np.isfinite(value) else "-"
