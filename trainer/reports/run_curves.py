"""The curves of runs, from the metrics that they write while they train, as a table and a plot."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from cowrec.errors import UserError
from cowrec.files import naming_full_disk, read_lines

from .plotting import plt
from .text_table import aligned, number_text

FORMATS = ("png", "svg", "pdf")
_SMOOTHED = 40


@dataclass(frozen=True)
class RunCurves:
    """The metrics that a run has written so far.

    Attributes:
        name: label of the run in legends.
        steps: lines of kind "train" of its ``metrics.jsonl``.
        epochs: lines of kind "eval"; where the test split was measured at the end, with its measures.
        clips: lines of kind "clip"; none in a run without a clip.
    """

    name: str
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    clips: list[dict[str, Any]]

    @staticmethod
    def read(name: str, metrics: Path) -> "RunCurves":
        """Reads a run's ``metrics.jsonl`` and its earlier part. Raises UserError if it has no metrics or is damaged."""
        lines = _lines(metrics)
        of_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("train", "eval", "test", "clip")}
        if not of_kind["train"]:
            raise UserError(f"{metrics} has no training step yet; wait for the run's first metrics")
        tested = {line["epoch"]: line for line in of_kind["test"]}
        epochs = [tested.get(line["epoch"], {}) | line for line in of_kind["eval"]]
        return RunCurves(name, of_kind["train"], epochs, of_kind["clip"])

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps, and the values of a key of the training lines; NaN where a line has none."""
        return _column(self.steps, "step"), _column(self.steps, key)

    def by_epoch(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the epochs, counted from 1, that have a measure, and its values."""
        values = _column(self.epochs, key)
        known = ~np.isnan(values)
        return _column(self.epochs, "epoch")[known] + 1, values[known]

    def epochs_of(self, steps: np.ndarray) -> np.ndarray:
        """Converts steps to epochs; returns steps where no epoch is complete."""
        if not self.epochs:
            return steps
        ends, epochs = _column(self.epochs, "step"), _column(self.epochs, "epoch") + 1
        ends, epochs = np.append(0, ends), np.append(0, epochs)
        later = epochs[-1] + (steps - ends[-1]) * (epochs[-1] - epochs[-2]) / (ends[-1] - ends[-2])
        found: np.ndarray = np.where(steps > ends[-1], later, np.interp(steps, ends, epochs))
        return found


def read_baselines(metrics: Path) -> list[dict[str, Any]]:
    """Reads the lines of ``cowrec baseline`` in a file of metrics, one a model; a run has none.

    Raises UserError if the file does not exist or is damaged.
    """
    return [line for line in _lines(metrics) if line["kind"] == "baseline"]


def _lines(metrics: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in read_lines(metrics)]
    except FileNotFoundError:
        raise UserError(f"{metrics} does not exist; pass the --run-dir of a cowrec train") from None
    except ValueError as error:
        raise UserError(f"{metrics} is damaged: {error}") from None


def curves_table(runs: Sequence[RunCurves], baselines: Sequence[dict[str, Any]] = ()) -> str:
    """Makes a table of AUC and logloss: for each run after its last epoch and its best one, and for each baseline."""
    rows = [["run", "epochs", "last AUC", "best (epoch)", "last logloss", "best (epoch)", "calibration", "samples/s"]]
    for run in runs:
        of_epochs = [run.by_epoch(key) for key in ("auc", "logloss", "calibration")]
        last_auc, last_logloss, calibration = (
            number_text(values[-1] if len(values) else None) for _, values in of_epochs
        )
        (epochs, auc), (logloss_epochs, logloss), _ = of_epochs
        speed = run.series("samples_per_second")[1][1:]  # in the first step kernels are compiled
        rows.append(
            [
                run.name,
                str(len(run.epochs)),
                last_auc,
                f"{auc.max():.4f} ({epochs[auc.argmax()]:.0f})" if len(auc) else "-",
                last_logloss,
                f"{logloss.min():.4f} ({logloss_epochs[logloss.argmin()]:.0f})" if len(logloss) else "-",
                calibration,
                number_text(float(np.median(speed)) if len(speed) else nan, ",.0f"),
            ]
        )
    for line in baselines:
        of_test = [number_text(line.get(key)) for key in ("auc", "logloss", "calibration")]
        rows.append([line["model"], "-", of_test[0], "-", of_test[1], "-", of_test[2], "-"])
    return aligned(rows)


def plot_runs(runs: Sequence[RunCurves], path: Path, baselines: Sequence[dict[str, Any]] = ()) -> Path:
    """Draws the runs in one figure, a colour each; AUC and logloss of baselines are horizontal lines."""
    figure, axes = plt.subplots(2, 4, figsize=(19, 8), layout="constrained")
    losses, auc, logloss, shares, rates, speeds, calibration, limits = axes.flat
    unit = "epoch" if all(run.epochs for run in runs) else "step"
    for number, run in enumerate(runs):
        color = f"C{number % 10}"
        steps, loss = run.series("loss")
        times = run.epochs_of(steps) if unit == "epoch" else steps
        # The first losses would hide the differences between the others.
        shown = slice(len(loss) // 50 + 1 if len(loss) > 4 else 0, None)
        losses.plot(times[shown], loss[shown], color=color, alpha=0.25, lw=0.8)
        label = f" {run.name}" if run.name.startswith("_") else run.name  # "_..." would be left out of the legend
        losses.plot(*_smoothed(times[shown], loss[shown], np.mean), color=color, label=label)
        for axis, measure in ((auc, "auc"), (logloss, "logloss")):
            axis.plot(*run.by_epoch(measure), color=color, marker="o", ms=4)
            axis.plot(*run.by_epoch(f"validation_{measure}"), color=color, marker="o", ms=4, mfc="white", ls="--")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        rates.plot(times, run.series("dense_lr")[1], color=color)
        rates.plot(times, run.series("embedding_lr")[1], color=color, ls="--")
        speeds.plot(*_smoothed(times[1:], run.series("samples_per_second")[1][1:], np.nanmedian), color=color)
        for axis, measure in ((shares, "clipped_share"), (limits, "limit_to_norm")):
            clip_steps, values = _column(run.clips, "step"), _column(run.clips, measure)
            clip_times = run.epochs_of(clip_steps) if unit == "epoch" else clip_steps
            axis.plot(*_smoothed(clip_times, values, np.nanmedian), color=color)
        bins = next((line["calibration_bins"] for line in reversed(run.epochs) if "calibration_bins" in line), None)
        if bins:
            calibration.plot(bins["prediction"], bins["ctr"], color=color, marker="o", ms=4, lw=1)
    for line, style in zip(baselines, itertools.cycle(("--", "-.", ":"))):
        auc.axhline(line["auc"], color="gray", ls=style, label=line["model"])
        logloss.axhline(line["logloss"], color="gray", ls=style)
    for axis in (auc, logloss):
        axis.set_xlim(0.5, max([1, *(line["epoch"] + 1 for run in runs for line in run.epochs)]) + 0.5)
    losses.set(title="training loss", xlabel=unit)
    auc.set(title="AUC (dashed: of validation samples)", xlabel="epoch")
    logloss.set(title="logloss (dashed: of validation samples)", xlabel="epoch")
    rates.set(title="learning rate (dashed: of tables)", xlabel=unit, yscale="log")
    highest = rates.get_ylim()[1]
    rates.set_ylim(1e-4 * highest, 2 * highest)  # a warm-up begins near 0, which would hide the rest
    speeds.set(title="training samples per second", xlabel=unit)
    speeds.set_ylim(0, 1.05 * speeds.get_ylim()[1])
    calibration.set(title="click rate of twentieths of test samples, at the end", xlabel="their mean prediction")
    calibration.axline((0, 0), slope=1, color="gray", ls=":", zorder=0)
    shares.set(title="share of the rows that the clip shortened", xlabel=unit)
    limits.set(title="median of the clip's limit to the gradient's norm", xlabel=unit, yscale="log")
    limits.axhline(1, color="gray", ls=":", zorder=0)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=min(len(runs) + len(baselines), 4), frameon=False)
    with naming_full_disk(path):
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _smoothed(times: np.ndarray, values: np.ndarray, how: Any) -> tuple[np.ndarray, np.ndarray]:
    """Averages times and values over at most `_SMOOTHED` parts of the curve."""
    known = ~np.isnan(values)
    times, values = times[known], values[known]
    parts = np.array_split(np.arange(len(times)), min(_SMOOTHED, len(times))) if len(times) else []
    return np.array([times[part].mean() for part in parts]), np.array([how(values[part]) for part in parts])


def _column(lines: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    return np.array([nan if line.get(key) is None else line[key] for line in lines], float)
