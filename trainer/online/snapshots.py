"""Snapshots of an online run: checkpoints with the stream's position and the open window, and the journal they need."""

import time
from functools import partial
from pathlib import Path

from cowrec.data_pipeline import Position, SampleStream
from cowrec.trainer.runs.checkpoint_folder import checkpoint_name, list_checkpoints
from cowrec.trainer.runs.run_dir import CHECKPOINTS
from cowrec.trainer.runtime.processes import on_first
from cowrec.trainer.training.trainer import Trainer

from .measurements import Measurements
from .progressive import FrozenWindow


class Snapshots:
    """Saves an online run, and resumes it.

    Args:
        trainer: of the run.
        measured: by the run.
    """

    def __init__(self, trainer: Trainer, measured: Measurements) -> None:
        self._trainer, self._measured = trainer, measured
        self._seconds = trainer.config.online.snapshot_seconds
        self._saved_step, self._saved_at = 0, time.monotonic()
        self._first_entries: dict[str, int] = {}
        """First entry of the journal that each checkpoint needs, by its name."""
        self._journal_begin = 0

    @property
    def is_overdue(self) -> bool:
        """True if it is time for the next snapshot."""
        return time.monotonic() - self._saved_at >= self._seconds

    def resume(self) -> Position | None:
        """Loads the newest checkpoint of the run and returns its position in the stream; None if there is none.

        All processes call together; the position is the first one's.
        """
        progress = self._trainer.resume()
        if progress is None:
            return None
        measured, path = self._measured, self._trainer.checkpoints.latest
        assert path is not None
        self._saved_step = progress.step
        measured.resume(progress.samples, progress.seconds)
        found: list[Position] = []

        def load() -> None:
            found.append(Position.load(path))
            measured.load(path, found[0].newest)
            # Entries of damaged checkpoints, which were skipped, are kept too.
            self._first_entries = {each.name: 0 for each in list_checkpoints(path.parent)}
            self._first_entries[path.name] = found[0].entry

        on_first(self._trainer.process, load)
        self._trainer.say(f"continuing from {path}: step {progress.step}, {measured.samples:,} samples")
        return found[0] if found else None

    def save(self, stream: SampleStream | None) -> None:
        """Saves a checkpoint from which the stream can be continued, unless the last one is of this step.

        All processes call together, the first one with the stream.
        """
        trainer, measured = self._trainer, self._measured
        if trainer.steps == self._saved_step:
            return
        trainer.require_finite()
        files = partial(_write_files, stream.position, measured.quality.freeze()) if stream else None
        trainer.save(files, samples=measured.samples, seconds=measured.trained_seconds)
        self._saved_step, self._saved_at = trainer.steps, time.monotonic()
        if stream:
            self._first_entries[checkpoint_name(self._saved_step)] = stream.position.entry
            self._trim_journal(stream)

    def _trim_journal(self, stream: SampleStream) -> None:
        """Removes what no checkpoint needs any more."""
        kept = list_checkpoints(self._trainer.run_dir / CHECKPOINTS)
        oldest = min((self._first_entries[each.name] for each in kept), default=0)
        if oldest > self._journal_begin:
            stream.trim(Position(entry=oldest))
            self._journal_begin = oldest


def _write_files(position: Position, window: FrozenWindow, folder: Path) -> None:
    position.save(folder)
    window.save(folder)
