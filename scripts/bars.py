"""Trains networks on a data set of BARS (github.com/reczoo/BARS) and puts their quality beside its leaderboard.

    python scripts/bars.py criteo_x1 FOLDER --models deepfm,dcnv2

FOLDER has BARS's train.csv, valid.csv and test.csv. The output folder, runs/bars/DATASET, gets the prepared data, the
runs and table.md. The same command continues; with other networks it adds them. --set changes the preset's settings.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cowrec.trainer
from cowrec.data_pipeline import Schema, prepare
from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runs.run_dir import REPORT
from cowrec.trainer.runtime.environment import prepare_process
from cowrec.trainer.training.loop import train

CONFIGS = Path(cowrec.trainer.__file__).parent / "configs" / "bars"
FILES = ("train.csv", "valid.csv", "test.csv")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepares the data and trains the networks, where that has not been done, and shows the table."""
    published = json.loads((CONFIGS / "published.json").read_text(encoding="utf-8"))
    options = _options(list(published["samples"])).parse_args(arguments)
    prepare_process()
    output = options.output or Path("runs/bars") / options.dataset
    overrides = [f"model.name={name}" for name in options.models.split(",")]
    configs = [load_config(CONFIGS / f"{options.dataset}.toml", [each, *options.set]) for each in overrides]
    prepared = prepared_data(options.dataset, options.folder, output / "data", configs[0])
    found = [prepared.split(name).rows for name in ("train", "validation", "test")]
    expected = published["samples"][options.dataset]
    comparable = found == expected
    if not comparable:
        print(
            f"these are not BARS's files, which have {expected} samples in {', '.join(FILES)}, but {found}: the results"
            " cannot be compared with its leaderboard",
            file=sys.stderr,
        )
    for config in configs:
        run_dir = output / config.model.name
        if not (run_dir / REPORT).is_file():
            train(config, output / "data", run_dir, resume=True)
    text = table(published["results"][options.dataset], output)
    note = "" if comparable else "\nother files than BARS's: not comparable\n"
    (output / "table.md").write_text(f"```\n{text}\n```\n{note}", encoding="utf-8")
    print(text)


def prepared_data(dataset: str, folder: Path, output: Path, config: RunConfig) -> Schema:
    """Prepares the three files as the splits of a data set, unless the output is there.

    Raises:
        ValueError: a file is missing.
    """
    if output.exists():
        return Schema.load(output)
    files = [folder / name for name in FILES]
    for file in files:
        if not file.is_file():
            raise ValueError(
                f"{file} is missing; download {dataset} of BARS (huggingface.co/reczoo), unpack it and name its folder"
            )
    train, validation, test = files
    schema = CONFIGS / f"{dataset}_schema.toml"
    return prepare("tabular", [train], output, config.prepare, schema_file=schema, validation=[validation], test=[test])


def table(published: Mapping[str, Sequence[float]], output: Path) -> str:
    """Formats test AUC and logloss of BARS and of the runs in the output folder."""
    lines = [("network", "AUC, BARS", "AUC, cowrec", "logloss, BARS", "logloss, cowrec")]
    for report in sorted(output.glob(f"*/{REPORT}")):
        name, own = report.parent.name, json.loads(report.read_text(encoding="utf-8"))
        theirs = published.get(name) or published.get(name.partition("_")[0])  # BARS has one MaskNet
        lines.append((name, _number(theirs, 0), f"{own['auc']:.4f}", _number(theirs, 1), f"{own['logloss']:.4f}"))
    return aligned(lines)


def _number(values: Sequence[float] | None, index: int) -> str:
    return "-" if values is None else f"{values[index]:.4f}"


def _options(datasets: Sequence[str]) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=datasets)
    parser.add_argument("folder", type=Path, help="Folder with train.csv, valid.csv and test.csv.")
    parser.add_argument("--models", default="deepfm", help="Networks, separated by commas. [deepfm]")
    parser.add_argument("--output", type=Path, help="[runs/bars/DATASET]")
    parser.add_argument("--set", action="append", default=[], help="section.key=value over the preset; repeatable.")
    return parser


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"bars: error: {error}")
