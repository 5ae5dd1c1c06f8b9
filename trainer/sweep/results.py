"""Results of sweeps and studies as tables, and of sweeps as a plot.

A sweep's measures are shown by batch size, as mean and deviation over seeds. They are compared with the base: the runs
at the base batch size, where all rules are one run.
"""

from collections.abc import Sequence
from math import isfinite, isnan, log2, nan
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from cowrec.files import naming_full_disk
from cowrec.sparse_opt import SCALING_RULES

from ..config.run import FEW_STEPS
from ..reports.plotting import plt, size_name
from ..reports.text_table import aligned, number_text

Lines = Sequence[dict[str, Any]]
Range = tuple[float, float]

SWEEP_PLOT = "sweep.png"
VALUES = ("embedding_lr", "dense_lr", "l2")
"""Keys of `[optimizer]` that a study searches."""

_CLEARLY = 0.001
"""AUC by which the best epoch must exceed the last one to be shown; 100,000 test samples resolve so much."""

_COLORS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "gold", "C8", "C9", "black")
_MARKERS = "osD^vP*X<>hd"
_BASE_COLOR = "0.45"
_MOST = 5


class Measure(NamedTuple):
    """How a measure is shown. ``best_possible`` is the key of the value that the true probabilities reach."""

    label: str
    best_possible: str
    higher_is_better: bool


MEASURES = {
    "auc": Measure("test AUC", "auc", True),
    "best_epoch_auc": Measure("test AUC of the best epoch", "auc", True),
    "logloss": Measure("test logloss", "logloss", False),
    "expected_logloss": Measure("expected logloss", "expected_logloss", False),
}

Curve = tuple[str, str]
"""Scaling rule, and clip: "on" or "off"."""

Series = dict[Curve, dict[int, list[float]]]
"""Curve -> batch size -> values of the seeds whose runs succeeded."""


def sweep_table(lines: Lines) -> str:
    """Formats a table for each measure, with differences from the base, and notes; rows are curves, columns sizes."""
    tables = [_table(lines, measure, with_steps=number == 0) for number, measure in enumerate(_shown_measures(lines))]
    return "\n\n".join([*tables, _notes(lines)])


def tune_table(lines: Lines, metric: str) -> str:
    """Formats the best trials, a line each, and the numbers of pruned and failed ones."""
    rows = [["trial", *VALUES, "validation logloss", "AUC", "epoch"]]
    for line in ranked(lines, metric)[:_MOST]:
        values = [f"{line[name]:.4g}" for name in VALUES]
        quality = [number_text(line[f"validation_{metric}"], ".5f") for metric in ("logloss", "auc")]
        rows.append([str(line["trial"] + 1), *values, *quality, str(line["best_epoch"])])
    states = [line["state"] for line in lines]
    counts = f"{len(lines)} trials, {states.count('pruned')} of them pruned, {states.count('failed')} failed"
    return f"{aligned(rows)}\n\n{counts}"


def ranked(lines: Lines, metric: str) -> list[dict[str, Any]]:
    """Sorts the complete trials of a study, the best one first."""
    complete = [line for line in lines if line["state"] == "complete"]
    return sorted(complete, key=lambda line: line[f"validation_{metric}"], reverse=metric == "auc")


def series(lines: Lines, measure: str) -> Series:
    """Groups a measure by curve and batch size; a batch size whose runs all failed has no values."""
    found: Series = {}
    for line in lines:
        values = found.setdefault((line["rule"], line["clip"]), {}).setdefault(line["batch_size"], [])
        if line.get(measure) is not None:
            values.append(line[measure])
    return found


def base_values(lines: Lines, measure: str) -> dict[str, list[float]]:
    """Groups a measure's values at the base batch size, where the lines of all rules are copies of one run, by clip."""
    by_seed = {
        (line["clip"], line["seed"]): line[measure]
        for line in lines
        if line["batch_size"] == line["base_batch_size"] and line.get(measure) is not None
    }
    values: dict[str, list[float]] = {}
    for (clip, _), value in by_seed.items():
        values.setdefault(clip, []).append(value)
    return values


def steps_by_batch_size(lines: Lines) -> dict[int, int]:
    """Returns the training steps at each batch size, without those at which all runs failed."""
    steps = dict.fromkeys(sorted({line["batch_size"] for line in lines}), 0)
    for line in lines:
        steps[line["batch_size"]] = max(steps[line["batch_size"]], line.get("steps") or 0)
    return {size: number for size, number in steps.items() if number}


def too_few_steps(batch_size: int, steps: int, base: int) -> str:
    """Warns of a batch larger than the base that has too few steps to judge a scaling rule; else ""."""
    if steps >= FEW_STEPS or batch_size <= base:
        return ""
    return f"warning: batch {size_name(batch_size)} has {steps} steps, below {FEW_STEPS}: too few steps to judge a rule"


def deviation(values: Sequence[float]) -> float:
    """Computes the standard deviation over seeds; NaN for a single one."""
    return stdev(values) if len(values) > 1 else nan


def _shown_measures(lines: Lines) -> list[str]:
    """Names AUC and logloss, and the others if a run has them or differs in them."""
    shown = ["auc", "logloss"]
    if any((line.get("best_epoch_auc") or 0) > (line.get("auc") or 1) + _CLEARLY for line in lines):
        shown.insert(1, "best_epoch_auc")
    if any(line.get("expected_logloss") is not None for line in lines):
        shown.append("expected_logloss")
    return shown


def _table(lines: Lines, measure: str, *, with_steps: bool) -> str:
    how, base, at_base = MEASURES[measure], lines[0]["base_batch_size"], base_values(lines, measure)
    sizes, seeds = sorted({line["batch_size"] for line in lines}), len({line["seed"] for line in lines})
    rows = [[how.label, *map(size_name, sizes)]]
    if with_steps:
        steps = steps_by_batch_size(lines)
        rows.append(["steps", *(f"{steps[size]:,}" if size in steps else "" for size in sizes)])
    for (rule, clip), by_size in series(lines, measure).items():
        compared = {size: at_base.get(clip, ()) if size != base else () for size in sizes}
        own = [line for line in lines if (line["rule"], line["clip"]) == (rule, clip)]
        failed = {line["batch_size"] for line in own if "error" in line}
        cells = [_cell(by_size.get(size, []), compared[size], how, seeds, failed=size in failed) for size in sizes]
        rows.append([f"{rule}, clip {clip}", *cells])
    return aligned(rows)


def _cell(values: Sequence[float], at_base: Sequence[float], how: Measure, seeds: int, *, failed: bool) -> str:
    """Formats values as ``0.8090 ± 0.0002, -0.0010 lost``, with the number of seeds if some have no value."""
    if not values:
        return "failed" if failed else "-"
    spread = deviation(values)
    text = f"{mean(values):.4f}" + (f" ± {spread:.4f}" if isfinite(spread) else "")
    if len(values) < seeds:
        text += f" ({len(values)} of {seeds})"
    if not at_base:
        return text
    difference, spread = mean(values) - mean(at_base), deviation(at_base)
    verdict = " better" if (difference > 0) == how.higher_is_better else " lost"
    if abs(difference) <= spread:
        verdict = " within"
    return f"{text}, {difference:+.4f}{'' if isnan(spread) else verdict}"


def _notes(lines: Lines) -> str:
    base, at_base = lines[0]["base_batch_size"], base_values(lines, "auc")
    steps = steps_by_batch_size(lines).items()
    notes = [warning for size, number in steps if (warning := too_few_steps(size, number, base))]
    if not any(line["batch_size"] == base for line in lines):
        notes.append(f"The base, batch {size_name(base)}, is not in this sweep; add it to see what a batch loses.")
    elif not at_base:
        notes.append(f"No run of the base, batch {size_name(base)}, has an AUC, so there are no differences.")
    else:
        notes.append(f"At the base, batch {size_name(base)}, all rules are one run, trained once for each seed.")
        notes.append(
            "After the comma: the difference from the base with the same clip; within: at most one standard deviation"
            " of the base over its seeds, else lost or better."
            if max(map(len, at_base.values())) > 1
            else "The base has one seed, so its spread is unknown; give --seeds 3 or more to judge differences."
        )
    return "\n".join(notes)


def plot_sweep(lines: Lines, path: Path) -> Path:
    """Draws a panel for each measure. Colour and marker: scaling rule. Solid: clip on. Dashed: clip off.

    Bars, and the band of the base, are one standard deviation over seeds: a mean on its worse side loses to the base.
    """
    measures = _shown_measures(lines)
    columns = 2 if len(measures) in (2, 4) else 3
    height = len(measures) // columns
    figure, axes = plt.subplots(
        height, columns, figsize=(5.5 * columns, 0.8 + 4.4 * height), layout="constrained", squeeze=False
    )
    best: dict[str, float] = next((line["best_possible"] for line in lines if line.get("best_possible")), {})
    for axis, measure in zip(axes.flat, measures, strict=True):
        _draw(axis, lines, series(lines, measure))
        # A line at the base's mean, and a band of one standard deviation around it.
        for clip, values in base_values(lines, measure).items():
            middle, spread = mean(values), deviation(values) if len(values) > 1 else 0.0
            label = f"base, batch {size_name(lines[0]['base_batch_size'])}, clip {clip}"
            axis.axhline(middle, color=_BASE_COLOR, lw=0.8, ls="-" if clip == "on" else "--", zorder=0, label=label)
            axis.axhspan(middle - spread, middle + spread, color=_BASE_COLOR, alpha=0.2, lw=0, zorder=0)
        if MEASURES[measure].best_possible in best:
            axis.axhline(best[MEASURES[measure].best_possible], color="gray", ls=":", label="best possible")
        axis.set(xlabel="batch size", ylabel=MEASURES[measure].label)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 2 * columns), frameon=False)
    seeds, first = len({line["seed"] for line in lines}), lines[0]
    over = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(f"{first['model']} on {first['data']}, {over}, {first['device']}")
    with naming_full_disk(path):
        figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _style(rule: str, clip: str) -> dict[str, Any]:
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
    sizes, steps = sorted({line["batch_size"] for line in lines}), steps_by_batch_size(lines)
    base = lines[0]["base_batch_size"]
    ticks = [size_name(size) + (f"\n{steps[size]:,} steps" if size in steps else "") for size in sizes]
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, ticks, minor=False)
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
            label=f"{rule}, clip {clip}",
            **_style(rule, clip),
        )
    axis.grid(alpha=0.3)
