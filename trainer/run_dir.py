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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from cowrec.data_pipeline import Schema

from .config import RunConfig, save_config

CONFIG, REPORT, CHECKPOINTS = "config.toml", "report.json", "checkpoints"
METRICS, BOARD, VOCABULARY = "metrics.jsonl", "tensorboard", "vocabulary"


def require_unused(path: Path) -> None:
    """Raises ValueError where a run's folder holds something already."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"run folder {path} is a file; choose another with --run-dir")
    if path.exists() and any(path.iterdir()):
        raise ValueError(f"run folder {path} is not empty; choose another with --run-dir or remove it")


def create_run_dir(path: Path, config: RunConfig, derived: Mapping[str, Any]) -> None:
    """Starts a run's folder: its configuration and all that is needed to use the run without its training data.

    Args:
        path: the folder.
        config: as resolved; ``config.data.dir`` is the data set.
        derived: what follows from the configuration, written above it as comments.
    """
    data_dir = Path(config.data.dir)
    path.mkdir(parents=True, exist_ok=True)
    save_config(config, path / CONFIG, "\n".join(f"derived: {key} = {value}" for key, value in derived.items()))
    Schema.load(data_dir).save(path)
    if (data_dir / VOCABULARY).is_dir():
        shutil.copytree(data_dir / VOCABULARY, path / VOCABULARY)


class RunLog:
    """Metrics of a run, to ``metrics.jsonl`` and TensorBoard; writes nothing where ``path`` is None (other ranks)."""

    def __init__(self, path: Path | None):
        self._path = path
        self._board = SummaryWriter(str(path / BOARD)) if path else None

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._board:
            self._board.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """One line ``{"kind": "train" | "clip" | "eval", "step": ..., ...}``; numbers go to TensorBoard as kind/key."""
        if self._path and self._board:
            with (self._path / METRICS).open("a", encoding="utf-8") as file:
                file.write(to_json({"kind": kind, "step": step, "time": time.time(), **values}) + "\n")
            for tag, value in _scalars(kind, values):
                self._board.add_scalar(tag, value, step)


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Writes ``report.json``, replacing an earlier one at once."""
    partial = path / f"{REPORT}.partial"
    partial.write_text(to_json(report, indent=2) + "\n", encoding="utf-8")
    partial.rename(path / REPORT)


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
