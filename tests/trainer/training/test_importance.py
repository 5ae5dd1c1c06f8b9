"""Importance of fields: the change of the measures on data that are permuted on disk, for every kind of field."""

import json
import re
import shutil
from math import nan
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands.command_line import Cowrec
from cowrec.data_pipeline import PrepareConfig, prepare
from cowrec.data_pipeline.dataset.schema import WEIGHT_SUFFIX
from cowrec.trainer.reports.text_table import quality_tables
from cowrec.trainer.training.saved_run import evaluate_run
from history_cases import make_histories
from refusal import refused
from trained_runs import run
from trainer_cases import COLUMNS, config_file, edit_column, raw_rows

UNLABELLED = 5


@pytest.fixture(scope="module", params=["flat", "histories"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "histories":
        make_histories(folder)
        run(folder, folder / "run")
        return folder
    config_file(folder)
    (folder / "raw.csv").write_text(raw_rows(700))
    kinds = COLUMNS | {"price": 'kind = "numeric"\ntransform = "buckets"'}
    fields = "".join(f'[[fields]]\nname = "{name}"\n{kind}\n' for name, kind in kinds.items())
    (folder / "columns.toml").write_text(f'delimiter = ","\nlabel = "click"\n{fields}')
    settings = PrepareConfig(split="order", test_rows=200)
    prepare("tabular", [folder / "raw.csv"], folder / "data", settings, schema_file=folder / "columns.toml")
    run(folder, folder / "run", "train.epochs=4")
    edit_column(folder / "data" / "test" / "00000.parquet", "label", UNLABELLED, nan)
    return folder


def test_importance_is_that_of_columns_permuted_on_disk(folder: Path, cowrec: Cowrec) -> None:
    """Exactly: the same predictions are measured."""
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
        for column in {name, f"{name}_bucket", f"{name}{WEIGHT_SUFFIX}"} & {*table.column_names}:
            values = table[column].take(pa.array(order))
            permuted = permuted.set_column(table.column_names.index(column), table.schema.field(column), values)
        pq.write_table(permuted, copy / "test" / shard.name)
        measured = evaluate_run(folder / "run", copy)
        assert change["auc_drop"] == found["auc"] - measured["auc"], name
        assert change["logloss_rise"] == measured["logloss"] - found["logloss"], name
    rises = [each["logloss_rise"] for each in found["importance"].values()]
    assert rises == sorted(rises, reverse=True)
    first, rise = next(iter(found["importance"])), f"{rises[0]:.4f}"
    assert first == "city" or "city" not in found["importance"]  # which has most of the signal
    assert re.search(rf"permuted +auc_drop +logloss_rise\n{first} .* {rise}\n", quality_tables(found))


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("measured in one process; start it without torchrun", evaluate_run, "run", "data", importance=True)
