"""Comparison of the transforms of numbers, `prepare.dense`: AUC on a lognormal column and on a raw file of Criteo's.

    python scripts/preparing/transforms.py criteo.tsv --output results/HARDWARE/transforms.jsonl

Trains DeepFM with the defaults of `cowrec train` on each transform and prints a table. The lognormal column is exp(3z)
of a normal z, and the logit of a click is 2z - 1; `best` in its lines is the AUC of that logit. The test split is a
random fifth.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from cowrec.data_pipeline import PrepareConfig, prepare
from cowrec.trainer.config.run import config_from, to_plain
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runs.provenance import environment
from cowrec.trainer.training.loop import train

TRANSFORMS: tuple[str, ...] = get_args(get_type_hints(PrepareConfig)["dense"])
SCHEMA = """
label = "click"
[[fields]]
name = "amount"
kind = "numeric"
[[fields]]
name = "place"
kind = "categorical"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("criteo", type=Path, help="raw file in Criteo's layout")
    parser.add_argument("--rows", type=int, default=80_000, help="samples of the lognormal column")
    parser.add_argument("--seeds", type=int, default=2, help="trainings of each transform")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write")
    arguments = parser.parse_args()
    lines = []
    with arguments.output.open("w", encoding="utf-8", buffering=1) as file:
        for line in measured(arguments.criteo, arguments.rows, arguments.seeds):
            file.write(json.dumps(line) + "\n")
            lines.append(line)
    print(table(lines))


def measured(criteo: Path, rows: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Yields a line for each data set, transform and seed."""
    torch.set_num_threads(1)
    machine = environment(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "columns.toml").write_text(SCHEMA)
        best = write_lognormal(folder / "lognormal.csv", rows)
        for transform in TRANSFORMS:
            config = config_from({"prepare": {"dense": transform, "test_fraction": 0.2}, "train": {"device": "cpu"}})
            own, kaggle = folder / f"lognormal_{transform}", folder / f"criteo_{transform}"
            prepare("tabular", [folder / "lognormal.csv"], own, config.prepare, schema_file=folder / "columns.toml")
            prepare("criteo", [criteo], kaggle, config.prepare)
            for data, raw in (
                (own, {"data": "lognormal", "rows": rows, "best": best}),
                (kaggle, {"data": criteo.name}),
            ):
                for seed in range(seeds):
                    seeded = config_from({**to_plain(config), "train": {"device": "cpu", "seed": seed}})
                    report = train(seeded, data, folder / f"run_{data.name}_{seed}")
                    epochs = [{key: each[key] for key in ("auc", "logloss")} for each in report["epochs"]]
                    yield {
                        **raw,
                        "transform": transform,
                        "seed": seed,
                        "epochs": epochs,
                        "config": to_plain(seeded),
                        **machine,
                    }


def write_lognormal(file: Path, rows: int) -> float:
    """Writes clicks that depend on the logarithm of an amount, and on nothing else; returns the AUC of their logits."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal(rows)
    logit = 2 * z - 1
    click = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(int)
    places = rng.integers(4, size=rows)
    with file.open("w", encoding="utf-8") as out:
        out.write("click,amount,place\n")
        out.writelines(f"{c},{a:.9g},p{p}\n" for c, a, p in zip(click, np.exp(3 * z), places, strict=True))
    return float(roc_auc_score(click, logit))


def table(lines: Sequence[dict[str, Any]]) -> str:
    """AUC in percent after each epoch, the mean over seeds: a row for each transform, a column for each data set."""
    data = list(dict.fromkeys(line["data"] for line in lines))
    rows = [["transform", *data]]
    for transform in TRANSFORMS:
        row = [transform]
        for name in data:
            runs = [line["epochs"] for line in lines if (line["data"], line["transform"]) == (name, transform)]
            row.append(
                " ".join(f"{100 * mean(each['auc'] for each in epoch):.2f}" for epoch in zip(*runs, strict=True))
            )
        rows.append(row)
    return aligned(rows)


if __name__ == "__main__":
    main()
