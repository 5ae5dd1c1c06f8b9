"""Predictions of a model that was trained on a share of the negatives, against the published correction."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import log_loss

from cowrec.data_pipeline import PrepareConfig, Schema, prepare
from cowrec.data_pipeline.codec import SampleCodec
from cowrec.data_pipeline.dataset.shards import load_shards
from cowrec.trainer.export.export import export_run
from cowrec.trainer.serving.served_model import ServedModel
from cowrec.trainer.training.saved_run import evaluate_run
from trained_runs import predicted, run
from trainer_cases import config_file, make_data, raw_rows

KEPT = 0.25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``data``, ``run``, and ``uncorrected``, the same run on data that are said to have all negatives."""
    folder = tmp_path_factory.mktemp("negatives")
    make_data(folder, ("price", "city"))
    (folder / "raw.csv").write_text(raw_rows(600, ("price", "city")))
    settings = PrepareConfig(split="order", test_rows=100, negative_fraction=KEPT)
    prepare(
        "tabular", [folder / "raw.csv"], folder / "data", settings, schema_file=folder / "columns.toml", overwrite=True
    )
    config_file(folder)
    run(folder, folder / "run")
    shutil.copytree(folder / "run", folder / "uncorrected")
    dataclasses.replace(Schema.load(folder / "run"), negative_fraction=1.0).save(folder / "uncorrected")
    return folder


def test_predictions_are_corrected(folder: Path) -> None:
    data = folder / "data"
    corrected, p = (predicted(folder / name, data).astype(float) for name in ("run", "uncorrected"))
    np.testing.assert_allclose(corrected, p / (p + (1 - p) / KEPT), rtol=1e-5)
    label = pq.read_table(folder / "data" / "test")["label"].to_numpy()
    quality = evaluate_run(folder / "run", folder / "data")
    assert quality["logloss"] == pytest.approx(log_loss(label, corrected), abs=1e-5)
    assert quality["auc"] == pytest.approx(evaluate_run(folder / "uncorrected", folder / "data")["auc"], abs=1e-6)
    # The training split lacks the negatives, so there predictions are as the model learned them.
    train_split = [predicted(folder / name, data, "train") for name in ("run", "uncorrected")]
    assert np.array_equal(*train_split)


def test_a_served_model_and_an_exported_network_correct_too(folder: Path, tmp_path: Path) -> None:
    expected = predicted(folder / "run", folder / "data")
    export_run(folder / "run", tmp_path / "export")
    schema = Schema.load(folder / "data")
    block = load_shards(folder / "data", schema, "test", range(len(schema.splits["test"].shards)))
    np.testing.assert_allclose(ServedModel.load(tmp_path / "export").predict(block), expected, rtol=1e-5)
    logits = {}
    for name in ("run", "uncorrected"):
        export_run(folder / name, tmp_path / f"{name}_network")
        program = torch.export.load(tmp_path / f"{name}_network" / "network.pt2").module()
        logits[name] = program(torch.zeros(3, 1), torch.zeros(3, 1, 8))
    torch.testing.assert_close(logits["run"], logits["uncorrected"] + np.log(KEPT))


def test_a_stream_has_all_negatives(folder: Path) -> None:
    codec = SampleCodec.load(folder / "data")
    samples = codec.from_objects([{"price": 1, "city": "city1", "click": 1, "time": 5}])
    with pytest.raises(ValueError, match="training on a stream takes all samples; prepare the data with"):
        codec.encode(samples)
    assert codec.encode(samples, training=False).table.num_rows == 1
