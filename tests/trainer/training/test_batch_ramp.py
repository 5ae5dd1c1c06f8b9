"""Batches that grow, against plain loops, and steps of several passes, which have the results of steps of one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cowrec.data_pipeline import Reader
from cowrec.sparse_opt import Hyperparameters, scale_hyperparameters
from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.config.sections import OptimizerConfig, TrainConfig
from cowrec.trainer.online.loop import online
from cowrec.trainer.sharded_model.run_plan import BatchRamp, Schedule
from cowrec.trainer.training.loop import train
from cowrec.trainer.training.saved_run import evaluate_run
from run_comparison import same
from trained_runs import make_folder, metrics, report_of, run
from trainer_cases import TRAIN_ROWS, checkpoint, interrupted

RAMP = [
    *("train.batch_ramp=2", "optimizer.base_batch_size=6", "optimizer.scaling=half_life"),
    *("optimizer.lr_decay=linear", "optimizer.warmup_epochs=0.5"),
    *("optimizer.weight_decay=0.1", "optimizer.dense_weight_decay=0.1"),
]
SIZES = [6, 6, 12, 12, 24, 24, 48, 48, 25, 51, 51, 51, 51, 1]
"""Batches of RAMP's two epochs over 205 samples: twice each size below 51, the rest, then an epoch without a ramp."""
ALWAYS = ["checkpoint.every_steps=1", "checkpoint.keep_last=100", "train.log_every=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and a run over a ramp."""
    folder = make_folder(tmp_path_factory.mktemp("ramp"), ("price", "city", "tags"))
    ramp(folder, folder / "run")
    return folder


def ramp(folder: Path, run_dir: Path, *overrides: str, resume: bool = False) -> dict[str, Any]:
    config = load_config(folder / "run.toml", [*ALWAYS, *RAMP, *overrides])
    return train(config, folder / "data", run_dir, resume=resume)


@pytest.mark.parametrize(
    ("base", "batch_size", "steps", "sizes"),
    [
        (64, 1024, 5, (64, 128, 256, 512)),
        (64, 1000, 1, (64, 128, 256, 512)),
        (1, 4, 3, (1, 2)),
        (64, 65, 1, (64,)),
        (64, 64, 5, ()),
        (64, 16, 5, ()),
        (64, 1024, 0, ()),
    ],
)
def test_sizes_double_from_the_base_to_below_the_batch(base: int, batch_size: int, steps: int, sizes: tuple) -> None:
    config = RunConfig(
        train=TrainConfig(batch_size=batch_size, batch_ramp=steps), optimizer=OptimizerConfig(base_batch_size=base)
    )
    ramp, before, plain = BatchRamp.of(config), 0, Schedule()
    assert ramp.sizes == sizes
    assert list(ramp.stages.values()) == ([*sizes, batch_size] if sizes else [])
    for step in range(40):
        assert ramp.full_steps(step) == pytest.approx(before / batch_size)
        size = sizes[step // steps] if sizes and step < steps * len(sizes) else batch_size
        if sizes:
            assert ramp.stages[max(first for first in ramp.stages if first <= step)] == size
        else:
            assert plain.ramp.full_steps(step) == ramp.full_steps(step) == step
        before += size


def test_each_step_has_the_values_of_its_batch_size(folder: Path) -> None:
    """The logged learning rates, and the samples of the lines before, against a loop over the sizes."""
    lines, seen = metrics(folder / "run", "train"), 0
    assert [line["step"] for line in lines] == list(range(1, len(SIZES) + 1))
    base = Hyperparameters(1e-2, 1e-2, 1e-4)
    for step, line in enumerate(lines):
        size = 51 if step >= 8 else SIZES[step]
        scaled = scale_hyperparameters(base, base_batch_size=6, batch_size=size).dense_lr
        warm = 1e-8 + (scaled - 1e-8) * min(seen / 51, 3) / 3  # half of five steps of the full size, rounded up
        total = (180 + 51 + 5 * 51) / 51  # short batches count as full ones, as without a ramp
        assert line["dense_lr"] == pytest.approx(warm * (1 - seen / 51 / total))
        seen += size
    report = report_of(folder / "run")
    assert (report["steps"], report["batch_ramp"]) == (len(SIZES), [6, 12, 24, 48])
    assert report["samples_per_second"] * report["train_seconds"] == pytest.approx(2 * TRAIN_ROWS - 6)


@pytest.mark.parametrize("at", [3, 4, 8])
def test_a_run_resumed_within_the_ramp_is_bit_identical(folder: Path, tmp_path: Path, at: int) -> None:
    """Within a stage, at the end of one, and of the ramp."""
    copy = interrupted(folder / "run", at, tmp_path / "copy")
    ramp(folder, copy, resume=True)
    assert same(checkpoint(copy), checkpoint(folder / "run"))
    assert len(metrics(copy, "train")) == len(SIZES)


def test_dense_and_resident_runs_are_the_same(folder: Path, tmp_path: Path) -> None:
    """Checkpoints within the ramp too, whose absent rows catch up with the values of their stage."""
    ramp(folder, tmp_path / "dense", "optimizer.absent_rows=dense", "data.resident=yes")
    for at in (3, len(SIZES)):
        copies = [interrupted(each, at, tmp_path / f"{each.name}{at}") for each in (folder / "run", tmp_path / "dense")]
        replayed, dense = (evaluate_run(copy, folder / "data") for copy in copies)
        for key in ("auc", "logloss"):
            assert replayed[key] == pytest.approx(dense[key], abs=1e-7)
    assert same(checkpoint(tmp_path / "dense")["dense_optimizer"], checkpoint(folder / "run")["dense_optimizer"])


def test_what_cannot_ramp_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train.batch_ramp must be at least 0, got -1"):
        ramp(folder, tmp_path / "run", "train.batch_ramp=-1")
    for optimizer in ("fbgemm_adam", "sgd"):
        with pytest.raises(ValueError, match=f"optimizer.embedding = '{optimizer}' keeps those that it was built with"):
            ramp(folder, tmp_path / "run", f"optimizer.embedding={optimizer}", "optimizer.weight_decay=0")
    with pytest.raises(ValueError, match=r"takes 270 samples, in batches of 6, 12, 24, 48, but there are 205 to train"):
        ramp(folder, tmp_path / "run", "train.batch_ramp=3")
    with pytest.raises(ValueError, match=r"train.batch_ramp = 2, but 1 is requested"):
        ramp(folder, folder / "run", "train.batch_ramp=1", resume=True)
    with pytest.raises(ValueError, match=r"a stream has none; add --set train.batch_ramp=0"):
        online(load_config(folder / "run.toml", RAMP), folder / "data", "nowhere", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("world_size", "start_step"), [(1, 0), (3, 2)])
def test_parts_join_to_the_batches(folder: Path, world_size: int, start_step: int) -> None:
    """Of 205 samples in a ramp and batches of 20; the last batch has one, and parts are as even as can be."""
    settings: dict[str, Any] = {"batch_size": 20, "first_batches": (2, 7, 55), "shuffle": True, "window_rows": 50}
    whole = Reader(folder / "data", "train", **settings)
    parts = [
        Reader(folder / "data", "train", passes=4, rank=rank, world_size=world_size, **settings)
        for rank in range(world_size)
    ]
    assert len(parts[0]) == len(whole)
    iterators = [each.epoch(0, start_step) for each in parts]
    for step, batch in enumerate(whole.epoch(0, start_step), start_step):
        taken = [[next(each) for each in iterators] for _ in range(parts[0].passes(0, step))]
        assert torch.equal(torch.cat([each.dense for of_ranks in taken for each in of_ranks]), batch.dense)
        sizes = [of_ranks[0].global_batch_size for of_ranks in taken]
        assert len(taken) == min(4, batch.global_batch_size)
        assert max(sizes) - min(sizes) <= 1
        assert [of_ranks[0].share for of_ranks in taken] == [size / batch.global_batch_size for size in sizes]
        assert batch.share == 1
    assert all(next(each, None) is None for each in iterators)


@pytest.mark.parametrize(
    "settings",
    [
        ["model.name=dcn", "optimizer.cross_l2=0.01"],
        ["train.batch_ramp=2", "optimizer.base_batch_size=6", "optimizer.dense_weight_decay=0.1"],
    ],
)
def test_a_run_in_passes_is_that_without(folder: Path, tmp_path: Path, settings: list[str]) -> None:
    """Five passes a step, and one in the last step of one sample. Counts and clip are over all passes of a step."""
    reports = [
        run(folder, tmp_path / str(passes), *settings, f"train.accumulation={passes}", "train.log_every=1")
        for passes in (1, 5)
    ]
    weights = [checkpoint(tmp_path / str(passes))["model"] for passes in (1, 5)]
    for key, value in weights[0].items():
        other = weights[1][key]
        torch.testing.assert_close(other, value, rtol=0, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
    assert reports[0]["steps"] == reports[1]["steps"]
    rows = [{name: each["rows"] for name, each in report["clip_statistics"]["fields"].items()} for report in reports]
    assert rows[0] == rows[1]
    assert reports[1]["logloss"] == pytest.approx(reports[0]["logloss"], abs=1e-5)


def test_a_run_in_passes_resumes_within_an_epoch(folder: Path, tmp_path: Path) -> None:
    always = ["checkpoint.every_steps=1", "checkpoint.keep_last=100", "train.accumulation=3"]
    run(folder, tmp_path / "run", *always)
    copy = interrupted(tmp_path / "run", 3, tmp_path / "copy")
    run(folder, copy, *always, resume=True)
    assert same(checkpoint(copy), checkpoint(tmp_path / "run"))


def test_what_cannot_accumulate_is_refused(folder: Path, tmp_path: Path) -> None:
    fused = ["train.accumulation=2", "optimizer.embedding=adagrad", "optimizer.l2=0", "clip.rule=none"]
    for overrides, message in (
        (["train.accumulation=52"], r"train.accumulation must be from 1 to train.batch_size = 51, got 52"),
        (fused, 'cannot add up gradients of optimizer.embedding = "adagrad" without a clip'),
    ):
        with pytest.raises(ValueError, match=message):
            run(folder, tmp_path / "run", *overrides)
    with pytest.raises(ValueError, match=r"is for data sets, not for streams; add --set train.accumulation=1"):
        online(load_config(folder / "run.toml", ["train.accumulation=2"]), folder / "data", "x", tmp_path / "run")
    assert not (tmp_path / "run").exists()
