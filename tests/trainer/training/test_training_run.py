"""Trained runs against scikit-learn: report, validation, early stopping, new data, refused data, failures."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cowrec.data_pipeline import PrepareConfig, Schema, SynthesizeConfig, prepare, synthesize
from cowrec.data_pipeline.reading import reader
from cowrec.trainer import evaluate, load_config, predict, train
from cowrec.trainer.online.loop import online
from cowrec.trainer.runs.checkpoint import best_epoch
from cowrec.trainer.runtime.errors import NonFiniteLoss
from cowrec.trainer.training import trainer
from refusal import refused
from run_comparison import assert_same
from trained_runs import data_folder, make_folder, metrics, predicted, report_of, run
from trainer_cases import TEST_ROWS, TRAIN_ROWS, UNWEIGHTED, edit_column, interrupted, make_data, raw_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``data`` (all kinds of field) and ``run``, trained on it."""
    folder = make_folder(tmp_path_factory.mktemp("run"))
    run(folder, folder / "run")
    return folder


def test_contents_of_the_run_folder(folder: Path) -> None:
    run_dir, report = folder / "run", report_of(folder / "run")
    saved = load_config(run_dir / "config.toml")
    assert saved.data.dir == str(folder / "data")
    assert saved.train == replace(load_config(folder / "run.toml").train, average=True)
    assert "# derived: dense_lr = 0.01\n" in (run_dir / "config.toml").read_text()
    # Five steps an epoch, a line every two steps, after the first step and at the end of an epoch.
    assert [line["step"] for line in metrics(run_dir, "train")] == [1, 2, 4, 5, 6, 8, 10]
    assert [line["auc"] for line in metrics(run_dir, "eval")] == [epoch["auc"] for epoch in report["epochs"]]
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["step_000000005", "step_000000010"]
    board = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert board.Scalars("eval/auc")[-1].value == pytest.approx(report["auc"], abs=1e-6)
    assert report["steps"] == 10
    assert 0 < report["train_seconds"] < report["wall_seconds"]
    # All samples except those of the first batch, whose step compiles.
    counted = report["samples_per_second"] * report["train_seconds"]
    assert counted == pytest.approx(2 * TRAIN_ROWS - 51, rel=1e-9)
    for key in ("versions", "device", "git_commit", "seed", "world_size", "embedding_lr", "dense_lr", "l2"):
        assert key in report


def test_raw_data_are_prepared_like_the_run_without_its_training_data(folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder / "run", tmp_path / "run")
    for labelled in (True, False):
        raw = tmp_path / "new.csv"
        raw.write_text(raw_rows(33, seed=5, labelled=labelled))
        data = tmp_path / f"new{labelled}"
        prepare("tabular", [raw], data, like=moved)
        assert predict(moved, data, tmp_path / f"{labelled}.parquet") == 33
        if labelled:
            assert evaluate(moved, data)["rows"] == 33
        else:
            refused("has no labels: it can be predicted, not evaluated", evaluate, moved, data)
            refused(r"the train split of .* has no samples", run, folder, tmp_path / "untrained", data=data)
            assert not (tmp_path / "untrained").exists()
    tables = [pq.read_table(tmp_path / f"{labelled}.parquet") for labelled in (True, False)]
    assert tables[0].column_names == ["sample_number", "label", "prediction"]
    assert tables[0].drop(["label"]).equals(tables[1])
    shutil.rmtree(moved / "checkpoints")
    refused(r"no checkpoint in .*; train the run first", evaluate, moved, folder / "data")


def test_predictions_join_their_source_whatever_was_skipped(folder: Path, tmp_path: Path) -> None:
    header, *lines = raw_rows(60, seed=7).splitlines()
    rows = [f"{line},u{number},{number}" for number, line in enumerate(lines)]
    bad = (0, 7, 8, 31, 59)
    for number in bad:
        values = rows[number].split(",")
        values[1] = "x"  # the price
        rows[number] = ",".join(values)
    rows = [f"{row},{number % 7}" for number, row in enumerate(rows)]
    header += ",user id,prediction,kept_prediction"
    for name, part in (("a", rows[:25]), ("b", rows[25:]), ("good", [r for n, r in enumerate(rows) if n not in bad])):
        (tmp_path / f"{name}.csv").write_text("\n".join([header, *part]))
    keep = ["user id", "prediction", "kept_prediction"]
    for output, files in (("skipped", ["a", "b"]), ("all", ["good"])):
        settings = PrepareConfig(on_bad_row="skip", shard_rows=9)
        raw = [tmp_path / f"{name}.csv" for name in files]
        prepare("tabular", raw, tmp_path / output, settings, like=folder / "run", keep=keep)
        predict(folder / "run", tmp_path / output, tmp_path / f"{output}.parquet")
    found, without_bad = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("skipped", "all"))
    shown = ["kept_prediction", "kept_kept_prediction"]
    assert found.column_names == ["sample_number", "label", "user id", *shown, "prediction"]
    assert found["prediction"].equals(without_bad["prediction"])
    predict(folder / "run", tmp_path / "skipped", tmp_path / "skipped.CSV")
    types = pa.csv.ConvertOptions(column_types=dict(zip(found.column_names, found.schema.types, strict=True)))
    assert pa.csv.read_csv(tmp_path / "skipped.CSV", convert_options=types).equals(found)
    refused("written as Parquet or CSV", predict, folder / "run", tmp_path / "skipped", tmp_path / "skipped.json")
    options = pa.csv.ConvertOptions(include_columns=["click", "user id"], column_types={"click": pa.string()})
    source = pa.concat_tables([pa.csv.read_csv(tmp_path / f"{name}.csv", convert_options=options) for name in "ab"])
    source = source.append_column("sample_number", pa.array(range(60))).rename_columns({"user id": "user"})
    joined = found.join(source, "sample_number").sort_by("sample_number")
    assert joined["sample_number"].to_pylist() == [number for number in range(60) if number not in bad]
    assert joined["user"].equals(joined["user id"])
    assert joined["click"].to_pylist() == [str(int(label)) for label in joined["label"].to_pylist()]


def test_a_run_resumes_on_its_own_data_set_alone(folder: Path, tmp_path: Path) -> None:
    """Of a copy elsewhere it takes no notice; what is refused leaves its files as they are."""
    ended, copy = shutil.copytree(folder / "run", tmp_path / "run"), shutil.copytree(folder / "data", tmp_path / "copy")

    def resume(data: Path) -> None:
        train(load_config(folder / "run.toml", ["train.epochs=3"]), data, ended, resume=True)

    city, *others = (ended / "vocabulary").iterdir()
    city.write_bytes(city.read_bytes()[:300])
    others[0].unlink()
    resume(copy)
    assert all(other.read_bytes() == (copy / "vocabulary" / other.name).read_bytes() for other in (city, *others))
    kept = {file: file.read_bytes() for file in ended.rglob("*") if file.is_file()}
    schema = Schema.load(copy)
    changed = replace(schema, sources=tuple(replace(source, bytes=source.bytes + 1) for source in schema.sources))
    changed.save(copy)
    refused(r"copy is not the data set of .*run: it was prepared from other files; resume with that", resume, copy)
    replace(schema, settings={**schema.settings, "layout": {}}).save(copy)
    refused(r"run: it was prepared with other settings \(layout\); resume with that one", resume, copy)
    schema.save(copy)
    table = pq.read_table(vocabulary := copy / "vocabulary" / "city.parquet")
    pq.write_table(table.take([1, 0, *range(2, len(table))]), vocabulary)
    refused("copy was not prepared like the data of .*run: the ids of field 'city' differ", resume, copy)
    (ended / "journal").touch()
    refused("run is a run that follows a stream, .*; continue it with cowrec online --resume", resume, folder / "data")
    (ended / "journal").unlink()
    assert {file: file.read_bytes() for file in ended.rglob("*") if file.is_file()} == kept


def test_data_with_other_ids_are_refused(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder / "data", tmp_path / "other")
    vocabulary = other / "vocabulary" / "city.parquet"
    table = pq.read_table(vocabulary)
    # Other bytes with the same ids are the same vocabulary.
    pq.write_table(table, vocabulary, compression="none")
    assert evaluate(folder / "run", other)["rows"] == TEST_ROWS
    # The same ids, with the rows of two exchanged.
    pq.write_table(table.take([1, 0, *range(2, len(table))]), vocabulary)
    refused(r"was not prepared like .*: the ids of field 'city' differ; .*--like", evaluate, folder / "run", other)
    vocabulary.unlink()
    refused(r"city.parquet is missing", evaluate, folder / "run", other)
    with pytest.raises(ValueError, match="its fields, their sizes or scales differ"):
        evaluate(folder / "run", make_data(tmp_path / "fewer", UNWEIGHTED))

    # Synthetic data of another seed.
    for name, seed in (("one", 0), ("two", 1)):
        synthesize(tmp_path / name, SynthesizeConfig(seed=seed, rows=60, test_rows=40, vocabulary_scale=1e-6))
    report = run(folder, tmp_path / "run", "train.epochs=1", data=tmp_path / "one")
    assert report["best_possible"]["auc"] > 0.5
    assert evaluate(tmp_path / "run", tmp_path / "one")["rows"] == 40
    refused("it is synthetic, of another seed or shape", evaluate, tmp_path / "run", tmp_path / "two")


@pytest.mark.parametrize("ids", [{"hash_buckets": 10}, {"raw_ids": True}], ids=["hash", "raw"])
def test_hashed_ids_of_other_text_are_refused(folder: Path, tmp_path: Path, ids: dict[str, Any]) -> None:
    """Hashes have no vocabulary in which they would differ."""
    settings = PrepareConfig(split="order", test_rows=TEST_ROWS, **ids)
    for name, more in (("one", ""), ("two", 'null = ["city1"]\n')):
        file = tmp_path / f"{name}.toml"
        file.write_text(more + (folder / "columns.toml").read_text())
        prepare("tabular", [folder / "raw.csv"], tmp_path / name, settings, schema_file=file)
    tables = ["id_table.kind=collisionless", "id_table.capacity=100"] if "raw_ids" in ids else []
    run(folder, tmp_path / "run", "train.epochs=1", *tables, data=tmp_path / "one")
    assert evaluate(tmp_path / "run", tmp_path / "one")["rows"] == TEST_ROWS
    message = r"two was not prepared like the data of .*: it was prepared with other settings \(fields\); prepare"
    refused(message, evaluate, tmp_path / "run", tmp_path / "two")


def test_seeds_residency_and_plans(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same seed gives bit-identical results, streamed or resident, under any plan; another seed gives others.

    A run of few steps is warned of before it starts.
    """
    run(folder, tmp_path / "resident", "data.resident=yes", "sharding.plan=row_wise")
    (warning,) = (number for number, message in enumerate(caplog.messages) if "the run has 10 steps, below" in message)
    assert not any("epoch 1/2" in message for message in caplog.messages[:warning])
    assert_same(tmp_path / "resident", folder / "run")
    run(folder, tmp_path / "seed", "train.seed=1")
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "seed", folder / "run")


@pytest.mark.parametrize(
    ("resident", "free", "read"),
    [
        ("yes", 1 << 40, ["train", "test"]),
        ("auto", 1 << 40, ["train", "test"]),
        ("auto", None, ["train", "test", "train", "test"]),
    ],
)
def test_samples_of_every_epoch_are_read_once_if_they_fit(
    folder: Path, tmp_path: Path, monkeypatch: Any, resident: str, free: int | None, read: list[str]
) -> None:
    """The training samples, and those that are measured after each of two epochs."""
    found, original = list[str](), reader.load_shards
    monkeypatch.setattr(reader, "load_shards", lambda *given: found.append(given[2]) or original(*given))
    monkeypatch.setattr(trainer, "available_bytes", lambda device: free)
    run(folder, tmp_path / "run", f"data.resident={resident}")
    assert found == read
    assert_same(tmp_path / "run", folder / "run")


def test_a_non_finite_loss_keeps_the_last_good_checkpoint(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    data = shutil.copytree(folder / "data", tmp_path / "data")
    good: Callable = trainer.evaluate

    def evaluate_then_poison(*arguments: Any) -> Any:
        quality = good(*arguments)
        edit_column(min((data / "train").iterdir()), "price", 7, math.nan)
        return quality

    monkeypatch.setattr(trainer, "evaluate", evaluate_then_poison)
    with pytest.raises(NonFiniteLoss, match=r"not finite at step \d+ \(epoch 2\); the last good .*step_000000005\. "):
        run(folder, tmp_path / "run", data=data)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000000005"]
    assert not (tmp_path / "run" / "report.json").exists()
    assert math.isfinite(evaluate(tmp_path / "run", folder / "data")["logloss"])
    with pytest.raises(NonFiniteLoss, match=r"\(epoch 1\); no checkpoint was saved"):
        run(folder, tmp_path / "from_the_start", data=data)
    # One step with a huge rate: its loss, from the weights before, is finite; the test split shows the damage.
    huge = ["train.batch_size=1000", "optimizer.scaling=none", "optimizer.dense_lr=1e30", "optimizer.warmup_epochs=0"]
    monkeypatch.undo()
    with pytest.raises(NonFiniteLoss, match=r"on the test split after step 1 \(epoch 1\)"):
        run(folder, tmp_path / "huge", *huge)
    assert not (tmp_path / "huge" / "checkpoints").exists()


FUSED, VALIDATED = "optimizer.embedding={} optimizer.l2=0", "train.validation_fraction={}"
REFUSED = {
    FUSED.format("fbgemm_adam"): "exists on CUDA only",
    "train.precision=tf32": 'tf32" exists on CUDA only; on CPU set train.precision = "float32" or "bfloat16"',
    "optimizer.embedding_lr_factors.city=-1": "embedding_lr_factors.city must be at least 0 and finite, got -1",
    FUSED.format("sgd"): "samples have several ids .field 'tags'",
    "train.accumulation=52": "train.accumulation must be from 1 to train.batch_size = 51, got 52",
    VALIDATED.format("1.0"): "train.validation_fraction must be at least 0 and below 1, got 1.0",
    VALIDATED.format("0.001"): "= 0.001 of 205 training samples is 0; choose one that leaves samples",
    "train.patience=-1": "train.patience must be at least 0",
    "train.patience=1 checkpoint.keep_best=auc": "train.patience = 1 needs validation samples; prepare the data with a",
}
OF_STREAMS = {
    "train.accumulation=2": "is for data sets, not for streams; add --set train.accumulation=1",
}


def test_invalid_settings_leave_nothing_behind(folder: Path, tmp_path: Path) -> None:
    for settings, message in REFUSED.items():
        refused(message, run, folder, tmp_path / "run", *settings.split())
    for settings, message in OF_STREAMS.items():
        with pytest.raises(ValueError, match=message):
            online(load_config(folder / "run.toml", settings.split()), folder / "data", "nowhere", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_the_batch_size_and_l2_that_it_began_with(folder: Path, tmp_path: Path) -> None:
    """Both follow the samples, and L2 the epochs, where the TOML file has neither."""
    (tmp_path / "run.toml").write_text(
        "[model]\nembedding_dim = 2\nhidden = [2]\n[train]\ndevice = 'cpu'\naverage = false\n"
    )
    for epochs in (1, 2):
        report = run(tmp_path, tmp_path / "run", f"train.epochs={epochs}", data=folder / "data", resume=True)
        assert (report["batch_size"], report["l2"]) == (64, 1e-6)
    assert len(report["epochs"]) == 2


VALIDATION = ["train.validation_fraction=0.2", "optimizer.dense_lr=0.05", "optimizer.warmup_epochs=0"]
PATIENT = [*VALIDATION, "train.epochs=16", "train.patience=2", "train.average=true", "checkpoint.keep_best=logloss"]
VALIDATED_ROWS = 41
"""A fifth of 205 training samples; 164 are left, which is four steps an epoch."""


single = data_folder("price", "city")


@pytest.fixture(scope="module")
def stopped(single: Path) -> dict[str, Any]:
    return run(single, single / "stopped", *PATIENT)


def labels_and_predictions(folder: Path, run_dir: Path, split: str) -> tuple[Any, Any]:
    """Labels and predictions of a split."""
    label = pq.read_table(folder / "data" / split)["label"].to_numpy()
    return label, predicted(run_dir, folder / "data", split).astype(float)


def test_the_last_training_samples_are_measured_and_not_trained_on(single: Path, tmp_path: Path) -> None:
    """Predictions are float32: 1e-6 in logloss, and in the AUC pairs that are closer may be ordered either way.

    Resident and streamed are bit-identical.
    """
    report = run(single, tmp_path / "run", *VALIDATION)
    label, prediction = (
        column[-VALIDATED_ROWS:] for column in labels_and_predictions(single, tmp_path / "run", "train")
    )
    low, high = (roc_auc_score(label, prediction + shift * label) for shift in (-1e-6, 1e-6))
    assert low - 1e-6 <= report["validation_auc"] <= high + 1e-6 < low + 0.02
    assert report["validation_logloss"] == pytest.approx(log_loss(label, prediction), abs=1e-6)
    label, prediction = labels_and_predictions(single, tmp_path / "run", "test")
    assert report["logloss"] == pytest.approx(log_loss(label, prediction), abs=1e-6)
    assert report["steps"] == 2 * 4
    assert report["epochs"][-1]["validation_logloss"] == report["validation_logloss"]
    measured = [line["validation_auc"] for line in metrics(tmp_path / "run", "eval")]
    assert measured == [epoch["validation_auc"] for epoch in report["epochs"]]
    assert not any("auc" in epoch for epoch in report["epochs"]), "the test split is measured at the end alone"
    assert [line["logloss"] for line in metrics(tmp_path / "run", "test")] == [report["logloss"]]
    assert (report["epoch"], "last_epoch" in report) == (2, False)
    # Other labels of the validation samples change what is measured, and nothing that is trained.
    shutil.copytree(single, tmp_path / "other")
    (shard,) = (tmp_path / "other" / "data" / "train").iterdir()
    edit_column(shard, "label", slice(-VALIDATED_ROWS, None), lambda label: 1 - label)
    other = run(tmp_path / "other", tmp_path / "flipped", *VALIDATION, "data.resident=yes")
    assert_same(tmp_path / "run", tmp_path / "flipped")
    assert other["logloss"] == report["logloss"]
    assert other["validation_auc"] == pytest.approx(1 - report["validation_auc"], abs=1e-6)


def test_patience_ends_the_run_and_chooses_the_best_epoch(
    single: Path, stopped: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = [epoch["validation_logloss"] for epoch in stopped["epochs"]]
    best = losses.index(min(losses))
    assert len(losses) == best + 1 + 2 < 16, losses
    assert stopped["best_epoch"] == stopped["epoch"] == best + 1
    for key in ("validation_auc", "validation_logloss"):
        assert stopped[key] == stopped["epochs"][best][key]
    # Later commands use the best epoch's checkpoint, and the last one where that is damaged.
    label, prediction = labels_and_predictions(single, single / "stopped", "test")
    assert stopped["logloss"] == pytest.approx(log_loss(label, prediction), abs=1e-6)
    copy = shutil.copytree(single / "stopped", tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints" / f"step_{4 * (best + 1):09d}")
    last = stopped["last_epoch"]
    assert (last["epoch"], last["validation_auc"]) == (len(losses), stopped["epochs"][-1]["validation_auc"])
    caplog.set_level("INFO", "cowrec")
    caplog.clear()
    assert evaluate(copy, single / "data")["logloss"] == pytest.approx(last["logloss"], abs=1e-7)
    assert "the checkpoint of the best epoch, is missing" in caplog.text
    assert "the best by" not in caplog.text


def test_the_report_is_of_weights_that_there_are(single: Path, tmp_path: Path) -> None:
    """A run that begins to keep the best checkpoint when it is gone reports the last epoch, as later commands use."""
    settings = ["train.epochs=8", "checkpoint.keep_last=1", "optimizer.embedding_lr=1", "optimizer.dense_lr=3"]
    run(single, tmp_path / "run", *settings)
    report = run(single, tmp_path / "run", *settings, "checkpoint.keep_best=logloss", resume=True)
    assert report["best_epoch"] < report["epoch"] == 8
    assert report["logloss"] == report["epochs"][-1]["logloss"]
    assert evaluate(tmp_path / "run", single / "data")["logloss"] == pytest.approx(report["logloss"], abs=1e-7)


def test_a_checkpoint_can_be_named(
    single: Path, stopped: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The best epoch's, the latest, or that of a step; what a run does not have is refused with what it has."""
    best = 4 * stopped["best_epoch"]
    steps = {"": best, "best": best, "latest": 4 * len(stopped["epochs"]), str(best): best}
    caplog.set_level("INFO", "cowrec")
    for name, step in steps.items():
        caplog.clear()
        found = evaluate(single / "stopped", single / "data", checkpoint=name)
        expected = stopped["last_epoch"] if name == "latest" else stopped
        assert (found["step"], found["auc"]) == (step, expected["auc"])
        text = f"step_{step:09d}, after epoch {step // 4}" + (", the best by logloss" if name in ("", "best") else "")
        assert text in caplog.text
    for name, message in (("3", r"no checkpoint of step 3; it has those of steps \d+"), ("bets", "got .bets.")):
        refused(message, evaluate, single / "stopped", single / "data", checkpoint=name)


def test_a_validation_split_is_used_like_samples_held_out_of_training(single: Path, tmp_path: Path) -> None:
    """The last fifth of the training samples as a split: the same weights and measures. A fraction of it is refused."""
    data = shutil.copytree(single, tmp_path / "own") / "data"
    rows = pa.concat_tables([pq.read_table(path) for path in sorted((data / "train").iterdir())])
    schema = json.loads((data / "schema.json").read_text())
    shutil.rmtree(data / "train")
    for name, part in (("train", rows[:-VALIDATED_ROWS]), ("validation", rows[-VALIDATED_ROWS:])):
        (data / name).mkdir()
        pq.write_table(part, data / name / "00000.parquet")
        positives = [int(sum(part["label"].to_pylist()))]
        described = {"rows": len(part), "positives": positives, "shards": [len(part)]}
        schema["splits"][name] = schema["splits"]["train"] | described
    (data / "schema.json").write_text(json.dumps(schema))
    best = ["checkpoint.keep_best=logloss", "data.resident=yes"]
    held_out = run(single, tmp_path / "held_out", *VALIDATION, *best)
    report = run(tmp_path / "own", tmp_path / "split", *VALIDATION[1:], *best)
    assert_same(tmp_path / "held_out", tmp_path / "split")
    assert report["epochs"] == held_out["epochs"]
    assert (report["auc"], report["epoch"]) == (held_out["auc"], held_out["epoch"])
    measured = evaluate(tmp_path / "split", data, "validation", checkpoint="latest")
    assert measured["logloss"] == pytest.approx(report["epochs"][-1]["validation_logloss"], abs=1e-7)
    with pytest.raises(ValueError, match=r"has a validation split, which is used; set train.validation_fraction = 0"):
        run(tmp_path / "own", tmp_path / "both", *VALIDATION)


def test_a_resumed_run_stops_at_the_same_epoch(single: Path, stopped: dict[str, Any], tmp_path: Path) -> None:
    always = [*PATIENT, "checkpoint.every_steps=3", "checkpoint.keep_last=100"]
    run(single, tmp_path / "all", *always)
    last = 4 * len(stopped["epochs"])
    for at in (3, 4, last):
        copy = interrupted(tmp_path / "all", at, tmp_path / f"at{at}")
        again = run(single, copy, *always, resume=True)
        assert again["epochs"] == stopped["epochs"]
        assert again["logloss"] == stopped["logloss"]
        assert_same(copy, single / "stopped")
    with pytest.raises(ValueError, match=r"checkpoint.keep_best = 'logloss', but 'auc' is requested"):
        run(single, tmp_path / "all", *always, "checkpoint.keep_best=auc", resume=True)


def test_the_best_epoch_is_the_first_of_equals_and_needs_a_value() -> None:
    def best(*values: float | None) -> int | None:
        epochs = [{"epoch": number, "auc": 0.0, "validation_auc": value} for number, value in enumerate(values, 1)]
        found = best_epoch(epochs, "auc")
        return found["epoch"] if found else None

    assert best(0.5, 0.7, 0.7) == best(math.nan, 0.1, None) == 2
    assert best(math.nan) is best() is None
