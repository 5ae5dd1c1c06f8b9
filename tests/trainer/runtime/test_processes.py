"""Two processes under torchrun train the same model as one process, and end together."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from cowrec.data_pipeline import SynthesizeConfig, synthesize
from run_comparison import assert_same_measures
from trainer_cases import (
    ENVIRONMENT,
    TEST_ROWS,
    TRAIN_ROWS,
    UNWEIGHTED,
    checkpoint,
    config_file,
    make_data,
    newest_progress,
    torchrun,
    train_case,
    train_in_processes,
)

STOCK = ["optimizer.embedding=rowwise_adagrad", "optimizer.l2=0", "clip.rule=none"]
FUSED = ["optimizer.embedding=rowwise_adagrad", "clip.rule=adaptive_field"]  # with L2
PATIENT = ["train.validation_fraction=0.2", "train.patience=1", "checkpoint.keep_best=logloss"]
RAMP = ["train.batch_ramp=1", "optimizer.base_batch_size=3", "train.validation_fraction=0.2", "train.epochs=1"]
MEASURED = ["train.epochs=1", "evaluate.by_id_counts=true"]

# name -> (data set, --set). The part before "/" names the run of one process that must have the same result.
CASES = {
    "adam/table_wise": ("weighted", ["sharding.plan=table_wise"]),
    "adam/row_wise": ("weighted", ["sharding.plan=row_wise"]),
    "adam/accumulated": ("weighted", ["sharding.plan=row_wise", "train.accumulation=4"]),
    "stock/table_wise": ("unweighted", [*STOCK, "sharding.plan=table_wise"]),
    "stock/row_wise": ("unweighted", [*STOCK, "sharding.plan=row_wise"]),
    "fused/table_wise": ("single", [*FUSED, "sharding.plan=table_wise"]),
    "fused/row_wise": ("single", [*FUSED, "sharding.plan=row_wise"]),
    "patient/row_wise": ("single", PATIENT),
    "ramp/row_wise": ("single", [*RAMP, "sharding.plan=row_wise"]),
    "one_test_row/row_wise": ("one_test_row", ["sharding.plan=row_wise", "train.epochs=1"]),
    "synthetic/row_wise": ("synthetic", [*MEASURED, "sharding.plan=row_wise"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process in ``runs1/NAME``, of two in ``runs2/NAME_PLAN``; the ranks' outcomes in cases.rank*."""
    folder = tmp_path_factory.mktemp("processes")
    config_file(folder)
    make_data(folder / "weighted")
    make_data(folder / "unweighted", UNWEIGHTED)
    make_data(folder / "single", ("price", "city"))
    make_data(folder / "one_test_row", test_rows=1)
    sizes = {"rows": TRAIN_ROWS, "test_rows": TEST_ROWS, "vocabulary_scale": 1e-6}
    synthesize(folder / "synthetic" / "data", SynthesizeConfig(**sizes))

    def case(name: str, data: str, overrides: list[str], world_size: int) -> dict:
        run_dir = folder / f"runs{world_size}" / name.replace("/", "_")
        data_dir = folder / data / "data"
        paths = {"config": f"{folder}/run.toml", "data": str(data_dir), "run_dir": str(run_dir)}
        return {**paths, "set": overrides}

    for name, (data, overrides) in CASES.items():
        if name.endswith("row_wise"):
            assert train_case(case(name.split("/")[0], data, overrides, 1)) == "ok"
    double = [case(name, *what, 2) for name, what in CASES.items()]
    # Once more into a folder that already has a run.
    train_in_processes([*double, double[0]], folder / "cases", 2)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_what_one_does(folder: Path, name: str) -> None:
    one, two = folder / "runs1" / name.split("/")[0], folder / "runs2" / name.replace("/", "_")
    reports = [json.loads((run / "report.json").read_text()) for run in (one, two)]
    assert [report["world_size"] for report in reports] == [1, 2]
    for first, second in zip(*(report["epochs"] for report in reports), strict=True):
        assert_same_measures(first, second)
    states = [checkpoint(run) for run in (one, two)]
    assert newest_progress(one)["step"] == newest_progress(two)["step"]
    weights = [state["model"] for state in states]
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[0].items():
        torch.testing.assert_close(
            weights[1][key], value, rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}"
        )
    assert any("embedding_bags" in key for key in weights[0])
    assert any("embedding_bags" not in key for key in weights[0])


@pytest.mark.parametrize("plan", ["table_wise", "row_wise"])
def test_clip_statistics_cover_the_tables_of_all_processes(folder: Path, plan: str) -> None:
    """Counts are exact except for a row at its limit. The median over the shards of a row-wise table is an estimate."""
    readings = []
    for run in (folder / "runs1" / "adam", folder / "runs2" / f"adam_{plan}"):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        readings.append([line for line in lines if line["kind"] == "clip"])
    assert len(readings[0]) == len(readings[1]) > 0
    for one, two in zip(*readings, strict=True):
        for first, second in ((one, two), *((one["fields"][name], two["fields"][name]) for name in one["fields"])):
            assert first["rows"] == second["rows"]
            assert first["clipped"] == pytest.approx(second["clipped"], abs=1.5 / first["rows"])
            if plan == "table_wise":
                assert first["limit_to_norm"] == pytest.approx(second["limit_to_norm"], rel=1e-3)


def test_all_ranks_end_with_the_first_ones_error(folder: Path) -> None:
    for rank in (0, 1):
        *good, refused = json.loads((folder / f"cases.rank{rank}").read_text())
        assert good == ["ok"] * len(CASES)
        assert "add --resume and raise train.epochs" in refused


def test_two_processes_write_one_report_and_one_log(folder: Path) -> None:
    run = folder / "runs2" / "adam_row_wise"
    assert not list(run.rglob("*.partial"))
    kinds = [json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert kinds.count("eval") == 2


@pytest.mark.parametrize("ended", ["ctrl_c", "launcher_killed"])
def test_both_ranks_end_with_one_checkpoint(folder: Path, ended: str) -> None:
    """The terminal sends SIGINT to every process of its group, and torchrun sends it to the ranks again. If torchrun is
    killed, its ranks must not go on alone."""
    run = folder / ended
    command = [*torchrun(2), "-m", "cowrec.trainer", "train", f"{folder}/run.toml", "--data", f"{folder}/weighted/data"]
    command += ["--run-dir", str(run), "--set", "train.epochs=100000", "--set", "train.log_every=1000000"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if line.startswith("epoch 1/"):
            os.killpg(process.pid, signal.SIGINT) if ended == "ctrl_c" else process.kill()
    assert process.wait(timeout=60) != 0
    assert seen.count("cowrec: stopped at step") == 1, seen
    newest = sorted((run / "checkpoints").iterdir())[-1]
    assert f"saved {newest}" in seen
    assert not list(run.rglob("*.partial"))
    assert newest_progress(run)["step"] == int(newest.name.removeprefix("step_"))
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
