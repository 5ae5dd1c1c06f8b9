"""The study of Optuna that proposes the values of trials, stored in a file that survives a kill at any time."""

import warnings
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from .search import Range, Search

_LINE = "line"
"""User attribute of a finished trial: its line of the results."""


class Study:
    """A study of the folder of `cowrec tune`, which its caller holds locked.

    Args:
        file: its journal.
        search: its settings. Ranges, seed and pruning may differ between calls.
        ranges: of the values that are searched.
        first: values of the first trial.

    Raises:
        ValueError: the study in the file has another metric.
    """

    def __init__(self, file: Path, search: Search, ranges: Mapping[str, Range], first: Mapping[str, float]) -> None:
        self._search, self._ranges = search, ranges
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        _repair(file)
        # Not after the first epoch, where values that learn fast and overfit look best.
        median = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=2)
        pruner = median if search.prune else optuna.pruners.NopPruner()
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(file), lock_obj=JournalFileOpenLock(str(file)))),
            study_name="tune",
            direction="minimize" if search.metric == "logloss" else "maximize",
            pruner=pruner,
            load_if_exists=True,
        )
        metric = self._study.user_attrs.get("metric")
        if metric is None:
            self._study.set_user_attr("metric", search.metric)
        elif metric != search.metric:
            raise ValueError(f"{file} is a study of {metric}, not of {search.metric}; choose another --output")
        if not self._trials():
            self._study.enqueue_trial({name: first[name] for name in ranges})

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of the finished trials."""
        return [dict(each.user_attrs[_LINE]) for each in self._trials() if each.state.is_finished()]

    def next_trial(self) -> tuple[Trial, dict[str, float]]:
        """The trial to run next, which is the interrupted one if there is one, and its values.

        The random numbers depend on the seed and the trial's number, so that an interrupted study goes on as it would
        have: a sampler that starts again from the same seed would repeat its first values.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            running = [each for each in self._trials() if each.state == TrialState.RUNNING]
            number = running[0].number if running else len(self.lines)
            seed = int(np.random.SeedSequence((self._search.seed, number)).generate_state(1)[0])
            self._study.sampler = TPESampler(seed=seed, n_startup_trials=8, multivariate=True)
            trial = Trial(self._study, running[0]._trial_id) if running else self._study.ask()
            if running:  # goes on with its own values, also if the ranges are others now
                return trial, dict(running[0].params)
            values = {name: trial.suggest_float(name, *bounds, log=True) for name, bounds in self._ranges.items()}
        return trial, values

    def report(self, trial: Trial, epoch: int, value: float) -> None:
        """Reports the value of an epoch, once."""
        if isfinite(value) and epoch not in self._trials()[trial.number].intermediate_values:
            trial.report(value, epoch)

    def finish(self, trial: Trial, line: dict[str, Any], value: float | None) -> None:
        """Stores the result of a trial; without a value it counts as pruned, which the sampler learns from."""
        trial.set_user_attr(_LINE, line)
        self._study.tell(trial, value, state=TrialState.PRUNED if value is None else TrialState.COMPLETE)

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)


def _repair(file: Path) -> None:
    """Removes what a killed process leaves: its lock, and an incomplete last line."""
    file.with_name(file.name + ".lock").unlink(missing_ok=True)
    if file.exists():
        content = file.read_bytes()
        if not content.endswith(b"\n"):
            file.write_bytes(content[: content.rfind(b"\n") + 1])
