"""Cost of collisions: AUC and logloss with hashing into part of a vocabulary, a full vocabulary, or a row per id.

    cowrec synthesize --output data/synthetic --rows 500000
    python scripts/compare_id_tables.py --data data/synthetic --output id_tables.jsonl

Trains trainer/configs/sweep_synthetic.toml with each kind of table and each seed, in its own process. Writes one JSON
line per run, and a plot in the same folder.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from cowrec.trainer.runtime.environment import prepare_process

prepare_process()  # before torch is loaded

from cowrec.data_pipeline import RESERVED_ROWS, Schema
from cowrec.trainer.config.id_table import IdConfig, TableIds
from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runtime.subprocess_call import run_in_subprocess
from cowrec.trainer.sharded_model.tables import table_specs
from cowrec.trainer.training.loop import train

CONFIG = Path(__file__).resolve().parents[1] / "trainer" / "configs" / "sweep_synthetic.toml"
SHARES = (0.05, 0.2, 0.5)
LABELS = {**{f"hash {share:.0%}": f"hashed into\n{share:.0%}" for share in SHARES}}
LABELS |= {"vocabulary": "full\nvocabulary", "collisionless": "collisionless\ntable"}
RUNS = list(LABELS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="synthetic data set")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    lines = []
    with arguments.output.open("w", encoding="utf-8", buffering=1) as file:
        for seed in range(arguments.seeds):
            for name in RUNS:
                given = [*arguments.overrides, f"train.seed={seed}"]
                line = run_in_subprocess(measure, name, arguments.data, arguments.config, given)
                print({key: line[key] for key in ("tables", "seed", "auc", "logloss", "rows")}, flush=True)
                file.write(json.dumps(line) + "\n")
                lines.append(line)
    print(f"{table(lines)}\n\nplot: {plot(lines, arguments.output.with_suffix('.png'))}")


def measure(name: str, data: Path, config_file: Path, overrides: list[str]) -> dict[str, Any]:
    """Trains once and returns the line of the run."""
    config, schema = load_config(config_file, overrides), Schema.load(data)
    config = dataclasses.replace(config, id_table=id_tables(name, schema))
    with tempfile.TemporaryDirectory() as folder:
        report = train(config, data, Path(folder) / "run")
    quality = ("auc", "logloss", "samples_per_second", "best_possible")
    setting = ("batch_size", "model", "versions", "device", "threads")
    return {
        "tables": name,
        "seed": config.train.seed,
        **{key: report[key] for key in (*quality, *setting)},
        "rows": sum(spec.num_embeddings for spec in table_specs(schema, config)),
        "data": dict(schema.settings),
        "config": settings(config),
    }


def id_tables(name: str, schema: Schema) -> IdConfig:
    """Returns the id tables of a run: hash tables of a share of the vocabulary, the vocabulary, or collisionless."""
    if name == "vocabulary":
        return IdConfig()
    percent = name.partition(" ")[2]
    share = float(percent.rstrip("%")) / 100 if percent else 1.1  # ids are not spread evenly over the segments
    sizes = {field.name: field.num_embeddings - RESERVED_ROWS for field in schema.sparse}
    tables = {field: TableIds(capacity=max(1, round(share * size))) for field, size in sizes.items()}
    return IdConfig(kind="hash" if percent else "collisionless", tables=tables)


def settings(config: RunConfig) -> dict[str, Any]:
    return {section: dataclasses.asdict(getattr(config, section)) for section in ("model", "optimizer", "clip")}


def table(lines: list[dict[str, Any]]) -> str:
    rows = [("tables", "rows", "test AUC", "logloss", "AUC by seed")]
    for name in RUNS:
        own = [line for line in lines if line["tables"] == name]
        aucs = [line["auc"] for line in own]
        seeds = " ".join(f"{auc:.4f}" for auc in aucs)
        logloss = mean(line["logloss"] for line in own)
        rows.append((name, f"{own[0]['rows']:,}", f"{mean(aucs):.4f}", f"{logloss:.4f}", seeds))
    return aligned(rows)


def plot(lines: list[dict[str, Any]], path: Path) -> Path:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, metric, title in zip(axes, ("auc", "logloss"), ("test AUC", "test logloss"), strict=True):
        for x, name in enumerate(RUNS):
            values = [line[metric] for line in lines if line["tables"] == name]
            color = "C0" if name.startswith("hash") else "C1"
            axis.plot([x - 0.25, x + 0.25], [mean(values)] * 2, color=color, lw=3)
            axis.plot([x] * len(values), values, ".", color="black", ms=5)
        axis.set_xticks(range(len(RUNS)), LABELS.values())
        axis.set_ylabel(title)
        axis.grid(axis="y", alpha=0.3)
    line = lines[0]
    seeds = len({each["seed"] for each in lines})
    figure.suptitle(
        f"{line['model']} on {line['data']['rows']:,} synthetic training samples; bars: mean of {seeds} seeds (dots)"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
