"""Measurement of id lifetimes over a year: memory saved and quality lost by admission, expiry and full tables.

    python scripts/measure_id_lifetimes.py --output id_lifetimes.jsonl

For each seed, `cowrec online` trains on a year of drifting samples, most of whose ids live for some weeks, once per
setting and in its own process. Progressive AUC and logloss are those of the second half of the year, with the best
possible for comparison. Each run is a JSON line; runs already in the file are skipped, so an interrupted measurement
can be continued. The plot in the same folder shows AUC by bytes.

Bytes are those of the maximum number of rows in use (weights, both moments, 22 for the id table) and of the counters of
admission.
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from cowrec.trainer.runtime.environment import prepare_process

prepare_process()  # before torch is loaded

import numpy as np
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from cowrec.data_pipeline import synthesize_drifting
from cowrec.data_pipeline.synthetic.drifting import DAY, DriftConfig, DriftingModel
from cowrec.data_pipeline.synthetic.drifting_samples import CHUNK_ROWS, best_by_window, drifting_tables
from cowrec.models import physical_dim
from cowrec.trainer.config.id_table import AdmissionKind, IdConfig, TableIds, WhenFull
from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.online.loop import online
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runtime.subprocess_call import run_in_subprocess

CONFIG = Path(__file__).resolve().parents[1] / "trainer" / "configs" / "drifting_year.toml"
HALF = 182 * DAY
YEAR = DriftConfig(
    rows=728_000,
    days=2 * HALF / DAY,
    start=108 * HALF,
    core_ids=(50, 1000, 1000, 5000, 0, 0),
    new_ids_per_day=(0, 0, 20, 100, 300, 1000),
    new_id_share=0.7,
    lifetime_days=10.0,
    drift_days=60.0,
    num_dense=2,
    id_effect=0.8,
    interaction_effect=0.1,
)
ALL = "every id, for ever"
THRESHOLDS: dict[str, tuple[AdmissionKind, int]] = {f"count {n}": ("count", n) for n in (2, 4, 8, 16)}
THRESHOLDS |= {f"lot {n}": ("probabilistic", n) for n in (4, 16)}
EXPIRIES = ("180d", "60d", "20d", "5d", "1d")
POLICIES: dict[str, tuple[WhenFull, str]] = {each: (each, "") for each in ("oldest", "least_frequent", "refuse")}
POLICIES["20d, least_frequent"] = ("least_frequent", "20d")
CAPACITIES = {f"{policy} {share:.0%}": (policy, share) for policy in POLICIES for share in (0.3, 0.1, 0.03)}
PANELS = {"admission": list(THRESHOLDS), "expiry": list(EXPIRIES), "capacity": list(CAPACITIES)}
RUNS = [("", ALL), *((panel, name) for panel, names in PANELS.items() for name in names)]
ID_BYTES = 22
LEGEND = {"lot": "probabilistic"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write or to continue")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=YEAR.rows, help="samples of the year [%(default)s]")
    parser.add_argument("--new-ids", type=float, default=1.0, help="factor on the number of new ids [%(default)s]")
    parser.add_argument("--config", type=Path, default=CONFIG)
    arguments = parser.parse_args()
    arguments.output.touch()
    lines = [json.loads(line) for line in arguments.output.read_text(encoding="utf-8").splitlines()]
    present = {(line["seed"], line["panel"], line["setting"]) for line in lines}
    with arguments.output.open("a", encoding="utf-8", buffering=1) as file:
        for seed in range(arguments.seeds):
            missing = [run for run in RUNS if (seed, *run) not in present]
            for line in runs_of(missing, arguments.config, year(seed, arguments.rows, arguments.new_ids)):
                print(f"{seed}  {line['panel']}  {line['setting']}  AUC {line['auc']:.4f}", flush=True)
                file.write(json.dumps(line) + "\n")
                lines.append(line)
    print(f"{table(lines)}\n\nplot: {plot(lines, arguments.output.with_suffix('.png'))}")


def year(seed: int, rows: int = YEAR.rows, new_ids: float = 1.0) -> DriftConfig:
    """Returns the year of a seed with `rows` samples and the given factor on its new ids."""
    per_day = tuple(round(new_ids * each) for each in YEAR.new_ids_per_day)
    return dataclasses.replace(YEAR, seed=seed, rows=rows, new_ids_per_day=per_day)


def runs_of(runs: list[tuple[str, str]], config_file: Path, drift: DriftConfig) -> Iterator[dict[str, Any]]:
    """Yields the lines of some runs on one year."""
    if not runs:
        return
    with tempfile.TemporaryDirectory() as folder:
        write_year(drift, Path(folder))
        seen = ids_seen(drift)
        best = best_by_window(drift, 0, drift.rows, HALF)[1]
        for panel, name in runs:
            line = run_in_subprocess(measure, panel, name, config_file, drift, Path(folder), seen)
            yield line | {"best_possible": {key: best[key] for key in ("auc", "logloss")}}


def write_year(drift: DriftConfig, folder: Path) -> None:
    """Writes some samples as a data set to ``folder/data`` and the stream of all to ``folder/incoming``."""
    few = drift.rows // 20
    synthesize_drifting(
        folder / "data", dataclasses.replace(drift, rows=few, days=drift.days * few / drift.rows), test_rows=few
    )
    (folder / "incoming").mkdir()
    for number, samples in enumerate(drifting_tables(drift, 0, drift.rows)):
        pq.write_table(samples, folder / "incoming" / f"{number:06d}.parquet")
    (folder / "incoming" / "_END").touch()


def ids_seen(drift: DriftConfig) -> dict[str, int]:
    """Counts the distinct ids of each field in the year."""
    model = DriftingModel.of(drift)
    seen: list[np.ndarray] = [np.empty(0, np.int64)] * drift.fields
    for first in range(0, drift.rows, CHUNK_ROWS):
        ids = model.draw(first, min(CHUNK_ROWS, drift.rows - first)).ids
        seen = [np.union1d(known, new) for known, new in zip(seen, ids, strict=True)]
    return {f"C{number}": len(ids) for number, ids in enumerate(seen, start=1)}


def measure(
    panel: str, name: str, config_file: Path, drift: DriftConfig, folder: Path, seen: dict[str, int]
) -> dict[str, Any]:
    """Trains once and returns the line of the run."""
    config = load_config(config_file, [f"train.seed={drift.seed}"])
    config = dataclasses.replace(config, id_table=id_tables(config.id_table, panel, name, drift, seen))
    with tempfile.TemporaryDirectory(dir=folder) as run:
        report = online(config, folder / "data", str(folder / "incoming"), Path(run) / "run")
        metrics = [json.loads(line) for line in (Path(run) / "run" / "metrics.jsonl").read_text().splitlines()]
    resident = [sum(line[field]["resident"] for field in seen) for line in metrics if line["kind"] == "ids"]
    second_half = report["windows"][1]
    counters = config.id_table.counters * 2 * drift.fields if config.id_table.admission == "count" else 0
    row_bytes = 3 * 4 * physical_dim(config.model.embedding_dim) + ID_BYTES
    return {
        "panel": panel,
        "setting": name,
        "seed": drift.seed,
        **{key: second_half[key] for key in ("auc", "logloss", "samples")},
        "ids_seen": sum(seen.values()),
        "resident": resident[-1],
        "most_resident": max(resident),
        "bytes": max(resident) * row_bytes + counters,
        "counters": report["id_tables"],
        "samples_per_second": report["samples_per_second"],
        "drift": dataclasses.asdict(drift),
        "config": settings(config),
        **{key: report[key] for key in ("versions", "device", "threads", "git_commit")},
    }


def id_tables(base: IdConfig, panel: str, name: str, drift: DriftConfig, seen: dict[str, int]) -> IdConfig:
    """Returns the id tables of a run; all ids fit, except in runs that measure capacity.

    Fields without new ids keep their capacity in those runs.
    """
    capacities = {field: 2 * count + 1000 for field, count in seen.items()}
    if panel == "admission":
        kind, threshold = THRESHOLDS[name]
        base = dataclasses.replace(base, admission=kind, threshold=threshold)
    elif panel == "expiry":
        base = dataclasses.replace(base, expire_after=name)
    elif panel == "capacity":
        policy, share = CAPACITIES[name]
        when_full, expire_after = POLICIES[policy]
        base = dataclasses.replace(base, when_full=when_full, expire_after=expire_after)
        for (field, count), new_ids in zip(seen.items(), drift.new_ids_per_day, strict=True):
            if new_ids:
                capacities[field] = max(1, round(share * count))
    tables = {field: TableIds(capacity=capacity) for field, capacity in capacities.items()}
    return dataclasses.replace(base, tables=tables)


def settings(config: RunConfig) -> dict[str, Any]:
    sections = ("model", "train", "optimizer", "clip", "id_table", "online")
    return {section: dataclasses.asdict(getattr(config, section)) for section in sections}


def table(lines: list[dict[str, Any]]) -> str:
    rows = [("what", "setting", "max rows", "MB", "AUC", "logloss", "AUC by seed")]
    for run in RUNS:
        own = lines_of(lines, *run)
        if own:
            means = {key: mean(line[key] for line in own) for key in ("most_resident", "bytes", "auc", "logloss")}
            sizes = (f"{means['most_resident']:,.0f}", f"{means['bytes'] / 1e6:.1f}")
            seeds = " ".join(f"{line['auc']:.4f}" for line in own)
            rows.append((*run, *sizes, f"{means['auc']:.4f}", f"{means['logloss']:.4f}", seeds))
    return aligned(rows)


def lines_of(lines: list[dict[str, Any]], panel: str, name: str) -> list[dict[str, Any]]:
    return sorted(
        (line for line in lines if (line["panel"], line["setting"]) == (panel, name)), key=lambda line: line["seed"]
    )


def plot(lines: list[dict[str, Any]], path: Path) -> Path:
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.8), layout="constrained", sharex=True, sharey=True)
    titles = ("admission threshold", "expiry after time unseen", "capacity, share of all ids")
    groups = (("count", "lot"), ("",), tuple(POLICIES))
    seeds = len({line["seed"] for line in lines})
    for axis, title, kinds, (panel, names) in zip(axes, titles, groups, PANELS.items(), strict=True):
        for number, kind in enumerate(kinds):
            own = [name for name in names if name.startswith(kind)]
            _curve(axis, lines, panel, own, kind, f"C{number}")
        _curve(axis, lines, "", [ALL], ALL, "black")
        axis.set(title=title, xscale="log", xlabel="MB of rows (maximum) and counters")
        axis.xaxis.set(
            major_locator=LogLocator(subs=(1, 2, 5)),
            major_formatter=StrMethodFormatter("{x:g}"),
            minor_locator=NullLocator(),
        )
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_ylabel("progressive AUC, second half of the year")
    line = lines[0]
    best = mean(each["best_possible"]["auc"] for each in lines_of(lines, "", ALL))
    figure.suptitle(
        f"{line['config']['model']['name']} online over a year of {line['drift']['rows']:,} drifting samples, best"
        f" possible AUC {best:.4f}; {'one seed' if seeds == 1 else f'lines: mean of {seeds} seeds (dots)'}"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _curve(axis: Axes, lines: list[dict[str, Any]], panel: str, names: list[str], label: str, color: str) -> None:
    """Plots the mean over seeds of each setting of one kind, annotated with the setting."""
    runs = {name: own for name in names if (own := lines_of(lines, panel, name))}
    points = [(mean(line["bytes"] for line in own) / 1e6, mean(line["auc"] for line in own)) for own in runs.values()]
    legend = LEGEND.get(label, label.replace("_", " ")) or panel
    axis.plot([x for x, _ in points], [y for _, y in points], "o-", color=color, label=legend)
    for (name, own), point in zip(runs.items(), points, strict=True):
        axis.plot([line["bytes"] / 1e6 for line in own], [line["auc"] for line in own], ".", color=color, ms=4)
        text = name.removeprefix(label).strip()
        axis.annotate(text, point, xytext=(4, 5), textcoords="offset points", fontsize=8, color=color)


if __name__ == "__main__":
    main()
