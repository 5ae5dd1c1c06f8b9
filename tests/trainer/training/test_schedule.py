"""Learning rates that fall over a run: what the tables' fused optimizer is given, and what a resumed run may change."""

from pathlib import Path

import pytest

from cowrec.data_pipeline import Reader
from cowrec.sparse_opt.tbe.discovery import find_lookups
from cowrec.trainer.config.run import load_config
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.training.loop import train
from cowrec.trainer.training.schedule import Schedule
from cowrec.trainer.training.state import TrainState
from trainer_cases import config_file, make_data

FUSED = ["optimizer.embedding=sgd", "optimizer.l2=0", "clip.rule=none", "optimizer.lr_decay=linear"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schedule")
    make_data(folder, ("price", "city"))
    config_file(folder)
    return folder


def test_a_fused_optimizer_follows_the_decay(folder: Path) -> None:
    """FBGEMM's own learning rate in each step, which falls from 0.01 to 0 over ten steps."""
    config = load_config(folder / "run.toml", FUSED)
    with process_group("cpu") as process:
        reader = Reader(folder / "data", "train", batch_size=51)
        state = TrainState(config, reader.schema, process, Schedule(decay_steps=10))
        batches = state.ids.training_batches(reader.epoch(0))
        modules = [lookup.module for lookup in find_lookups(state.model)[0]]
        assert modules
        for step in range(4):
            state.step(batches)
            for module in modules:
                assert module.get_learning_rate() == pytest.approx(0.01 * (1 - step / 10))


def test_a_resumed_run_keeps_the_epochs_over_which_its_rates_fall(folder: Path, tmp_path: Path) -> None:
    train(load_config(folder / "run.toml", FUSED), folder / "data", tmp_path / "run")
    longer = load_config(folder / "run.toml", [*FUSED, "train.epochs=3"])
    with pytest.raises(ValueError, match=r"train.epochs = 2, but 3 is requested"):
        train(longer, folder / "data", tmp_path / "run", resume=True)
