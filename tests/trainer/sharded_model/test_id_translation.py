"""Runs whose ids are given rows as they come: what they equal, on one process and on two, and that they resume."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet as pq

from cowrec.trainer.config.run import load_config
from cowrec.trainer.training.loop import train
from cowrec.trainer.training.saved_run import evaluate_run, predict_run
from run_comparison import same
from trainer_cases import (
    UNWEIGHTED,
    checkpoint,
    config_file,
    free_port,
    interrupted,
    make_data,
    tensors,
    train_case,
    train_in_processes,
)

IDS = ["id_table.kind=collisionless", "id_table.capacity=100"]
OPTIMIZERS = {
    "replay": [],
    "lazy": ["optimizer.absent_rows=lazy"],
    "dense": ["optimizer.absent_rows=dense"],
    "rowwise_adagrad": ["optimizer.embedding=rowwise_adagrad"],
    "adagrad": ["optimizer.embedding=adagrad"],
    "sgd": ["optimizer.embedding=sgd"],
    "fbgemm_cowclip": ["optimizer.embedding=fbgemm_cowclip", "clip.rule=none"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ids")
    make_data(folder / "single", ("price", "city"))
    make_data(folder / "unweighted", UNWEIGHTED)
    make_data(folder / "weighted")
    config_file(folder)
    return folder


def run(folder: Path, data: str, run_dir: Path, *overrides: str, resume: bool = False) -> dict[str, Any]:
    config = load_config(folder / "run.toml", overrides)
    return train(config, folder / data / "data", run_dir, resume=resume)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_of_their_own_train_as_the_rows_of_a_vocabulary(folder: Path, tmp_path: Path, optimizer: str) -> None:
    """With tables that start at zero a row's number is all that differs, and with it the order of some sums."""
    settings = [*OPTIMIZERS[optimizer], "optimizer.embedding_init_std=0"]
    fixed = run(folder, "single", tmp_path / "fixed", *settings)
    own = run(folder, "single", tmp_path / "own", *settings, *IDS)
    assert own["logloss"] == pytest.approx(fixed["logloss"], abs=2e-6)
    predictions = []
    for name in ("fixed", "own"):
        predict_run(tmp_path / name, folder / "single" / "data", tmp_path / f"{name}.parquet")
        predictions.append(pq.read_table(tmp_path / f"{name}.parquet")["prediction"].to_numpy())
    np.testing.assert_allclose(*predictions, atol=2e-6)


@pytest.mark.parametrize("optimizer", ["replay", "adagrad"])
@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["id_table.capacity=6", "id_table.when_full=oldest"],
        ["id_table.admission=count", "id_table.threshold=4"],
        ["id_table.admission=probabilistic", "id_table.threshold=4"],
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    folder: Path, tmp_path: Path, optimizer: str, settings: list[str]
) -> None:
    given = [*OPTIMIZERS[optimizer], *IDS, *settings, "checkpoint.every_steps=3", "checkpoint.keep_last=100"]
    run(folder, "single", tmp_path / "whole", *given)
    for at in (3, 5):
        copy = interrupted(tmp_path / "whole", at, tmp_path / f"at{at}")
        run(folder, "single", copy, *given, resume=True)
        assert same(checkpoint(copy), checkpoint(tmp_path / "whole"))


def test_evaluation_changes_no_table(folder: Path, tmp_path: Path) -> None:
    run(folder, "single", tmp_path / "run", *IDS)
    before = checkpoint(tmp_path / "run")
    first = evaluate_run(tmp_path / "run", folder / "single" / "data")
    assert evaluate_run(tmp_path / "run", folder / "single" / "data") == first
    assert same(checkpoint(tmp_path / "run"), before)


def test_warm_start_takes_over_ids_and_rows(folder: Path, tmp_path: Path) -> None:
    run(folder, "single", tmp_path / "earlier", *IDS)
    frozen = ["optimizer.embedding_lr=0", "optimizer.dense_lr=0", "optimizer.warmup_epochs=0", "optimizer.l2=0"]
    report = run(folder, "single", tmp_path / "next", *IDS, *frozen, f"train.warm_start={tmp_path / 'earlier'}")
    assert report["logloss"] == pytest.approx(
        evaluate_run(tmp_path / "earlier", folder / "single" / "data")["logloss"], abs=1e-6
    )
    with pytest.raises(ValueError, match="gives the ids of table 'city' rows in another way"):
        run(folder, "single", tmp_path / "other", f"train.warm_start={tmp_path / 'earlier'}")


SHARED = ["id_table.tables={both = {fields = ['city', 'tags'], kind = 'collisionless', capacity = 40}}"]
CASES = {
    "replay/table_wise": ("weighted", [*IDS, "sharding.plan=table_wise"]),
    "replay/row_wise": ("weighted", [*IDS, "sharding.plan=row_wise"]),
    "replay/data_parallel": ("weighted", [*IDS, "sharding.plan=data_parallel"]),
    "lazy/column_wise": ("single", [*IDS, *OPTIMIZERS["lazy"], "sharding.plan=column_wise", "model.embedding_dim=7"]),
    "full/row_wise": (
        "single",
        [*IDS, "id_table.capacity=5", "id_table.when_full=refuse", "sharding.plan=row_wise"],
    ),
    "counted/row_wise": (
        "unweighted",
        [*IDS, "id_table.admission=count", "id_table.threshold=3", "sharding.plan=row_wise"],
    ),
    "adagrad/row_wise": ("unweighted", [*IDS, *OPTIMIZERS["adagrad"], "optimizer.l2=0", "clip.rule=none"]),
    "hash/row_wise": ("unweighted", ["id_table.kind=hash", "id_table.capacity=7", "sharding.plan=row_wise"]),
}


@pytest.fixture(scope="module")
def on_two(folder: Path) -> Path:
    """``runs1/NAME`` of one process, ``runs2/NAME`` of two in one launch."""

    def case(name: str, data: str, overrides: list[str], world_size: int) -> dict:
        run_dir = folder / f"runs{world_size}" / name.replace("/", "_")
        places = {"config": f"{folder}/run.toml", "data": str(folder / data / "data"), "run_dir": str(run_dir)}
        return {**places, "set": overrides, "port": free_port()}

    for name, what in CASES.items():
        assert train_case(case(name, *what, 1)) == "ok"
    train_in_processes([case(name, *what, 2) for name, what in CASES.items()], folder / "cases.json", 2)
    return folder


def test_a_run_of_one_process_is_gone_on_with_by_two(folder: Path, tmp_path: Path) -> None:
    """Ids keep their rows on whichever process they then are; weights differ by rounding."""
    given = [*IDS, "id_table.capacity=6", "sharding.plan=row_wise"]
    often = ["checkpoint.every_steps=3", "checkpoint.keep_last=100"]
    run(folder, "single", tmp_path / "whole", *given, *often)
    copy = interrupted(tmp_path / "whole", 3, tmp_path / "copy")
    places = {"config": f"{folder}/run.toml", "data": str(folder / "single" / "data"), "run_dir": str(copy)}
    case = {**places, "set": [*given, *often], "port": free_port(), "resume": True}
    train_in_processes([case], tmp_path / "cases.json", 2)
    assert json.loads((tmp_path / "cases.rank0").read_text()) == ["ok"]
    one, two = (tensors(checkpoint(each)["model"]) for each in (tmp_path / "whole", copy))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_what_one_trains(on_two: Path, name: str) -> None:
    """The same ids on the same rows, and weights that differ by rounding: sums are taken in another order."""
    for rank in range(2):
        assert json.loads((on_two / f"cases.rank{rank}").read_text()) == ["ok"] * len(CASES)
    one, two = (tensors(checkpoint(on_two / f"runs{count}" / name.replace("/", "_"))["model"]) for count in (1, 2))
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=2e-5)
