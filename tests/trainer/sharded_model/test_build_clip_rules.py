"""Clip rules and L2 as the trainer builds them: thresholds at the run's batch size, fused optimizers, errors."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from cowrec.data_pipeline import Schema
from cowrec.sparse_opt import ConstantClip, CowClip, GlobalClip
from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.config.sections import ClipConfig, OptimizerConfig, TrainConfig
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.training.loop import train
from trained_runs import make_folder, run
from trainer_cases import TRAIN_ROWS, checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``data`` of one single-valued field, and a configuration."""
    return make_folder(tmp_path_factory.mktemp("single"), ("price", "city"))


def city_table(run_dir: Path) -> torch.Tensor:
    """Rows of the run's newest checkpoint, [rows, D]."""
    (name,) = [name for name in checkpoint(run_dir)["model"] if name.endswith("city.weight")]
    table: torch.Tensor = checkpoint(run_dir)["model"][name]
    return table.double()


@pytest.mark.parametrize(
    ("clip", "scaling", "batch_size", "expected"),
    [
        (ClipConfig("constant", max_norm=1e-3), "cowclip", 4096, ConstantClip(2e-3)),
        (ClipConfig("global", max_norm=1.0), "linear", 256, GlobalClip(0.5)),
        (ClipConfig("constant", max_norm=1e-3), "none", 4096, ConstantClip(1e-3)),
        (ClipConfig("cowclip", r=2.0), "cowclip", 4096, CowClip(r=2.0)),
    ],
)
def test_thresholds_grow_with_the_root_of_the_batch(
    clip: ClipConfig, scaling: str, batch_size: int, expected: Any
) -> None:
    optimizer = OptimizerConfig(base_batch_size=1024, scaling=scaling, absent_rows="lazy", l2=0.0)
    config = RunConfig(train=TrainConfig(batch_size=batch_size), optimizer=optimizer, clip=clip)
    plan = RunPlan.of(config, Schema("none", (), (), {}), Process(0, 1, 1, False, torch.device("cpu")))
    assert plan.scaled.clip == expected
    assert plan.describe()["clip_values"] == dataclasses.asdict(expected)


@pytest.mark.parametrize(
    ("embedding", "rule"),
    [
        *[("sgd", "constant max_norm=1e-3"), ("rowwise_adagrad", "field max_norm=1e-2")],
        *[("adam", "adaptive_field r=0.01"), ("sgd", "global max_norm=1e-2")],
    ],
)
def test_every_rule_trains_by_configuration(folder: Path, tmp_path: Path, embedding: str, rule: str) -> None:
    name, value = rule.split()
    config = (folder / "run.toml").read_text().partition("[clip]")[0] + f'[clip]\nrule = "{name}"\n{value}\n'
    (tmp_path / "run.toml").write_text(config)
    settings = [f"optimizer.embedding={embedding}", "optimizer.absent_rows=lazy", "train.epochs=1"]
    report = train(load_config(tmp_path / "run.toml", settings), folder / "data", tmp_path / "run")
    assert report["clip"] == name
    assert report["clip_statistics"]["clipped"] > 0


def test_fused_sgd_applies_l2_to_the_rows_of_the_batch(folder: Path, tmp_path: Path) -> None:
    """One step over all samples: L2 lowers a row by lr * 2 * l2 * w; rows of absent ids do not change."""
    settings = [
        *("optimizer.embedding=sgd", "clip.rule=none", "train.epochs=1", "optimizer.scaling=none"),
        *(f"train.batch_size={TRAIN_ROWS}", "optimizer.embedding_lr=0.5"),
    ]
    run(folder, tmp_path / "start", *settings, "optimizer.embedding_lr=0", "optimizer.l2=0")
    run(folder, tmp_path / "without", *settings, "optimizer.l2=0")
    report = run(folder, tmp_path / "with", *settings, "optimizer.l2=0.1")
    assert report["steps"] == 1
    start, without, with_l2 = (city_table(tmp_path / name) for name in ("start", "without", "with"))
    updated = (without != start).any(1)
    assert updated.any()
    assert not updated.all()
    expected = without - 0.5 * 2 * 0.1 * start * updated[:, None]
    torch.testing.assert_close(with_l2, expected, rtol=1e-5, atol=1e-8)
