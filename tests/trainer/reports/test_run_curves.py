"""`cowrec plot`: what is read from the metrics of runs, the table and the figure; texts that commands share."""

import json
import re
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands.command_line import Cowrec
from cowrec.trainer.reports.run_curves import RunCurves, curves_table
from cowrec.trainer.reports.text_table import speed_text
from refusal import refused

BINS = {"prediction": [0.1, 0.3], "ctr": [0.2, 0.25]}


def lines_of(epochs: int, steps: int = 3) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for epoch in range(epochs + 1):
        for step in range(epoch * steps + 1, (epoch + 1) * steps + 1):
            rates = {"dense_lr": 0.01 * step, "embedding_lr": 0.0}
            found.append({"kind": "train", "step": step, "loss": 1 / step, "samples_per_second": 100.0 + step, **rates})
            found.append({"kind": "clip", "step": step, "clipped_share": step / 100, "limit_to_norm": inf})
        if epoch < epochs:
            quality = {"auc": 0.8 - 0.01 * epoch, "logloss": 0.4, "calibration": None, "calibration_bins": BINS}
            found.append({"kind": "eval", "step": (epoch + 1) * steps, "epoch": epoch, **quality})
    return found


def write(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_steps_are_placed_between_the_ends_of_epochs(tmp_path: Path) -> None:
    run = RunCurves.read("a", write(tmp_path / "a", lines_of(2)) / "metrics.jsonl")
    steps, losses = run.series("loss")
    assert losses.tolist() == [1 / step for step in range(1, 10)]
    assert run.epochs_of(steps) == pytest.approx(steps / 3)
    assert [line["clipped_share"] for line in run.clips] == (steps / 100).tolist()
    epochs, aucs = run.by_epoch("auc")
    assert (epochs.tolist(), aucs.tolist()) == ([1, 2], [0.8, 0.79])
    assert run.by_epoch("calibration")[0].size == run.by_epoch("validation_auc")[0].size == 0
    unfinished = RunCurves.read("b", write(tmp_path / "b", lines_of(0)) / "metrics.jsonl")
    assert np.array_equal(unfinished.epochs_of(steps), steps)


def test_the_command_draws_runs_and_prints_a_table(cowrec: Cowrec, tmp_path: Path) -> None:
    """Of two runs of one name the table has the paths; one of them is still in its first epoch."""
    runs = [write(tmp_path / name / "run", lines_of(epochs)) for name, epochs in (("a", 2), ("b", 0))]
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')  # being written
    picture = tmp_path / "runs.png"
    header, first, second, _, last = cowrec("plot", *runs, "--output", picture)[1].splitlines()
    columns = ["run", "epochs", "last AUC", "best (epoch)", "last logloss", "best (epoch)", "calibration", "samples/s"]
    assert re.split("  +", header) == columns
    assert re.split("  +", first) == [str(runs[0]), "2", "0.7900", "0.8000 (1)", "0.4000", "0.4000 (1)", "-", "106"]
    assert second.split() == [str(runs[1]), "0", *"-----", "102"]
    assert last == f"plot: {picture}"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_curves_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    refused("does not exist; pass the --run-dir of a cowrec train", RunCurves.read, "a", file)
    for content, message in (("", "has no training step yet"), ("{\n", "is damaged")):
        file.write_text(content)
        refused(message, RunCurves.read, "a", file)


def test_a_test_split_measured_at_the_end_is_shown_at_its_epoch(tmp_path: Path) -> None:
    """As with validation samples: the last epoch and the best one are tested, after both have ended."""
    lines = [{"kind": "train", "step": 1, "loss": 1.0, "samples_per_second": 9.0, "dense_lr": 1.0, "embedding_lr": 1.0}]
    lines += [{"kind": "eval", "step": 5 * (n + 1), "epoch": n, "validation_auc": 0.6} for n in range(3)]
    lines += [{"kind": "test", "step": 15, "epoch": n, "auc": auc, "logloss": 0.5} for n, auc in ((2, 0.7), (0, 0.8))]
    curves = RunCurves.read("run", write(tmp_path, lines) / "metrics.jsonl")
    assert [tensor.tolist() for tensor in curves.by_epoch("auc")] == [[1, 3], [0.8, 0.7]]
    assert [line["step"] for line in curves.epochs] == [5, 10, 15]
    assert curves_table([curves]).splitlines()[-1].split()[:5] == ["run", "3", "0.7000", "0.8000", "(1)"]


def test_a_speed_that_was_not_measured_is_no_number() -> None:
    assert speed_text(12345.6) == "12,346 samples/s"
    assert speed_text(None) == speed_text(float("nan")) == "too few steps to measure the speed"
