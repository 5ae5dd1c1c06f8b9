"""`scripts/demo.py` on few samples: its runs differ in batch size and scaling rule alone; summary, table and plot."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from cowrec.data_pipeline import SynthesizeConfig
from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.config.sections import OptimizerConfig
from cowrec.trainer.reports.plotting import plt

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("scripts.demo")


def alike(config: RunConfig) -> RunConfig:
    """The configuration without batch size and scaling rule."""
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, batch_size=1),
        optimizer=dataclasses.replace(config.optimizer, scaling="none"),
    )


def test_runs_summary_table_and_plot(script: Any, tmp_path: Path) -> None:
    (tmp_path / "small_batch").mkdir()
    (tmp_path / "small_batch" / "earlier").touch()
    rows = 2 * 4096 + 1
    printed = script.demo(tmp_path, SynthesizeConfig(rows=rows, test_rows=2000, vocabulary_scale=1e-5))
    assert not (tmp_path / "small_batch" / "earlier").exists()
    summary = json.loads((tmp_path / "summary.json").read_text())
    runs = [tmp_path / each["name"].replace(" ", "_") for each in summary]
    reports = [json.loads((run / "report.json").read_text()) for run in runs]
    for line, report in zip(summary, reports, strict=True):
        assert [line[key] for key in ("auc", "logloss", "steps", "seconds")] == [
            report[key] for key in ("auc", "logloss", "steps", "train_seconds")
        ]
    small, *large = summary
    assert (small["batch_size"], small["steps"]) == (64, 2 * 129)
    assert {(each["batch_size"], each["steps"]) for each in large} == {(4096, 2 * 3)}
    assert [each["default"] for each in summary] == [False, True, *[False] * (len(summary) - 2)]
    assert [each["scaling"] for each in large][:2] == [OptimizerConfig().scaling, "none"]
    configs = [alike(load_config(run / "config.toml")) for run in runs]
    assert configs == [configs[0]] * len(configs)
    assert configs[0].optimizer.base_batch_size == small["batch_size"]

    head, *lines = printed.strip().split("\n\n")[0].splitlines()
    assert head.split()[:4] == ["run", "batch", "rule", "epochs"]
    for line, shown in zip(large, lines[1:], strict=True):
        assert [f"{100 * (line['auc'] - small['auc']):+.2f}", f"{line['logloss']:.4f}"] == shown.split()[-3:-1]
        assert f"  {line['scaling']}  " in shown
    assert min(plt.imread(tmp_path / "demo.png").shape[:2]) > 400
