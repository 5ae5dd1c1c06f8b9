"""Metrics of a run, in files of limited size, MLflow and Weights & Biases, which may fail; its commit."""

import json
import logging
import os
import posixpath
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cowrec.trainer.reports.run_curves import RunCurves
from cowrec.trainer.runs import metrics_log
from cowrec.trainer.runs.metrics_log import MetricsLog, TrackedRun, Tracking, _mlflow_name, without_secrets
from cowrec.trainer.runtime import environment
from cowrec.trainer.runtime.errors import Interrupted, NonFiniteLoss
from trained_runs import data_folder, run
from trainer_cases import interrupted

folder = data_folder()


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class Library:
    """The part of both libraries that trackers call; it keeps what it is given."""

    def __init__(self) -> None:
        self.begun, self.config, self.tags = list[Any](), dict[str, Any](), dict[str, Any]()
        self.history, self.ends = list[tuple[int, dict[str, float]]](), list[Any]()
        self.__spec__ = SimpleNamespace(origin="here")

    # MLflow

    def active_run(self) -> None:
        return None

    def start_run(self, run_id: str | None, run_name: str | None) -> Any:
        self.begun.append(run_id)
        return SimpleNamespace(info=SimpleNamespace(run_id="id7"), data=SimpleNamespace(params=dict(self.config)))

    def set_tags(self, tags: dict[str, Any]) -> None:
        self.tags |= tags

    def log_params(self, params: dict[str, Any]) -> None:
        assert not params.keys() & self.config.keys(), "MLflow's parameters cannot change"
        self.config |= params

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.history.append((step, values))

    def end_run(self, status: str) -> None:
        self.ends.append(status)

    # W&B

    def login(self, prompt: bool) -> bool:
        return not prompt

    def Settings(self, **given: Any) -> dict[str, Any]:
        assert (given["console"], given["x_disable_meta"]) == ("off", True)
        return given

    def init(self, *, id: str | None, config: dict[str, Any], **_: Any) -> Any:
        self.begun.append(id)
        self.config |= config
        return SimpleNamespace(id="id7", define_metric=lambda *_, **__: None, log=self._log, finish=self._finish)

    def _log(self, values: dict[str, float]) -> None:
        self.history.append((int(values["step"]), values))

    def _finish(self, exit_code: int) -> None:
        self.ends.append(exit_code)


@pytest.mark.parametrize(("name", "ends"), [("mlflow", ["FINISHED"] * 2 + ["FAILED"]), ("wandb", [0, 0, 1])])
def test_a_tracker_has_the_settings_and_metrics_of_a_resumed_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ends: list[Any]
) -> None:
    library: Any = Library()
    monkeypatch.setitem(sys.modules, name, library)
    tracked = f'train.trackers=["{name}"]'
    first = run(folder, tmp_path / "run", tracked)
    lines, copy = lines_of(tmp_path / "run"), interrupted(tmp_path / "run", 5, tmp_path / "copy")
    second = run(folder, copy, tracked, "train.epochs=3", resume=True)
    lines += [line for line in lines_of(copy) if line["step"] > 5]  # those of repeated steps twice
    assert library.begun == [None, "id7"]
    losses = [(step, values["train/loss"]) for step, values in library.history if "train/loss" in values]
    assert losses == [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
    aucs = [values["report/auc"] for _, values in library.history if "report/auc" in values]
    assert aucs == [first["auc"], second["auc"]]
    assert (tmp_path / "copy" / f"{name}_run_id.txt").read_text() == "id7\n"
    config = {key: str(value) for key, value in (library.config | library.tags).items()}
    assert config["train.epochs"] == "3"  # changed on resuming
    assert (config["clip.rule"], config["derived.embedding_lr"]) == ("cowclip", "0.01")
    assert config["versions.torch"] == second["versions"]["torch"]
    with pytest.raises(NonFiniteLoss):
        run(folder, tmp_path / "infinite", tracked, "optimizer.dense_lr=1e30")
    assert library.ends == ends


def test_a_tracker_that_is_not_installed_is_refused(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(metrics_log, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"train\.trackers has \"wandb\".*pip install 'cowrec\[wandb\]'"):
        run(folder, tmp_path / "run", 'train.trackers=["wandb"]')
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


def logging_to(folder: Path, tracker: Recorder, resumed_at: int = 0) -> MetricsLog:
    return MetricsLog(folder, resumed_at, [Tracking("some", tracker, TrackedRun(folder, {}, {}))])


def test_errors_of_a_tracker_leave_out_readings_and_warn_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Recorder(["begin", "begin", "log"])
    with logging_to(tmp_path, tracker) as log:
        for step in range(1, 6):
            log.write("train", step, loss=step / 2, rate=float("nan"), names=["a"], clip={"city": 3})
    # Beginning failed with the first two readings, and the third could not be recorded.
    logged = [("log", step, {"train/loss": step / 2, "train/clip/city": 3.0}) for step in (4, 5)]
    assert tracker.calls == [("begin", None), *logged, ("end", "FINISHED")]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "some does not record all metrics: OSError: begin failed at https://***@host/;" in warning
    again = Recorder()
    with pytest.raises(Interrupted), logging_to(tmp_path, again, resumed_at=5):
        raise Interrupted
    assert again.calls == [("begin", "id7"), ("end", "KILLED")]


def test_messages_have_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, f"secret-of-{name.lower()}")
    text = (
        "refused secret-of-wandb_api_key, secret-of-mlflow_tracking_token at http://a:b%40@host:5000/x and s3://k:s@b"
    )
    assert without_secrets(text) == "refused ***, *** at http://***@host:5000/x and s3://***@b"


@given(st.lists(st.text(), min_size=1, max_size=4, unique=True))
@example(["年龄", "性别", "user (id)", "user [id]"])
@example(["a/", "a", "a//", "..", "."])
def test_names_of_fields_are_names_that_mlflow_takes_and_stay_apart(fields: list[str]) -> None:
    """MLflow takes letters, digits and _-. :/ in a path that is its own shortest form."""
    names = [_mlflow_name(f"clip/fields/{field}/rows") for field in fields]
    assert len({*names}) == len(fields)
    for name in names:
        assert re.fullmatch(r"[/\w.\- :]*", name), name
        assert posixpath.normpath(name) == name
    assert _mlflow_name("eval/auc of_a-b.c: d") == "eval/auc of_a-b.c: d"
    assert _mlflow_name("clip/fields/年龄/rows") == "clip/fields/年龄/rows"


def steps(run_dir: Path) -> list[int]:
    return RunCurves.read("run", run_dir / "metrics.jsonl").series("loss")[0].astype(int).tolist()


def write(run_dir: Path, first: int, last: int, resumed_at: int = 0) -> None:
    with MetricsLog(run_dir, resumed_at, max_bytes=5000) as log:
        for step in range(first, last + 1):
            log.write("train", step, loss=1 / step, samples_per_second=1.0)


def test_metrics_keep_to_their_size_and_a_resumed_run_continues_them(tmp_path: Path) -> None:
    """From a checkpoint before the last time that the file was full; the run was killed in the middle of a line.

    Files of TensorBoard are removed too.
    """
    write(tmp_path, 1, 500)
    sizes = [file.stat().st_size for file in tmp_path.glob("metrics.jsonl*")]
    assert len(sizes) == 2
    assert max(sizes) <= 5000
    first, *_, last = steps(tmp_path)
    assert (steps(tmp_path), last) == (list(range(first, 501)), 500)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("train/loss")] == steps(tmp_path)
    checkpoint = lines_of(tmp_path)[0]["step"] - 5
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    write(tmp_path, checkpoint + 1, 520, resumed_at=checkpoint)
    found = steps(tmp_path)
    assert found == list(range(found[0], 521))
    assert found[0] <= 500


def test_damaged_lines_are_removed_with_a_warning(tmp_path: Path, caplog: Any) -> None:
    write(tmp_path, 1, 4)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[1:3] = [b"\0" * 40 + lines[1][9:], b"\xff" + lines[2], b"17\n"]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    write(tmp_path, 5, 6, resumed_at=4)
    assert steps(tmp_path) == [1, 4, 5, 6]
    assert caplog.messages == [f"warning: 3 damaged lines of {tmp_path}/metrics.jsonl are removed"]


def test_the_commit_is_read_without_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git status refreshes the index otherwise, and a run that is killed meanwhile leaves its lock behind."""
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "code.py"))
    assert environment._git_commit() is None
    (tmp_path / "code.py").touch()
    for command in ("init", "add .", "-c user.name=a -c user.email=a@b commit -m first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    os.utime(tmp_path / "code.py", (0, 0))
    index = (tmp_path / ".git" / "index").read_bytes()
    (head,) = (tmp_path / ".git" / "refs" / "heads").iterdir()
    commit = head.read_text().strip()
    assert environment._git_commit() == commit
    assert (tmp_path / ".git" / "index").read_bytes() == index
    (tmp_path / "code.py").write_text("changed")
    assert environment._git_commit() == commit + "+"
