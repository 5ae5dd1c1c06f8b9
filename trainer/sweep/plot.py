"""Results of a sweep as a plot: each measure by batch size, mean and deviation over seeds, with the base's spread."""

from math import log2
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cowrec.sparse_opt import SCALING_RULES
from cowrec.trainer.reports.plotting import plt, size_name

from .comparison import (
    MEASURES,
    Lines,
    Series,
    base_batch_size,
    base_values,
    deviation,
    series,
    shown_measures,
    steps_by_batch_size,
)

PLOT = "sweep.png"
_COLORS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "gold", "C8", "C9", "black")
_MARKERS = "osD^vP*X<>hd"
_BASE_COLOR = "0.45"


def plot(lines: Lines, path: Path) -> Path:
    """Draws a panel for each measure. Colour and marker: scaling rule. Solid: clip on. Dashed: clip off.

    Bars are one standard deviation over seeds, and so is the band, of the base: a mean below it, for logloss above it,
    is lost to the base.
    """
    measures = shown_measures(lines)
    columns = 2 if len(measures) in (2, 4) else 3
    height = len(measures) // columns
    figure, axes = plt.subplots(
        height, columns, figsize=(5.5 * columns, 0.8 + 4.4 * height), layout="constrained", squeeze=False
    )
    best: dict[str, float] = next((line["best_possible"] for line in lines if line.get("best_possible")), {})
    for axis, measure in zip(axes.flat, measures, strict=True):
        _draw(axis, lines, series(lines, measure))
        _draw_base(axis, base_values(lines, measure))
        if MEASURES[measure].best_possible in best:
            axis.axhline(best[MEASURES[measure].best_possible], color="gray", ls=":")
        axis.set(xlabel="batch size", ylabel=MEASURES[measure].label)
    handles = _legend(lines, has_best=bool(best))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 2 * columns), frameon=False)
    seeds, first = len({line["seed"] for line in lines}), lines[0]
    over = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(f"{first['model']} on {first['data']}, {over}, {first['device']}")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def style(rule: str, clip: str) -> dict[str, Any]:
    number = list(SCALING_RULES).index(rule)
    color = _COLORS[number % len(_COLORS)]
    return {
        "color": color,
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 5,
        "mfc": color if clip == "on" else "white",
        "ls": "-" if clip == "on" else "--",
    }


def _draw(axis: Axes, lines: Lines, curves: Series) -> None:
    sizes, steps, base = (
        sorted({line["batch_size"] for line in lines}),
        steps_by_batch_size(lines),
        base_batch_size(lines),
    )
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [_tick(size, steps.get(size)) for size in sizes], minor=False)
    # Shifted sideways, since curves may coincide; at the base batch size all of them do.
    width = 0.08 * max(log2(sizes[-1] / sizes[0]), 1)
    for number, ((rule, clip), by_size) in enumerate(curves.items()):
        shift = 2 ** (width * ((number + 0.5) / len(curves) - 0.5))
        known = {size: values for size, values in sorted(by_size.items()) if values}
        axis.errorbar(
            [size if size == base else size * shift for size in known],
            [mean(values) for values in known.values()],
            [deviation(values) for values in known.values()],
            capsize=3,
            **style(rule, clip),
        )
    axis.grid(alpha=0.3)


def _draw_base(axis: Axes, values_by_clip: dict[str, list[float]]) -> None:
    """A line at the base's mean, and a band of one standard deviation around it."""
    for clip, values in values_by_clip.items():
        middle, spread = mean(values), deviation(values)
        axis.axhline(middle, color=_BASE_COLOR, lw=0.8, ls="-" if clip == "on" else "--", zorder=0)
        if len(values) > 1:
            axis.axhspan(middle - spread, middle + spread, color=_BASE_COLOR, alpha=0.2, lw=0, zorder=0)


def _tick(size: int, steps: int | None) -> str:
    return size_name(size) + (f"\n{steps:,} steps" if steps else "")


def _legend(lines: Lines, *, has_best: bool) -> list[Any]:
    """An entry for each rule, and one for each other kind of line."""
    rules = list(dict.fromkeys(line["rule"] for line in lines))
    clips = list(dict.fromkeys(line["clip"] for line in lines))
    base = base_batch_size(lines)
    handles: list[Any] = [Line2D([], [], **style(rule, clips[0]), label=rule) for rule in rules]
    for clip in clips:
        handles.append(Line2D([], [], color="black", ls="-" if clip == "on" else "--", label=f"clip {clip}"))
    if base is not None and any(line["batch_size"] == base for line in lines):
        handles.append(Patch(color=_BASE_COLOR, alpha=0.3, label=f"spread of the base, batch {size_name(base)}"))
    if has_best:
        handles.append(Line2D([], [], color="gray", ls=":", label="best possible"))
    return handles
