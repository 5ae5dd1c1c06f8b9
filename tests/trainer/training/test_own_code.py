"""A network and loss of a user's own, those of docs/models.md, in every command; what is missing or has changed."""

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cowrec.data_pipeline import Schema, prepare
from cowrec.data_pipeline.dataset.shards import load_shards
from cowrec.trainer import evaluate, export_model, train
from cowrec.trainer.config.run import load_config, with_defaults
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.runtime.subprocess_call import Subprocess
from cowrec.trainer.serving.served_model import ServedModel
from cowrec.trainer.sharded_model.build import unsharded_task
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.sweep.runs import train_here
from cowrec.trainer.sweep.sweep import Grid, sweep
from refusal import refused
from run_comparison import assert_close, assert_same, state_of
from trained_runs import metrics, predicted, report_of, write_network
from trainer_cases import case_of, checkpoint, make_data, train_in_processes

PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"


def write_example(folder: Path) -> Path:
    """Writes my_network.py and my_run.toml of docs/models.md into a folder; returns the latter."""
    text = PAGE.read_text(encoding="utf-8").partition("## A network of your own")[2]
    folder.mkdir(exist_ok=True)
    for name, language in (("my_network.py", "python"), ("my_run.toml", "toml")):
        block = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
        assert block, language
        (folder / name).write_text(block[1])
    return folder / "my_run.toml"


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """Forgets the modules and folders that a test has imported, as if each were a process of its own."""
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    for name in [module for module in sys.modules if module.startswith("my_")]:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in modules.items() if name.startswith("my_")})


def forget() -> None:
    sys.modules.pop("my_network", None)
    sys.path[:] = [folder for folder in sys.path if not (Path(folder) / "my_network.py").exists()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made anew, with another example, where tests of other files run in between."""
    forget()
    folder = tmp_path_factory.mktemp("own")
    make_data(folder)
    train(load_config(write_example(folder / "code")), folder / "data", folder / "run")
    return folder


def test_a_sweep_does_not_go_on_with_another_network(folder: Path, tmp_path: Path) -> None:
    """Its table would compare runs of both."""
    forget()
    file, grid = write_example(tmp_path / "code"), Grid([51], ["half_life"], ["off"], 1)
    sweep(load_config(file), folder / "data", tmp_path / "grid", grid)
    network = file.with_name("my_network.py")
    network.write_text(network.read_text() + "\n# changed\n")
    forget()
    with pytest.raises(ValueError, match=r"my_network.py is not as .*grid/runs/.* was trained with it"):
        sweep(load_config(file), folder / "data", tmp_path / "grid", grid)


def test_evaluation_prediction_export_and_serving(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Probabilities are float32; the exported program is another order of operations.

    An export, which may come from others, does not say where code is searched.
    """
    forget()
    quality = evaluate(folder / "run", folder / "data")
    last = report_of(folder / "run")["epochs"][-1]
    assert [quality[key] for key in ("auc", "logloss")] == [last[key] for key in ("auc", "logloss")]
    export_model(folder / "run", folder / "export")
    monkeypatch.chdir(folder / "code")
    forget()
    served = ServedModel.load(folder / "export")
    block = load_shards(folder / "data", served.schema, "test", [0])
    np.testing.assert_allclose(served.predict(block), predicted(folder / "run", folder / "data"), rtol=0, atol=1e-6)
    forget()
    monkeypatch.chdir(tmp_path)
    refused("there is no module my_network in Python's path", ServedModel.load, folder / "export")


@pytest.mark.parametrize(("loss", "expected"), [([], 0.5**1.5), (["train.loss=bce"], math.log(2))])
def test_the_loss_is_the_mean_of_the_function(folder: Path, tmp_path: Path, loss: list[str], expected: float) -> None:
    """Logits start near 0: the first loss is |1/2 - label|^1.5, or log 2."""
    settings = ["train.batch_size=1000", "optimizer.l2=0", *loss, *(["train.loss_options={}"] if loss else [])]
    train(load_config(folder / "code" / "my_run.toml", settings), folder / "data", tmp_path / "run")
    assert metrics(tmp_path / "run", "train")[0]["loss"] == pytest.approx(expected, rel=0.2)


def test_two_processes_and_a_subprocess(folder: Path, tmp_path: Path) -> None:
    """A subprocess, as of sweep and tune, gives the same bits; two processes are within rounding."""
    config = folder / "code" / "my_run.toml"
    train_in_processes(case_of(folder, tmp_path / "two") | {"config": str(config)})
    assert_close(state_of(folder / "run", "model"), state_of(tmp_path / "two", "model"), rtol=1e-4, atol=1e-5)
    loaded = load_config(config, [f"data.dir={folder / 'data'}"])
    with Subprocess() as process:
        process.call(train_here, loaded, tmp_path / "subprocess")
    assert_same(tmp_path / "subprocess", folder / "run")


def test_a_changed_file_is_told(folder: Path, tmp_path: Path, capsys: Any) -> None:
    code = tmp_path / "code"
    forget()
    train(load_config(write_example(code)), folder / "data", tmp_path / "run")
    file = code / "my_network.py"
    assert file.name in (tmp_path / "run" / "code.json").read_text()
    file.write_text(file.read_text().replace("nn.ReLU()", "nn.Tanh()"))
    with pytest.raises(ValueError, match=r"my_network.py has changed since this process imported it; restart Python"):
        evaluate(tmp_path / "run", folder / "data")
    forget()
    capsys.readouterr()
    evaluate(tmp_path / "run", folder / "data")
    warning = f"warning: {file} is not as {tmp_path / 'run'} was trained with it"
    assert capsys.readouterr().err.count(warning) == 1


def test_a_mask_of_minus_infinity_is_no_divergence(folder: Path, tmp_path: Path) -> None:
    """A buffer that was not finite at the start; the same number elsewhere is a divergence."""
    file, config = tmp_path / "my_mask.py", tmp_path / "run.toml"
    write_network(file, "self.out(x.flat)[:, 0] + self.mask.clamp(-1)[0] + self.norm(x.flat)[:, 0] * 0")
    mask = 'self.register_buffer("mask", torch.full((2,), -torch.inf))'
    text = file.read_text().replace("from torch import nn", "import torch\nfrom torch import nn")
    file.write_text(text.replace("        self.front,", f"        {mask}\n        self.front,"))
    config.write_text(f'[model]\nname = "{file.stem}:Net"\n[train]\nbatch_size = 64\nepochs = 1\ndevice = "cpu"\n')
    train(load_config(config), folder / "data", tmp_path / "run")
    evaluate(tmp_path / "run", folder / "data")
    state = checkpoint(tmp_path / "run")["model"]
    assert state["model.mask"].isinf().all()
    export_model(tmp_path / "run", tmp_path / "export")
    served = ServedModel.load(tmp_path / "export")
    block = load_shards(folder / "data", served.schema, "test", [0])
    np.testing.assert_allclose(served.predict(block), predicted(tmp_path / "run", folder / "data"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["SyncBatchNorm"])
def test_several_processes_refuse_a_batch_norm(folder: Path, tmp_path: Path, kind: str) -> None:
    """Online runs show that its means are exported."""
    file, config = tmp_path / f"my_{kind}.py", tmp_path / "run.toml"
    write_network(file, "self.norm(x.flat)[:, 0]")
    file.write_text(file.read_text().replace("BatchNorm1d", kind))
    config.write_text(f'[model]\nname = "{file.stem}:Net"\n[train]\nbatch_size = 64\nepochs = 1\ndevice = "cpu"\n')
    given, two = with_defaults(load_config(config), 200), Process(0, 2, 2, True, torch.device("cpu"))
    plan = RunPlan.of(given, Schema.load(folder / "data"), two)
    refused(rf"has a {kind} .*norm., whose means leave out samples of other processes, or", unsharded_task, plan)


@pytest.mark.parametrize("loss", [
    "F.binary_cross_entropy(torch.sigmoid(logits), label, reduction='none')",
])  # fmt: skip
def test_a_loss_need_not_know_samples_without_a_label(tmp_path: Path, loss: str) -> None:
    name = f"my_strict_{'binary' in loss}"
    (tmp_path / f"{name}.py").write_text(
        f"import torch\nimport torch.nn.functional as F\n\n\ndef loss(logits, label):\n    return {loss}\n"
    )
    draw = np.random.default_rng(0)
    known = pa.table({"click": draw.integers(0, 2, 200), "city": draw.integers(0, 9, 200)})
    pq.write_table(known, tmp_path / "raw.parquet")
    pq.write_table(known.drop_columns(["click"]), tmp_path / "new.parquet")
    (tmp_path / "columns.toml").write_text('label = "click"\nfields = [{name = "city", kind = "categorical"}]\n')
    prepare("tabular", [tmp_path / "raw.parquet"], tmp_path / "data", schema_file=tmp_path / "columns.toml")
    prepare("tabular", [tmp_path / "new.parquet"], tmp_path / "new", like=tmp_path / "data")
    config = tmp_path / "run.toml"
    config.write_text(f'[train]\nloss = "{name}:loss"\nbatch_size = 64\nepochs = 1\ndevice = "cpu"\n')
    train(load_config(config), tmp_path / "data", tmp_path / "run")
    assert np.isfinite(predicted(tmp_path / "run", tmp_path / "new")).all()
