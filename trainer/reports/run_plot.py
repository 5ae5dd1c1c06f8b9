"""The curves of runs as a plot: loss, quality, learning rates and speed over epochs, and calibration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .plotting import plt
from .run_curves import RunCurves

FORMATS = ("png", "svg", "pdf")
_SMOOTHED = 40
"""Points of a smoothed curve."""


def plot_runs(runs: Sequence[RunCurves], path: Path) -> Path:
    """Draws the runs in one figure, a colour each."""
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
        "calibration after the last epoch",
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
