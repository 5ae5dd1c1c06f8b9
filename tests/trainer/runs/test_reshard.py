"""Resuming on another number of processes and under another plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cowrec.trainer.config.run import load_config
from cowrec.trainer.training.loop import train
from run_comparison import assert_same_measures
from trainer_cases import checkpoint, config_file, interrupted, make_data, tensors, train_in_processes

OFTEN = ["checkpoint.every_steps=3", "checkpoint.keep_last=100"]
SETTINGS = {
    "replay": [],
    "rowwise_adagrad": ["optimizer.embedding=rowwise_adagrad", "optimizer.l2=0", "clip.rule=none"],
}
# processes, plan, and the step to resume from; there are checkpoints at 3, 5, 6, 9 and 10.
STAGES = [(2, "row_wise", 3), (4, "table_wise", 6), (1, "row_wise", 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains ``uninterrupted/NAME`` on one process and ``stageN/NAME``, each resumed from the stage before."""
    folder = tmp_path_factory.mktemp("reshard")
    config_file(folder)
    make_data(folder)
    for name, settings in SETTINGS.items():
        config = load_config(folder / "run.toml", [*OFTEN, *settings])
        train(config, folder / "data", folder / "uninterrupted" / name)
    before = folder / "uninterrupted"
    for stage, (processes, plan, step) in enumerate(STAGES):
        cases = []
        for name, settings in SETTINGS.items():
            run_dir = interrupted(before / name, step, folder / f"stage{stage}" / name)
            paths = {"config": f"{folder}/run.toml", "data": f"{folder}/data", "run_dir": str(run_dir)}
            cases.append({**paths, "set": [*OFTEN, *settings, f"sharding.plan={plan}"], "resume": True})
        launch(folder / f"cases{stage}", cases, processes)
        before = folder / f"stage{stage}"
    return folder


def launch(file: Path, cases: list[dict[str, Any]], processes: int) -> None:
    train_in_processes(cases, file, processes)
    for rank in range(processes):
        assert json.loads(file.with_suffix(f".rank{rank}").read_text()) == ["ok"] * len(cases)


@pytest.mark.parametrize("stage", range(len(STAGES)))
@pytest.mark.parametrize("name", SETTINGS)
def test_another_number_of_processes_resumes(folder: Path, name: str, stage: int) -> None:
    """Weights and moments within 1e-6: several processes add dense gradients in another order."""
    expected = tensors(checkpoint(folder / "uninterrupted" / name))
    found = tensors(checkpoint(folder / f"stage{stage}" / name))
    compared = [key for key in expected if not key.startswith("/random")]
    assert any("exp_avg" in key or "momentum1" in key for key in compared)
    assert set(compared) == {key for key in found if not key.startswith("/random")}
    for key in compared:
        torch.testing.assert_close(
            found[key], expected[key], rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_measurements_are_resumed(folder: Path) -> None:
    reports = [json.loads((folder / run / "replay" / "report.json").read_text()) for run in ("uninterrupted", "stage2")]
    for first, second in zip(*(report["epochs"] for report in reports), strict=True):
        assert_same_measures(first, second)
    assert [report["world_size"] for report in reports] == [1, 1]
    assert reports[0]["clip_statistics"]["rows"] == reports[1]["clip_statistics"]["rows"]
