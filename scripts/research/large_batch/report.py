"""Plots and tables of the large-batch study, from the results of `study.py`.

    python scripts/research/large_batch/report.py runs/large_batch

Writes rules.png (AUC against the batch size), by_epoch.png (AUC over ten epochs), by_id_counts.png (AUC by how often
ids occur) and tables.md into the folder. The titles of the plots state findings of the committed results; new results
may need other titles.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from cowrec.trainer.config.run import FEW_STEPS
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.sweep.results import Lines, base_values, deviation, series, steps_by_batch_size

BEDS = {
    "synthetic": "synthetic, 500,000 samples",
    "criteo": "Criteo, 70,000 samples",
    "movielens": "MovieLens-1M, 900,500 samples",
    "avazu": "Avazu, 7,200 samples",
}
RULES = {
    "half_life": ("half_life", "C0"),
    "sqrt_star": ("sqrt_star", "C2"),
    "none": ("not scaled", "0.45"),
    "cowclip": ("the paper's rule", "C3"),
}
"""The rules that plots show, with their names and colours there; tables.md has all rules."""

GROUPS = ("rare", "middle", "frequent")
WIDTH = 8.3
"""Width of a plot in inches. A page shows the plot 830 pixels wide, so that text of 9 points is 12 pixels high."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="output of study.py")
    folder: Path = parser.parse_args().folder
    plt.rcParams.update({"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False})
    beds = {bed: lines for bed in BEDS if (lines := parts(folder / bed, "rules", "scales", "farther"))}
    plot_rules(beds, folder / "rules.png")
    plot_groups({bed: lines for bed, lines in beds.items() if has_128(lines)}, folder / "by_id_counts.png")
    if ten := parts(folder / "criteo", "ten_epochs"):
        plot_epochs(ten, folder / "by_epoch.png")
    (folder / "tables.md").write_text("\n".join(tables(folder)), encoding="utf-8")


def parts(bed: Path, *names: str) -> list[dict[str, Any]]:
    """Lines of the runs of some parts of a bed that succeeded."""
    files = [file for name in names for file in (bed / name).glob("sweep.jsonl")]
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "error" not in line]


def has_128(lines: Lines) -> bool:
    """Whether a bed has runs at 128 times its base batch."""
    return any(line["batch_size"] == 128 * line["base_batch_size"] for line in lines)


def plot_rules(beds: Mapping[str, Lines], path: Path) -> None:
    """Draws the AUC of each rule against the batch size, a panel for each bed. Band: the base's spread over seeds."""
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 6.6), layout="constrained")
    for axis, (bed, lines) in zip(axes.flat, beds.items(), strict=False):
        _draw_rules(axis, lines)
        axis.set_title(BEDS[bed], fontweight="bold")
    for row in axes:
        row[0].set_ylabel("test AUC")
    for axis in axes[-1]:
        axis.set_xlabel("batch size")
    figure.suptitle(
        "On three of four data sets, half_life loses at most 0.0017 of AUC;\n"
        "every other rule loses 0.0097 or more on one of these three",
        fontsize=12,
    )
    figure.supxlabel(
        f"Band: one standard deviation of the smallest batch over seeds. Hollow: fewer than {FEW_STEPS} steps.",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_rules(axis: Axes, lines: Lines) -> None:
    base, size, steps = base_values(lines, "auc")["on"], lines[0]["base_batch_size"], steps_by_batch_size(lines)
    spread = deviation(base) if len(base) > 1 else 0.0
    axis.axhspan(mean(base) - spread, mean(base) + spread, color="0.88", zorder=0)
    measured = {rule: by_size for (rule, clip), by_size in series(lines, "auc").items() if clip == "on"}
    ends = {}
    for rule, (name, color) in reversed(RULES.items()):  # the first rule is drawn last, above the others
        points = {batch: mean(values) for batch, values in sorted(measured.get(rule, {}).items()) if batch > size}
        if not points:
            continue
        axis.plot([size, *points], [mean(base), *points.values()], color=color)
        faces = ["white" if steps[batch] < FEW_STEPS else color for batch in points]
        axis.scatter(list(points), list(points.values()), s=28, c=faces, edgecolors=color, zorder=3)
        ends[name, color] = max(points.items())
    axis.scatter(size, mean(base), s=28, c="black", zorder=3)
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(ticks := _ticks(list(steps))), [f"{batch:,}" for batch in ticks])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:.4f}"))
    axis.grid(alpha=0.3)
    _name_ends(axis, ends, at=max(steps) * 1.6)


def _ticks(sizes: list[int]) -> list[int]:
    """Batch sizes whose labels do not touch: from the largest down, those at least four times as small as the last."""
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or 4 * size <= kept[-1]:
            kept.append(size)
    return kept


def _name_ends(axis: Axes, ends: Mapping[tuple[str, str], tuple[float, float]], at: float) -> None:
    """Writes names of lines in a column right of the panel, each at the height of its line's end, or below the last."""
    low, high = axis.get_ylim()
    gap, free = 0.07 * (high - low), high
    for (name, color), end in sorted(ends.items(), key=lambda item: -item[1][1]):
        free = min(free, end[1])
        axis.annotate(
            name,
            end,
            (at, free),
            color=color,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "lw": 0.6, "shrinkA": 0, "shrinkB": 3},
        )
        free -= gap


def plot_groups(beds: Mapping[str, Lines], path: Path) -> None:
    """Draws differences from the base at 128 times its batch, by thirds of the test samples by their ids' counts."""
    figure, axes = plt.subplots(1, len(beds), figsize=(WIDTH, 4.6), sharey=True, squeeze=False, layout="constrained")
    for axis, (bed, lines) in zip(axes[0], beds.items(), strict=True):
        size = lines[0]["base_batch_size"]
        base = [line for line in lines if line["batch_size"] == size]
        for top, (rule, (_, color)) in zip(range(0, 4 * len(RULES), 4), RULES.items(), strict=True):
            large = [line for line in lines if line["batch_size"] == 128 * size and line["rule"] == rule]
            if not large:
                continue
            losses = [
                mean(line["by_id_counts"][group]["auc"] for line in large)
                - mean(line["by_id_counts"][group]["auc"] for line in base)
                for group in GROUPS
            ]
            axis.barh([top, top + 1, top + 2], losses, color=color)
        axis.axvline(0, color="black", lw=0.8)
        axis.set_title(f"{BEDS[bed].split(',')[0]}, batch {128 * size:,}\nless batch {size}", fontweight="bold")
        axis.locator_params(axis="x", nbins=4)
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:.4f}"))
        axis.tick_params(left=False)
        axis.grid(axis="x", alpha=0.3)
    axes[0, 0].set_yticks(
        [top + number for top in range(0, 4 * len(RULES), 4) for number in range(3)],
        [f"{name}   {group}" if group == "middle" else group for name, _ in RULES.values() for group in GROUPS],
    )
    axes[0, 0].invert_yaxis()
    figure.suptitle(
        "half_life keeps the AUC of rare and of frequent ids within 0.003 of the small batch's", fontsize=12
    )
    figure.supxlabel(
        "Difference in test AUC, by thirds of the test samples; rare: their ids are the rarest. The scales differ.",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_epochs(lines: Lines, path: Path) -> None:
    """Draws the test AUC after each epoch at the base batch, and at 128 times this batch under three rules."""
    figure, axis = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    size = lines[0]["base_batch_size"]
    curves = {(f"batch {size}", "black"): [line for line in lines if line["batch_size"] == size]}
    for rule in ("half_life", "sqrt_star", "cowclip"):
        name, color = RULES[rule]
        large = [line for line in lines if line["batch_size"] == 128 * size and line["rule"] == rule]
        curves[f"batch {128 * size:,}, {name}", color] = large
    ends = {}
    for (name, color), runs in curves.items():
        values = by_epoch(runs)
        axis.plot(range(1, 1 + len(values)), values, color=color, marker="o", markersize=5)
        ends[name, color] = (len(values), values[-1])
    axis.set(xlabel="epoch", ylabel="test AUC", xticks=range(1, 11))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:.4f}"))
    axis.grid(alpha=0.3)
    _name_ends(axis, ends, at=10.3)
    figure.suptitle(f"Criteo: half_life at batch {128 * size:,} follows batch {size} through ten epochs", fontsize=12)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def by_epoch(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Mean of the AUC over seeds after each epoch."""
    epochs = zip(*([epoch["auc"] for epoch in run["by_epoch"]] for run in runs), strict=True)
    return [mean(values) for values in epochs]


def tables(folder: Path) -> Iterator[str]:
    """A table in Markdown for each part of each bed."""
    for bed in BEDS:
        files = sorted((folder / bed).glob("*/sweep.jsonl")) + sorted((folder / bed).glob("*/*/sweep.jsonl"))
        bases = parts(folder / bed, "rules", "ten_epochs")
        for file in files:
            lines = [line for line in parts(file.parent, ".") if line.get("auc") is not None]
            yield f"\n## {bed}: {file.parent.relative_to(folder / bed)}\n"
            yield "| rule | clip | batch | steps | AUC | less base | best epoch's | less base's | logloss | less base |"
            yield "|---|---|---|---|---|---|---|---|---|---|"
            yield from _rows(lines, bases)


def _rows(lines: Lines, others: Lines) -> Iterator[str]:
    """Lines of a table; differences are from the base of the same part, else from the tuned one of as many epochs."""
    if not lines:
        return
    size, epochs = lines[0]["base_batch_size"], lines[0]["epochs"]
    base = [line for line in lines if line["batch_size"] == size] or [
        line for line in others if (line["batch_size"], line["epochs"]) == (size, epochs)
    ]
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for line in lines:
        rule = "base" if line["batch_size"] == size else line["rule"]
        groups.setdefault((rule, line["clip"], line["batch_size"]), []).append(line)
    for (rule, clip, batch), all_runs in groups.items():
        runs = list({run["seed"]: run for run in all_runs}.values())  # at the base batch, all rules are one run
        cells = [
            rule,
            clip,
            f"{batch:,}",
            f"{runs[0]['steps']:,}" + (" (few)" if runs[0]["steps"] < FEW_STEPS else ""),
        ]
        for measure in ("auc", "best_epoch_auc", "logloss"):
            values = [run[measure] for run in runs]
            spread = f" ± {deviation(values):.4f}" if len(values) > 1 else ""
            difference = mean(values) - mean(run[measure] for run in base) if base else float("nan")
            cells += [f"{mean(values):.4f}{spread}", f"{difference:+.4f}"]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
