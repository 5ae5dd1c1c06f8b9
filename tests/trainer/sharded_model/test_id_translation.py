"""Runs with id translation: equality with vocabularies and between one process and two, resuming, warm starts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cowrec.data_pipeline import RESERVED_ROWS, Reader
from cowrec.trainer.config.run import load_config
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.sharded_model.run_plan import RunPlan, Schedule
from cowrec.trainer.sharded_model.tables import tables_of
from cowrec.trainer.training.saved_run import evaluate_run
from cowrec.trainer.training.state import TrainState
from run_comparison import assert_same
from trained_runs import predicted
from trained_runs import run as run_of
from trainer_cases import (
    UNWEIGHTED,
    checkpoint,
    config_file,
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
    return run_of(folder, run_dir, *overrides, data=folder / data / "data", resume=resume)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_id_tables_train_like_a_vocabulary(folder: Path, tmp_path: Path, optimizer: str) -> None:
    """Tables start at zero, so that only row numbers differ, and with them the order of some sums."""
    settings = [*OPTIMIZERS[optimizer], "optimizer.embedding_init_std=0"]
    vocabulary = run(folder, "single", tmp_path / "vocabulary", *settings)
    translated = run(folder, "single", tmp_path / "translated", *settings, *IDS)
    assert translated["logloss"] == pytest.approx(vocabulary["logloss"], abs=2e-6)
    data = folder / "single" / "data"
    np.testing.assert_allclose(
        predicted(tmp_path / "translated", data), predicted(tmp_path / "vocabulary", data), atol=2e-6
    )


def test_a_batch_is_translated_directly_before_its_step(folder: Path) -> None:
    """No batch is read ahead of the step before it; new rows have initial values when the model sees them."""
    config = load_config(folder / "run.toml", IDS)
    with process_group("cpu") as process:
        reader = Reader(folder / "single" / "data", "train", batch_size=51)
        state = TrainState(RunPlan.of(config, reader.schema, process, schedule=Schedule()))
        assert state.id_tables is not None
        batches, seen = state.ids.training_batches(reader.epoch(0)), 0
        for batch in reader.epoch(0):
            state.step(batches)
            seen += int((batch.sparse.values() > 1).sum())
            assert state.id_tables.counters()["city"]["occurrences"] == seen


def test_new_ids_get_initialized_rows(folder: Path) -> None:
    """Each of its own; a later batch of the same ids gets them again, as does a lookup. Each row has its width."""
    config = load_config(folder / "run.toml", [*IDS, "model.embedding_dims={city = 3}"])
    with process_group("cpu") as process:
        reader = Reader(folder / "unweighted" / "data", "train", batch_size=51)
        state = TrainState(RunPlan.of(config, reader.schema, process, schedule=Schedule()))
        tables = {name: value.local_shards()[0].tensor.fill_(7) for name, value in tables_of(state.model).items()}
        batch = next(reader.epoch(0))
        assert set(state.ids.lookup(batch).sparse.values().tolist()) <= set(range(RESERVED_ROWS))
        first = state.ids.training(batch).sparse
        for translated in (state.ids.training(batch), state.ids.lookup(batch)):
            assert torch.equal(translated.sparse.values(), first.values())
        for name, width, stored in (("city", 3, 4), ("tags", 6, 8)):
            ids, rows = batch.sparse[name].values(), first[name].values()
            assert len({*zip(ids.tolist(), rows.tolist(), strict=True)}) == len(ids.unique()) == len(rows.unique())
            initialized = torch.isin(torch.arange(len(tables[name])), rows[rows >= RESERVED_ROWS])
            assert torch.equal((tables[name] == 7).all(1), ~initialized)
            new = tables[name][initialized]
            assert len(new) > 3
            assert new.shape[1] == stored
            assert (new[:, :width] != 0).all()
            assert not new[:, width:].any()


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("adagrad", []),
        ("replay", ["id_table.capacity=6", "id_table.when_full=oldest"]),
        ("replay", ["id_table.admission=count", "id_table.threshold=4"]),
        ("adagrad", ["id_table.admission=probabilistic", "id_table.threshold=4"]),
    ],
)
def test_a_resumed_run_is_bit_identical(folder: Path, tmp_path: Path, optimizer: str, settings: list[str]) -> None:
    given = [*OPTIMIZERS[optimizer], *IDS, *settings, "checkpoint.every_steps=3", "checkpoint.keep_last=100"]
    run(folder, "single", tmp_path / "uninterrupted", *given)
    copy = interrupted(tmp_path / "uninterrupted", 3, tmp_path / "copy")
    run(folder, "single", copy, *given, resume=True)
    assert_same(copy, tmp_path / "uninterrupted")


def test_warm_start_copies_ids_and_rows(folder: Path, tmp_path: Path) -> None:
    run(folder, "single", tmp_path / "earlier", *IDS)
    frozen = ["optimizer.embedding_lr=0", "optimizer.dense_lr=0", "optimizer.warmup_epochs=0", "optimizer.l2=0"]
    report = run(folder, "single", tmp_path / "next", *IDS, *frozen, f"train.warm_start={tmp_path / 'earlier'}")
    before = [evaluate_run(tmp_path / "earlier", folder / "single" / "data") for _ in range(2)]
    assert before[0] == before[1], "evaluation changes no table"
    assert report["logloss"] == pytest.approx(before[0]["logloss"], abs=1e-6)
    with pytest.raises(ValueError, match="gives the ids of table 'city' rows in another way"):
        run(folder, "single", tmp_path / "other", f"train.warm_start={tmp_path / 'earlier'}")


CASES = {
    "replay/row_wise": ("weighted", [*IDS, "sharding.plan=row_wise"]),
    "replay/mixed": ("weighted", [*IDS, 'sharding.tables={city = "table_wise", tags = "data_parallel"}']),
    "lazy/column_wise": ("single", [*IDS, *OPTIMIZERS["lazy"], "sharding.plan=column_wise", "model.embedding_dim=7"]),
    "full/row_wise": ("single", [*IDS, "id_table.capacity=5", "id_table.when_full=refuse", "sharding.plan=row_wise"]),
    "counted/row_wise": (
        "unweighted",
        [*IDS, "id_table.admission=count", "id_table.threshold=3", "sharding.plan=row_wise"],
    ),
    "adagrad/row_wise": ("unweighted", [*IDS, *OPTIMIZERS["adagrad"], "optimizer.l2=0", "clip.rule=none"]),
    "hash/row_wise": ("unweighted", ["id_table.kind=hash", "id_table.capacity=7", "sharding.plan=row_wise"]),
}


@pytest.fixture(scope="module")
def on_two(folder: Path) -> Path:
    """Trains ``runs1/NAME`` on one process and ``runs2/NAME`` on two, in one launch."""

    def case(name: str, data: str, overrides: list[str], world_size: int) -> dict:
        run_dir = folder / f"runs{world_size}" / name.replace("/", "_")
        paths = {"config": f"{folder}/run.toml", "data": str(folder / data / "data"), "run_dir": str(run_dir)}
        return {**paths, "set": overrides}

    for name, settings in CASES.items():
        assert train_case(case(name, *settings, 1)) == "ok"
    train_in_processes([case(name, *settings, 2) for name, settings in CASES.items()], folder / "cases", 2)
    return folder


def test_two_processes_resume_a_run_of_one(folder: Path, tmp_path: Path) -> None:
    """Ids keep their rows, whichever process then holds them; weights differ by rounding."""
    given = [*IDS, "id_table.capacity=6", "sharding.plan=row_wise"]
    often = ["checkpoint.every_steps=3", "checkpoint.keep_last=100"]
    run(folder, "single", tmp_path / "uninterrupted", *given, *often)
    copy = interrupted(tmp_path / "uninterrupted", 3, tmp_path / "copy")
    paths = {"config": f"{folder}/run.toml", "data": str(folder / "single" / "data"), "run_dir": str(copy)}
    case = {**paths, "set": [*given, *often], "resume": True}
    train_in_processes([case], tmp_path / "cases", 2)
    assert json.loads((tmp_path / "cases.rank0").read_text()) == ["ok"]
    one, two = (tensors(checkpoint(each)["model"]) for each in (tmp_path / "uninterrupted", copy))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(on_two: Path, name: str) -> None:
    """Ids have the same rows; weights differ by rounding, because sums are taken in another order."""
    for rank in range(2):
        assert json.loads((on_two / f"cases.rank{rank}").read_text()) == ["ok"] * len(CASES)
    one, two = (tensors(checkpoint(on_two / f"runs{count}" / name.replace("/", "_"))["model"]) for count in (1, 2))
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=0, atol=2e-5)
