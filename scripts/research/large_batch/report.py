"""Plots and tables of the large-batch study, from the results of `study.py`.

    python scripts/research/large_batch/report.py runs/large_batch

Writes rules.png (quality against the batch size), by_epoch.png (ten epochs), by_id_counts.png (groups of samples) and
tables.md into the folder.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.axes import Axes

from cowrec.trainer.config.run import FEW_STEPS
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.sweep.results import Lines, base_values, deviation, series, steps_by_batch_size, style

BEDS = {"synthetic": "synthetic", "criteo": "Criteo, 80K samples", "movielens": "MovieLens-1M", "avazu": "Avazu, 9K"}
QUALITY = {"auc": ("AUC, points", 100), "logloss": ("logloss", 1)}
GROUPS = ("rare", "middle", "frequent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="output of study.py")
    folder: Path = parser.parse_args().folder
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
    """Draws each rule's difference from the base against the multiple of the base batch. Band: the base's spread."""
    figure, axes = plt.subplots(
        len(QUALITY), len(beds), figsize=(3.4 * len(beds), 5.6), sharex="col", squeeze=False, layout="constrained"
    )
    for column, (bed, lines) in zip(axes.T, beds.items(), strict=True):
        base = lines[0]["base_batch_size"]
        for axis, (measure, (label, factor)) in zip(column, QUALITY.items(), strict=True):
            _draw_differences(axis, lines, measure, factor)
            axis.set_ylabel(f"{label} above the base" if axis is axes[0, 0] or axis is axes[1, 0] else "")
        steps = steps_by_batch_size(lines)
        ticks = {size // base: f"{size // base}x\n{number:,}" for size, number in steps.items()}
        column[-1].set_xscale("log", base=2)
        column[-1].set_xticks(list(ticks), list(ticks.values()), fontsize=7)
        column[-1].set_xlabel(f"batch / {base}; steps")
        column[0].set_title(BEDS[bed], fontsize=10)
    handles = {text: handle for axis in axes[0] for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_differences(axis: Axes, lines: Lines, measure: str, factor: float) -> None:
    base = base_values(lines, measure)["on"]
    middle, spread, size = mean(base), deviation(base) if len(base) > 1 else 0.0, lines[0]["base_batch_size"]
    axis.axhspan(-spread * factor, spread * factor, color="0.85", label="base ± one standard deviation")
    lowest = 0.0
    for (rule, clip), by_size in series(lines, measure).items():
        points = {
            batch // size: factor * (mean(values) - middle) for batch, values in sorted(by_size.items()) if values
        }
        points[1] = 0.0
        points = dict(sorted(points.items()))
        axis.plot(list(points), list(points.values()), **style(rule, clip), label=rule)
        if rule == "half_life":
            lowest = max(abs(value) for value in points.values())
    # Rules that go far astray would hide the differences between the others.
    reach = max(4 * spread * factor, 1.5 * lowest, 3.0 if measure == "auc" else 0.03)
    axis.set_ylim(*((-reach, reach / 3) if measure == "auc" else (-reach / 3, reach)))
    axis.grid(alpha=0.3)


def plot_groups(beds: Mapping[str, Lines], path: Path) -> None:
    """Draws differences from the base at 128 times its batch, by thirds of the test samples by their ids' counts."""
    figure, axes = plt.subplots(1, len(beds), figsize=(3.4 * len(beds), 3.2), squeeze=False, layout="constrained")
    for axis, (bed, lines) in zip(axes[0], beds.items(), strict=True):
        size = lines[0]["base_batch_size"]
        base = [line for line in lines if line["batch_size"] == size]
        for rule in dict.fromkeys(line["rule"] for line in lines):
            large = [line for line in lines if line["batch_size"] == 128 * size and line["rule"] == rule]
            if not large:
                continue
            heights = [
                100 * (mean(line["by_id_counts"][group]["auc"] for line in large)
                       - mean(line["by_id_counts"][group]["auc"] for line in base))
                for group in GROUPS
            ]  # fmt: skip
            axis.plot(GROUPS, heights, **style(rule, "on"), label=rule)
        axis.axhline(0, color="0.5", lw=0.8)
        axis.set_title(BEDS[bed], fontsize=10)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("AUC at 128x, points above the base")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_epochs(lines: Lines, path: Path) -> None:
    """Draws AUC by epoch of the test split, and beside it of training samples where the runs measured theirs."""
    measured = all("train" in epoch for line in lines for epoch in line["by_epoch"])
    panels = {"test AUC (%)": None} | ({"AUC of training samples (%)": "train"} if measured else {})
    figure, [axes] = plt.subplots(1, len(panels), figsize=(4.5 * len(panels), 4), layout="constrained", squeeze=False)
    size = lines[0]["base_batch_size"]
    curves = {("base", size): [line for line in lines if line["batch_size"] == size and line["rule"] == "half_life"]}
    for rule in dict.fromkeys(line["rule"] for line in lines):
        curves[rule, 128 * size] = [line for line in lines if line["batch_size"] == 128 * size and line["rule"] == rule]
    for (name, batch), runs in curves.items():
        look = {"color": "black", "lw": 2} if name == "base" else style(name, "on")
        for axis, part in zip(axes, panels.values(), strict=True):
            values = by_epoch(runs, part)
            axis.plot(range(1, 1 + len(values)), values, **look, label=f"{name}, batch {batch:,}")
    for axis, label in zip(axes, panels, strict=True):
        axis.set(xlabel="epoch", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(bottom=max(axes[0].get_ylim()[0], axes[0].get_ylim()[1] - 12))
    legend = {"loc": "outside lower center", "ncols": 2 * len(panels), "frameon": False, "fontsize": 8}
    figure.legend(*axes[0].get_legend_handles_labels(), **legend)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def by_epoch(runs: Sequence[dict[str, Any]], part: str | None = None, measure: str = "auc") -> list[float]:
    """Mean of a measure over seeds after each epoch, in percent."""
    epochs = zip(
        *([(epoch[part] if part else epoch)[measure] for epoch in run["by_epoch"]] for run in runs), strict=True
    )
    return [100 * mean(values) for values in epochs]


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
