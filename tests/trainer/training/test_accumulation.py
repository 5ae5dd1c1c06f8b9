"""Batches that grow, against plain loops, and steps of several passes, which have the results of steps of one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cowrec.data_pipeline import Reader
from cowrec.sparse_opt import EmbeddingAdam, Hyperparameters, scale_hyperparameters
from cowrec.trainer import RunConfig, evaluate
from cowrec.trainer.config.sections import OptimizerConfig, TrainConfig
from cowrec.trainer.sharded_model.run_plan import BatchRamp, Schedule
from run_comparison import assert_close, assert_same, state_of
from trained_runs import make_folder, metrics, report_of, run
from trainer_cases import TRAIN_ROWS, interrupted

RAMP = [
    *("train.batch_ramp=2", "optimizer.base_batch_size=6", "optimizer.scaling=half_life"),
    *("optimizer.lr_decay=linear", "optimizer.warmup_epochs=0.5", "optimizer.wide=ftrl"),
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
    return run(folder, run_dir, *ALWAYS, *RAMP, *overrides, resume=resume)


def test_a_ramp_that_never_begins_is_told(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "cowrec")
    ramped = ("train.batch_ramp=2", "optimizer.base_batch_size=1024", "train.batch_size=51")
    assert run(folder, tmp_path / "run", *ramped, "train.epochs=1")["batch_ramp"] == ()
    warning = "train.batch_ramp = 2 has no effect: train.batch_size = 51 is not above optimizer.base_batch_size = 1,024"
    assert caplog.text.count(warning) == 1


def test_ftrl_takes_the_samples_of_each_batch(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is the mean over the batch that there is, which the last one of an epoch makes short."""
    seen, told = [], EmbeddingAdam.set_ftrl_samples

    def tell(adam: EmbeddingAdam, samples: int) -> None:
        seen.append(samples)
        told(adam, samples)

    monkeypatch.setattr(EmbeddingAdam, "set_ftrl_samples", tell)
    for number, passes in enumerate(([], ["train.accumulation=3"])):
        seen.clear()
        run(folder, tmp_path / str(number), "train.batch_size=51", "train.epochs=1", "optimizer.wide=ftrl", *passes)
        trained = seen[: 4 * (3 if passes else 1) + 1]
        assert list(dict.fromkeys(trained)) == [51, 1]


TO_512 = (64, 128, 256, 512)


@pytest.mark.parametrize(
    ("base", "batch_size", "steps", "sizes"),
    [
        *[(64, 1024, 5, TO_512), (64, 1000, 1, TO_512), (1, 4, 3, (1, 2)), (64, 65, 1, (64,))],
        *[(64, 64, 5, ()), (64, 16, 5, ()), (64, 1024, 0, ())],
    ],
)
def test_sizes_double_from_the_base_to_below_the_batch(base: int, batch_size: int, steps: int, sizes: tuple) -> None:
    train = TrainConfig(batch_size=batch_size, batch_ramp=steps)
    ramp = BatchRamp.of(RunConfig(train=train, optimizer=OptimizerConfig(base_batch_size=base)))
    before, plain = 0, Schedule()
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
    assert_same(copy, folder / "run")
    assert len(metrics(copy, "train")) == len(SIZES)
    with pytest.raises(ValueError, match=r"train.batch_ramp = 2, but 1 is requested"):
        ramp(folder, folder / "run", "train.batch_ramp=1", resume=True)


def test_dense_and_resident_runs_are_the_same(folder: Path, tmp_path: Path) -> None:
    """Checkpoints within the ramp too, whose absent rows catch up with the values of their stage."""
    ramp(folder, tmp_path / "dense", "optimizer.absent_rows=dense", "data.resident=yes")
    for at in (3, len(SIZES)):
        copies = [interrupted(each, at, tmp_path / f"{each.name}{at}") for each in (folder / "run", tmp_path / "dense")]
        replayed, dense = (evaluate(copy, folder / "data") for copy in copies)
        for key in ("auc", "logloss"):
            assert replayed[key] == pytest.approx(dense[key], abs=1e-7)
    moments = [state_of(each, "dense_optimizer") for each in (tmp_path / "dense", folder / "run")]
    assert_close(*moments, atol=0)


def test_the_best_epoch_after_a_ramp_is_tested_at_the_end(folder: Path, tmp_path: Path) -> None:
    """Its weights are loaded into the model that was trained on since; large rates make it the first epoch."""
    best = ["train.validation_fraction=0.2", "checkpoint.keep_best=logloss", "optimizer.lr_decay=none"]
    best += ["train.batch_ramp=1", "optimizer.embedding_lr=0.3", "optimizer.dense_lr=0.3"]
    report = ramp(folder, tmp_path / "run", *best, "train.epochs=6")
    assert report["best_epoch"] < report["last_epoch"]["epoch"] == 6
    again = evaluate(tmp_path / "run", folder / "data", checkpoint="best")
    for key in ("auc", "logloss"):
        assert again[key] == pytest.approx(report[key], abs=1e-7)


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


CROSSES = "model.name=dcn optimizer.cross_l2=0.01"
DECAYING_RAMP = "train.batch_ramp=2 optimizer.base_batch_size=6 optimizer.dense_weight_decay=0.1"


@pytest.mark.parametrize("settings", [CROSSES, DECAYING_RAMP])
def test_a_run_in_passes_is_that_without(folder: Path, tmp_path: Path, settings: str) -> None:
    """Five passes a step, and one in the last step of one sample. Counts and clip are over all passes of a step."""
    given = [*settings.split(), "train.log_every=1"]
    reports = [run(folder, tmp_path / str(passes), *given, f"train.accumulation={passes}") for passes in (1, 5)]
    assert_close(*(state_of(tmp_path / str(passes), "model") for passes in (1, 5)), atol=1e-5)
    assert reports[0]["steps"] == reports[1]["steps"]
    rows = [{name: each["rows"] for name, each in report["clip_statistics"]["fields"].items()} for report in reports]
    assert rows[0] == rows[1]
    assert reports[1]["logloss"] == pytest.approx(reports[0]["logloss"], abs=1e-5)
