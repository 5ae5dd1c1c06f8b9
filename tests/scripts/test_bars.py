"""The presets of BARS, and the script that runs them, on a few lines of the same shape."""

import csv
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from cowrec.data_pipeline import Schema
from cowrec.models import MODELS
from cowrec.trainer.config.run import load_config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.bars import CONFIGS, main

ROWS = {"train.csv": 300, "valid.csv": 60, "test.csv": 41}
QUICK = ["--set", "train.epochs=1", "--set", "train.batch_size=64", "--set", "train.device=cpu"]


def write_files(folder: Path) -> None:
    """Files with Criteo_x1's columns."""
    folder.mkdir()
    rng = random.Random(0)
    numbers, ids = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
    for name, rows in ROWS.items():
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["label", *numbers, *ids])
            for _ in range(rows):
                values = [f"{rng.random():.4f}" for _ in numbers]
                writer.writerow([rng.randrange(2), *values, *(rng.randrange(9) for _ in ids)])


@pytest.mark.parametrize("dataset", ["criteo_x1", "criteo_x4", "avazu_x1"])
def test_presets_and_published_results_name_networks(dataset: str) -> None:
    published = json.loads((CONFIGS / "published.json").read_text())
    load_config(CONFIGS / f"{dataset}.toml")
    names = {name.partition("_")[0] for name in MODELS} | set(MODELS)
    assert set(published["results"][dataset]) <= names


def test_files_become_splits_and_results_a_table(tmp_path: Path, capsys: Any) -> None:
    write_files(tmp_path / "files")
    arguments = ["criteo_x1", str(tmp_path / "files"), "--output", str(tmp_path / "out"), *QUICK]
    main([*arguments, "--models", "fm,masknet_parallel", "--set", "model.hidden=[8]"])
    printed = capsys.readouterr()
    assert "these are not BARS's files, which have [33003326, 8250124, 4587167]" in printed.err
    schema = Schema.load(tmp_path / "out" / "data")
    assert [schema.split(name).rows for name in ("train", "validation", "test")] == list(ROWS.values())
    report = json.loads((tmp_path / "out" / "fm" / "report.json").read_text())
    (line,) = [each.split() for each in printed.out.splitlines() if each.startswith("fm ")]
    assert line == ["fm", "0.8022", f"{report['auc']:.4f}", "0.4491", f"{report['logloss']:.4f}"]
    assert "0.8139" in printed.out.splitlines()[-1]
    main(arguments[:2] + arguments[2:] + ["--models", "fm"])  # trains nothing, shows both
    assert capsys.readouterr().out == printed.out
    assert "not comparable" in (tmp_path / "out" / "table.md").read_text()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train.csv is missing; download avazu_x1 of BARS"):
        main(["avazu_x1", str(tmp_path), "--output", str(tmp_path / "out")])
