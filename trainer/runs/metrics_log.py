"""Metrics of a run while it trains: a JSON line for each reading, TensorBoard, and trackers of experiments."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from cowrec.files import append_line, earlier, replace_file

from ..runtime.errors import Interrupted
from .run_dir import BOARD, METRICS, to_json
from .trackers import Tracking, flattened

logger = logging.getLogger(__name__)


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """Log of a run's metrics, to ``metrics.jsonl``, TensorBoard and trackers.

    Args:
        path: the run's folder; None on ranks other than the first, which write nothing.
        step: step that the run continues from; metrics of later steps are removed because it takes those steps again.
        set_aside: batches that it has set aside until then, which are no steps; lines of later ones are removed, too.
        max_bytes: size at which ``metrics.jsonl`` becomes ``metrics.jsonl.1`` and the one before is removed, and so are
            TensorBoard's files but the newest; 0: never.
        may_drop: whether what cannot be written, because the disk is full, is left out with one warning.
    """

    def __init__(
        self,
        path: Path | None,
        step: int = 0,
        trackers: Sequence[Tracking] = (),
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
        if append_line(path / METRICS, line, self._max_bytes):  # the file was full: TensorBoard begins another one too
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

    Of the lines of batches that were set aside the first ``set_aside`` stay; returns how many fewer there were.
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
