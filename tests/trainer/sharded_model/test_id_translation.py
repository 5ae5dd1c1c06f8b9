"""Runs with id translation: equality with vocabularies, new rows, warm starts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cowrec.data_pipeline import RESERVED_ROWS, Reader
from cowrec.trainer import evaluate, load_config
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.sharded_model.build import tables_of
from cowrec.trainer.sharded_model.run_plan import LrSchedule, RunPlan
from cowrec.trainer.training.state import TrainState
from refusal import refused
from tiers import tiered
from trained_runs import predicted
from trained_runs import run as run_of
from trainer_cases import OPTIMIZERS, UNWEIGHTED, config_file, make_data

IDS = ["id_table.kind=collisionless", "id_table.capacity=100"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ids")
    make_data(folder / "single", ("price", "city"))
    make_data(folder / "unweighted", UNWEIGHTED)
    config_file(folder)
    return folder


def run(folder: Path, run_dir: Path, *overrides: str) -> dict[str, Any]:
    return run_of(folder, run_dir, *overrides, data=folder / "single" / "data")


@pytest.mark.parametrize("optimizer", tiered(OPTIMIZERS, ("replay", "lazy", "rowwise_adagrad")))
def test_id_tables_train_like_a_vocabulary(folder: Path, tmp_path: Path, optimizer: str) -> None:
    """Tables start at zero, so that only row numbers differ, and with them the order of some sums."""
    settings = [*OPTIMIZERS[optimizer], "optimizer.embedding_init_std=0", "train.average=false"]
    vocabulary = run(folder, tmp_path / "vocabulary", *settings)
    translated = run(folder, tmp_path / "translated", *settings, *IDS)
    assert translated["logloss"] == pytest.approx(vocabulary["logloss"], abs=2e-6)
    one, other = (predicted(tmp_path / name, folder / "single" / "data") for name in ("translated", "vocabulary"))
    np.testing.assert_allclose(one, other, atol=2e-6)


def test_a_batch_is_translated_directly_before_its_step(folder: Path) -> None:
    """No batch is read ahead of the step before it; new rows have initial values when the model sees them."""
    config = load_config(folder / "run.toml", IDS)
    with process_group("cpu") as process:
        reader = Reader(folder / "single" / "data", "train", batch_size=51)
        state = TrainState(RunPlan.of(config, reader.schema, process, schedule=LrSchedule()))
        assert state.id_tables is not None
        batches, seen = map(state.ids.training, reader.epoch(0)), 0
        for batch in reader.epoch(0):
            state.step(batches)
            seen += int((batch.sparse.values() > 1).sum())
            assert state.id_tables.counters()["city"]["occurrences"] == seen


def test_new_ids_get_initialized_rows(folder: Path) -> None:
    """Each of its own; a later batch of the same ids gets them again, as does a lookup. Each row has its width."""
    config = load_config(folder / "run.toml", [*IDS, "model.embedding_dims={city = 3}"])
    with process_group("cpu") as process:
        reader = Reader(folder / "unweighted" / "data", "train", batch_size=51)
        state = TrainState(RunPlan.of(config, reader.schema, process, schedule=LrSchedule()))
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


def test_warm_start_copies_ids_and_rows(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "earlier", *IDS)
    frozen = ["optimizer.embedding_lr=0", "optimizer.dense_lr=0", "optimizer.warmup_epochs=0", "optimizer.l2=0"]
    warm = f"train.warm_start={tmp_path / 'earlier'}"
    report = run(folder, tmp_path / "next", *IDS, *frozen, warm)
    before = [evaluate(tmp_path / "earlier", folder / "single" / "data") for _ in range(2)]
    assert before[0] == before[1], "evaluation changes no table"
    assert report["logloss"] == pytest.approx(before[0]["logloss"], abs=1e-6)
    refused("gives the ids of table 'city' rows in another way", run, folder, tmp_path / "other", warm)
