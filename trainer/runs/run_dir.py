"""The folder of a run: resolved configuration, metrics, TensorBoard events, checkpoints, data description, report.

config.toml  metrics.jsonl  tensorboard/  checkpoints/step_N/  schema.json  vocabulary/  report.json
"""

import json
import math
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.files import locked_folder, replace_file
from cowrec.trainer.config.run import RunConfig, first_difference, load_config, save_config, to_plain
from cowrec.trainer.runtime.processes import Process, on_first

CONFIG, REPORT, CHECKPOINTS = "config.toml", "report.json", "checkpoints"
METRICS, BOARD, VOCABULARY = "metrics.jsonl", "tensorboard", "vocabulary"


_MAY_CHANGE = {
    "data": ("dir", "resident"),
    "train": ("epochs", "device", "eval_batch_size", "log_every", "timeout_seconds"),
    "checkpoint": ("every_steps", "keep_last", "keep_best", "asynchronous"),
    "sharding": ("plan", "tables"),
}
"""What a resumed run may do otherwise: it changes neither the steps taken nor what they mean."""


@contextmanager
def alone_in(path: Path, process: Process) -> Iterator[None]:
    """The first process holds the run's folder for all; ValueError on all where another run is at work in it."""
    with ExitStack() as held:
        on_first(process, lambda: held.enter_context(locked_folder(path)))
        yield


def require_unused(path: Path) -> None:
    """Raises ValueError where a run's folder holds something already."""
    if _holds_something(path):
        raise ValueError(
            f"run folder {path} is not empty; go on with its run by --resume, choose another with --run-dir or remove"
            " it"
        )


def require_own(path: Path, config: RunConfig) -> None:
    """Raises ValueError where a folder holds something else than a run of this configuration."""
    if not _holds_something(path):
        return
    if not (path / CONFIG).is_file():
        raise ValueError(f"{path} is not a run: it has no {CONFIG}; choose another with --run-dir")
    there, given = to_plain(load_config(path / CONFIG)), to_plain(config)
    for section, keys in _MAY_CHANGE.items():
        for key in keys:
            there.get(section, {}).pop(key, None)
            given.get(section, {}).pop(key, None)
    different = first_difference(there, given)
    if different:
        raise ValueError(
            f"{path} is of another configuration: {different}; resume with the run's own {path / CONFIG}, or start"
            " another run"
        )


def _holds_something(path: Path) -> bool:
    if path.exists() and not path.is_dir():
        raise ValueError(f"run folder {path} is a file; choose another with --run-dir")
    return path.exists() and any(each.suffix != ".partial" for each in path.iterdir())


def create_run_dir(path: Path, config: RunConfig, derived: Mapping[str, Any]) -> None:
    """Fills a run's folder: its configuration and all that is needed to use the run without its training data.

    What an interrupted start left is replaced; so is the configuration of a resumed run.

    Args:
        path: the folder.
        config: as resolved; ``config.data.dir`` is the data set.
        derived: what follows from the configuration, written above it as comments.
    """
    data_dir = Path(config.data.dir)
    save_config(config, path / CONFIG, "\n".join(f"derived: {key} = {value}" for key, value in derived.items()))
    Schema.load(data_dir).save(path)
    if (data_dir / VOCABULARY).is_dir():
        shutil.copytree(data_dir / VOCABULARY, path / VOCABULARY, dirs_exist_ok=True)


class RunLog:
    """Metrics of a run, to ``metrics.jsonl`` and TensorBoard; writes nothing where ``path`` is None (other ranks).

    Of a run that goes on from ``step`` those of later steps, which it will take again, are left out.
    """

    def __init__(self, path: Path | None, step: int = 0):
        self._path = path
        self._board = SummaryWriter(str(path / BOARD), purge_step=step + 1) if path else None
        if path:
            _drop_after(path / METRICS, step)

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._board:
            self._board.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One line ``{"kind": "train", "clip" or such, "step": ..., ...}``; numbers go to TensorBoard as kind/key."""
        if self._path and self._board:
            with (self._path / METRICS).open("a", encoding="utf-8") as file:
                file.write(to_json({"kind": kind, "step": step, "time": time.time(), **values}) + "\n")
            for tag, value in _scalars(kind, values):
                self._board.add_scalar(tag, value, step)


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Writes ``report.json``, replacing an earlier one at once."""
    replace_file(path / REPORT, (to_json(report, indent=2) + "\n").encode())


def to_json(value: dict[str, Any], indent: int | None = None) -> str:
    """JSON with null where a number is not finite, since JSON has no NaN."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware and source revision, to go beside every number."""
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "git_commit": _git_commit(),
    }


def _drop_after(metrics: Path, step: int) -> None:
    """Removes the lines of steps after ``step``, and what a process that was killed left of a line."""
    if not metrics.exists():
        return
    kept = []
    for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    replace_file(metrics, "".join(kept).encode())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _scalars(tag: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(tag/key, number) of nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _scalars(f"{tag}/{key}", value)
        else:
            yield f"{tag}/{key}", value


def _versions() -> dict[str, str]:
    found = {}
    for name in ("cowrec", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "numpy", "pyarrow", "numba"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """Commit of the source this runs from, with "+" where files differ from it; None outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
