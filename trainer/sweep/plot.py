"""Results of a sweep as a plot and as a table: AUC and logloss by batch size, mean and deviation over seeds."""

from collections.abc import Sequence
from math import isfinite, log2, nan
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.axes import Axes

from cowrec.sparse_opt import SCALING_RULES
from cowrec.trainer.reports.plotting import plt, size_name
from cowrec.trainer.reports.text_table import aligned

PLOT = "sweep.png"
_BEST = "best possible"
_MEASURES = {"auc": "test AUC", "logloss": "test logloss"}

Series = dict[tuple[str, str], dict[int, list[float]]]
"""(rule, clip) -> batch size -> values of the seeds whose runs succeeded."""


def series(lines: Sequence[dict[str, Any]], measure: str) -> Series:
    """A measure of a sweep's lines by curve and batch size; a batch size whose runs all failed has no values."""
    found: Series = {}
    for line in lines:
        values = found.setdefault((line["rule"], line["clip"]), {}).setdefault(line["batch_size"], [])
        if line.get(measure) is not None:
            values.append(line[measure])
    return found


def table(lines: Sequence[dict[str, Any]]) -> str:
    """AUC in percent and logloss, mean and standard deviation over seeds; a line per curve, a column per batch size."""
    seeds = len({line["seed"] for line in lines})
    sizes = sorted({line["batch_size"] for line in lines})
    blocks = []
    for measure, (factor, form) in {"auc": (100, ".2f"), "logloss": (1, ".4f")}.items():
        unit = " (%)" if factor == 100 else ""
        rows = [[_MEASURES[measure] + unit, *(size_name(size) for size in sizes)]]
        for (rule, clip), by_size in series(lines, measure).items():
            cells = [[factor * value for value in by_size.get(size, [])] for size in sizes]
            rows.append([f"{rule}, clip {clip}", *(_with_spread(cell, form, seeds) for cell in cells)])
        blocks.append(aligned(rows))
    return "\n\n".join(blocks)


def plot(lines: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draws the same values. Colour: scaling rule. Solid: clip on. Dashed: clip off. Bars: one standard deviation."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    best: dict[str, float] = next((line["best_possible"] for line in lines if line.get("best_possible")), {})
    for axis, (measure, label) in zip(axes, _MEASURES.items(), strict=True):
        _draw(axis, series(lines, measure))
        if measure in best:
            axis.axhline(best[measure], color="gray", ls=":", label=_BEST)
        axis.set(xlabel="batch size", ylabel=label)
    handles, labels = axes[0].get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda index: labels[index] == _BEST)
    columns = [[values[index] for index in order] for values in (handles, labels)]
    figure.legend(*columns, loc="outside lower center", ncols=(len(labels) + 1) // 2, frameon=False)
    seeds, first = len({line["seed"] for line in lines}), lines[0]
    over = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(f"{first['model']} on {first['data']}, {over}, {first['device']}")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _draw(axis: Axes, curves: Series) -> None:
    sizes = sorted({size for by_size in curves.values() for size in by_size})
    # Shifted sideways, since curves may coincide: at the base batch size all rules do.
    apart = 0.013 * max(log2(sizes[-1] / sizes[0]), 1)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [size_name(size) for size in sizes], minor=False)
    for number, ((rule, clip), by_size) in enumerate(curves.items()):
        shift = 2 ** (apart * (number - (len(curves) - 1) / 2))
        known = {size: values for size, values in sorted(by_size.items()) if values}
        on = clip == "on"
        axis.errorbar(
            [size * shift for size in known],
            [mean(values) for values in known.values()],
            [_spread(values) for values in known.values()],
            color=f"C{list(SCALING_RULES).index(rule)}",
            marker="o" if on else "s",
            markersize=5,
            mfc=None if on else "white",
            ls="-" if on else "--",
            capsize=3,
            label=f"{rule}, clip {clip}",
        )
    axis.grid(alpha=0.3)


def _spread(values: Sequence[float]) -> float:
    return stdev(values) if len(values) > 1 else nan


def _with_spread(values: Sequence[float], form: str, seeds: int) -> str:
    """Text such as ``80.90 ± 0.02``, with the number of seeds if some failed."""
    if not values:
        return "failed"
    spread = _spread(values)
    text = f"{mean(values):{form}}" + (f" ± {spread:{form}}" if isfinite(spread) else "")
    return text if len(values) == seeds else f"{text} ({len(values)} of {seeds})"
