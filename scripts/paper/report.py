"""Table and plot of `scripts/reproduce_paper.sh`: its runs beside the published results, and the time left.

Prints the combinations that still have runs to train, one a line: MODEL BATCH CLIP RULE.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes

from cowrec.data_pipeline import Schema
from cowrec.names import parse_count
from cowrec.trainer.cli.flags import parse_list
from cowrec.trainer.reports.plotting import plt, size_name
from cowrec.trainer.runtime.environment import environment

PUBLISHED = Path(__file__).with_name("criteo.json")
NAMES = {"deepfm": "DeepFM", "wdl": "W&D", "dcn": "DCN", "dcnmix": "DCN-v2 (mixture)", "dcnv2": "DCN-v2 (full matrix)"}
PAPER = (41_256_555, 10)
"""Training samples and epochs of the published runs: nine tenths of the file's lines, and `criteo.toml`'s epochs."""


class Cell(NamedTuple):
    """A combination of which there is one run for each seed."""

    model: str
    clip: str
    rule: str
    batch_size: int


class Values(NamedTuple):
    """Results of a run: AUC, logloss, minutes of training."""

    auc: float | None = None
    logloss: float | None = None
    minutes: float | None = None


Results = dict[Cell, list[Values | None]]
"""The results of each seed that has been run; None if the run failed."""
Published = dict[tuple[str, str, int], Values]
"""Published results by model, clip and batch size."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder of the runs")
    parser.add_argument("--models", required=True)
    parser.add_argument("--batches", required=True)
    parser.add_argument("--seeds", type=int, required=True)
    parser.add_argument("--baseline", required=True, help="scaling rules without the clip")
    arguments = parser.parse_args()
    output: Path = arguments.output
    batches = [parse_count(each, "a batch size") for each in arguments.batches.split()]
    methods = [("on", "cowclip"), *(("off", rule) for rule in parse_list(arguments.baseline))]
    cells = [
        Cell(model, *method, batch) for batch, model, method in product(batches, arguments.models.split(), methods)
    ]
    lines, published = read_lines(output), read_published()
    results = results_of(lines)
    print(progress(cells, results, published, arguments.seeds), file=sys.stderr)
    if done := {cell: results[cell] for cell in cells if cell in results}:
        samples = Schema.load(output / "data").split("train").rows
        setting = {(samples, line["epochs"], line["device"]) for line in lines if "epochs" in line}
        (output / "table.md").write_text(markdown(done, published, setting), encoding="utf-8")
        draw(done, published, setting, output / "plot.png")
    for cell in cells:
        if len(results.get(cell, [])) < arguments.seeds:
            print(cell.model, cell.batch_size, cell.clip, cell.rule)


def read_lines(output: Path) -> list[dict[str, Any]]:
    """Reads the lines of all sweeps below a folder."""
    files = sorted(output.glob("*/*/sweep.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def results_of(lines: Sequence[dict[str, Any]]) -> Results:
    """Returns the results of the lines of sweeps."""
    results: Results = {}
    for line in lines:
        cell = Cell(line["model"], line["clip"], line["rule"], line["batch_size"])
        results.setdefault(cell, []).append(None if "error" in line else _values(line))
    return results


def _values(line: dict[str, Any]) -> Values:
    # Runs of a few steps have no measured seconds.
    return Values(line["auc"], line["logloss"], line["train_seconds"] / 60 or None)


def read_published() -> Published:
    """Reads the published results."""
    file = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    rows = [dict(zip(file["columns"], row, strict=True)) for row in file["results"]]
    return {
        (row["model"], row["clip"], parse_count(row["batch"], "a batch size")): Values(
            row["auc"] / 100, row["logloss"], row["minutes"]
        )
        for row in rows
    }


def progress(cells: Sequence[Cell], results: Results, published: Published, seeds: int) -> str:
    """Returns a line with the device, the number of runs, and the training time left.

    The time of a run is that of the finished runs of the nearest batch size, multiplied by the ratio that the published
    times have between the two sizes.
    """
    runs = [values for cell in cells for values in results.get(cell, [])[:seeds]]
    seen = [(cell.batch_size, run.minutes) for cell in cells for run in results.get(cell, []) if run and run.minutes]
    pending = [cell.batch_size for cell in cells for _ in range(seeds - len(results.get(cell, [])))]
    left = "the time they take is estimated after the first"
    if not pending:
        left = "all done"
    elif seen:
        left = f"about {_hours(sum(_estimate(size, seen, published) for size in pending))} of training left"
    failed = f", {runs.count(None)} failed" if None in runs else ""
    device = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))["device"]
    return f"{device}: {len(runs)} of {len(runs) + len(pending)} runs done{failed}; {left}"


def _estimate(size: int, seen: Sequence[tuple[int, float]], published: Published) -> float:
    """Estimates the minutes of a run of a batch size from those of finished runs."""

    def relative(batch_size: int) -> float:
        return (published.get(("deepfm", "on", batch_size)) or Values()).minutes or 768 * 1024 / batch_size

    nearest = min({each for each, _ in seen}, key=lambda each: max(each, size) / min(each, size))
    return mean(minutes for each, minutes in seen if each == nearest) * relative(size) / relative(nearest)


def _hours(minutes: float) -> str:
    return (
        f"{minutes / 60:.1f} h" if minutes >= 90 else f"{minutes:.0f} min" if minutes >= 2 else f"{60 * minutes:.0f} s"
    )


def markdown(results: Results, published: Published, setting: set[tuple[int, int, str]]) -> str:
    """Returns a table for each model, with ours / published in each cell."""
    methods = list(dict.fromkeys((cell.clip, cell.rule) for cell in results))
    head = ["batch"]
    for clip, rule in methods:
        head += [f"{_method(clip, rule)}: AUC", "logloss", "minutes"]
    parts = ["# CowClip on Criteo", _preface(setting)]
    for model in dict.fromkeys(cell.model for cell in results):
        sizes = sorted({cell.batch_size for cell in results if cell.model == model})
        rows = [head, ["---"] * len(head)]
        for size in sizes:
            row = [size_name(size)]
            for clip, rule in methods:
                # The published baseline has the base batch size, at which all scaling rules are the same.
                paper = published.get((model, clip, size), Values())
                row += _pairs(results.get(Cell(model, clip, rule, size)), paper)
            rows.append(row)
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"## {NAMES.get(model, model)}\n\n{table}")
    file = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    sources = "\n".join(f"* {text}" for text in (*file["sources"].values(), file["missing"]))
    return (
        "\n\n".join([*parts, f"Published numbers (`scripts/paper/criteo.json` has the source of each):\n\n{sources}"])
        + "\n"
    )


def _pairs(runs: Sequence[Values | None] | None, paper: Values) -> list[str]:
    """Returns the three cells of a method, ours / published."""
    found = [run for run in runs or [] if run]
    cells = []
    for field, form in (("auc", ".4f"), ("logloss", ".4f"), ("minutes", ".3g")):
        values = _known(found, field)
        ours = f"{mean(values):{form}}" if values else "failed" if runs and not found else "-"
        if len(values) > 1 and field != "minutes":
            ours += f" ± {stdev(values):{form}}"
        theirs = getattr(paper, field)
        cells.append(f"{ours} / {'-' if theirs is None else f'{theirs:{form}}'}")
    return cells


def _known(runs: Sequence[Values | None], field: str) -> list[float]:
    """Returns a field's values of the runs that have one."""
    return [value for run in runs if run and (value := getattr(run, field)) is not None]


def _preface(setting: set[tuple[int, int, str]]) -> str:
    """Describes the cells, and warns of results that are not comparable."""
    text = "Each cell: ours / published. Minutes are those of the training steps; the published ones are a V100's."
    for samples, epochs, device in sorted(setting):
        text += f"\n\nOurs: {device}, {samples:,} training samples, epochs: {epochs}."
        if (samples, epochs) != PAPER:
            text += " **Not comparable:** the paper has {:,} samples, epochs: {}.".format(*PAPER)
    return text


def _method(clip: str, rule: str) -> str:
    return "CowClip" if clip == "on" else f"{rule} scaling, no clip"


def draw(results: Results, published: Published, setting: set[tuple[int, int, str]], path: Path) -> None:
    """Draws AUC, logloss and minutes by batch size. Solid: CowClip. Dashed and dotted: no clip. Crosses: published."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 5.4), layout="constrained")
    models = list(dict.fromkeys(cell.model for cell in results))
    methods = list(dict.fromkeys((cell.clip, cell.rule) for cell in results))
    sizes = sorted({cell.batch_size for cell in results})
    measures = {"auc": "test AUC", "logloss": "test logloss", "minutes": "minutes of training"}
    for axis, (field, label) in zip(axes, measures.items(), strict=True):
        for (number, model), (style, (clip, rule)) in product(enumerate(models), enumerate(methods)):
            points = dict(_points(results, Cell(model, clip, rule, 0), field))
            line, marker = ("-", "o") if clip == "on" else (("--", ":", "-.")[(style - 1) % 3], "s")
            name, fill = f"{NAMES.get(model, model)}, {_method(clip, rule)}", None if clip == "on" else "white"
            axis.plot(list(points), list(points.values()), f"{line}{marker}", color=f"C{number}", mfc=fill, label=name)
        for (number, model), (clip, marker) in product(enumerate(models), {"on": "x", "off": "+"}.items()):
            theirs = {size: getattr(published.get((model, clip, size)), field, None) for size in sizes}
            if known := {size: value for size, value in theirs.items() if value is not None}:
                name = f"{NAMES.get(model, model)}, {'CowClip' if clip == 'on' else 'no clip'}, published"
                cross = {"ls": "none", "marker": marker, "ms": 9, "mew": 2, "color": f"C{number}", "label": name}
                axis.plot(list(known), list(known.values()), **cross)
        _scale(axis, sizes, label)
    if any(_known(runs, "minutes") for runs in results.values()):  # an empty axis cannot be logarithmic
        axes[2].set_yscale("log")
    legends = [axis.get_legend_handles_labels() for axis in axes]
    handles = {label: handle for legend in legends for handle, label in zip(*legend, strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
    described = (
        f"{samples:,} training samples of Criteo, epochs: {epochs}, {device}" for samples, epochs, device in setting
    )
    figure.suptitle("\n".join(described))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _points(results: Results, curve: Cell, field: str) -> Iterator[tuple[int, float]]:
    """Yields batch size and mean value of a curve's finished runs, by batch size."""
    for cell in sorted((cell for cell in results if cell[:3] == curve[:3]), key=lambda cell: cell.batch_size):
        if values := _known(results[cell], field):
            yield cell.batch_size, mean(values)


def _scale(axis: Axes, sizes: Sequence[int], label: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(sizes), [size_name(size) for size in sizes], minor=False)
    axis.set(xlabel="batch size", ylabel=label)
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    main()
