"""Data of several labels, and of a share of the negatives, from training to serving."""

import dataclasses
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from cowrec.data_pipeline import PrepareConfig, Schema, prepare
from cowrec.data_pipeline.codec import SampleCodec
from cowrec.data_pipeline.dataset.shards import load_shards
from cowrec.trainer import evaluate, export_model, predict
from cowrec.trainer.serving.request_samples import RequestSample
from cowrec.trainer.serving.served_model import ServedModel
from cowrec.trainer.serving.service import Service
from refusal import refused
from run_comparison import assert_close, state_of
from trained_runs import make_folder, metrics, predicted, report_of
from trained_runs import run as run_of
from trainer_cases import TEST_ROWS, case_of, config_file, make_data, raw_rows, train_in_processes

LABELS = ("click", "buy")
PREDICTIONS = [f"prediction_{name}" for name in LABELS]
LABELS_OF_COLUMNS = 'labels = ["click", {name = "buy", column = "bought", positive = ["yes"]}]'
OPTIONS = ["model.name=ple", "model.options={levels=2,task_experts=1,shared_experts=2,tower=[4]}"]


def make_both(folder: Path) -> None:
    """Prepares raw.csv again with a second label, which is unknown for each fourth sample."""
    header, *rows = (folder / "raw.csv").read_text().splitlines()
    rng, lines = random.Random(1), [f"{header},bought"]
    for number, row in enumerate(rows):
        bought = "yes" if rng.random() < 0.3 + 0.4 * int(row[0]) else "no"
        lines.append(f"{row},{bought if number % 4 else ''}")
    (folder / "both.csv").write_text("\n".join(lines) + "\n")
    fields = (folder / "columns.toml").read_text().replace('label = "click"', LABELS_OF_COLUMNS)
    (folder / "both.toml").write_text(fields)
    settings = PrepareConfig(split="order", test_rows=TEST_ROWS)
    prepare("tabular", [folder / "both.csv"], folder / "both", settings, schema_file=folder / "both.toml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("labels"))
    make_both(folder)
    run(folder, "run", "checkpoint.keep_best=auc", "train.epochs=3", "train.validation_fraction=0.3")
    predict(folder / "run", folder / "both", folder / "predictions.parquet")
    return folder


def run(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    return run_of(folder, folder / name, *OPTIONS, *overrides, data=folder / "both")


def test_each_task_is_measured_and_predicted(folder: Path) -> None:
    """Predictions are float32; those that are closer than that may be ordered either way."""
    quality = evaluate(folder / "run", folder / "both")
    predicted, table = pq.read_table(folder / "predictions.parquet"), pq.read_table(folder / "both" / "test")
    assert predicted.column_names == ["sample_number", "label_click", "label_buy", *PREDICTIONS]
    for task in LABELS:
        label = table[f"label_{task}"].to_numpy()
        known = ~np.isnan(label)
        prediction = predicted[f"prediction_{task}"].to_numpy().astype(float)[known]
        assert quality[f"logloss_{task}"] == pytest.approx(log_loss(label[known], prediction), abs=1e-6)
        assert quality[f"auc_{task}"] == pytest.approx(roc_auc_score(label[known], prediction), abs=0.01)
        assert quality[f"rows_{task}"] == known.sum()
    assert np.isnan(table["label_buy"].to_numpy()).sum() > 0
    assert (quality["auc"], quality["logloss"]) == (quality["auc_click"], quality["logloss_click"])
    report = report_of(folder / "run")
    assert metrics(folder / "run", "train")[0]["loss"] == pytest.approx(2 * np.log(2), rel=0.05)
    assert report["auc"] == report["auc_click"] != report["auc_buy"]
    epoch = report["epochs"][0]
    assert epoch["validation_auc"] == epoch["validation_auc_click"] != epoch["validation_auc_buy"]


def test_an_export_serves_a_probability_for_each_task(folder: Path) -> None:
    export_model(folder / "run", folder / "export")
    served = ServedModel.load(folder / "export")
    predictions = pq.read_table(folder / "predictions.parquet", columns=PREDICTIONS)
    expected = np.stack([column.to_numpy() for column in predictions.columns], 1)
    block = load_shards(folder / "both", served.schema, "test", [0])
    np.testing.assert_allclose(served.predict(block), expected, rtol=0, atol=1e-6)
    service = Service(folder / "export")
    service.load()
    ((result, _),) = service.compute([RequestSample(dict.fromkeys(service._codec.columns))])
    assert result.keys() == set(LABELS)


def test_two_processes_train_what_one_does(folder: Path, tmp_path: Path) -> None:
    """Each rank knows other labels; sums of losses are in another order."""
    given = [*OPTIONS, "train.epochs=1", "train.task_weights={buy=0.5}"]
    train_in_processes(case_of(folder, tmp_path / "two", *given, data=folder / "both"))
    run_of(folder, tmp_path / "one", *given, data=folder / "both")
    assert_close(*(state_of(tmp_path / name, "model") for name in ("one", "two")), rtol=1e-3, atol=1e-4)


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    for setting, message in (
        ("model.name=deepfm model.options={}", r'"deepfm" computes one logit, but the data have 2 labels'),
        ("train.task_weights={by=1}", r"train.task_weights.by = 1: the data have no label 'by'; did you mean 'buy'[?]"),
        ("optimizer.cross_l2=0.1", "optimizer.cross_l2 = 0.1 is for cross layers, CIN and AutoInt, of which .* none"),
        ("train.task_weights={buy=-1}", "train.task_weights.buy must be at least 0 and finite, got -1"),
    ):
        refused(message, run, folder, "refused", *setting.split())
        assert not (folder / "refused").exists()
    weights, message = "train.task_weights={label=2.0}", "weighs labels against each other, but the data have one"
    refused(message, run_of, folder, folder / "refused", weights, data=folder / "data")
    refused("its labels are label instead of click, buy", evaluate, folder / "run", folder / "data")


KEPT = 0.25


@pytest.fixture(scope="module")
def negatives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``data``, ``run``, and ``uncorrected``, the same run on data that are said to have all negatives."""
    negatives = tmp_path_factory.mktemp("negatives")
    make_data(negatives, ("price", "city"))
    (negatives / "raw.csv").write_text(raw_rows(600, ("price", "city")))
    settings = PrepareConfig(split="order", test_rows=100, negative_fraction=KEPT)
    given: dict[str, Any] = {"schema_file": negatives / "columns.toml", "overwrite": True}
    prepare("tabular", [negatives / "raw.csv"], negatives / "data", settings, **given)
    config_file(negatives)
    run_of(negatives, negatives / "run")
    shutil.copytree(negatives / "run", negatives / "uncorrected")
    dataclasses.replace(Schema.load(negatives / "run"), negative_fraction=1.0).save(negatives / "uncorrected")
    return negatives


def test_predictions_are_corrected(negatives: Path) -> None:
    data = negatives / "data"
    corrected, p = (predicted(negatives / name, data).astype(float) for name in ("run", "uncorrected"))
    np.testing.assert_allclose(corrected, p / (p + (1 - p) / KEPT), rtol=1e-5)
    label = pq.read_table(negatives / "data" / "test")["label"].to_numpy()
    quality = evaluate(negatives / "run", negatives / "data")
    assert quality["logloss"] == pytest.approx(log_loss(label, corrected), abs=1e-5)
    assert quality["auc"] == pytest.approx(evaluate(negatives / "uncorrected", negatives / "data")["auc"], abs=1e-6)
    # The training split lacks the negatives, so there predictions are as the model learned them.
    train_split = [predicted(negatives / name, data, "train") for name in ("run", "uncorrected")]
    assert np.array_equal(*train_split)


def test_a_served_model_and_an_exported_network_correct_too(negatives: Path, tmp_path: Path) -> None:
    logits = {}
    for name in ("run", "uncorrected"):
        export_model(negatives / name, tmp_path / name)
        program = torch.export.load(tmp_path / name / "network.pt2").module()
        logits[name] = program(torch.zeros(3, 1), torch.zeros(3, 1, 8))
    schema = Schema.load(negatives / "data")
    block = load_shards(negatives / "data", schema, "test", range(len(schema.splits["test"].shards)))
    expected = predicted(negatives / "run", negatives / "data")
    np.testing.assert_allclose(ServedModel.load(tmp_path / "run").predict(block), expected, rtol=1e-5)
    torch.testing.assert_close(logits["run"], logits["uncorrected"] + np.log(KEPT))


def test_a_stream_has_all_negatives(negatives: Path) -> None:
    codec = SampleCodec.load(negatives / "data")
    samples = codec.from_objects([{"price": 1, "city": "city1", "click": 1, "time": 5}])
    refused("training on a stream takes all samples; prepare the data with", codec.encode, samples)
    assert codec.encode(samples, training=False).table.num_rows == 1
