"""Validation samples and early stopping, against scikit-learn and runs on data that were cut by hand."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from cowrec.data_pipeline import Reader
from cowrec.trainer.runs.checkpoint import best_epoch
from cowrec.trainer.training.saved_run import evaluate_run
from run_comparison import assert_same
from trained_runs import data_folder, metrics, report_of, run
from trained_runs import predicted as predicted_by
from trainer_cases import TRAIN_ROWS, edit_column, interrupted

VALIDATION = ["train.validation_fraction=0.2", "optimizer.dense_lr=0.05", "optimizer.warmup_epochs=0"]
PATIENT = [*VALIDATION, "train.epochs=8", "train.patience=2", "checkpoint.keep_best=logloss"]
ROWS = 41
"""A fifth of 205 training samples; 164 are left, which is four steps an epoch."""


folder = data_folder("price", "city")


@pytest.fixture(scope="module")
def stopped(folder: Path) -> dict[str, Any]:
    return run(folder, folder / "stopped", *PATIENT)


def predicted(folder: Path, run_dir: Path, split: str) -> tuple[Any, Any]:
    """Labels and predictions of a split."""
    label = pq.read_table(folder / "data" / split)["label"].to_numpy()
    return label, predicted_by(run_dir, folder / "data", split).astype(float)


def test_the_last_training_samples_are_measured_and_not_trained_on(folder: Path, tmp_path: Path) -> None:
    """Predictions are float32: 1e-6 in logloss, and in the AUC pairs that are closer may be ordered either way.

    Resident and streamed are bit-identical.
    """
    report = run(folder, tmp_path / "run", *VALIDATION)
    label, prediction = predicted(folder, tmp_path / "run", "train")
    low, high = (roc_auc_score(label[-ROWS:], prediction[-ROWS:] + shift * label[-ROWS:]) for shift in (-1e-6, 1e-6))
    assert low - 1e-6 <= report["validation_auc"] <= high + 1e-6 < low + 0.02
    assert report["validation_logloss"] == pytest.approx(log_loss(label[-ROWS:], prediction[-ROWS:]), abs=1e-6)
    label, prediction = predicted(folder, tmp_path / "run", "test")
    assert report["logloss"] == pytest.approx(log_loss(label, prediction), abs=1e-6)
    assert report["steps"] == 2 * 4
    assert report["epochs"][-1]["validation_logloss"] == report["validation_logloss"]
    measured = [line["validation_auc"] for line in metrics(tmp_path / "run", "eval")]
    assert measured == [epoch["validation_auc"] for epoch in report["epochs"]]
    assert not any("auc" in epoch for epoch in report["epochs"]), "the test split is measured at the end alone"
    assert [line["logloss"] for line in metrics(tmp_path / "run", "test")] == [report["logloss"]]
    assert (report["epoch"], "last_epoch" in report) == (2, False)
    # Other labels of the validation samples change what is measured, and nothing that is trained.
    shutil.copytree(folder, tmp_path / "other")
    (shard,) = (tmp_path / "other" / "data" / "train").iterdir()
    edit_column(shard, "label", slice(-ROWS, None), lambda label: 1 - label)
    other = run(tmp_path / "other", tmp_path / "flipped", *VALIDATION, "data.resident=yes")
    assert_same(tmp_path / "run", tmp_path / "flipped")
    assert other["logloss"] == report["logloss"]
    assert other["validation_auc"] == pytest.approx(1 - report["validation_auc"], abs=1e-6)


def test_patience_ends_the_run_and_chooses_the_best_epoch(
    folder: Path, stopped: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = [epoch["validation_logloss"] for epoch in stopped["epochs"]]
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 2 < 8, losses
    assert stopped["best_epoch"] == best + 1
    assert stopped["epoch"] == best + 1
    for key in ("validation_auc", "validation_logloss"):
        assert stopped[key] == stopped["epochs"][best][key]
    # Later commands use the best epoch's checkpoint, and the last one where that is damaged.
    label, prediction = predicted(folder, folder / "stopped", "test")
    assert stopped["logloss"] == pytest.approx(log_loss(label, prediction), abs=1e-6)
    copy = shutil.copytree(folder / "stopped", tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints" / f"step_{4 * (best + 1):09d}")
    last = stopped["last_epoch"]
    assert (last["epoch"], last["validation_auc"]) == (len(losses), stopped["epochs"][-1]["validation_auc"])
    assert evaluate_run(copy, folder / "data")["logloss"] == pytest.approx(last["logloss"], abs=1e-7)
    assert "the checkpoint of the best epoch, is missing" in caplog.text


def test_a_checkpoint_can_be_named(folder: Path, stopped: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The best epoch's, the latest, or that of a step; what a run does not have is refused with what it has."""
    steps = {"": 4 * stopped["best_epoch"], "best": 4 * stopped["best_epoch"], "latest": 4 * len(stopped["epochs"])}
    steps |= {str(steps["best"]): steps["best"]}
    caplog.set_level("INFO", "cowrec")
    for name, step in steps.items():
        caplog.clear()
        found = evaluate_run(folder / "stopped", folder / "data", checkpoint=name)
        expected = stopped["last_epoch"] if name == "latest" else stopped
        assert (found["step"], found["auc"]) == (step, expected["auc"])
        text = f"step_{step:09d}, after epoch {step // 4}" + (", the best by logloss" if name in ("", "best") else "")
        assert text in caplog.text
    for name, message in (("3", r"no checkpoint of step 3; it has those of steps \d+"), ("bets", "got .bets.")):
        with pytest.raises(ValueError, match=message):
            evaluate_run(folder / "stopped", folder / "data", checkpoint=name)


def test_a_validation_split_is_used_like_samples_held_out_of_training(folder: Path, tmp_path: Path) -> None:
    """The last fifth of the training samples as a split: the same weights and measures. A fraction of it is refused."""
    shutil.copytree(folder, tmp_path / "own")
    data = tmp_path / "own" / "data"
    rows = pa.concat_tables([pq.read_table(each) for each in sorted((data / "train").iterdir())])
    schema = json.loads((data / "schema.json").read_text())
    shutil.rmtree(data / "train")
    for name, part in (("train", rows[:-ROWS]), ("validation", rows[-ROWS:])):
        (data / name).mkdir()
        pq.write_table(part, data / name / "00000.parquet")
        positives = [int(sum(part["label"].to_pylist()))]
        described = {"rows": len(part), "positives": positives, "shards": [len(part)]}
        schema["splits"][name] = schema["splits"]["train"] | described
    (data / "schema.json").write_text(json.dumps(schema))
    best = ["checkpoint.keep_best=logloss", "data.resident=yes"]
    held_out = run(folder, tmp_path / "held_out", *VALIDATION, *best)
    report = run(tmp_path / "own", tmp_path / "split", *VALIDATION[1:], *best)
    assert_same(tmp_path / "held_out", tmp_path / "split")
    assert report["epochs"] == held_out["epochs"]
    assert (report["auc"], report["epoch"]) == (held_out["auc"], held_out["epoch"])
    measured = evaluate_run(tmp_path / "split", data, "validation", checkpoint="latest")
    assert measured["logloss"] == pytest.approx(report["epochs"][-1]["validation_logloss"], abs=1e-7)
    with pytest.raises(ValueError, match=r"has a validation split, which is used; set train.validation_fraction = 0"):
        run(tmp_path / "own", tmp_path / "both", *VALIDATION)


def test_a_resumed_run_stops_at_the_same_epoch(folder: Path, stopped: dict[str, Any], tmp_path: Path) -> None:
    always = [*PATIENT, "checkpoint.every_steps=3", "checkpoint.keep_last=100"]
    run(folder, tmp_path / "all", *always)
    last = 4 * len(stopped["epochs"])
    for at in (3, 4, last):
        copy = interrupted(tmp_path / "all", at, tmp_path / f"at{at}")
        again = run(folder, copy, *always, resume=True)
        assert again["epochs"] == stopped["epochs"]
        assert again["logloss"] == stopped["logloss"]
        assert_same(copy, folder / "stopped")
    with pytest.raises(ValueError, match=r"checkpoint.keep_best = 'logloss', but 'auc' is requested"):
        run(folder, tmp_path / "all", *always, "checkpoint.keep_best=auc", resume=True)


def test_the_best_epoch_is_the_first_of_equals_and_needs_a_value() -> None:
    def epochs(*values: float | None) -> list[dict[str, Any]]:
        return [{"epoch": number, "auc": 0.0, "validation_auc": value} for number, value in enumerate(values, 1)]

    def best(*values: float | None) -> int | None:
        found = best_epoch(epochs(*values), "auc")
        return found["epoch"] if found else None

    assert best(0.5, 0.7, 0.7) == 2
    assert best(float("nan"), 0.1, None) == 2
    assert best(float("nan")) is None
    assert best() is None


def test_a_range_of_one_class_has_no_auc(folder: Path, tmp_path: Path) -> None:
    """The last sample alone has one class: its AUC is null, and the run goes on."""
    assert Reader(folder / "data", "train", batch_size=1).num_rows == TRAIN_ROWS
    report = run(folder, tmp_path / "run", "train.validation_fraction=0.005", "train.epochs=1")
    saved = report_of(tmp_path / "run")
    assert saved["validation_auc"] is None
    assert saved["validation_logloss"] == report["validation_logloss"] > 0
