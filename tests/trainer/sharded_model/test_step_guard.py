"""The guard of a step: bit-identical steps on good data, and the same skipped batches on any number of processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cowrec.data_pipeline import PrepareConfig, prepare
from cowrec.trainer.config.run import load_config
from cowrec.trainer.runtime.errors import NonFiniteLoss
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.step_guard import LARGEST_GRADIENT, not_finite
from cowrec.trainer.training.loop import train
from run_comparison import assert_same
from trainer_cases import UNWEIGHTED, checkpoint, config_file, make_data, tensors, train_in_processes

NETWORK = """
from torch import nn
class Net(nn.Module):
    def __init__(self, config, front):
        super().__init__()
        self.front, self.out = front, nn.Linear(front.width, 1)
    def forward(self, dense, sparse):
        return self.out(self.front(dense, sparse).flat / 1e3).squeeze(1) + (dense / 1e4).exp().mean(1)
"""
SKIPS = "train.on_nonfinite=skip"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with ``data``, and ``poisoned`` whose sample 70 has a number that overflows the network's logits."""
    folder = tmp_path_factory.mktemp("guard")
    make_data(folder, UNWEIGHTED)
    config_file(folder)
    rows = (folder / "raw.csv").read_text().splitlines()
    label, _, rest = rows[70].split(",", 2)
    rows[70] = f"{label},1e39,{rest}"
    (folder / "poisoned.csv").write_text("\n".join(rows))
    settings = PrepareConfig(split="order", test_rows=41, dense="none")
    prepare("tabular", [folder / "poisoned.csv"], folder / "poisoned", settings, schema_file=folder / "columns.toml")
    (folder / "my_overflowing.py").write_text(NETWORK)
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        ["train.accumulation=2"],
        ["optimizer.embedding=adagrad", "optimizer.l2=0", "clip.rule=none"],
    ],
    ids=["accumulated", "fbgemm"],
)
def test_steps_on_good_data_are_bit_identical(folder: Path, tmp_path: Path, settings: list[str]) -> None:
    for name, more in (("guarded", [SKIPS]), ("plain", [])):
        config = load_config(folder / "run.toml", ["train.epochs=1", *settings, *more])
        train(config, folder / "data", tmp_path / name)
    assert_same(tmp_path / "guarded", tmp_path / "plain")


def set_aside(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "set_aside"]


def test_all_processes_skip_a_batch_together(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, of which one has the sample, train as one; tolerance of float32 sums in another order."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    given = [SKIPS, "model.name=my_overflowing:Net"]
    config = load_config(folder / "run.toml", given)
    report = train(config, folder / "poisoned", tmp_path / "one")
    assert (report["steps"], report["batches_set_aside"]) == (8, 2), "one of five batches, in each of two epochs"
    case = {"config": str(folder / "run.toml"), "set": given, "data": str(folder / "poisoned")}
    train_in_processes([{**case, "run_dir": str(tmp_path / "two")}], tmp_path / "outcomes", 2)
    found, expected = (tensors(checkpoint(tmp_path / name)) for name in ("two", "one"))
    for name, value in expected.items():
        if "random" not in name and "iterations" not in name:
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)
    one, two = set_aside(tmp_path / "one"), set_aside(tmp_path / "two")
    assert [(each["epoch"], each["batch"]) for each in one] == [(each["epoch"], each["batch"]) for each in two]
    assert "the loss is " in one[0]["reason"]
    with pytest.raises(NonFiniteLoss, match=r"the loss was not finite at step \d"):
        train(load_config(folder / "run.toml", given[1:]), folder / "poisoned", tmp_path / "stops")


def test_a_checkpoint_of_moments_that_are_not_finite_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients whose squares overflow, while the loss stays finite: without the guard the moments do."""
    network = NETWORK.replace("/ 1e3", "* 1e17").replace("+ (dense / 1e4).exp().mean(1)", "")
    (tmp_path / "my_steep.py").write_text(network)
    monkeypatch.syspath_prepend(tmp_path)
    given = ["model.name=my_steep:Net", "clip.rule=none", "train.epochs=1"]
    with pytest.raises(NonFiniteLoss, match=r"exp_avg_sq has numbers that are not finite, and no checkpoint is"):
        train(load_config(folder / "run.toml", given), folder / "poisoned", tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
    report = train(load_config(folder / "run.toml", [*given, SKIPS]), folder / "poisoned", tmp_path / "guarded")
    assert report["batches_set_aside"] > 0
    assert all("the gradient of " in each["reason"] for each in set_aside(tmp_path / "guarded"))
    assert (tmp_path / "guarded" / "checkpoints" / f"step_{report['steps']:09d}").is_dir()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_the_tensor_that_is_not_finite_is_named(value: float) -> None:
    process = Process(0, 1, 1, False, torch.device("cpu"))
    good = {"a": {"x": torch.full((9,), 3e38), "count": torch.ones(2, dtype=torch.int64)}, "empty": torch.zeros(0)}
    assert not not_finite(good, process), "whose sum does not fit float32"
    assert not_finite({**good, "b": {"y": torch.tensor([1.0, value])}}, process) == "b y"
    assert torch.finfo(torch.float32).max > LARGEST_GRADIENT**2
