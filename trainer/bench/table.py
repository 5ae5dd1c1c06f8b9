"""Results of a bench as tables: speed by batch size, and time of a step's parts."""

from collections.abc import Sequence
from typing import Any

from ..reports.plotting import size_name
from ..reports.text_table import aligned
from .mlperf import BATCH_SIZE_OF_GPU, NAME, PUBLISHED

Lines = Sequence[dict[str, Any]]

PAPER_MINUTES = {1024: 768, 8192: 102, 131072: 9}
"""Ten epochs of Criteo, DeepFM with CowClip on one V100. Source: CowClip (arXiv 2204.06240), Table 5."""


def table(lines: Lines) -> str:
    """Three tables of combinations that did not fail: speed and memory, time of a step's parts, time of 10 epochs.

    Memory is in GB: peak, and the size of tables and moments. Lines of MLPerf's shape have what was published for it
    instead of the time of 10 epochs.
    """
    head = ["mode", "batch", "samples/s", "quartiles", "step ms", "peak GB", "tables GB"]
    parts = [part.replace("_", " ") for part in lines[0]["step_parts_ms"]]
    of_parts = [["step ms by part", "batch", *parts, "roofline"]]
    for line in lines:
        times = [*line["step_parts_ms"].values(), line["roofline"]["step_ms"]]
        of_parts.append(
            [_name(line), size_name(line["batch_size"]), *("-" if each is None else f"{each:.2f}" for each in times)]
        )
    last = _published if lines[0]["model"] == NAME else _minutes_table
    return "\n\n".join([aligned([head, *map(_cells, lines)]), aligned(of_parts), last(lines)])


def short(line: dict[str, Any]) -> str:
    """One line of text about a combination."""
    if "error" in line:
        return f"{_name(line)}, batch {size_name(line['batch_size'])}: failed: {line['error']}"
    name, batch, speed, _, step, peak, *_ = _cells(line)
    return f"{name}, batch {batch}: {speed} samples/s, {step} ms a step, {peak} GB"


def _minutes_table(lines: Lines) -> str:
    sizes = sorted({line["batch_size"] for line in lines})
    minutes: dict[str, dict[int, float]] = {}
    floors: dict[str, dict[int, float]] = {}
    for line in lines:
        size, of_10_epochs = line["batch_size"], line["minutes_of_10_epochs"]
        minutes.setdefault(_name(line), {})[size] = of_10_epochs
        floor = of_10_epochs * line["roofline"]["step_ms"] / line["step_ms"]
        floors.setdefault(f"roofline {line['precision']}", {})[size] = floor
    rows = [["minutes of 10 epochs", *map(size_name, sizes)]]
    for name, by_size in {**minutes, **floors}.items():
        rows.append([name, *(f"{by_size[size]:,.1f}" if size in by_size else "-" for size in sizes)])
    if lines[0]["model"] == "deepfm":
        rows.append(["CowClip paper, one V100", *(str(PAPER_MINUTES.get(size, "-")) for size in sizes)])
    return aligned(rows)


def _published(lines: Lines) -> str:
    speeds = ", ".join(f"{line['samples_per_second_of_gpu']:,.0f}" for line in lines)
    own = f"samples/s of each of {lines[0]['world_size']} processes: {speeds}"
    return f"{own}\nMLPerf, 8 x H200, batch {8 * BATCH_SIZE_OF_GPU:,}: {PUBLISHED / 8:,.0f} samples/s each"


def _cells(line: dict[str, Any]) -> list[str]:
    return [
        _name(line),
        size_name(line["batch_size"]),
        f"{line['samples_per_second']:,.0f}",
        " - ".join(f"{each:,.0f}" for each in line["samples_per_second_quartiles"]),
        f"{line['step_ms']:.1f}",
        f"{line['peak_memory_bytes'] / 1e9:.2f}",
        f"{(line['table_bytes'] + line['moments_bytes']) / 1e9:.2f}",
    ]


def _name(line: dict[str, Any]) -> str:
    """The mode, followed by the values that are not the default."""
    unclipped = ["no clip"] if line["clip"] == "off" else []
    precision = [line["precision"]] if line["precision"] != "float32" else []
    return ", ".join([line["mode"], *unclipped, *precision])
