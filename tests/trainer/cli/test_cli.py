"""The command line as users see it: help, messages about mistakes, progress on the screen, and requests to stop."""

import dataclasses
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from commands.command_line import exit_code
from cowrec.data_pipeline import PrepareConfig
from cowrec.trainer.cli.main import app
from cowrec.trainer.training.saved_run import evaluate_run
from trainer_cases import TEST_ROWS, config_file, make_data, newest_progress

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    make_data(folder)
    config_file(folder)
    return folder


# A line whenever metrics are written.
LINES = ["--set", "train.log_seconds=1e-9", "--set", "train.log_every=50"]
PROGRESS = r"epoch 1/100000  (48.8%  step 100|0.5%  step 1)  loss 0\.\d{4}  [\d,]+ samples/s  \d+:\d\d:\d\d left\n+"


def endless_training(folder: Path, run: str) -> list[str]:
    command = [sys.executable, "-m", "cowrec.trainer", "train", f"{folder}/run.toml", "--data", f"{folder}/data"]
    # One sample per step: an epoch has 205 steps, and a request to stop arrives in the middle of one.
    command += ["--set", "train.epochs=100000", "--set", "train.batch_size=1", *LINES]
    return [*command, "--run-dir", f"{folder}/{run}"]


def check_stopped(run: Path, printed: str) -> None:
    """Checks the one line about the stop, and the checkpoint that it names."""
    newest = sorted((run / "checkpoints").iterdir())[-1]
    step = int(newest.name.removeprefix("step_"))
    said = f"cowrec: stopped at step {step}; saved {newest}; to continue, add --run-dir {run} --resume to the command"
    assert said in printed.splitlines(), printed
    assert "Traceback" not in printed
    assert newest_progress(run)["step"] == step
    assert evaluate_run(run, run.parent / "data")["rows"] == TEST_ROWS
    assert not list(run.rglob("*.partial"))
    assert not (run / "report.json").exists()


def test_sigterm_saves_and_a_pipe_sees_progress(folder: Path) -> None:
    process = subprocess.Popen(endless_training(folder, "term"), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("epoch 1/100000  step"):  # the epoch's quality
            process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    check_stopped(folder / "term", "".join(seen))
    kinds = ("deepfm on tabular: 205 training samples", "batch 1 (205 steps an epoch)", "epoch ")
    assert all(line.startswith((*kinds, "cowrec: stopped")) for line in seen), "a library printed something"
    assert any(re.fullmatch(PROGRESS, line) for line in seen), seen


def test_ctrl_c_on_a_terminal_saves_and_lines_show_progress(folder: Path) -> None:
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(
        endless_training(folder, "int"), env=ENVIRONMENT, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    shown, asked = b"", False
    while True:
        try:
            shown += os.read(screen, 4096)
        except OSError:  # the terminal's other side is closed
            break
        if not asked and b"epoch 1/" in shown:
            asked = True
            os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    printed = shown.decode().replace("\r", "\n")
    check_stopped(folder / "int", printed)
    assert re.search(PROGRESS, printed), printed


def commands_of(app: Any, *names: str) -> Iterator[list[str]]:
    for group in app.registered_groups:
        yield from commands_of(group.typer_instance, *names, *([group.name] if group.name else []))
    yield from ([*names, each.name or each.callback.__name__] for each in app.registered_commands)


@pytest.mark.parametrize("command", commands_of(app), ids=" ".join)
def test_every_help_has_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"], terminal_width=200)
    assert result.exit_code == 0
    assert f"Example: cowrec {' '.join(command)}" in result.output


def test_every_count_may_have_a_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "synthesize", "-o", tmp_path / "data", "--rows", "2K", "--test-rows", "1_000") == 0
    assert "2,048 train samples, 1,000 test samples" in capsys.readouterr().out
    assert exit_code(monkeypatch, "synthesize", "-o", tmp_path / "data", "--rows", "2Q") == 2
    assert "Invalid value for '--rows': a count must be a whole number such as" in capsys.readouterr().err


def test_the_help_of_prepare_lists_all_its_settings() -> None:
    output = CliRunner().invoke(app, ["prepare", "--help"], terminal_width=200).output
    assert all(re.search(rf"\b{each.name}\b", output) for each in dataclasses.fields(PrepareConfig))


def test_prepare_train_evaluate_predict(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns, data = folder / "columns.toml", tmp_path / "data"
    monkeypatch.chdir(tmp_path)
    header, *lines = (folder / "raw.csv").read_text().splitlines(keepends=True)
    for name, part in (("a", lines[:50]), ("b", lines[50:99]), ("c", lines[99:])):
        (tmp_path / f"{name}.csv").write_text(header + "".join(part))
    split = ["--set", "prepare.test_fraction=0.3"]
    inputs = ["-i", "a.csv", "b.csv", "--input", "[c].csv"]
    assert exit_code(monkeypatch, "prepare", "tabular", *inputs, "--schema", columns, "-o", data, *split) == 0
    assert "1 dense and 3 sparse fields" in capsys.readouterr().out
    assert exit_code(monkeypatch, "train", folder / "run.toml", "--set", f"data.dir={data}") == 0
    captured = capsys.readouterr()
    assert "\r" not in captured.err
    (made,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(
        rf"AUC 0\.\d{{4}}  logloss 0\.\d{{4}}  epoch 2 of 2  [\d,]+ samples/s  run runs/{made.name}\n", captured.out
    )
    assert exit_code(monkeypatch, "evaluate", made, "--data", data) == 0
    report = json.loads((made / "report.json").read_text())
    assert json.loads(capsys.readouterr().out)["auc"] == pytest.approx(report["auc"], abs=1e-7)
    assert exit_code(monkeypatch, "predict", made, "--data", data, "-o", tmp_path / "p.parquet") == 0
    assert capsys.readouterr().out == f"{tmp_path}/p.parquet: {report['epochs'][0]['rows']} rows\n"


def test_an_inferred_schema_prepares_its_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, columns = folder / "raw.csv", tmp_path / "inferred.toml"
    assert exit_code(monkeypatch, "schema", "infer", raw, "-o", columns) == 0
    assert re.match(rf"{columns}: 4 fields, \d+ remarks to check\n", capsys.readouterr().out)
    assert exit_code(monkeypatch, "prepare", "tabular", "-i", raw, "--schema", columns, "-o", tmp_path / "data") == 0
    assert "1 dense and 3 sparse fields" in capsys.readouterr().out
    assert exit_code(monkeypatch, "schema", "infer", raw, "-o", columns) == 2
    assert "inferred.toml exists; choose another file or remove it" in capsys.readouterr().err


def test_set_overrides_the_prepare_section_of_the_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[prepare]\nsplit = "order"\ntest_rows = 10\nmin_count = 2')
    where = ["--schema", folder / "columns.toml", "--config", config, "--output"]
    command = ["prepare", "tabular", "--input", folder / "raw.csv", *where]
    assert exit_code(monkeypatch, *command, tmp_path / "file") == 0
    assert "10 test samples" in capsys.readouterr().out
    assert exit_code(monkeypatch, *command, tmp_path / "flag", "--set", "prepare.test_rows=20") == 0
    assert "20 test samples" in capsys.readouterr().out
    # The size of the tail split does not apply to another split.
    assert exit_code(monkeypatch, *command, tmp_path / "other", "--set", "prepare.split=random") == 0
    settings = json.loads((tmp_path / "other" / "schema.json").read_text())["settings"]["prepare"]
    assert (settings["split"], settings["test_rows"], settings["min_count"]) == ("random", None, 2)
    config.write_text("[train]\nbatch_size = -1")
    assert exit_code(monkeypatch, *command, tmp_path / "wrong") == 2
    assert "train.batch_size must be at least 0, got -1" in capsys.readouterr().err


MISTAKES = {
    "no such toml": (["train", "none.toml", "--data", "{data}"], "none.toml does not exist"),
    "no data": (["train", "{toml}"], "no data set: pass --data DIR or set data.dir"),
    "data not there": (["train", "{toml}", "--data", "none"], "none is not a prepared data set"),
    "run folder in use": (
        ["train", "{toml}", "--data", "{data}", "--run-dir", "{data}"],
        "is not empty, and not that of a run; or choose another with --run-dir",
    ),
    "run folder a file": (["train", "{toml}", "--data", "{data}", "--run-dir", "{toml}"], "is a file; choose another"),
    "wrong key": (["train", "{toml}", "--data", "{data}", "--set", "train.seeds=1"], "did you mean train.seed?"),
    "cuda": (["train", "{toml}", "--data", "{data}", "--set", "train.device=cuda"], "torch sees no GPU"),
    "no run": (["evaluate", "{data}", "--data", "{data}"], "is not a run: it has no config.toml"),
    "raw not there": (["prepare", "criteo", "-i", "none.tsv", "-o", "out"], "none.tsv"),
    "raw of another layout": (["prepare", "criteo", "-i", "{toml}", "-o", "out"], "run.toml"),
    "wrong flag value": (
        ["prepare", "avazu", "-i", "{toml}", "-o", "out", "--set", "prepare.dense=cut"],
        "prepare.dense = 'cut'",
    ),
    "setting as a flag": (
        ["prepare", "avazu", "-i", "{toml}", "-o", "out", "--hash-buckets", "9"],
        "prepare has no --hash-buckets; write --set prepare.hash_buckets=VALUE",
    ),
    "setting as a flag with value": (
        ["prepare", "avazu", "-i", "{toml}", "-o", "out", "--min-count=4"],
        "prepare has no --min-count; write --set prepare.min_count=4",
    ),
    "wrong prepare key": (
        ["prepare", "avazu", "-i", "{toml}", "-o", "out", "--set", "prepare.mincount=4"],
        "unknown key prepare.mincount (= 4); did you mean prepare.min_count?",
    ),
    "section of another command": (
        ["prepare", "avazu", "-i", "{toml}", "-o", "out", "--set", "train.seed=4"],
        "prepare takes --set prepare.key=value only, got section train",
    ),
    "raw ids and hash buckets": (
        ["prepare", "avazu", "-i", "{toml}", "-o", "out", "--raw-ids", "--set", "prepare.hash_buckets=9"],
        "hash_buckets and raw_ids exclude each other",
    ),
    "synthesize nothing": (["synthesize", "-o", "out", "--rows", "0"], "rows must be at least 1, got 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_code_2(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    import torch

    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    arguments, message = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    paths = {"toml": folder / "run.toml", "data": folder / "data"}
    assert exit_code(monkeypatch, *(each.format(**paths) for each in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"cowrec: error: [^\n]+\n", captured.err), captured.err
    assert message in captured.err
    assert not list(tmp_path.iterdir()), "incomplete output was left behind"


def test_serve_without_its_extra_names_the_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "cowrec.trainer.serving.server", raising=False)
    assert exit_code(monkeypatch, "serve", folder) == 2
    remedy = "serve requires uvicorn, which is not installed: pip install 'cowrec[serve]'"
    assert capsys.readouterr().err == f"cowrec: error: {remedy}\n"


def test_an_error_inside_a_library_keeps_its_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import cowrec.trainer.training.saved_run as saved_run

    monkeypatch.setattr(saved_run, "evaluate_run", lambda *_: json.loads("no json"))
    assert exit_code(monkeypatch, "evaluate", folder, "--data", folder) == 1
    assert "Traceback" in capsys.readouterr().err


def test_predict_refuses_torchrun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cowrec.trainer.training.saved_run import predict_run

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="predict runs in one process; start it without torchrun"):
        predict_run(folder / "run", folder / "data", folder / "p.parquet")


@pytest.mark.parametrize("command", [["train"], ["online", "--source", "incoming"]])
def test_processes_of_a_run_are_told_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    ended = []
    monkeypatch.setattr("os._exit", ended.append)  # torchrun's processes end at once
    monkeypatch.setenv("WORLD_SIZE", "2")
    exit_code(monkeypatch, *command, folder / "run.toml", "--data", folder / "data")
    assert ended[0] == 2
    assert "pass --run-dir under torchrun, so that all processes agree on it" in capsys.readouterr().err
