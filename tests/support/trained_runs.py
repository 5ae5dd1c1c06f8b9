"""Small runs for the trainer's tests, and what is read from their folders."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from cowrec.trainer.config.run import load_config
from cowrec.trainer.training.saved_run import predict_run
from cowrec.trainer.training.trainer import train
from trainer_cases import COLUMNS, config_file, make_data


def make_folder(folder: Path, columns: Sequence[str] = tuple(COLUMNS)) -> Path:
    """Makes ``data`` and ``run.toml`` in a folder; returns it."""
    make_data(folder, columns)
    config_file(folder)
    return folder


def data_folder(*columns: str) -> Any:
    """A fixture of a file's tests: a folder with ``data`` and ``run.toml``."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_folder(tmp_path_factory.mktemp("case"), columns or tuple(COLUMNS))

    return folder


def run(folder: Path, run_dir: Path, *overrides: str, data: Path | None = None, resume: bool = False) -> dict[str, Any]:
    """Trains with ``folder/run.toml`` and overrides, by default on ``folder/data``; returns the report."""
    return train(load_config(folder / "run.toml", overrides), data or folder / "data", run_dir, resume=resume)


def write_network(file: Path, output: str) -> None:
    """Writes a network ``Net`` of a user's own, whose output is an expression of ``self.out``, ``self.norm`` and ``x``.

    ``x`` is what the front gives: ``flat`` and ``wide``; batch normalisation ``self.norm`` is there if it is used.
    """
    norm = "nn.BatchNorm1d(front.width)" if "norm" in output else "None"
    file.write_text(f"""
from torch import nn
class Net(nn.Module):
    def __init__(self, config, front):
        super().__init__()
        self.front, self.out, self.norm = front, nn.Linear(front.width, 1), {norm}
    def forward(self, dense, sparse):
        x = self.front(dense, sparse)
        return {output}
""")


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
