"""`evaluate --by`: groups of samples against scikit-learn's measures of the predictions, on one and two processes."""

import csv
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from commands.command_line import Cowrec
from cowrec.data_pipeline.dataset.schema import KEPT_PREFIX
from cowrec.trainer.config.run import load_config
from cowrec.trainer.training.loop import train
from cowrec.trainer.training.saved_run import evaluate_run, predict_run
from process_groups import in_processes
from trainer_cases import TRAIN_ROWS, config_file, free_port, launched_as, make_data

TEST_ROWS = 301
COLUMNS = ("city", "tags", "history", "user")
TOP = 3


def add_users(data: Path) -> None:
    """Adds the kept column `user`, which is missing for some samples."""
    for shard in (data / "test").glob("*.parquet"):
        table = pq.read_table(shard)
        users = [f"u{row % 7}" if row % 5 else "" for row in range(len(table))]
        pq.write_table(table.append_column(f"{KEPT_PREFIX}user", pa.array(users)), shard)
    content = json.loads((data / "schema.json").read_text())
    (data / "schema.json").write_text(json.dumps(content | {"kept": ["user"]}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("segments")
    make_data(folder, test_rows=TEST_ROWS)
    train(load_config(config_file(folder), ["train.epochs=1"]), folder / "data", folder / "run")
    predict_run(folder / "run", folder / "data", folder / "predictions.parquet")
    add_users(folder / "data")
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
        ids = [{each if each in seen else "(rare or unknown)" for each in bag} for bag in bags[TRAIN_ROWS:]]
    found = defaultdict(list)
    for sample, bag in enumerate(ids):
        for each in bag:
            found[each or "(missing)"].append(sample)
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
def test_groups_are_measured_as_by_scikit_learn(folder: Path, column: str) -> None:
    """Tolerance 1e-6: predictions are float32."""
    result = evaluate_run(folder / "run", folder / "data", by=[column], top=TOP)["by"][column]
    groups = members(folder, column)
    label = pq.read_table(folder / "data" / "test")["label"].to_numpy()
    sizes = sorted((len(chosen) for chosen in groups.values()), reverse=True)
    assert [line["rows"] for line in result["largest"]] == sizes[:TOP]
    for line in result["largest"]:
        expected = measured(folder, groups.pop(line["id"]))
        assert {key: line[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    rest = measured(folder, [sample for chosen in groups.values() for sample in chosen])
    assert {key: result["rest"][key] for key in rest} == pytest.approx(rest, abs=1e-6)

    both = [chosen for chosen in members(folder, column).values() if len(set(label[chosen])) == 2]
    aucs, weights = [measured(folder, chosen)["auc"] for chosen in both], [len(chosen) for chosen in both]
    assert result["gauc"] == pytest.approx(np.average(aucs, weights=weights), abs=1e-6)
    assert (result["groups"], result["groups_in_gauc"]) == (len(sizes), len(both))
    assert result["share_in_gauc"] == pytest.approx(sum(weights) / sum(sizes))

    no_group = evaluate_run(folder / "run", folder / "data", by=[column], top=0)["by"][column]
    assert (no_group["largest"], no_group["rest"]["rows"]) == ([], sum(sizes))


def test_two_processes_measure_what_one_does(folder: Path) -> None:
    """Batches of 20 of 301 samples: the last one leaves the second process without a sample."""
    port = free_port()
    in_processes(_evaluate_as, (folder, port), 2)
    one = evaluate_run(folder / "run", folder / "data", by=COLUMNS, top=TOP)
    for rank in (0, 1):
        several = json.loads((folder / f"rank{rank}.json").read_text())
        for key in ("auc", "logloss", "calibration_error"):
            assert several[key] == pytest.approx(one[key], abs=1e-6)
        for column in COLUMNS:
            own, other = several["by"][column], one["by"][column]
            assert own["gauc"] == pytest.approx(other["gauc"], abs=1e-6)
            assert [line["id"] for line in own["largest"]] == [line["id"] for line in other["largest"]]


def _evaluate_as(rank: int, folder: Path, port: int) -> None:
    launched_as(rank, 2, port)
    result = evaluate_run(folder / "run", folder / "data", by=COLUMNS, top=TOP)
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    os._exit(0)  # see process_groups


def test_the_command_prints_json(cowrec: Cowrec, folder: Path) -> None:
    _, printed, said = cowrec("evaluate", folder / "run", "--data", folder / "data", "--top", "2", "--by", "city")
    result = json.loads(printed)
    assert len(result["by"]["city"]["largest"]) == 2
    assert f"{result['rows']} samples of test: AUC {result['auc']:.4f}" in said


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("price", "'price' of .* is a number, by which samples cannot be grouped"),
        ("town", "has no field or kept column 'town' to group by; there are: city, tags, history, user"),
    ],
)
def test_other_columns_are_refused(folder: Path, column: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate_run(folder / "run", folder / "data", by=[column])
