"""Measures of an evaluation: under the true probabilities and by groups, against scikit-learn's of the predictions."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from cowrec.data_pipeline import Schema, SynthesizeConfig, synthesize
from cowrec.trainer.config.run import load_config
from cowrec.trainer.training.loop import train
from cowrec.trainer.training.saved_run import evaluate_run, predict_run
from trainer_cases import config_file

ROWS, TEST_ROWS = 400, 301
EXPECTED = ("expected_auc", "expected_logloss", "excess_logloss")
KEYS = ("auc", "logloss", "rows", "ctr", "normalized_entropy", "calibration", *EXPECTED)
SIZES = {"rows": ROWS, "test_rows": TEST_ROWS, "vocabulary_scale": 1e-5, "shard_rows": 150}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality")
    synthesize(folder / "data", SynthesizeConfig(**SIZES))
    config_file(folder)
    settings = ["train.epochs=1", "evaluate.by_id_counts=true"]
    train(load_config(folder / "run.toml", settings), folder / "data", folder / "run")
    for split in ("train", "test"):
        predict_run(folder / "run", folder / "data", folder / f"{split}.parquet", split)
    return folder


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run" / "report.json").read_text())
    return content


def known(measured: dict[str, Any]) -> dict[str, Any]:
    """The measures of KEYS."""
    return {key: value for key, value in measured.items() if key in KEYS}


def of_predictions(folder: Path, chosen: Any = slice(None), split: str = "test") -> dict[str, Any]:
    """Measures of some samples by scikit-learn; soft labels are samples of both classes with weights."""
    q = pq.read_table(folder / f"{split}.parquet")["prediction"].to_numpy().astype(float)[chosen]
    stored = pq.read_table(folder / "data" / split)
    label = stored["label"].to_numpy()[chosen]
    p = 1 / (1 + np.exp(-stored["true_logit"].to_numpy().astype(float)[chosen]))
    both, weights = np.repeat([1, 0], len(p)), np.concatenate([p, 1 - p])
    pairs, own = p.sum() * (1 - p).sum(), (p * (1 - p)).sum()
    expected, least = (log_loss(both, np.tile(each, 2), sample_weight=weights) for each in (q, p))
    return {
        "auc": roc_auc_score(label, q),
        "logloss": log_loss(label, q),
        "rows": len(q),
        "ctr": label.mean(),
        "normalized_entropy": log_loss(label, q) / log_loss(label, np.full(len(q), label.mean(dtype=float))),
        "calibration": q.mean() / label.mean(),
        "expected_auc": (roc_auc_score(both, np.tile(q, 2), sample_weight=weights) * pairs - own / 2) / (pairs - own),
        "expected_logloss": expected,
        "excess_logloss": expected - least,
    }


def test_measures_equal_scikit_learns(folder: Path) -> None:
    """Tolerance 1e-6: predictions are float32."""
    measured = known(report(folder)["epochs"][-1])
    assert measured == pytest.approx(of_predictions(folder), abs=1e-6)
    assert 0 < measured["excess_logloss"] < measured["expected_logloss"]
    assert known(evaluate_run(folder / "run", folder / "data")) == pytest.approx(measured, abs=1e-7)
    best = report(folder)["best_possible"]
    assert measured["expected_logloss"] - measured["excess_logloss"] == pytest.approx(
        best["expected_logloss"], abs=1e-6
    )
    assert best["expected_auc"] > measured["expected_auc"]


def test_groups_are_thirds_by_the_counts_of_ids(folder: Path) -> None:
    trained, test = (pq.read_table(folder / "data" / split).to_pydict() for split in ("train", "test"))
    fields = [field.name for field in Schema.load(folder / "data").sparse]
    occurrences = {name: Counter(trained[name]) for name in fields}
    counts = [[occurrences[name][each] for each in test[name]] for name in fields]
    groups = np.argsort(np.argsort(np.log1p(np.stack(counts)).mean(0), kind="stable")) * 3 // TEST_ROWS
    measured = report(folder)["by_id_counts"]
    assert list(measured) == ["rare", "middle", "frequent"]
    for group, values in enumerate(measured.values()):
        assert known(values) == pytest.approx(of_predictions(folder, groups == group), abs=1e-6)
    board = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(board[-1])["by_id_counts"] == measured
