"""The guard of a step: bit-identical steps on good data, and the same skipped batches on any number of processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cowrec.data_pipeline import PrepareConfig, prepare
from cowrec.trainer.runtime.errors import NonFiniteLoss
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.step_guard import LARGEST_GRADIENT, not_finite
from run_comparison import assert_close, assert_same, state_of
from trained_runs import make_folder, metrics, run, write_network
from trainer_cases import UNWEIGHTED, case_of, train_in_processes

SKIPS = "train.on_nonfinite=skip"


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


FBGEMM = "optimizer.embedding=adagrad optimizer.l2=0 clip.rule=none"


@pytest.mark.parametrize("settings", ["train.accumulation=2", FBGEMM], ids=["accumulated", "fbgemm"])
def test_steps_on_good_data_are_bit_identical(folder: Path, tmp_path: Path, settings: str) -> None:
    for name, more in (("guarded", [SKIPS]), ("plain", [])):
        run(folder, tmp_path / name, "train.epochs=1", *settings.split(), *more)
    assert_same(tmp_path / "guarded", tmp_path / "plain")


def test_all_processes_skip_a_batch_together(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, of which one has the sample, train as one; tolerance of float32 sums in another order."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    given = [SKIPS, f"model.name=overflowing_in_{folder.name}:Net"]
    report = run(folder, tmp_path / "one", *given, data=folder / "poisoned")
    assert (report["steps"], report["batches_set_aside"]) == (8, 2), "one of five batches, in each of two epochs"
    train_in_processes(case_of(folder, tmp_path / "two", *given, data=folder / "poisoned"))
    states = [state_of(tmp_path / name) for name in ("one", "two")]
    for state in states:
        state.pop("/iterations", None)  # which FBGEMM counts in forward passes
    assert_close(*states, rtol=1e-4)
    one, two = (metrics(tmp_path / name, "set_aside") for name in ("one", "two"))
    assert [(each["epoch"], each["batch"]) for each in one] == [(each["epoch"], each["batch"]) for each in two]
    assert "the loss is " in one[0]["reason"]
    with pytest.raises(NonFiniteLoss, match=r"the loss was not finite at step \d"):
        run(folder, tmp_path / "stops", *given[1:], data=folder / "poisoned")


def test_a_run_that_trains_on_no_batch_fails(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few they are; also when it is resumed after its end."""
    monkeypatch.syspath_prepend(folder)
    given = [SKIPS, f"model.name=overflowing_in_{folder.name}:Net", "train.batch_size=1000"]
    for resume, why in ((False, r" \(the loss is .*\)"), (True, "")):
        with pytest.raises(
            NonFiniteLoss, match=rf"the loss or a gradient was not finite in any of the 2 batches{why};"
        ):
            run(folder, tmp_path / "run", *given, data=folder / "poisoned", resume=resume)
        assert not (tmp_path / "run" / "report.json").exists()


def test_a_checkpoint_of_moments_that_are_not_finite_is_refused(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A sample of gradients whose squares overflow, while the loss stays finite: without the guard the moments do."""
    write_network(tmp_path / "my_steep.py", "self.out(x.flat * dense.amax(1, keepdim=True).clamp(1, 1e20)).squeeze(1)")
    monkeypatch.syspath_prepend(tmp_path)
    given = ["model.name=my_steep:Net", "clip.rule=none", "train.epochs=1"]
    with pytest.raises(NonFiniteLoss, match=r"exp_avg_sq has numbers that are not finite, and no checkpoint is"):
        run(folder, tmp_path / "run", *given, data=folder / "poisoned")
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
    report = run(folder, tmp_path / "guarded", *given, SKIPS, data=folder / "poisoned")
    assert report["batches_set_aside"] == 1
    assert all("the gradient of " in each["reason"] for each in metrics(tmp_path / "guarded", "set_aside"))
    assert (tmp_path / "guarded" / "checkpoints" / f"step_{report['steps']:09d}").is_dir()


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
