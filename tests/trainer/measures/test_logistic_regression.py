"""The logistic regression beside the first report, against scikit-learn's on the one-hot matrix of the raw samples."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.feature_extraction import DictVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

from cowrec.data_pipeline import PrepareConfig, prepare
from cowrec.trainer.config.run import load_config
from cowrec.trainer.training.loop import train
from trainer_cases import checkpoint, config_file, tensors

TRAIN, HELD_OUT, TEST = 600, 150, 250
LABELS = ("click", "buy")
SCHEMA = """
labels = ["click", {name = "buy", positive = ["1"]}]
weight = "weight"
fields = [
    {name = "price", kind = "numeric"},
    {name = "city", kind = "categorical"},
    {name = "tags", kind = "multi", separator = "|", pooling = "sum"},
    {name = "words", kind = "multi", separator = "|", pooling = "mean"},
HISTORY]
"""
HISTORY = '    {name = "history", kind = "weighted", separator = " ", weight_separator = ":"},\n'


def samples() -> list[dict[str, Any]]:
    """Raw samples; each fourth one has no second label, and the last ones have cities that no other has."""
    draw, found = random.Random(5), []
    for number in range(TRAIN + HELD_OUT + TEST):
        city, price = draw.randrange(12), draw.uniform(1, 9)
        tags, words = ([f"t{draw.randrange(5)}" for _ in range(draw.randrange(4))] for _ in range(2))
        history = {f"h{each}": draw.choice((1.0, 0.5, 2.0)) for each in draw.sample(range(9), draw.randrange(4))}
        logit = (city - 6) / 3 + (price - 5) / 4 + history.get("h1", 0) - ("t1" in words)
        found.append(
            {
                "click": int(draw.random() < 1 / (1 + np.exp(-logit))),
                "buy": "" if number % 4 == 0 else int(draw.random() < 1 / (1 + np.exp(1 - logit))),
                "weight": draw.choice((0.5, 1, 3)),
                "price": price,
                "city": f"c{city}" if number < TRAIN + HELD_OUT or number % 10 else f"new{number}",
                "tags": tags,
                "words": words,
                "history": history,
            }
        )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs "run_vocabulary" and "run_raw" on samples with a vocabulary, and with raw ids and no weighted field."""
    folder = tmp_path_factory.mktemp("regression")
    lines = [",".join(samples()[0])]
    for each in samples():
        bags = (
            "|".join(each["tags"]),
            "|".join(each["words"]),
            " ".join(f"{k}:{v}" for k, v in each["history"].items()),
        )
        lines.append(",".join(map(str, [*list(each.values())[:5], *bags])))
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    config_file(folder)
    for name, history in (("vocabulary", HISTORY), ("raw", "")):
        (folder / "schema.toml").write_text(SCHEMA.replace("HISTORY", history))
        settings = PrepareConfig(split="order", test_rows=TEST, raw_ids=name == "raw", dense="none")
        prepare("tabular", [folder / "log.csv"], folder / name, settings, schema_file=folder / "schema.toml")
        run(folder, name, f"run_{name}")
    return folder


def run(folder: Path, data: str, name: str, *overrides: str, **options: bool) -> dict[str, Any]:
    settings = [
        "model.name=shared_bottom",
        "train.epochs=1",
        f"train.validation_fraction={HELD_OUT / (TRAIN + HELD_OUT)}",
    ]
    settings += ["id_table.kind=collisionless", "id_table.capacity=64"] if data == "raw" else []
    return train(load_config(folder / "run.toml", [*settings, *overrides]), folder / data, folder / name, **options)


def one_hot(sample: dict[str, Any], mean: float, deviation: float) -> dict[str, float]:
    """The columns of a sample that are not 0."""
    columns = {"price": (sample["price"] - mean) / deviation, f"city={sample['city']}": 1.0}
    for name, unit in (("tags", 1), ("words", 1 / max(len(sample["words"]), 1))):
        for each in sample[name]:
            columns[f"{name}={each}"] = columns.get(f"{name}={each}", 0) + unit
    columns.update({f"history={each}": weight for each, weight in (sample["history"] or {}).items()})
    # Bags without an id have one of their own, for missing values.
    columns.update({f"{name} missing": 1.0 for name in ("tags", "words", "history") if sample[name] in ([], {})})
    return columns


def by_scikit_learn(with_history: bool) -> dict[str, float]:
    """AUC and logloss of both labels on the validation samples and the test split."""
    every = samples() if with_history else [each | {"history": None} for each in samples()]
    prices = [each["price"] for each in every[:TRAIN]]
    coder = DictVectorizer().fit(
        [one_hot(each, float(np.mean(prices)), float(np.std(prices))) for each in every[:TRAIN]]
    )
    found = {}
    for label in LABELS:
        known = [
            [each for each in part if each[label] != ""] for part in (every[:TRAIN], every[TRAIN:-TEST], every[-TEST:])
        ]
        inputs = [
            coder.transform([one_hot(each, float(np.mean(prices)), float(np.std(prices))) for each in part])
            for part in known
        ]
        weights = [np.array([each["weight"] for each in part]) for part in known]
        unit = np.mean([each["weight"] for each in every[:TRAIN]])
        labels = [[each[label] for each in part] for part in known]
        model = LogisticRegression(C=0.1, tol=1e-8, max_iter=1000).fit(inputs[0], labels[0], weights[0] / unit)
        for number, prefix in ((1, "validation_"), (2, "")):
            p = model.predict_proba(inputs[number])[:, 1]
            found[f"{prefix}auc_{label}"] = roc_auc_score(labels[number], p, sample_weight=weights[number])
            found[f"{prefix}logloss_{label}"] = log_loss(labels[number], p, sample_weight=weights[number])
    return found


@pytest.mark.parametrize("ids", ["vocabulary", "raw"])
def test_it_is_scikit_learns(folder: Path, ids: str) -> None:
    """The search ends just above the least sum of losses, which may order a few of the 3,000 pairs in another way."""
    report = json.loads((folder / f"run_{ids}" / "report.json").read_text())
    found, expected = report["logistic_regression"], by_scikit_learn(ids == "vocabulary")
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=3e-3 if "auc" in key else 1e-3), key
    assert found["auc"] == found["auc_click"]
    assert found["validation_logloss"] == found["validation_logloss_click"]
    assert report["epochs"][0]["logistic_regression"] == found


def test_training_does_not_depend_on_it(folder: Path) -> None:
    without = run(folder, "vocabulary", "run_without", "evaluate.logistic_regression_rows=599")
    assert without["logistic_regression"] is None
    states = [tensors(checkpoint(folder / name)) for name in ("run_vocabulary", "run_without")]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_a_resumed_run_keeps_it(folder: Path) -> None:
    before = json.loads((folder / "run_vocabulary" / "report.json").read_text())["logistic_regression"]
    report = run(folder, "vocabulary", "run_vocabulary", "train.epochs=2", resume=True)
    assert report["logistic_regression"] == before
    lines = map(json.loads, (folder / "run_vocabulary" / "metrics.jsonl").read_text().splitlines())
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert ["logistic_regression" in line for line in evaluations] == [True, False]
