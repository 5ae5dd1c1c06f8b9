"""Measurement of the quality lost when shards of an online model fail and are restored from old snapshots.

    python scripts/measure_snapshot_interval.py --output snapshot_interval.jsonl

Monolith (arXiv 2209.07663) takes infrequent snapshots of its parameter servers: a failed server is restored from its
last snapshot while the stream continues, and later updates of its rows are lost. cowrec loses nothing, because its
checkpoints include the stream's position and the stream is replayed from there. This script measures the cost of not
replaying, on a year of drifting samples that are predicted in time order and then trained on.

A shard has every tenth row of all tables. At random times, the same for all intervals, one of the ten is restored to
its weights and moments at the latest snapshot, taken once per interval of sample time (rounded to batches). Ids keep
their rows, no row is reused, and a row assigned since the snapshot becomes untrained. The network is never lost.
Progressive AUC and logloss are those of the second half of the year, with the best possible for comparison. Each run is
a JSON line; runs already in the file are skipped, so an interrupted measurement can be continued.
"""

import argparse
import dataclasses
import json
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from cowrec.trainer.runtime.environment import prepare_process

prepare_process()  # before torch is loaded

import numpy as np
from torch import Tensor

from cowrec.data_pipeline import Batch, Reader, synthesize_drifting
from cowrec.data_pipeline.synthetic.drifting import DAY, LIFETIMES, DriftConfig
from cowrec.data_pipeline.synthetic.drifting_samples import best_by_window
from cowrec.sparse_opt import EmbeddingAdam
from cowrec.trainer.config.id_table import seconds
from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.online.progressive import ProgressiveQuality, WindowQuality
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.runtime.subprocess_call import run_in_subprocess
from cowrec.trainer.training.schedule import Schedule
from cowrec.trainer.training.state import TrainState

CONFIG = Path(__file__).resolve().parents[1] / "trainer" / "configs" / "drifting_year.toml"
HALF = 182 * DAY
YEAR = DriftConfig(
    rows=364_000,
    days=2 * HALF / DAY,
    start=108 * HALF,
    core_ids=(50, 1000, 1000, 2500, 0),
    new_ids_per_day=(0, 0, 10, 50, 150),
    new_id_share=0.7,
    lifetime_days=10.0,
    drift_days=60.0,
    num_dense=2,
    id_effect=0.8,
    interaction_effect=0.1,
)
SHARDS = 10
NEVER = "never"
INTERVALS = ("1h", "6h", "1d", "5d", "20d")
RUNS = [NEVER, *INTERVALS]
FAILURES_PER_DAY = 1.0
"""Failures per day of sample time, over all shards."""


class Event(NamedTuple):
    """Snapshot or failure of a shard; a snapshot precedes a failure at the same time."""

    time: float
    """Unix seconds."""
    fails: bool
    shard: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write or to continue")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=YEAR.rows, help="samples of the year [%(default)s]")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", dest="overrides", action="append", default=["train.batch_size=64"])
    arguments = parser.parse_args()
    arguments.output.touch()
    lines = [json.loads(line) for line in arguments.output.read_text(encoding="utf-8").splitlines()]
    present = {(line["seed"], line["interval"]) for line in lines}
    with arguments.output.open("a", encoding="utf-8", buffering=1) as file:
        for seed in range(arguments.seeds):
            config = load_config(arguments.config, [*arguments.overrides, f"train.seed={seed}"])
            drift = dataclasses.replace(YEAR, seed=seed, rows=arguments.rows)
            missing = [run for run in RUNS if (seed, run) not in present]
            for line in runs_of(missing, config, drift):
                shown = {key: line[key] for key in ("seed", "interval", "failures", "auc")}
                print(shown, flush=True)
                file.write(json.dumps(line) + "\n")
                lines.append(line)
    print(f"{table(lines)}\n\nplot: {plot(lines, arguments.output.with_suffix('.png'))}")


def runs_of(runs: list[str], config: RunConfig, drift: DriftConfig) -> Iterator[dict[str, Any]]:
    """Yields the lines of some runs on one year."""
    if not runs:
        return
    with tempfile.TemporaryDirectory() as folder:
        synthesize_drifting(folder, drift, test_rows=1)
        best = best_by_window(drift, 0, drift.rows, HALF)[1]
        for interval in runs:
            line = run_in_subprocess(measure, interval, config, drift, folder)
            yield line | {"best_possible": {key: best[key] for key in ("auc", "logloss")}}


def measure(interval: str, config: RunConfig, drift: DriftConfig, data: str) -> dict[str, Any]:
    """Trains once and returns the line of the run.

    Raises:
        ValueError: absent rows are replayed, so a restored row would be caught up again.
    """
    if config.optimizer.absent_rows != "lazy":
        raise ValueError(f'optimizer.absent_rows must be "lazy", got {config.optimizer.absent_rows!r}')
    events = [] if interval == NEVER else events_of(drift, seconds(interval, "interval"))
    config = dataclasses.replace(config, id_table=dataclasses.replace(config.id_table, capacity=2 * max_ids(drift)))
    with process_group("cpu") as process:
        reader = Reader(data, "train", batch_size=config.train.batch_size)
        trained = TrainState(config, reader.schema, process, Schedule())
        assert trained.id_tables is not None
        quality = follow(trained, reader, events)[1]
        tables = trained.id_tables.counters()
    assert not any(each["evicted"] + each["refused"] for each in tables.values()), "a row was reused"
    sections = ("model", "train", "optimizer", "clip", "id_table")
    return {
        "interval": interval,
        "failures_per_day": FAILURES_PER_DAY if events else 0.0,
        "seed": drift.seed,
        "failures": sum(event.fails for event in events),
        **{key: quality.plain()[key] for key in ("auc", "logloss", "samples")},
        "shards": SHARDS,
        "drift": dataclasses.asdict(drift),
        "config": {section: dataclasses.asdict(getattr(config, section)) for section in sections},
        **trained.environment,
    }


def events_of(drift: DriftConfig, interval: int) -> list[Event]:
    """Returns failures, and the snapshots they restore, in order.

    Failures do not depend on the interval, in seconds.
    """
    random = np.random.default_rng((drift.seed, round(1000 * FAILURES_PER_DAY)))
    count = int(random.poisson(FAILURES_PER_DAY * drift.days))
    times = random.uniform(0, drift.days * DAY, count).tolist()
    shards = random.integers(0, SHARDS, count).tolist()
    failures = {Event(drift.start + time, True, shard) for time, shard in zip(times, shards, strict=True)}
    snapshots = {
        Event(drift.start + time // interval * interval, False, shard)
        for time, shard in zip(times, shards, strict=True)
    }
    return sorted(failures | snapshots)


def follow(trained: TrainState, reader: Reader, events: list[Event]) -> list[WindowQuality]:
    """Predicts and trains on each batch and applies events in between; returns the quality of each half of the year."""
    adam = trained.adam
    assert adam is not None
    quality, halves = ProgressiveQuality(HALF), list[WindowQuality]()
    snapshots: dict[int, list[Tensor]] = {}
    due = deque(events)
    for batch in reader.epoch(0):
        assert batch.time is not None
        while due and due[0].time <= batch.time[0]:
            apply_event(due.popleft(), adam, snapshots)
        logits = train_on(trained, batch)
        halves += quality.add(logits, batch.label, batch.time)
    return [*halves, quality.close()]


def apply_event(event: Event, adam: EmbeddingAdam, snapshots: dict[int, list[Tensor]]) -> None:
    """Stores a shard in ``snapshots``, the latest of each shard, or restores it from them."""
    rows = shard_rows(adam, event.shard)
    if not event.fails:
        snapshots[event.shard] = [each.clone() for each in rows]
        return
    for now, then in zip(rows, snapshots[event.shard], strict=True):
        now.copy_(then)


def train_on(trained: TrainState, batch: Batch) -> Tensor:
    """Takes a step; returns the logits before its update, float32 [B]."""
    return trained.step(iter((trained.ids.training(batch).batch,))).logits


def shard_rows(adam: EmbeddingAdam, shard: int) -> list[Tensor]:
    """Returns views of the weights and moments of a shard's rows in each table, float32 [n, P]."""
    return [
        tables.lookup.view_of(flat, number)[shard::SHARDS]
        for tables in adam.lookups
        for flat in (tables.lookup.flat_weights(), tables.exp_avg, tables.exp_avg_sq)
        for number in range(len(tables.lookup.shards))
    ]


def max_ids(drift: DriftConfig) -> int:
    """Returns an upper bound of a field's ids in the year, including those that appeared before it."""
    days = drift.days + LIFETIMES * drift.lifetime_days + 1
    return max(drift.core_ids) + round(max(drift.new_ids_per_day) * days)


def table(lines: list[dict[str, Any]]) -> str:
    rows = [("snapshots every", "AUC", "AUC lost", "logloss", "AUC lost by seed")]
    for run in RUNS:
        if own := lines_of(lines, run):
            auc, logloss = (mean(line[key] for line in own) for key in ("auc", "logloss"))
            lost = auc_lost(lines, run)
            seeds = " ".join(f"{each:.5f}" for each in lost)
            rows.append((run, f"{auc:.4f}", f"{mean(lost):.5f}", f"{logloss:.4f}", seeds))
    return aligned(rows)


def lines_of(lines: list[dict[str, Any]], interval: str) -> list[dict[str, Any]]:
    """Returns the line of each seed."""
    return sorted((line for line in lines if line["interval"] == interval), key=lambda line: line["seed"])


def auc_lost(lines: list[dict[str, Any]], interval: str) -> list[float]:
    """Returns the AUC lost of each seed against its run without failures."""
    reference = {line["seed"]: line["auc"] for line in lines_of(lines, NEVER)}
    return [reference[line["seed"]] - line["auc"] for line in lines_of(lines, interval)]


def plot(lines: list[dict[str, Any]], path: Path) -> Path:
    figure, axis = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    lost = {seconds(each, "interval") / DAY: auc_lost(lines, each) for each in INTERVALS if lines_of(lines, each)}
    axis.plot(list(lost), [mean(each) for each in lost.values()], "o-", color="C0")
    for interval, each in lost.items():
        axis.plot([interval] * len(each), each, ".", color="black", ms=5)
    axis.axhline(0, color="gray", lw=1)
    axis.set(xscale="log", xlabel="sample time between two snapshots", ylabel="progressive AUC lost")
    axis.set_xticks([seconds(each, "interval") / DAY for each in INTERVALS], INTERVALS)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    line, reference = lines[0], lines_of(lines, NEVER)
    auc, best = (mean(each["auc"] for each in some) for some in (reference, [e["best_possible"] for e in reference]))
    seeds = f"Mean of {len(reference)} seeds (dots)" if len(reference) > 1 else "One seed"
    figure.suptitle(
        f"{line['config']['model']['name']} online over a year of {line['drift']['rows']:,} drifting samples;\n"
        f"{FAILURES_PER_DAY:g} of {SHARDS} shards per day is restored from its last snapshot. {seeds}.\n"
        f"AUC without failures {auc:.4f}, best possible {best:.4f}",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
