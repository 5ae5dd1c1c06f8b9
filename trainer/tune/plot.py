"""Results of a study as a plot and as a table."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from cowrec.trainer.reports.plotting import plt, size_name
from cowrec.trainer.reports.text_table import aligned

from .search import VALUES, Range
from .tune import ranked

PLOT = "tune.png"
_MOST = 5


def table(lines: Sequence[dict[str, Any]], metric: str) -> str:
    """The best trials, a line each; then how many were pruned and failed."""
    rows = [["trial", *VALUES, "validation logloss", "AUC", "epoch"]]
    for line in ranked(list(lines), metric)[:_MOST]:
        values = [f"{line[name]:.4g}" for name in VALUES]
        quality = [f"{line['validation_logloss']:.5f}", f"{line['validation_auc']:.5f}", str(line["best_epoch"])]
        rows.append([str(line["trial"] + 1), *values, *quality])
    states = [line["state"] for line in lines]
    counts = f"{len(lines)} trials, {states.count('pruned')} of them pruned, {states.count('failed')} failed"
    return f"{aligned(rows)}\n\n{counts}"


def plot(lines: Sequence[dict[str, Any]], metric: str, ranges: Mapping[str, Range], path: Path) -> Path:
    """Draws the quality of each trial against each searched value. Filled: complete; open: pruned; cross: the best."""
    key = f"validation_{metric}"
    figure, axes = plt.subplots(1, len(ranges), figsize=(4 * len(ranges), 3.8), sharey=True, squeeze=False)
    best = next(iter(ranked(list(lines), metric)), None)
    measured = [line for line in lines if key in line]
    for axis, (name, bounds) in zip(axes[0], ranges.items(), strict=True):
        for state, face in (("pruned", "none"), ("complete", "C0")):
            shown = [line for line in measured if line["state"] == state]
            x, y = [line[name] for line in shown], [line[key] for line in shown]
            axis.scatter(x, y, facecolors=face, edgecolors="C0", label=state, s=24)
        if best:
            axis.scatter([best[name]], [best[key]], marker="x", color="C3", s=90, label="best")
        for line in lines:
            if line["state"] == "failed":
                axis.axvline(line[name], color="gray", lw=0.8, ls=":")
        axis.set(xscale="log", xlabel=name, xlim=(bounds[0] / 1.1, bounds[1] * 1.1))
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
    if len(measured) > 3:  # a trial gone astray would hide the differences between the good ones
        values = np.array([line[key] for line in measured])
        low, high = np.quantile(values, [0, 0.75]) if metric == "logloss" else np.quantile(values, [0.25, 1])
        margin = 0.1 * (high - low) or 1e-3
        axes[0][0].set_ylim(low - margin, high + margin)
    axes[0][0].set_ylabel(f"validation {metric}, best epoch")
    axes[0][0].legend(frameon=False)
    figure.suptitle(f"{len(lines)} trials at batch size {size_name(lines[0]['batch_size'])}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
