"""The command line as users see it: help, messages about mistakes, progress on the screen, and requests to stop."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from commands.command_line import Cowrec
from cowrec.data_pipeline import PrepareConfig
from cowrec.trainer.cli.main import app
from cowrec.trainer.reports.text_table import quality_tables
from cowrec.trainer.training.saved_run import evaluate_run, predict_run
from refusal import refused
from trained_runs import data_folder
from trainer_cases import ENVIRONMENT, TEST_ROWS, newest_progress

folder = data_folder()


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


PROGRESS = r"epoch 1/100000  (48.8%  step 100|0.5%  step 1)  loss 0\.\d{4}  [\d,]+ samples/s(  \d+:\d\d:\d\d left)?\n+"


AT_THE_END = """
import sys, threading
from cowrec.trainer.__main__ import main

threading.Thread(target=threading.Event().wait).start()
sys.argv = ["cowrec", "--help"]
main()
"""


def test_the_end_waits_for_no_thread_and_a_full_disk_is_no_success(tmp_path: Path) -> None:
    def ended(output: str) -> subprocess.CompletedProcess[str]:
        with open(output, "w", encoding="utf-8") as file:
            command = [sys.executable, "-c", AT_THE_END]
            return subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True, timeout=600, check=False)

    assert (ended("/dev/null").returncode, ended("/dev/null").stderr) == (0, "")
    full = ended("/dev/full")
    assert full.returncode == 2
    assert re.fullmatch(r"cowrec: error: .*No space left on device.*\n", full.stderr)


def test_sigterm_saves_and_a_pipe_sees_progress(folder: Path) -> None:
    """With one sample per step an epoch has 205 steps, and the request to stop arrives in the middle of one."""
    run = folder / "run"
    command = [sys.executable, "-m", "cowrec.trainer", "train", f"{folder}/run.toml", "--data", f"{folder}/data"]
    # A line whenever metrics are written.
    settings = ("epochs=100000", "batch_size=1", "log_every=50", "log_seconds=1e-9")
    command += ["--run-dir", f"{run}", *(part for setting in settings for part in ("--set", f"train.{setting}"))]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    seen = []
    for line in process.stderr or ():
        seen.append(line)
        if line.startswith("epoch 1/100000  step"):  # the epoch's quality
            process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=600) == 130
    newest = sorted((run / "checkpoints").iterdir())[-1]
    step = int(newest.name.removeprefix("step_"))
    said = f"cowrec: stopped at step {step}; saved {newest}; to continue, add --run-dir {run} --resume to the command"
    assert seen[-1] == f"{said}\n"
    assert newest_progress(run)["step"] == step
    assert evaluate_run(run, folder / "data")["rows"] == TEST_ROWS
    assert not list(run.rglob("*.partial"))
    assert not (run / "report.json").exists()
    kinds = ("deepfm on tabular: 205 training samples", "batch 1 (205 steps an epoch)", "epoch ")
    kinds = (*kinds, "compiling kernels", "cowrec: stopped")  # the first run of an installation compiles
    assert all(line.startswith(kinds) for line in seen), "a library printed something"
    assert any(re.fullmatch(PROGRESS, line) for line in seen), seen
    assert any(
        re.match(r"batch 1 .*\), scaling \w+, clip \w+: .*, l2 [^ ,]+, mean of the weights$", line) for line in seen
    ), seen
    known = {re.search(r"step ([\d,]+)", line)[1]: line.endswith("left\n") for line in seen if "samples/s" in line}
    assert known.pop("1") is False, "the first step says nothing of the others"
    assert all(known.values())


def commands_of(app: Any, *names: str) -> Iterator[list[str]]:
    for group in app.registered_groups:
        yield from commands_of(group.typer_instance, *names, *([group.name] if group.name else []))
    yield from ([*names, command.name or command.callback.__name__] for command in app.registered_commands)


@pytest.mark.parametrize("command", commands_of(app), ids=" ".join)
def test_every_help_has_an_example_and_that_of_prepare_all_settings(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], terminal_width=200)
    assert result.exit_code == 0
    assert f"Example: cowrec {' '.join(command)}" in result.output
    settings = dataclasses.fields(PrepareConfig) if command == ["prepare"] else ()
    assert all(re.search(rf"\b{setting.name}\b", result.output) for setting in settings)


def test_every_count_may_have_a_unit(cowrec: Cowrec, tmp_path: Path) -> None:
    code, printed, _ = cowrec("synthesize", "-o", tmp_path / "data", "--rows", "2K", "--test-rows", "1_000")
    assert code == 0
    assert "2,048 train samples, 1,000 test samples" in printed
    code, _, error = cowrec("synthesize", "-o", tmp_path / "data", "--rows", "2Q")
    assert code == 2
    assert "Invalid value for '--rows': a count must be a whole number such as" in error


def test_prepare_train_evaluate_predict(cowrec: Cowrec, folder: Path, empty: Path) -> None:
    columns, data = folder / "columns.toml", empty / "data"
    header, *lines = (folder / "raw.csv").read_text().splitlines(keepends=True)
    for name, part in (("a", lines[:50]), ("b", lines[50:99]), ("c", lines[99:])):
        Path(f"{name}.csv").write_text(header + "".join(part))
    inputs = ["-i", "a.csv", "b.csv", "--input", "[c].csv", "--set", "prepare.test_fraction=0.3"]
    code, printed, _ = cowrec("prepare", "tabular", *inputs, "--schema", columns, "-o", data)
    assert code == 0
    assert re.search(r"; label positive in [\d.]+ % of train, [\d.]+ % of test; 1 dense and 3 sparse fields", printed)
    code, printed, said = cowrec("train", folder / "run.toml", "--set", f"data.dir={data}")
    assert code == 0
    assert "\r" not in said
    (made,) = (empty / "runs").iterdir()
    line = rf"AUC 0\.\d{{4}}  logloss 0\.\d{{4}}  epoch 2 of 2  [\d,]+ samples/s  run runs/{made.name}\n"
    assert re.fullmatch(line, printed)
    report = json.loads((made / "report.json").read_text())
    code, printed, said = cowrec("evaluate", made, "--data", data)
    assert f"{report['epochs'][0]['rows']} samples of test: AUC {report['auc']:.4f}" in said
    assert json.loads(printed)["auc"] == pytest.approx(report["auc"], abs=1e-7)
    by_city = json.loads(cowrec("evaluate", made, "--data", data, "--by", "city", "--top", "2", "--json")[1])
    assert len(by_city["by"]["city"]["largest"]) == 2
    tables = quality_tables(by_city)
    assert re.search(rf"^auc +{report['auc']:.4f}$", tables, re.MULTILINE)
    ranked = r"GAUC [-.\d]+  NDCG [-.\d]+  MRR [-.\d]+  by city: \d+ of \d+ groups have both classes"
    assert re.search(rf"\n\n{ranked}\ncity +rows +ctr +auc ", tables)
    predicted = cowrec("predict", made, "--data", data, "-o", "p.parquet")
    assert predicted[:2] == (0, f"p.parquet: {report['epochs'][0]['rows']} rows\n")


def test_set_overrides_the_prepare_section_of_the_file(cowrec: Cowrec, folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[prepare]\nsplit = "order"\ntest_rows = 10\nmin_count = 2')
    where = ["--schema", folder / "columns.toml", "--config", config, "--output"]
    command = ["prepare", "tabular", "--input", folder / "raw.csv", *where]
    assert "10 test samples" in cowrec(*command, tmp_path / "file")[1]
    assert "20 test samples" in cowrec(*command, tmp_path / "flag", "--set", "prepare.test_rows=20")[1]
    # The size of the tail split does not apply to another split.
    assert cowrec(*command, tmp_path / "other", "--set", "prepare.split=random")[0] == 0
    settings = json.loads((tmp_path / "other" / "schema.json").read_text())["settings"]["prepare"]
    assert (settings["split"], settings["test_rows"], settings["min_count"]) == ("random", None, 2)
    config.write_text("[train]\nbatch_size = -2")
    message = 'train.batch_size must be at least 0, or "auto", in Python -1, got -2'
    assert message in cowrec(*command, tmp_path / "wrong")[2]


TRAIN, AVAZU = "train {toml} --data {data}", "prepare avazu -i {toml} -o out"
SWEEP = "sweep {toml} --data {data} -o out --batch-sizes"
TUNE = "tune {toml} --data {data} -o out --batch-size 51"
MISTAKES = {
    "train none.toml --data {data}": "none.toml does not exist",
    "train {toml} --data none": "none is not a prepared data set",
    "train {toml} --data {toml}": "run.toml is a file, not the folder of a prepared data set; if it has raw samples",
    "config init -o no/run.toml": "no/run.toml cannot be written: the folder no does not exist; create it first",
    f"{TRAIN} --run-dir {{data}}": "is not empty, and not that of a run; or choose another with --run-dir",
    f"{TRAIN} --set train.device=cuda": "torch sees no GPU",
    "evaluate {data} --data {data}": "is not a run: it has no config.toml",
    "prepare criteo -i {toml} -o out --like s3://bucket/run": "like s3://bucket/run must be a local folder: its vocab",
    f"{AVAZU} --min-count=4": "prepare has no --min-count; write --set prepare.min_count=4",
    f"{AVAZU} --set prepare.mincount=4": "unknown key prepare.mincount (= 4); did you mean prepare.min_count?",
    f"{SWEEP} 8Q": "--batch-sizes must be a whole number such as 512, 64K or 1M (K is 1,024, M is 1,024 K), got '8Q'",
    f"{SWEEP} 0": "--batch-sizes must be at least 1, got 0",
    f"{SWEEP} 1K --set clip.rule=none": "--clip on needs a clip rule",
    f"{TUNE} --validation-fraction 0": "--validation-fraction must be above 0",
    "predict none --data none -o no/p.parquet": "no/p.parquet cannot be written: the folder no does not exist; create",
    "schema infer {toml} -o {toml}": "run.toml exists; choose another --output, or remove it",
    "bench -o {toml}": "run.toml exists, with earlier measurements; choose another --output, or remove it",
    "bench -o out --model deepfn": 'did you mean "deepfm"?',
    "bench -o out --preset mlperf": "--preset 'mlperf' is not known; known: criteo, mlperf-dcnv2",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_code_2(cowrec: Cowrec, folder: Path, empty: Path, mistake: str) -> None:
    if "cuda" in mistake and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    code, printed, error = cowrec(*mistake.format(toml=folder / "run.toml", data=folder / "data").split())
    assert (code, printed) == (2, "")
    assert re.fullmatch(r"cowrec: error: [^\n]+\n", error), error
    assert MISTAKES[mistake] in error
    assert not list(empty.iterdir()), "incomplete output was left behind"


@pytest.mark.parametrize("missing", ["serve uvicorn serving.server", "tune optuna sweep.tune"])
def test_a_missing_extra_is_named(cowrec: Cowrec, folder: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    command, package, module = missing.split()
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"cowrec.trainer.{module}", raising=False)
    given = ["--batch-size", "51"] if command == "tune" else []
    remedy = f"{command} requires {package}, which is not installed: pip install 'cowrec[{command}]'"
    assert cowrec(command, folder / "run.toml", *given) == (2, "", f"cowrec: error: {remedy}\n")


NAMED = "pass --run-dir under torchrun, so that all processes agree on it"
ALONE = "sweep starts its own processes; start it without torchrun"
LAUNCHED = {"train": NAMED, "online --source incoming": NAMED, "sweep --batch-sizes 1": ALONE}


@pytest.mark.parametrize("command", LAUNCHED)
def test_torchrun_is_told_what_commands_need(cowrec: Cowrec, folder: Path, monkeypatch: Any, command: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    name, *given = command.split()
    code, _, error = cowrec(name, folder / "run.toml", "--data", folder / "data", *given)
    assert code == 2
    assert LAUNCHED[command] in error
    alone = "predict runs in one process; start it without torchrun"
    refused(alone, predict_run, folder / "run", folder / "data", folder / "p.parquet")
