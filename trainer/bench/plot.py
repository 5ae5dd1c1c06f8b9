"""Results of a bench as tables and as a plot: speed by batch size, and time of a step's parts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from cowrec.trainer.reports.plotting import plt, size_name
from cowrec.trainer.reports.text_table import aligned

from .mlperf import BATCH_SIZE_OF_GPU, MODEL, PUBLISHED

Lines = Sequence[dict[str, Any]]

_SPEED = "samples_per_second"
PAPER_MINUTES = {1024: 768, 8192: 102, 131072: 9}
"""Ten epochs of Criteo, DeepFM with CowClip on one V100. Source: CowClip (arXiv 2204.06240), Table 5."""


class Curve(NamedTuple):
    """The values that the points of a curve share."""

    mode: str
    clip: str
    precision: str
    spacing: int


def measured(lines: Lines) -> list[dict[str, Any]]:
    """The lines of combinations that did not fail."""
    return [line for line in lines if "error" not in line]


def table(lines: Lines) -> str:
    """Four tables: speed and memory of each combination, time of a step's parts, time of 10 epochs, ratios of speed.

    Memory is in GB: peak, and the size of tables and moments. Replayed steps are per sample. The ratios are the first
    curve's speed over the others'. Failed combinations are left out. MLPerf's lines have its published speed instead of
    the time of 10 epochs.
    """
    lines = measured(lines)
    if not lines:
        return ""
    head = ["mode", "batch", "samples/s", "quartiles", "step ms", "peak GB", "tables GB", "replayed"]
    times = _published(lines) if lines[0]["model"] == MODEL else _minutes_table(lines)
    tables = [aligned([head, *map(_cells, lines)]), _parts_table(lines), times, _ratio_table(lines)]
    return "\n\n".join(filter(None, tables))


def short(line: dict[str, Any]) -> str:
    """One line of text about a combination."""
    if "error" in line:
        return f"{_name(_curve(line))}, batch {size_name(line['batch_size'])}: failed: {line['error']}"
    name, batch, speed, _, step, peak, *_ = _cells(line)
    return f"{name}, batch {batch}: {speed} samples/s, {step} ms a step, {peak} GB"


def plot(lines: Lines, path: Path) -> Path:
    """Draws the minutes of 10 epochs by batch size, and the time of a step's parts.

    Failed combinations are left out; one at least must not have failed.
    """
    lines = measured(lines)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained", width_ratios=(1, 1.1))
    _draw_minutes(axes[0], lines)
    _draw_parts(axes[1], lines)
    first = lines[0]
    ids = first["table_rows"] // first["spacing"]
    figure.suptitle(f"{first['model']}, {ids:,} ids with Criteo's frequencies, {first['device']}")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _draw_minutes(axis: Axes, lines: Lines) -> None:
    for number, (curve, by_size) in enumerate(_curves(lines).items()):
        minutes = [line["minutes_of_10_epochs"] for line in by_size.values()]
        speeds = [(line[_SPEED], *line[f"{_SPEED}_quartiles"]) for line in by_size.values()]
        errors = [
            [each * (1 - median / high) for each, (median, _, high) in zip(minutes, speeds, strict=True)],
            [each * (median / low - 1) for each, (median, low, _) in zip(minutes, speeds, strict=True)],
        ]
        axis.errorbar(list(by_size), minutes, errors, marker="o", capsize=3, color=f"C{number}", label=_name(curve))
    for number, (precision, floor) in enumerate(_floors(lines).items()):
        axis.plot(list(floor), list(floor.values()), "k", ls=(":", "-.", "--")[number], label=f"roofline {precision}")
    sizes = sorted({line["batch_size"] for line in lines})
    paper = {size: minutes for size, minutes in PAPER_MINUTES.items() if sizes[0] <= size <= sizes[-1]}
    if paper and lines[0]["model"] == "deepfm":
        axis.plot(list(paper), list(paper.values()), "kx", label="CowClip paper, one V100")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.set_xticks(sizes, [size_name(size) for size in sizes], minor=False)
    axis.set(xlabel="batch size", ylabel="minutes", title="Time of 10 epochs of Criteo (median, quartiles)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _floors(lines: Lines) -> dict[str, dict[int, float]]:
    """Minutes of 10 epochs at the roofline by precision and batch size."""
    floors: dict[str, dict[int, float]] = {}
    for line in sorted(lines, key=lambda each: each["batch_size"]):
        minutes = line["minutes_of_10_epochs"] * line["roofline"]["step_ms"] / line["step_ms"]
        floors.setdefault(line["precision"], {})[line["batch_size"]] = minutes
    return floors


def _draw_parts(axis: Axes, lines: Lines) -> None:
    """Draws a bar per combination: time per sample by part. The dense oracle's bars would dwarf the others."""
    lines = [line for line in lines if line["mode"] != "dense"] or lines
    names = [f"{_name(_curve(line))}, {size_name(line['batch_size'])}" for line in lines]
    ends = [0.0] * len(lines)
    for part in lines[0]["step_parts_ms"]:
        times = [1e3 * line["step_parts_ms"][part] / line["batch_size"] for line in lines]
        axis.barh(names, times, left=ends, label=part.replace("_", " "))
        ends = [end + time for end, time in zip(ends, times, strict=True)]
    axis.invert_yaxis()
    axis.tick_params(axis="y", labelsize=8)
    axis.set(xlabel="microseconds per sample", title="Time of a step by part")
    axis.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14))


def _curve(line: dict[str, Any]) -> Curve:
    return Curve(*(line[field] for field in Curve._fields))


def _curves(lines: Lines) -> dict[Curve, dict[int, dict[str, Any]]]:
    """Lines by curve, in the order of measurement, and by batch size."""
    curves: dict[Curve, dict[int, dict[str, Any]]] = {_curve(line): {} for line in lines}
    for line in sorted(lines, key=lambda each: each["batch_size"]):
        curves[_curve(line)][line["batch_size"]] = line
    return curves


def _parts_table(lines: Lines) -> str:
    parts = list(lines[0]["step_parts_ms"])
    rows = [["step ms by part", "batch", *(part.replace("_", " ") for part in parts), "roofline"]]
    for line in lines:
        times = [*line["step_parts_ms"].values(), line["roofline"]["step_ms"]]
        rows.append([_name(_curve(line)), size_name(line["batch_size"]), *(f"{each:.2f}" for each in times)])
    return aligned(rows)


def _minutes_table(lines: Lines) -> str:
    sizes = sorted({line["batch_size"] for line in lines})
    rows = [["minutes of 10 epochs", *map(size_name, sizes)]]
    for curve, by_size in _curves(lines).items():
        minutes = {size: line["minutes_of_10_epochs"] for size, line in by_size.items()}
        rows.append([_name(curve), *(_cell(minutes, size, ",.1f") for size in sizes)])
    for precision, floor in _floors(lines).items():
        rows.append([f"roofline {precision}", *(_cell(floor, size, ",.1f") for size in sizes)])
    if lines[0]["model"] == "deepfm":
        rows.append(["CowClip paper, one V100", *(str(PAPER_MINUTES.get(size, "-")) for size in sizes)])
    return aligned(rows)


def _published(lines: Lines) -> str:
    speeds = ", ".join(f"{line['samples_per_second_of_gpu']:,.0f}" for line in lines)
    own = f"samples/s of each of {lines[0]['world_size']} processes: {speeds}"
    return f"{own}\nMLPerf, 8 x H200, batch {8 * BATCH_SIZE_OF_GPU:,}: {PUBLISHED / 8:,.0f} samples/s each"


def _ratio_table(lines: Lines) -> str:
    curves = _curves(lines)
    first, *others = curves
    sizes = sorted({line["batch_size"] for line in lines})
    rows = [["ratio of samples/s", *map(size_name, sizes)]]
    for other in others:
        both = curves[first].keys() & curves[other].keys()
        ratios = {size: curves[first][size][_SPEED] / curves[other][size][_SPEED] for size in both}
        rows.append([f"{_name(first)} / {_name(other)}", *(_cell(ratios, size, ".2f") for size in sizes)])
    return aligned(rows) if others else ""


def _cell(values: dict[int, float], size: int, form: str) -> str:
    return format(values[size], form) if size in values else "-"


def _cells(line: dict[str, Any]) -> list[str]:
    replayed = line.get("replayed_row_steps")
    return [
        _name(_curve(line)),
        size_name(line["batch_size"]),
        f"{line[_SPEED]:,.0f}",
        " - ".join(f"{each:,.0f}" for each in line["samples_per_second_quartiles"]),
        f"{line['step_ms']:.1f}",
        f"{line['peak_memory_bytes'] / 1e9:.2f}",
        f"{(line['table_bytes'] + line['moments_bytes']) / 1e9:.2f}",
        "-" if replayed is None else f"{replayed:,.0f}",
    ]


def _name(curve: Curve) -> str:
    """The mode, followed by the values that are not the default."""
    unclipped = ["no clip"] if curve.clip == "off" else []
    precision = [curve.precision] if curve.precision != "float32" else []
    spacing = [f"tables x{curve.spacing}"] if curve.spacing > 1 else []
    return ", ".join([curve.mode, *unclipped, *precision, *spacing])
