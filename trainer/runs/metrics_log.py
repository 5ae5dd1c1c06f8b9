"""Metrics of a run while it trains: a JSON line for each reading, TensorBoard, and trackers of experiments."""

import importlib
import json
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from cowrec.errors import UserError
from cowrec.files import append_line, earlier, replace_file

from ..runtime.errors import Interrupted
from .run_dir import BOARD, METRICS, to_json

logger = logging.getLogger(__name__)

_LAST_SECONDS = 30.0
"""Longest time that the end of a run waits for a tracker."""
_MOST_WAITING = 10_000
"""Number of readings that may wait for a tracker."""


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Log of a run's metrics, to ``metrics.jsonl``, TensorBoard and trackers.

    Args:
        path: the run's folder; None on ranks other than the first, which write nothing.
        step: step that the run continues from; metrics of later steps are removed because it takes those steps again.
        set_aside: number of batches set aside until then; lines of later ones are removed, too.
        max_bytes: size at which ``metrics.jsonl`` becomes ``.1`` and TensorBoard's older files are removed; 0: never.
        may_drop: whether metrics are left out, with one warning, while the disk is full.
    """

    def __init__(
        self,
        path: Path | None,
        step: int = 0,
        trackers: Sequence["Tracking"] = (),
        *,
        max_bytes: int = 0,
        may_drop: bool = False,
        set_aside: int = 0,
    ) -> None:
        self._tolerated: tuple[type[OSError], ...] = (OSError,) if may_drop else ()
        self._drops = False
        self._path, self._trackers, self._max_bytes = path, trackers, max_bytes
        self._board = SummaryWriter(str(path / BOARD), purge_step=step + 1) if path else None
        if path:
            left = set_aside
            for file in (earlier(path / METRICS), path / METRICS):
                left = _drop_after(file, step, left)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._board:
            with suppress(*self._tolerated):
                self._board.close()
        stopped = kind is not None and issubclass(kind, Interrupted | KeyboardInterrupt)
        for tracker in self._trackers:
            tracker.close("FINISHED" if kind is None else "KILLED" if stopped else "FAILED")

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Writes a line ``{"kind": "train", "step": ..., ...}``; numbers go to TensorBoard and trackers as kind/key."""
        if self._path is None:
            return
        line = to_json({"kind": kind, "step": step, "time": time.time(), **values}) + "\n"
        flat = flattened(values, f"{kind}/", "/")
        numbers = {key: value for key, value in flat.items() if isinstance(value, int | float)}
        try:
            self._write_files(self._path, line.encode(), step, numbers)
            self._drops = False
        except self._tolerated as error:
            if not self._drops:
                logger.warning("warning: metrics are left out until they can be written: %s; free disk space", error)
            self._drops, self._board = True, None  # a board that has failed takes no more numbers
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def _write_files(self, path: Path, line: bytes, step: int, numbers: Mapping[str, float]) -> None:
        if append_line(path / METRICS, line, self._max_bytes):  # the file was full: TensorBoard begins another file
            if self._board:
                self._board.close()
            for file in sorted((path / BOARD).glob("events.*"), key=lambda file: file.stat().st_mtime)[:-1]:
                file.unlink()
            self._board = None
        self._board = self._board or SummaryWriter(str(path / BOARD))
        for tag, value in numbers.items():
            self._board.add_scalar(tag, value, step)


def _drop_after(metrics: Path, step: int, set_aside: int) -> int:
    """Removes the lines of steps after ``step``, the incomplete last line of a killed process, and damaged lines.

    The first ``set_aside`` lines of batches that were set aside stay; returns how many of so many the file lacks.
    """
    if not metrics.exists():
        return set_aside
    kept, damaged = [], 0
    for line in metrics.read_bytes().splitlines(keepends=True):
        try:
            found = json.loads(line)
            if line.endswith(b"\n") and found["step"] <= step and (found.get("kind") != "set_aside" or set_aside):
                set_aside -= found.get("kind") == "set_aside"
                kept.append(line)
        except (ValueError, LookupError, TypeError):  # after a power failure a part of a file may be zeros
            damaged += 1
    if damaged:
        logger.warning("warning: %d damaged lines of %s are removed", damaged, metrics)
    replace_file(metrics, b"".join(kept))
    return set_aside


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker gets of a run: the folder, every setting by ``section.key``, and commit, versions and hardware."""

    folder: Path
    config: Mapping[str, Any]
    tags: Mapping[str, Any]


class Tracker(Protocol):
    """A run as a tracker records it; all calls come from one thread and may raise anything."""

    def begin(self, run: TrackedRun, known_id: str | None) -> str:
        """Begins the run, or continues the one with an id; returns its id. Called again after it has failed."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records finite values of a step, which a resumed run may repeat."""

    def end(self, status: str) -> None:
        """Ends the run: "FINISHED", "KILLED" (it can be resumed) or "FAILED"."""


class _Mlflow:
    def __init__(self) -> None:
        self._mlflow = importlib.import_module("mlflow")
        # MLflow would print the address of the run, with any credentials of the server in it.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        # A server that is away would be a warning with each repetition of each request.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)

    def begin(self, run: TrackedRun, known_id: str | None) -> str:
        # A run of this thread is active where an earlier call failed after starting it.
        name = None if known_id or "MLFLOW_RUN_ID" in os.environ else run.folder.name
        active = self._mlflow.active_run() or self._mlflow.start_run(known_id, run_name=name)
        config = {_mlflow_name(key): str(value) for key, value in run.config.items()}
        earlier = active.data.params
        # MLflow's parameters cannot change; what a resumed run changes becomes a tag.
        changed = {key: value for key, value in config.items() if earlier.get(key, value) != value}
        self._mlflow.set_tags({**run.tags, **changed})
        self._mlflow.log_params({key: value for key, value in config.items() if key not in earlier})
        return str(active.info.run_id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({_mlflow_name(key): value for key, value in values.items()}, step)

    def end(self, status: str) -> None:
        self._mlflow.end_run(status)


def _mlflow_name(key: str) -> str:
    """Makes a key that MLflow takes: other characters, as in names of fields, become "_" and a checksum."""

    def part(text: str) -> str:
        taken = "" if text in (".", "..") else re.sub(r"[^\w\-. :]", "_", text)
        return text if text and taken == text else f"{taken}_{zlib.crc32(text.encode()):08x}"

    return "/".join(map(part, key.split("/")))


class _Wandb:
    def __init__(self) -> None:
        self._wandb = importlib.import_module("wandb")

    def begin(self, run: TrackedRun, known_id: str | None) -> str:
        if os.environ.get("WANDB_MODE", "online") == "online" and not self._wandb.login(prompt=False):
            raise UserError("no API key; set WANDB_API_KEY, or run `wandb login`")
        # Neither console output nor the command line, which may have credentials, is recorded.
        quiet = self._wandb.Settings(silent=True, console="off", x_disable_meta=True)
        self._run = self._wandb.init(
            id=known_id,
            resume="allow" if known_id else None,
            name=None if "WANDB_NAME" in os.environ else run.folder.name,
            config={**run.config, **run.tags},
            allow_val_change=True,
            reinit="create_new",
            settings=quiet,
        )
        # W&B's own steps only rise, but those of a resumed run begin again at its checkpoint.
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def end(self, status: str) -> None:
        self._run.finish(exit_code=int(status != "FINISHED"))


TRACKERS: dict[str, Callable[[], Tracker]] = {"mlflow": _Mlflow, "wandb": _Wandb}
"""Trackers by the name of their module, which is also that of cowrec's extra."""


def require_trackers(names: Sequence[str]) -> None:
    for name in names:
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder of that name, such as W&B's ./wandb, has no origin
            raise UserError(
                f"train.trackers has \"{name}\", whose package is not installed: pip install 'cowrec[{name}]'"
            )


class Tracking:
    """A run in one tracker, which a thread of its own calls: training never waits for it, nor ends with its errors.

    The first error is a warning; metrics that could not be recorded are left out. The file ``NAME_run_id.txt`` in the
    run's folder has the id with which a resumed run continues.
    """

    def __init__(self, name: str, tracker: Tracker, run: TrackedRun) -> None:
        self._name, self._tracker, self._run = name, tracker, run
        self._queue: Queue[tuple[int, Mapping[str, float]] | str] = Queue(_MOST_WAITING)
        self._begun = self._warned = False
        self._thread = Thread(target=self._work, name=f"cowrec-tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Passes on the finite values of a step."""
        try:
            self._queue.put_nowait((step, {key: float(value) for key, value in values.items() if isfinite(value)}))
        except Full:
            self._warn("it takes metrics more slowly than the run writes them")

    def close(self, status: str) -> None:
        """Ends the run in the tracker with a status of :meth:`Tracker.end`, after a short wait."""
        try:
            self._queue.put(status, timeout=_LAST_SECONDS)
            self._thread.join(_LAST_SECONDS)
        except Full:
            pass
        if self._thread.is_alive():
            self._warn(f"no answer in the last {_LAST_SECONDS:g} seconds of the run")

    def _work(self) -> None:
        status = None
        while status is None:
            entry = self._queue.get()
            try:
                if not self._begun:
                    self._begin()
                if isinstance(entry, str):
                    status = entry
                    self._tracker.end(status)
                else:
                    self._tracker.log(*entry)
            except Exception as error:
                status = entry if isinstance(entry, str) else None
                self._warn(f"{type(error).__name__}: {error}")

    def _begin(self) -> None:
        record = self._run.folder / f"{self._name}_run_id.txt"
        run_id = self._tracker.begin(self._run, record.read_text().strip() if record.is_file() else None)
        self._begun = True
        replace_file(record, f"{run_id}\n".encode())
        logger.info("%s records the metrics too, as run %s", self._name, run_id)

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            where = "the run goes on, and its metrics are in metrics.jsonl"
            logger.warning("%s does not record all metrics: %s; %s", self._name, without_secrets(problem), where)


def without_secrets(text: str) -> str:
    """Hides the user part of addresses and the secrets in the trackers' environment variables."""
    for name, value in os.environ.items():
        if value and re.match(r"(MLFLOW|WANDB)_\w*(KEY|TOKEN|PASSWORD|SECRET)", name):
            text = text.replace(value, "***")
    return re.sub(r"://[^/@\s]+@", "://***@", text)


def flattened(values: Mapping[str, Any], prefix: str = "", separator: str = ".") -> dict[str, Any]:
    """Flattens nested mappings: joins keys with the separator, after the prefix, and hides credentials in texts."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}{separator}", separator)
        else:
            flat[prefix + key] = without_secrets(value) if isinstance(value, str) else value
    return flat
