"""The guard of a step: bit-identical steps on good data, and batches that it sets aside."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cowrec.data_pipeline import PrepareConfig, Schema, prepare
from cowrec.trainer.config.run import load_config, with_defaults, with_values
from cowrec.trainer.config.sections import OnNonfinite
from cowrec.trainer.runs.local_copy import RunPlace
from cowrec.trainer.runtime.errors import NonFiniteLoss
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.sharded_model.step_guard import LARGEST_GRADIENT, not_finite
from cowrec.trainer.training.active_run import ActiveRun
from cowrec.trainer.training.trainer import training_readers
from run_comparison import assert_same
from trained_runs import make_folder, run, write_network
from trainer_cases import TRAIN_ROWS, UNWEIGHTED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``data``, and ``poisoned`` whose sample 70 has a number that overflows the network's logits."""
    folder = make_folder(tmp_path_factory.mktemp("guard"), UNWEIGHTED)
    rows = (folder / "raw.csv").read_text().splitlines()
    label, _, rest = rows[70].split(",", 2)
    rows[70] = f"{label},1e39,{rest}"
    (folder / "poisoned.csv").write_text("\n".join(rows))
    settings = PrepareConfig(split="order", test_rows=41, dense="none")
    prepare("tabular", [folder / "poisoned.csv"], folder / "poisoned", settings, schema_file=folder / "columns.toml")
    output = "self.out(x.flat / 1e3).squeeze(1) + (dense / 1e4).exp().mean(1)"
    write_network(folder / f"overflowing_in_{folder.name}.py", output)  # a worker may make the folder twice
    return folder


def set_aside(folder: Path, run_dir: Path, settings: Sequence[str], on_nonfinite: OnNonfinite, data: str) -> list[str]:
    """Trains an epoch as a run over a stream would, and saves; why batches were set aside."""
    config = with_values(load_config(folder / "run.toml", settings), data={"dir": str(folder / data)})
    with process_group("cpu") as process:
        plan = RunPlan.of(with_defaults(config, TRAIN_ROWS), Schema.load(folder / data).of_batches(), process)
        trainer, reader = ActiveRun(plan, RunPlace(run_dir, resume=False), on_nonfinite), training_readers(plan).train
        batches = map(trainer.state.ids.training, reader.epoch(0))
        steps = [trainer.step(batches, reader.passes(number)) for number in range(len(reader))]
        trainer.save()
        trainer.checkpoints.finish()
    return [step.set_aside for step in steps if step.set_aside]


FBGEMM = "optimizer.embedding=adagrad optimizer.l2=0 clip.rule=none"


@pytest.mark.parametrize("settings", ["train.accumulation=2", FBGEMM], ids=["accumulated", "fbgemm"])
def test_steps_on_good_data_are_bit_identical(folder: Path, tmp_path: Path, settings: str) -> None:
    for on_nonfinite in ("skip", "stop"):
        assert not set_aside(folder, tmp_path / on_nonfinite, settings.split(), on_nonfinite, "data")
    assert_same(tmp_path / "skip", tmp_path / "stop")


def test_a_loss_that_is_not_finite_ends_a_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Online runs show that the batch can be set aside, by all of their processes together."""
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(NonFiniteLoss, match=r"the loss was not finite at step \d"):
        run(folder, tmp_path / "run", f"model.name=overflowing_in_{folder.name}:Net", data=folder / "poisoned")


def test_a_checkpoint_of_moments_that_are_not_finite_is_refused(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A sample of gradients whose squares overflow, while the loss stays finite: without the guard the moments do."""
    write_network(tmp_path / "my_steep.py", "self.out(x.flat * dense.amax(1, keepdim=True).clamp(1, 1e20)).squeeze(1)")
    monkeypatch.syspath_prepend(tmp_path)
    given = ["model.name=my_steep:Net", "clip.rule=none", "train.epochs=1"]
    with pytest.raises(NonFiniteLoss, match=r"exp_avg_sq has numbers that are not finite, and no checkpoint is"):
        run(folder, tmp_path / "run", *given, data=folder / "poisoned")
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
    (reason,) = set_aside(folder, tmp_path / "guarded", given, "skip", "poisoned")
    assert "the gradient of " in reason


def test_the_tensor_that_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(0, 1, 1, False, torch.device("cpu"))
    good = {"a": {"x": torch.full((9,), 3e38), "count": torch.ones(2, dtype=torch.int64)}, "empty": torch.zeros(0)}
    assert not not_finite(good, process), "whose sum does not fit float32"
    for value in (torch.nan, torch.inf, -torch.inf):
        assert not_finite({**good, "b": {"y": torch.tensor([1.0, value])}}, process) == "b y"
        assert not_finite({**good, "scalar": torch.tensor(value)}, process) == "scalar"
    monkeypatch.setattr("cowrec.trainer.sharded_model.step_guard._PART", 4)
    for row in range(5):
        table = torch.ones(5, 2)
        assert not not_finite({"table": table}, process)
        table[row, 1] = torch.nan
        assert not_finite({"table": table}, process) == "table", "whichever part it is in"
    assert torch.finfo(torch.float32).max > LARGEST_GRADIENT**2
