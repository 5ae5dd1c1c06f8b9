"""FBGEMM's COWCLIP mode, which differs from CowClip, as an optimizer of the trainer."""

from pathlib import Path

import pytest

from cowrec.trainer.config.run import load_config
from cowrec.trainer.training.loop import train
from cowrec.trainer.training.saved_run import evaluate_run
from trainer_cases import config_file, make_data


def test_the_trainer_trains_and_loads_it(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    settings = ["optimizer.embedding=fbgemm_cowclip", "clip.rule=none", "optimizer.l2=0"]
    report = train(load_config(config_file(tmp_path), settings), data, tmp_path / "run")
    assert evaluate_run(tmp_path / "run", data)["auc"] == pytest.approx(report["auc"], abs=1e-7)
