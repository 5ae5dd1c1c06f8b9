"""Measures, also by weights, groups and age, and the importance of fields, against scikit-learn and plain loops."""

import csv
import json
import math
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score

from commands.command_line import Cowrec
from cowrec.data_pipeline import PrepareConfig, Schema, SynthesizeConfig, prepare, synthesize
from cowrec.data_pipeline.dataset.schema import KEPT_PREFIX, WEIGHT_SUFFIX
from cowrec.trainer.measures.quality import (
    Samples,
    auc_remark,
    calibration_remark,
    curve_remark,
    group_aucs,
    group_ranks,
    measure,
    require_distinct_measures,
)
from cowrec.trainer.reports.text_table import quality_tables
from cowrec.trainer.training.saved_run import evaluate_run, predict_run
from history_cases import make_histories
from process_groups import in_processes
from refusal import refused
from trained_runs import report_of, run
from trainer_cases import COLUMNS as KINDS
from trainer_cases import TRAIN_ROWS, config_file, edit_column, free_port, launched_as, make_data, raw_rows

ROWS, TEST_ROWS = 400, 301
EXPECTED = ("expected_auc", "expected_logloss", "excess_logloss")
KEYS = ("auc", "logloss", "rows", "ctr", "normalized_entropy", "calibration", *EXPECTED)
SIZES = {"rows": ROWS, "test_rows": TEST_ROWS, "vocabulary_scale": 1e-5, "shard_rows": 150}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality")
    synthesize(folder / "data", SynthesizeConfig(**SIZES))
    config_file(folder)
    run(folder, folder / "run", "train.epochs=1", "evaluate.by_id_counts=true")
    for split in ("train", "test"):
        predict_run(folder / "run", folder / "data", folder / f"{split}.parquet", split)
    return folder


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
    expected, least = (log_loss(both, np.tile(probabilities, 2), sample_weight=weights) for probabilities in (q, p))
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
    measured = known(report_of(folder / "run")["epochs"][-1])
    assert measured == pytest.approx(of_predictions(folder), abs=1e-6)
    assert 0 < measured["excess_logloss"] < measured["expected_logloss"]
    assert known(evaluate_run(folder / "run", folder / "data")) == pytest.approx(measured, abs=1e-7)
    best = report_of(folder / "run")["best_possible"]
    least = measured["expected_logloss"] - measured["excess_logloss"]
    assert least == pytest.approx(best["expected_logloss"], abs=1e-6)
    assert best["expected_auc"] > measured["expected_auc"]


def test_groups_are_thirds_by_the_counts_of_ids(folder: Path) -> None:
    trained, test = (pq.read_table(folder / "data" / split).to_pydict() for split in ("train", "test"))
    fields = [field.name for field in Schema.load(folder / "data").sparse]
    occurrences = {name: Counter(trained[name]) for name in fields}
    counts = [[occurrences[name][row] for row in test[name]] for name in fields]
    groups = np.argsort(np.argsort(np.log1p(np.stack(counts)).mean(0), kind="stable")) * 3 // TEST_ROWS
    measured = report_of(folder / "run")["by_id_counts"]
    assert list(measured) == ["rare", "middle", "frequent"]
    for group, values in enumerate(measured.values()):
        assert known(values) == pytest.approx(of_predictions(folder, groups == group), abs=1e-6)
    board = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(board[-1])["by_id_counts"] == measured


COLUMNS = ("city", "tags", "history", "user")
TOP = 3


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and its data with the kept column `user`, which is missing for some samples."""
    folder = tmp_path_factory.mktemp("segments")
    data = make_data(folder, test_rows=TEST_ROWS)
    config_file(folder)
    run(folder, folder / "run", "train.epochs=1")
    predict_run(folder / "run", folder / "data", folder / "predictions.parquet")
    for shard in (data / "test").glob("*.parquet"):
        table = pq.read_table(shard)
        users = [f"u{row % 7}" if row % 5 else "" for row in range(len(table))]
        pq.write_table(table.append_column(f"{KEPT_PREFIX}user", pa.array(users)), shard)
    replace(Schema.load(data), kept=("user",)).save(data)
    return folder


def members(folder: Path, column: str) -> dict[str, list[int]]:
    """Samples of each group, from the raw file; ids that the training samples lack are one group."""
    with (folder / "raw.csv").open() as file:
        rows = list(csv.DictReader(file))
    if column == "user":
        users = pq.read_table(folder / "data" / "test")[f"{KEPT_PREFIX}user"].to_pylist()
        ids = [{user or "(missing)"} for user in users]
    else:
        separator = {"tags": "|", "history": " "}.get(column, ",")
        bags = [{part.partition(":")[0] for part in row[column].split(separator)} for row in rows]
        seen = set().union(*bags[:TRAIN_ROWS])
        ids = [{id_ if id_ in seen else "(rare or unknown)" for id_ in bag} for bag in bags[TRAIN_ROWS:]]
    found = defaultdict(list)
    for sample, bag in enumerate(ids):
        for id_ in bag:
            found[id_ or "(missing)"].append(sample)
    return found


def measured(folder: Path, chosen: Sequence[int]) -> dict[str, Any]:
    p = pq.read_table(folder / "predictions.parquet")["prediction"].to_numpy().astype(float)[list(chosen)]
    y = pq.read_table(folder / "data" / "test")["label"].to_numpy()[list(chosen)]
    return {
        "rows": len(y),
        "ctr": y.mean(),
        "auc": roc_auc_score(y, p) if len(set(y)) == 2 else float("nan"),
        "logloss": log_loss(y, p, labels=[0, 1]),
        "calibration": p.mean() / y.mean() if y.any() else float("nan"),
    }


@pytest.mark.parametrize("column", COLUMNS)
def test_groups_are_measured_as_by_scikit_learn(segments: Path, column: str) -> None:
    """Tolerance 1e-6: predictions are float32."""
    result = evaluate_run(segments / "run", segments / "data", by=[column], top=TOP)["by"][column]
    groups = members(segments, column)
    label = pq.read_table(segments / "data" / "test")["label"].to_numpy()
    sizes = sorted((len(chosen) for chosen in groups.values()), reverse=True)
    assert [line["rows"] for line in result["largest"]] == sizes[:TOP]
    for line in result["largest"]:
        expected = measured(segments, groups.pop(line["id"]))
        assert {key: line[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    rest = measured(segments, sorted({sample for chosen in groups.values() for sample in chosen}))
    assert {key: result["rest"][key] for key in rest} == pytest.approx(rest, abs=1e-6)

    both = [chosen for chosen in members(segments, column).values() if len(set(label[chosen])) == 2]
    aucs, weights = [measured(segments, chosen)["auc"] for chosen in both], [len(chosen) for chosen in both]
    assert result["gauc"] == pytest.approx(np.average(aucs, weights=weights), abs=1e-6)
    assert (result["groups"], result["groups_in_gauc"]) == (len(sizes), len(both))
    assert result["share_in_gauc"] == pytest.approx(sum(weights) / sum(sizes))
    p = pq.read_table(segments / "predictions.parquet")["prediction"].to_numpy()
    ranked = [ndcg_score([label[chosen]], [p[chosen]]) for chosen in both]
    assert result["ndcg"] == pytest.approx(np.mean(ranked), abs=1e-6)

    no_group = evaluate_run(segments / "run", segments / "data", by=[column], top=0)["by"][column]
    assert (no_group["largest"], no_group["rest"]["rows"]) == (
        [],
        len({sample for chosen in members(segments, column).values() for sample in chosen}),
    )


def test_two_processes_measure_what_one_does_and_other_columns_are_refused(segments: Path) -> None:
    """Batches of 20 of 301 samples: the last one leaves the second process without a sample."""
    in_processes(_evaluate_as, (segments, free_port()), 2)
    one = evaluate_run(segments / "run", segments / "data", by=COLUMNS, top=TOP)
    for rank in (0, 1):
        several = json.loads((segments / f"rank{rank}.json").read_text())
        for key in ("auc", "logloss", "calibration_error"):
            assert several[key] == pytest.approx(one[key], abs=1e-6)
        for column in COLUMNS:
            own, other = several["by"][column], one["by"][column]
            assert own["gauc"] == pytest.approx(other["gauc"], abs=1e-6)
            assert [line["id"] for line in own["largest"]] == [line["id"] for line in other["largest"]]
    for column, message in (
        ("price", "'price' of .* is a number, by which samples cannot be grouped"),
        ("town", "has no field or kept column 'town' to group by; there are: city, tags, history, user"),
    ):
        refused(message, evaluate_run, segments / "run", segments / "data", by=[column])


def _evaluate_as(rank: int, folder: Path, port: int) -> None:
    launched_as(rank, 2, port)
    result = evaluate_run(folder / "run", folder / "data", by=COLUMNS, top=TOP)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    os._exit(0)  # see process_groups


# Few different logits, so that many are equal; weights may be 0.
SAMPLE = st.tuples(st.integers(-4, 4), st.booleans(), st.sampled_from([0.0, 0.25, 1.0, 7.0]), st.integers(0, 3))


def columns(drawn: list[tuple]) -> tuple[torch.Tensor, ...]:
    logits, label, weight, groups = (np.array(column) for column in zip(*drawn, strict=True))
    floats = (torch.from_numpy(tensor.astype(np.float32)) for tensor in (logits / 2, label, weight))
    return (*floats, torch.from_numpy(groups))


@given(drawn=st.lists(SAMPLE, min_size=1, max_size=60))
def test_groups_are_ranked_as_by_scikit_learn(drawn: list[tuple]) -> None:
    """Of one sample scikit-learn computes no NDCG; the reciprocal rank is compared with its definition."""
    logits, label, _, groups = (column.numpy() for column in columns(drawn))
    ndcg, reciprocal = group_ranks(logits, label.astype(float), groups, 5)
    for group in range(5):
        x, y = logits[groups == group].astype(float), label[groups == group]
        if not y.any():
            assert math.isnan(ndcg[group])
            assert math.isnan(reciprocal[group])
            continue
        assert ndcg[group] == pytest.approx(ndcg_score([y], [x]) if len(y) > 1 else 1.0)
        assert reciprocal[group] == 1 / (1 + sum((x >= x[y == 1].max()) & (y == 0)))


@given(drawn=st.lists(SAMPLE, min_size=1, max_size=60))
def test_any_weighted_samples_are_measured_as_by_scikit_learn(drawn: list[tuple]) -> None:
    logits, label, weight, groups = columns(drawn)
    quality = measure(Samples(logits, label, weight))
    assert quality.rows == (weight > 0).sum()
    of_groups = group_aucs(*Samples(logits, label, weight).arrays(), groups.numpy(), 5)
    kept = weight > 0
    measured_groups = [groups >= 0, *(groups == g for g in range(5))]
    for expected, chosen in zip([quality.auc, *of_groups.tolist()], measured_groups, strict=True):
        x, y, w = (tensor[chosen & kept].double().numpy() for tensor in (logits, label, weight))
        if len(set(y)) == 2:
            assert expected == pytest.approx(roc_auc_score(y, x, sample_weight=w), abs=1e-12)
        else:
            assert math.isnan(expected)
    if not kept.any():
        assert math.isnan(quality.logloss)
        return
    y, w = (tensor[kept].double().numpy() for tensor in (label, weight))
    p = 1 / (1 + np.exp(-logits[kept].double().numpy()))
    ctr = np.average(y, weights=w)
    assert quality.ctr == pytest.approx(ctr)
    assert quality.logloss == pytest.approx(log_loss(y, p, sample_weight=w, labels=[0, 1]))
    if 0 < ctr < 1:
        alone = log_loss(y, np.full(len(y), ctr), sample_weight=w)
        assert quality.normalized_entropy == pytest.approx(quality.logloss / alone)
        assert quality.calibration == pytest.approx(np.average(p, weights=w) / ctr)
    else:
        assert math.isnan(quality.normalized_entropy)
    check_bins(p, y, w, quality.calibration_bins, quality.calibration_error)


def check_bins(p: np.ndarray, y: np.ndarray, w: np.ndarray, bins, error: float) -> None:
    """Bins hold all samples between their ends, and no prediction is in two."""
    assert list(bins.lower) == sorted(bins.lower)
    assert all(upper < lower for upper, lower in zip(bins.upper, bins.lower[1:], strict=False))
    assert sum(bins.weight) == pytest.approx(w.sum())
    differences = 0.0
    for lower, upper, prediction, rate, weight in zip(*vars(bins).values(), strict=True):
        inside = (lower - 1e-12 <= p) & (p <= upper + 1e-12)  # the sigmoid here rounds in another way
        assert weight == pytest.approx(w[inside].sum())
        assert prediction == pytest.approx(np.average(p[inside], weights=w[inside]))
        assert rate == pytest.approx(np.average(y[inside], weights=w[inside]))
        differences += weight * abs(prediction - rate)
    assert error == pytest.approx(differences / w.sum())


def test_bins_of_different_predictions_are_scikit_learns_quantiles() -> None:
    rng = np.random.default_rng(0)
    p, y = rng.permutation(np.arange(1, 401)) / 401, (rng.random(400) < 0.3).astype(float)
    bins = measure(Samples(torch.from_numpy(p).logit().float(), torch.from_numpy(y))).calibration_bins
    rates, predictions = calibration_curve(y, p, n_bins=20, strategy="quantile")
    assert bins.prediction == pytest.approx(predictions)
    assert bins.ctr == pytest.approx(rates)
    assert bins.weight == (20.0,) * 20


def test_zeros_of_both_signs_and_neighbouring_numbers_are_ordered_exactly() -> None:
    rng = np.random.default_rng(0)
    near = 2 + rng.integers(0, 300, 3000) * 2.0**-22
    for logits in (near, rng.integers(-4, 5, 3000) / 2 * rng.choice([1, -1], 3000)):
        label = rng.random(3000) < 1 / (1 + np.exp(2 - logits))
        quality = measure(Samples(*(torch.from_numpy(tensor.astype(np.float32)) for tensor in (logits, label))))
        assert quality.auc == pytest.approx(roc_auc_score(label, logits), abs=1e-12)


def test_samples_without_a_label_are_left_out_and_numbers_that_are_not_finite_are_no_quality() -> None:
    logits, label = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.0, 1.0, math.nan])
    assert measure(Samples(logits, label)) == measure(Samples(logits[:2], label[:2]))
    nothing = measure(Samples(logits[2:], label[2:]))
    assert (nothing.rows, math.isnan(nothing.logloss)) == (0, True)
    label = torch.tensor([0.0, 1.0, 1.0])
    for wrong in (math.nan, math.inf):
        assert not math.isfinite(measure(Samples(torch.tensor([0.0, wrong, 1.0]), label)).logloss)
    logits = torch.tensor([-1.0, 1.0, 0.5])
    quality = measure(Samples(logits, label, true_logit=torch.tensor([1.0, math.nan, 0.0])))
    assert (quality.auc, math.isnan(quality.expected_auc + quality.expected_logloss)) == (1, True)


DAY, TIMED_ROWS, TESTED, NEWEST = 86_400, 600, 240, 24
TIMED = 'label = "click"\ntime = "time"\nfields = [{name = "city", kind = "categorical"}]\n'


def test_the_newest_tenth_is_measured_and_its_drift_is_remarked(tmp_path: Path) -> None:
    """Everything is clicked in the end; the samples are stored in random order."""
    draw = np.random.default_rng(0)
    click = draw.random(TIMED_ROWS) < 0.3
    click[-NEWEST:] = True
    table = pa.table({"click": click, "time": np.arange(TIMED_ROWS) * DAY, "city": draw.integers(0, 5, TIMED_ROWS)})
    pq.write_table(table.take(pa.array(draw.permutation(TIMED_ROWS))), tmp_path / "raw.parquet")
    (tmp_path / "columns.toml").write_text(TIMED)
    config_file(tmp_path)
    for split in ("time", "random"):
        settings = PrepareConfig(split=split, test_fraction=TESTED / TIMED_ROWS)
        data = tmp_path / split
        prepare("tabular", [tmp_path / "raw.parquet"], data, settings, schema_file=tmp_path / "columns.toml")
        run(tmp_path, tmp_path / f"run_{split}", "train.average=false", data=data)
    report = report_of(tmp_path / "run_time")
    assert (report["newest"]["rows"], report["newest"]["ctr"]) == (NEWEST, 1)
    assert report["newest"] == report["epochs"][-1]["newest"]
    assert report["calibration_remark"].startswith("the newest tenth of the test samples has ")
    over_time = report["over_time"]
    first = TIMED_ROWS - TESTED
    assert [*over_time] == [str((first + tenth * NEWEST) * DAY) for tenth in range(10)]
    clicks = click[first:].reshape(10, NEWEST).mean(1)
    assert [tenth["ctr"] for tenth in over_time.values()] == pytest.approx(clicks.tolist())
    assert [*over_time.values()][-1] == report["newest"]
    assert len(report["training"]) == len(report["epochs"])
    assert all(0 < epoch["loss"] < 1 and epoch["seconds"] > 0 for epoch in report["training"])
    other = report_of(tmp_path / "run_random")
    assert ("newest" in other, other["calibration_remark"], len(other["over_time"])) == (False, None, 10)


def test_the_remark_tells_drifts_apart() -> None:
    def remark(calibration: float, *, whole: float = 1.0, **newest: float) -> str | None:
        usual = {"calibration": calibration, "auc": 0.7, "ctr": 0.2, "effective_clicks": 2e3, "effective_others": 8e3}
        return calibration_remark({"calibration": whole, "auc": 0.7, "newest": usual | newest})

    assert remark(1.09) is remark(0.91) is remark(math.nan, ctr=0.0) is calibration_remark({"auc": 0.7}) is None
    assert remark(1.25, effective_clicks=20) is None, "20 clicks are off by 22 % by chance"
    lately = "has 25% too many predicted clicks. AUC is not clearly lower there: perhaps the click rate has changed"
    clicked = "has 20% too few predicted clicks. AUC is 0.050 lower there: what is clicked has"
    overall = "clicks. Calibration of the whole split is 1.200: the click rate differs from that of"
    drifts = [(lately, remark(1.25)), (clicked, remark(0.8, auc=0.65)), (overall, remark(1.25, whole=1.2))]
    for expected, found in [*drifts, (lately, remark(1.25, whole=0.6))]:
        assert expected in str(found)
        assert str(found).endswith(". Train on newer samples, or as they arrive (cowrec online)")


def test_weights_of_few_samples_leave_few_clicks() -> None:
    """A sum of weighted clicks has the variance of the squares of their weights; those of weight 0 do not count."""
    draw, chosen = np.random.default_rng(0), 1_000
    p, weight = np.full(100_000, 0.2), np.zeros(100_000)
    weight[:chosen] = draw.choice([1.0, 7.0], chosen)
    sums = [(weight * (draw.random(100_000) < p))[:chosen].sum() for _ in range(400)]
    label = torch.from_numpy((draw.random(100_000) < p).astype(np.float32))
    quality = measure(Samples(torch.zeros(100_000), label, torch.from_numpy(weight).float()))
    assert quality.rows == chosen
    # Of rare clicks the deviation is 1 / sqrt(clicks); with a rate of 0.2 that of chance is smaller by sqrt(0.8).
    assert np.std(sums) / np.mean(sums) == pytest.approx((0.8 / quality.effective_clicks) ** 0.5, rel=0.1)
    plain = measure(Samples(torch.zeros(100_000), label))
    assert (plain.effective_clicks, plain.effective_others) == (label.sum(), 100_000 - label.sum())


UNLABELLED = 5


def make_flat(folder: Path) -> None:
    config_file(folder)
    (folder / "raw.csv").write_text(raw_rows(700))
    kinds = KINDS | {"price": 'kind = "numeric"\ntransform = "buckets"'}
    fields = "".join(f'[[fields]]\nname = "{name}"\n{kind}\n' for name, kind in kinds.items())
    (folder / "columns.toml").write_text(f'delimiter = ","\nlabel = "click"\n{fields}')
    settings = PrepareConfig(split="order", test_rows=200)
    prepare("tabular", [folder / "raw.csv"], folder / "data", settings, schema_file=folder / "columns.toml")
    edit_column(folder / "data" / "test" / "00000.parquet", "label", UNLABELLED, math.nan)


@pytest.mark.parametrize("make", [make_flat, make_histories])
def test_importance_is_that_of_columns_permuted_on_disk(cowrec: Cowrec, tmp_path: Path, make: Callable) -> None:
    """Exactly, for every kind of field: the same predictions are measured."""
    folder = tmp_path
    make(folder)
    run(folder, folder / "run", "train.epochs=4")
    found = evaluate_run(folder / "run", folder / "data", importance=True)
    code, printed, _ = cowrec("evaluate", folder / "run", "--data", folder / "data", "--importance")
    assert (code, json.loads(printed)["importance"]) == (0, found["importance"])
    shard = folder / "data" / "test" / "00000.parquet"
    table = pq.read_table(shard)
    known = np.flatnonzero(~np.isnan(table["label"].to_numpy()))
    order = np.arange(table.num_rows)
    order[known] = known[np.random.default_rng(0).permutation(len(known))]
    for name, change in found["importance"].items():
        copy, permuted = folder / f"permuted_{name}", table
        shutil.copytree(folder / "data", copy)
        along = [field.name for field in Schema.load(folder / "data").sparse if field.along == name]
        for column in {name, *along, f"{name}_bucket", f"{name}{WEIGHT_SUFFIX}"} & {*table.column_names}:
            values = table[column].take(pa.array(order))
            permuted = permuted.set_column(table.column_names.index(column), table.schema.field(column), values)
        pq.write_table(permuted, copy / "test" / shard.name)
        measured = evaluate_run(folder / "run", copy)
        assert change["auc_drop"] == found["auc"] - measured["auc"], name
        assert change["logloss_rise"] == measured["logloss"] - found["logloss"], name
    assert not any(field.along and field.name in found["importance"] for field in Schema.load(folder / "data").sparse)
    rises = [of_field["logloss_rise"] for of_field in found["importance"].values()]
    assert rises == sorted(rises, reverse=True)
    first, rise = next(iter(found["importance"])), f"{rises[0]:.4f}"
    assert first == "city" or "city" not in found["importance"]  # which has most of the signal
    assert re.search(rf"permuted +auc_drop +logloss_rise\n{first} .* {rise}\n", quality_tables(found))


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("measured in one process; start it without torchrun", evaluate_run, "run", "data", importance=True)


def test_groups_of_very_different_weights_are_measured_as_alone() -> None:
    """Each group as by scikit-learn, though its weights are far below the others', and NaN where it has one class."""
    random = np.random.default_rng(0)
    groups, logits = random.integers(0, 400, 2000), random.integers(-8, 8, 2000).astype(np.float32)
    label = (random.random(2000) < 0.3).astype(np.float64)
    weight = (random.random(2000) * 10.0 ** random.integers(-15, 15, 400)[groups]).astype(np.float32).astype(np.float64)
    for group, found in enumerate(group_aucs(logits, label, weight, groups, 400)):
        own = groups == group
        both = len(set(label[own])) == 2
        expected = roc_auc_score(label[own], logits[own], sample_weight=weight[own]) if both else math.nan
        assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize(
    ("validation", "training", "most", "text"),
    [
        ([0.5, 0.4], [0.5, 0.4], 2, "after epoch 2 of 2, the last one: more epochs may improve"),
        ([0.5, 0.4, 0.45], [0.5, 0.385, 0.3], 9, "after epoch 2 of 3, 0.015 above .*: more samples may improve"),
        ([0.5, 0.4, 0.45], [0.5, 0.395, 0.3], 9, "after epoch 2 of 3: more epochs do not"),
        ([0.5, 0.6], [0.5, 0.4], 2, "after epoch 1 of 2, in 100 steps: a smaller train.batch_size may"),
        ([math.nan, 0.6], [0.5, 0.4], 3, "after epoch 2 of 2, 0.200 above"),
        ([math.nan, None], [0.5, 0.4], 2, None),
    ],
)
def test_remarks_on_the_curves(
    validation: list[float | None], training: list[float], most: int, text: str | None
) -> None:
    epochs = [{"epoch": n, "step": 100 * n, "validation_logloss": loss} for n, loss in enumerate(validation, 1)]
    found = curve_remark(epochs, training, few_steps=150, most_epochs=most)
    assert found is text or re.search(f"the validation logloss was best {text}", found or "")


def test_remarks_on_auc() -> None:
    """On later epochs that are worse, of the validation samples where there are some; and on a perfect one."""
    nan, text = math.nan, "AUC was 0.7100 after epoch 2, and is 0.7000 now: .* set train.epochs = 2, or stop early"
    for key in ("auc", "validation_auc"):
        epochs = [{"epoch": n + 1, key: auc} for n, auc in enumerate((nan, 0.71, 0.7))]
        assert re.match(text, auc_remark({"auc": 0.6, key: 0.7}, epochs) or "")
        assert auc_remark({"auc": 0.6, key: 0.7075}, epochs) is None
    assert auc_remark({"auc": nan}, [{"epoch": 1, "auc": nan}]) is None
    assert "AUC is 0.9999: perhaps a field says" in (auc_remark({"auc": 0.99991}, [{"epoch": 1, "auc": 1.0}]) or "")


@pytest.mark.parametrize("labels", [("click", "error"), ("x", "error_x"), ("click", "remark")])
def test_labels_whose_measures_would_have_one_name_are_refused(labels: tuple[str, ...]) -> None:
    refused("give the label another name", require_distinct_measures, labels)
    require_distinct_measures(labels[:1])
