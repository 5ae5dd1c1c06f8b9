"""What a bench found, as text and as a plot: speed by mode and batch size, and how long rows had been absent."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from .sweep_plot import size_name
from .text_table import aligned

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Lines = Sequence[dict[str, Any]]
Curve = tuple[str, int]
"""Mode and spacing."""

_SPEED = "samples_per_second"


def table(lines: Lines) -> str:
    """A row per combination, and the ratios of speed: the first mode over the others, larger tables over smaller.

    Memory is in GB: at most, at most without tables, and what tables and moments take. Row-steps are those replayed
    for a sample.
    """
    head = ["", "batch", "samples/s", "quartiles", "step ms", "peak GB", "without tables", "of tables", "row-steps"]
    return f"{aligned([head, *map(_cells, lines)])}\n\n{_ratio_table(lines)}"


def short(line: dict[str, Any]) -> str:
    """A combination in one line."""
    name, batch, speed, _, step, peak, *_ = _cells(line)
    return f"{name}, batch {batch}: {speed} samples/s, {step} ms a step, {peak} GB"


def plot(lines: Lines, path: Path) -> Path:
    """Draws samples/s with quartiles against the batch size, and the rows of a sample against their gaps."""
    figure, (speed, gaps) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    sizes = sorted({line["batch_size"] for line in lines})
    for curve, by_size in _curves(lines).items():
        medians = [line[_SPEED] for line in by_size.values()]
        quartiles = [line["samples_per_second_quartiles"] for line in by_size.values()]
        errors = [
            [median - low for median, (low, _) in zip(medians, quartiles, strict=True)],
            [high - median for median, (_, high) in zip(medians, quartiles, strict=True)],
        ]
        speed.errorbar(list(by_size), medians, errors, marker="o", capsize=3, label=_name(curve))
    speed.set_xscale("log", base=2)
    speed.set_yscale("log")
    speed.set_xticks(sizes, [size_name(size) for size in sizes], minor=False)
    speed.set(xlabel="batch size", ylabel="training samples per second", title="steady state, median and quartiles")
    speed.grid(which="both", alpha=0.3)
    speed.legend(frameon=False)
    _draw_gaps(gaps, [next(line for line in lines if line["batch_size"] == size) for size in sizes])
    first = lines[0]
    ids = first["table_rows"] // first["spacing"]
    figure.suptitle(f"{first['model']}, {ids:,} ids with Criteo's frequencies, {first['device']}")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _draw_gaps(axis: Axes, lines: Lines) -> None:
    """Bars side by side, a colour per batch size; rows never seen before at the right."""
    bins = sorted({int(gap) for line in lines for gap in line["gaps"]})
    width = 0.8 / len(lines)
    for number, line in enumerate(lines):
        heights = [line["gaps"].get(str(gap), 0.0) for gap in bins] + [line["never_seen"]]
        places = [place + (number - (len(lines) - 1) / 2) * width for place in range(len(heights))]
        axis.bar(places, heights, width, label=f"batch {size_name(line['batch_size'])}")
    axis.set_xticks(range(len(bins) + 1), [*(size_name(gap) for gap in bins), "never"], rotation=60)
    axis.set(
        xlabel="steps since the row's last one, from ... to twice that",
        ylabel="distinct rows per sample",
        title="how long the rows of a batch were absent",
    )
    axis.legend(frameon=False)


def _curves(lines: Lines) -> dict[Curve, dict[int, dict[str, Any]]]:
    """Lines by mode and spacing, and those by batch size."""
    curves: dict[Curve, dict[int, dict[str, Any]]] = {}
    for line in sorted(lines, key=lambda each: each["batch_size"]):
        curves.setdefault((line["mode"], line["spacing"]), {})[line["batch_size"]] = line
    return curves


def _ratio_table(lines: Lines) -> str:
    curves = _curves(lines)
    modes, spacings = list(dict.fromkeys(mode for mode, _ in curves)), sorted({spacing for _, spacing in curves})
    pairs = [((modes[0], spacing), (other, spacing)) for spacing in spacings for other in modes[1:]]
    pairs += [((mode, spacing), (mode, spacings[0])) for mode in modes for spacing in spacings[1:]]
    sizes = sorted({line["batch_size"] for line in lines})
    rows = [["samples/s, ratio", *(size_name(size) for size in sizes)]]
    for one, other in pairs:
        ratios = [curves[one][size][_SPEED] / curves[other][size][_SPEED] for size in sizes]
        rows.append([f"{_name(one)} / {_name(other)}", *(f"{ratio:.2f}" for ratio in ratios)])
    return aligned(rows) if pairs else ""


def _cells(line: dict[str, Any]) -> list[str]:
    replayed = line["replayed_row_steps"]
    return [
        _name((line["mode"], line["spacing"])),
        size_name(line["batch_size"]),
        f"{line[_SPEED]:,.0f}",
        " - ".join(f"{each:,.0f}" for each in line["samples_per_second_quartiles"]),
        f"{line['step_ms']:.1f}",
        f"{line['peak_memory_bytes'] / 1e9:.2f}",
        f"{line['peak_without_tables_bytes'] / 1e9:.2f}",
        f"{(line['table_bytes'] + line['moments_bytes']) / 1e9:.2f}",
        "-" if replayed is None else f"{replayed:,.0f}",
    ]


def _name(curve: Curve) -> str:
    mode, spacing = curve
    return mode if spacing == 1 else f"{mode}, tables x{spacing}"
