"""Runs that share a configuration: their folder, with a JSON line for each, and their training in a subprocess."""

import gc
import hashlib
import json
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.dataset.schema import SCHEMA_FILE
from cowrec.errors import UserError
from cowrec.files import locked_folder, replace_file

from ..config.run import RunConfig, first_difference, load_config, save_config, to_plain, with_defaults, with_values
from ..runs.run_dir import CHECKPOINTS, CONFIG, REPORT, VOCABULARY, changes, difference_of_samples, load_code, to_json
from ..runtime.environment import prepare_process
from ..runtime.errors import Interrupted
from ..runtime.subprocess_call import Subprocess
from ..sharded_model.check_run import check_settings
from ..training.active_run import interrupted_by_sigterm
from ..training.trainer import AfterEpoch, train

RUNS = "runs"


class Runs:
    """The runs of a folder, trained one after the other; ``lines`` are those of runs that have ended."""

    def __init__(self, folder: Path, results: str, process: Subprocess) -> None:
        self._folder, self._results, self._process = folder, folder / results, process
        self._hash = hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest()
        text = self._results.read_text(encoding="utf-8") if self._results.exists() else ""
        self.lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.strip()]

    def folder_of(self, name: str) -> Path:
        return self._folder / RUNS / name

    def train(self, config: RunConfig, name: str, after_epoch: AfterEpoch | None = None) -> dict[str, Any]:
        """Trains a run, from its latest checkpoint if there is one; returns its report.

        A run that has a report is not trained again. The subprocess stays for the next run, which then needs no imports
        and compiled kernels; a run that fails ends it.

        Raises:
            ProcessFailed: the run failed; the message is its error.
            Interrupted: the subprocess or this process was asked to stop.
        """
        folder = self.folder_of(name)
        if not (folder / CONFIG).exists():
            shutil.rmtree(folder, ignore_errors=True)  # killed before it had begun
        try:
            ended = (folder / REPORT).exists() or self._process.call(train_here, config, folder, after_epoch)
        except KeyboardInterrupt:
            ended = False
        if not ended:
            self._process.close()
            raise Interrupted(f"stopped in run {name}; the same command continues there")
        self.remove_checkpoints(name)
        report: dict[str, Any] = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        return report

    def remove_checkpoints(self, name: str) -> None:
        for large in (CHECKPOINTS, VOCABULARY):
            shutil.rmtree(self.folder_of(name) / large, ignore_errors=True)

    def add(self, line: dict[str, Any]) -> None:
        """Keeps the line of a run that has ended; the file never holds half a line."""
        self.lines.append({**line, "config_sha256": self._hash})
        replace_file(self._results, "".join(to_json(ended) + "\n" for ended in self.lines).encode())


@contextmanager
def open_runs(folder: Path, config: RunConfig, results: str, what: str) -> Iterator[Runs]:
    """Locks the folder of a sweep or study, and writes or checks the configuration that its runs share.

    Raises UserError if another process is at work there, or the folder has another configuration, runs of other data or
    of own code that has changed since, or other files.
    """
    check_settings(config)
    with interrupted_by_sigterm(), locked_folder(folder), Subprocess() as process:
        file = folder / CONFIG
        if file.exists():
            # Loaded, so that a key that was left out has its default.
            if difference := first_difference(to_plain(load_config(file)), to_plain(config)):
                raise UserError(f"{file} has another configuration: {difference}; choose another --output")
        elif any(path.suffix != ".partial" for path in folder.iterdir()):
            raise UserError(f"{folder} is not empty and not the folder of a {what}; choose another --output")
        else:
            save_config(config, file)
        if earlier := next(folder.glob(f"{RUNS}/*/{SCHEMA_FILE}"), None):
            different = difference_of_samples(Schema.load(earlier.parent), Schema.load(config.data.dir))
            if different:
                raise UserError(
                    f"{folder} has runs on other samples than {config.data.dir}: {different}; results would not"
                    " compare, choose another --output"
                )
            if changed := changes(load_code(earlier.parent), earlier.parent):
                raise UserError(f"{changed[0]}; results would not compare, choose another --output")
        yield Runs(folder, results, process)


def on_data(config: RunConfig, data_dir: Path, schema: Schema, *, fixed: bool = False) -> RunConfig:
    """Sets the data set of a configuration, and the defaults that depend on its samples; :func:`with_defaults`."""
    config, validated = with_values(config, data={"dir": str(data_dir)}), "validation" in schema.splits
    return with_defaults(config, schema.split("train").rows, validated=validated, fixed=fixed)


def say(text: str) -> None:
    with suppress(OSError):  # the log of a long search may be on a full disk
        print(text, file=sys.stderr, flush=True)


def train_here(config: RunConfig, run_dir: Path, after_epoch: AfterEpoch | None = None) -> bool:
    """Trains in this process; returns False if the run was interrupted."""
    # Outside the training loop, which handles SIGTERM itself, the signal interrupts as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # tqdm's default lock includes a semaphore, which a killed run would leave behind.
    tqdm.set_lock(threading.RLock())
    prepare_process()
    if not gc.get_freeze_count():
        gc.freeze()  # what was imported is never garbage; looking through it would take longer than building a model
    try:
        train(config, Path(config.data.dir), run_dir, resume=True, after_epoch=after_epoch)
        return True
    except (Interrupted, KeyboardInterrupt):
        return False
    finally:
        # The tables of this run would otherwise be in memory together with those of the next one.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
