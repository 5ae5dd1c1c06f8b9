"""Small runs for the trainer's tests, and what is read from their folders."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from cowrec.trainer.config.run import load_config
from cowrec.trainer.training.loop import train
from cowrec.trainer.training.saved_run import predict_run
from trainer_cases import COLUMNS, config_file, make_data


def make_folder(folder: Path, columns: Sequence[str] = tuple(COLUMNS)) -> Path:
    """Makes ``data`` and ``run.toml`` in a folder; returns it."""
    make_data(folder, columns)
    config_file(folder)
    return folder


def run(folder: Path, run_dir: Path, *overrides: str, data: Path | None = None, resume: bool = False) -> dict[str, Any]:
    """Trains with ``folder/run.toml`` and overrides, by default on ``folder/data``; returns the report."""
    return train(load_config(folder / "run.toml", overrides), data or folder / "data", run_dir, resume=resume)


def report_of(run_dir: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((run_dir / "report.json").read_text())
    return report


def metrics(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Lines of a run's metrics of one kind, without their times."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines if line["kind"] == kind]


def predicted(run_dir: Path, data: Path, split: str = "test") -> np.ndarray:
    """Predictions of `cowrec predict`, float32 [rows]."""
    predict_run(run_dir, data, run_dir / "predictions.parquet", split)
    return pq.read_table(run_dir / "predictions.parquet")["prediction"].to_numpy()
