"""Metrics in MLflow and Weights & Biases, read back by their clients; trackers that fail or do not answer."""

import importlib.util
import json
import logging
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cowrec.trainer.config.run import load_config
from cowrec.trainer.runs import trackers
from cowrec.trainer.runs.metrics_log import MetricsLog
from cowrec.trainer.runs.trackers import TrackedRun, Tracking, without_secrets
from cowrec.trainer.runtime.errors import Interrupted, NonFiniteLoss
from cowrec.trainer.training.loop import train
from trainer_cases import config_file, free_port, interrupted, make_data

INSTALLED = {name: importlib.util.find_spec(name) is not None for name in ("mlflow", "wandb")}
needs = {
    name: pytest.mark.skipif(not found, reason=f"{name} is not installed: pip install 'cowrec[{name}]'")
    for name, found in INSTALLED.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracked")
    make_data(folder)
    config_file(folder)
    return folder


def train_tracked(folder: Path, run: Path, tracker: str, *overrides: str, resume: bool = False) -> dict[str, Any]:
    config = load_config(folder / "run.toml", [f'train.trackers=["{tracker}"]', *overrides])
    return train(config, folder / "data", run, resume=resume)


def resumed(folder: Path, run: Path, tracker: str) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """Trains two epochs of five steps, goes back to the first checkpoint, and trains from there for three epochs.

    Returns:
        Both reports, and the lines of metrics that the runs wrote, those of repeated steps twice.
    """
    first = train_tracked(folder, run, tracker)
    written = lines_of(run)
    interrupted(run, 5, run.with_name("copy"))
    second = train_tracked(folder, run.with_name("copy"), tracker, "train.epochs=3", resume=True)
    return first, second, written + [line for line in lines_of(run.with_name("copy")) if line["step"] > 5]


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@needs["mlflow"]
def test_mlflow_has_the_settings_and_metrics_of_a_resumed_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "store"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "clicks")
    _, report, lines = resumed(folder, tmp_path / "run", "mlflow")
    with pytest.raises(NonFiniteLoss):
        train_tracked(folder, tmp_path / "infinite", "mlflow", "optimizer.dense_lr=1e30")

    client = importlib.import_module("mlflow").MlflowClient()
    experiment = client.get_experiment_by_name("clicks").experiment_id
    by_name = {run.info.run_name: run for run in client.search_runs([experiment])}
    assert by_name.keys() == {"run", "infinite"}  # the copy continued the run
    assert by_name["infinite"].info.status == "FAILED"
    run = by_name["run"]
    assert run.info.status == "FINISHED"
    assert run.info.run_id == (tmp_path / "copy" / "mlflow_run_id.txt").read_text().strip()
    assert {key: run.data.params[key] for key in ("train.batch_size", "clip.rule", "derived.embedding_lr")} == {
        "train.batch_size": "51",
        "clip.rule": "cowclip",
        "derived.embedding_lr": "0.01",
    }
    assert run.data.params["train.epochs"] == "2"
    assert run.data.tags["train.epochs"] == "3"  # changed on resuming
    assert run.data.tags["versions.torch"] == report["versions"]["torch"]
    assert run.data.tags["git_commit"] == str(report["git_commit"])
    history = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "train/loss")]
    assert history == [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
    assert run.data.metrics["report/auc"] == report["auc"]
    assert "samples_per_second" not in run.data.metrics  # NaN in the first step


@needs["wandb"]
def test_wandb_has_the_settings_and_metrics_of_a_resumed_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("API_KEY", "k" * 40)):
        monkeypatch.setenv(f"WANDB_{name}", value)
    first, second, lines = resumed(folder, tmp_path / "run", "wandb")
    run_id = (tmp_path / "copy" / "wandb_run_id.txt").read_text().strip()
    # The two parts were written by one process within a second or more; their order is that of their beginning.
    files = sorted(tmp_path.rglob(f"run-{run_id}.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) == 2
    records = [record for file in files for record in wandb_records(file)]
    history = [
        {item.nested_key[0]: json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    losses = [(each["step"], each["train/loss"]) for each in history if "train/loss" in each]
    assert losses == [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
    assert [each["report/auc"] for each in history if "report/auc" in each] == [first["auc"], second["auc"]]
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [0, 0]
    config = {
        i.key or i.nested_key[0]: json.loads(i.value_json)
        for r in records
        if r.HasField("run")
        for i in r.run.config.update
    }
    assert config["train.epochs"] == 3
    assert config["model.hidden"] == [8]
    assert config["versions.torch"] == second["versions"]["torch"]


def wandb_records(file: Path) -> list[Any]:
    """Reads a run's file: LevelDB's log, blocks of 32 KiB with pieces of protobuf messages, after seven bytes."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, at, found, message = file.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:  # too little room for a piece
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # complete, or the last piece
            found.append(record.FromString(message))
            message = b""
    return found


@needs["mlflow"]
@pytest.mark.parametrize("listens", [False, True], ids=["refuses", "is silent"])
def test_an_mlflow_server_that_is_away_costs_one_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, listens: bool
) -> None:
    with socket.socket() as server:
        if listens:
            server.bind(("localhost", 0))
            server.listen()
        port = server.getsockname()[1] if listens else free_port()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://name:hunter2@localhost:{port}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        monkeypatch.setattr(trackers, "_LAST_SECONDS", 0.1 if listens else 60.0)
        report = train_tracked(folder, tmp_path / "run", "mlflow")
    for thread in threading.enumerate():
        if thread.name.startswith("cowrec-tracker"):
            thread.join(60)  # while the address is that of the server
    assert report["steps"] == 10
    warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len([each for each in warnings if "mlflow does not record all metrics" in each]) == 1
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_tracker_that_is_not_installed_is_refused_at_the_start(folder: Path, tmp_path: Path, name: str) -> None:
    if INSTALLED[name]:
        pytest.skip(f"{name} is installed")
    with pytest.raises(ValueError, match=rf"train\.trackers has \"{name}\".*pip install 'cowrec\[{name}\]'"):
        train_tracked(folder, tmp_path / "run", name)
    assert not (tmp_path / "run").exists()


class Recorder:
    """A tracker that keeps its calls, and that raises an error where it is told to."""

    def __init__(self, fails: Sequence[str] = (), waits: threading.Event | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails, self._waits = list(fails), waits

    def begin(self, run: TrackedRun, known_id: str | None) -> str:
        self._call("begin", known_id)
        return "id7"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call("log", step, values)

    def end(self, status: str) -> None:
        self._call("end", status)

    def _call(self, *call: Any) -> None:
        if self._waits:
            self._waits.wait()
        if self._fails and self._fails[0] == call[0]:
            raise OSError(f"{self._fails.pop(0)} failed at https://me:pass@host/")
        self.calls.append(call)


def test_errors_of_a_tracker_leave_out_readings_and_warn_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recorder(["begin", "begin", "log"])
    with MetricsLog(tmp_path, 0, [Tracking("some", tracker, TrackedRun(tmp_path, {}, {}))]) as log:
        for step in range(1, 6):
            log.write("train", step, loss=step / 2, rate=float("nan"), names=["a"], clip={"city": 3})
    # Beginning failed with the first two readings, and the third could not be recorded.
    logged = [("log", step, {"train/loss": step / 2, "train/clip/city": 3.0}) for step in (4, 5)]
    assert tracker.calls == [("begin", None), *logged, ("end", "FINISHED")]
    (warning,) = (each.getMessage() for each in caplog.records if each.levelno == logging.WARNING)
    assert "some does not record all metrics: OSError: begin failed at https://***@host/;" in warning
    again = Recorder()
    with pytest.raises(Interrupted), MetricsLog(tmp_path, 5, [Tracking("some", again, TrackedRun(tmp_path, {}, {}))]):
        raise Interrupted
    assert again.calls == [("begin", "id7"), ("end", "KILLED")]


def test_a_tracker_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "_LAST_SECONDS", 0.05)
    monkeypatch.setattr(trackers, "_MOST_WAITING", 3)
    answer = threading.Event()
    with MetricsLog(tmp_path, 0, [Tracking("some", Recorder(waits=answer), TrackedRun(tmp_path, {}, {}))]) as log:
        for step in range(1, 9):
            log.write("train", step, loss=1.0)
    answer.set()
    assert len(lines_of(tmp_path)) == 8
    (warning,) = (each.getMessage() for each in caplog.records if each.levelno == logging.WARNING)
    assert "some does not record all metrics: it takes metrics more slowly than the run writes them" in warning


def test_messages_have_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, f"secret-of-{name.lower()}")
    text = (
        "refused secret-of-wandb_api_key, secret-of-mlflow_tracking_token at http://a:b%40@host:5000/x and s3://k:s@b"
    )
    assert without_secrets(text) == "refused ***, *** at http://***@host:5000/x and s3://***@b"
