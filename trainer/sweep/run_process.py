"""Training of runs one after the other in a subprocess, so that the caller survives a run that fails."""

import dataclasses
import gc
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runs.run_dir import CONFIG
from cowrec.trainer.runtime.environment import prepare_process
from cowrec.trainer.runtime.errors import Interrupted
from cowrec.trainer.runtime.subprocess_call import Subprocess
from cowrec.trainer.training.loop import AfterEpoch, train


def train_in(
    process: Subprocess, config: RunConfig, run_dir: Path, after_epoch: AfterEpoch | None = None
) -> dict[str, Any]:
    """Trains a run in a subprocess, from the latest checkpoint if there is one. Returns its report.

    The subprocess stays, so that the next run needs no start, imports and compiled kernels; a run that fails ends it.

    Raises:
        ProcessFailed: the run failed; the message is its error.
        Interrupted: the subprocess or this process was asked to stop, which is no failure of the run.
    """
    # The runs share their data, so that regression would reach the same beside each.
    config = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, logistic_regression_rows=0))
    if not (run_dir / CONFIG).exists():
        shutil.rmtree(run_dir, ignore_errors=True)  # killed before it had begun
    try:
        report = process.call(_train_here, config, run_dir, answer=after_epoch or _never)
    except KeyboardInterrupt:
        report = None
    if report is None:
        process.close()
        raise Interrupted(f"stopped in run {run_dir.name}; the same command continues there")
    return report


def _never(epoch: dict[str, Any]) -> bool:
    return False


def _train_here(config: RunConfig, run_dir: Path, after_epoch: AfterEpoch) -> dict[str, Any] | None:
    """Trains in this process. Returns the report, or None if the run was interrupted."""
    # Before and after the training loop, which handles SIGTERM itself, the signal interrupts as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # tqdm's default lock includes a semaphore, which a killed run would leave behind.
    tqdm.set_lock(threading.RLock())
    prepare_process()
    if not gc.get_freeze_count():
        gc.freeze()  # what was imported is never garbage; looking through it would take longer than building a model
    try:
        return train(config, Path(config.data.dir), run_dir, resume=True, after_epoch=after_epoch)
    except (Interrupted, KeyboardInterrupt):
        return None
    finally:
        # The tables of this run would otherwise be in memory together with those of the next one.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
