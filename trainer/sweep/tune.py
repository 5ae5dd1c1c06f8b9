"""A search for the learning rates and the L2 of one batch size, by validation quality; Optuna proposes the values.

Files of its folder: config.toml, tune.jsonl, tuned.toml, runs/trial-0/ and so on. A study is made again from the lines
of tune.jsonl: Optuna's own storage would be a second truth, which a kill could tear.
"""

import dataclasses
import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, log
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from optuna.trial import Trial, TrialState, create_trial

from cowrec.data_pipeline import Schema
from cowrec.errors import UserError
from cowrec.files import read_lines
from cowrec.names import require

from ..config.run import RunConfig, load_config, save_config, with_values
from ..reports.text_table import number_text
from ..runs.checkpoint import best_epoch
from ..runs.run_dir import CONFIG, METRICS
from ..runtime.errors import NonFiniteLoss, ProcessFailed
from ..sharded_model.check_run import check_scaled_decay
from ..sharded_model.run_plan import Scaled
from .results import VALUES, Range, ranked
from .runs import Runs, on_data, open_runs, say

RESULTS, TUNED = "tune.jsonl", "tuned.toml"
_DEFAULT_FACTOR = 10.0
_EDGE = 0.05


@dataclass(frozen=True)
class Search:
    """Settings of a study, which the flags of `cowrec tune` describe.

    Attributes:
        metric: "logloss" or "auc" of the validation samples; a trial's value is that of its best epoch.
        ranges: (lowest, highest) of a value; None: not searched. By default a tenth to ten times the configuration's
            value, except for 0, which is not searched.
        prune: from the second epoch on, end a trial that is worse than the median of the others at that epoch.
    """

    batch_size: int
    metric: str = "logloss"
    ranges: Mapping[str, Range | None] = dataclasses.field(default_factory=dict)
    validation_fraction: float = 0.1
    patience: int | None = None
    prune: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        require("--batch-size", self.batch_size, self.batch_size >= 1, "at least 1")
        require("--metric", self.metric, self.metric in ("logloss", "auc"), "logloss or auc")
        fraction = self.validation_fraction
        require("--validation-fraction", fraction, 0 < fraction < 1, "above 0 and below 1")
        for name, bounds in self.ranges.items():
            if bounds and not 0 < bounds[0] < bounds[1] < inf:
                raise UserError(f"{_flag(name)} needs 0 < LOWEST < HIGHEST, got {bounds[0]:g},{bounds[1]:g}")

    def based_on(self, config: RunConfig) -> RunConfig:
        """A configuration of the study's batch size with base values for it: its own, scaled by its own rule."""
        scaled = Scaled.of(config)
        derived = dataclasses.asdict(scaled.hyperparameters)
        values = {key: value for key, value in derived.items() if hasattr(config.optimizer, key)}
        return with_values(config, optimizer={"base_batch_size": self.batch_size, **values}, clip=vars(scaled.clip))

    def searched(self, base: RunConfig) -> dict[str, Range]:
        """The ranges of the values that are searched.

        Raises UserError: nothing is searched, or a range does not include the configuration's value.
        """
        found = {}
        for name in VALUES:
            own = getattr(base.optimizer, name)
            default = (own / _DEFAULT_FACTOR, own * _DEFAULT_FACTOR) if own else None
            bounds = self.ranges.get(name, default)
            if bounds is None:
                continue
            if not bounds[0] <= own <= bounds[1]:
                raise UserError(
                    f"{_flag(name)} {bounds[0]:g},{bounds[1]:g} does not include the first trial's, the configuration's"
                    f" optimizer.{name} = {own:g} at batch size {self.batch_size}; widen the range, or change the value"
                    f" with --set optimizer.{name}=VALUE"
                )
            found[name] = bounds
        if not found:
            raise UserError(f"nothing to search: give a range with {', '.join(map(_flag, VALUES))}")
        return found

    def of_trials(self, base: RunConfig, *, has_validation: bool) -> RunConfig:
        """The configuration that all trials share: with validation samples, and as few checkpoints as possible.

        Raises UserError: a patience where learning rates fall over the epochs.
        """
        train = base.train
        # Where learning rates fall over the epochs, a trial that ends early says nothing about the whole run.
        falls = base.optimizer.rates_follow_epochs
        if falls and self.patience:
            raise UserError(
                f"--patience {self.patience} would end trials before their learning rates have fallen:"
                f' optimizer.lr_decay is "{base.optimizer.lr_decay}"; leave it out, or set optimizer.lr_decay=none'
            )
        patience = self.patience if self.patience is not None else int(not falls)
        fraction = train.validation_fraction or (0.0 if has_validation else self.validation_fraction)
        validation = {"validation_fraction": fraction, "patience": train.patience or patience}
        return with_values(base, train=validation, checkpoint={"keep_last": 1, "keep_best": self.metric})


@dataclass(frozen=True)
class Outcome:
    """Lines of a study's trials, that of the best complete one, and the ranges searched last."""

    lines: list[dict[str, Any]]
    best: dict[str, Any] | None
    ranges: dict[str, Range]


def tune(config: RunConfig, data_dir: Path, output: Path, search: Search, trials: int) -> Outcome:
    """Searches `[optimizer]`'s embedding_lr, dense_lr and l2 at one batch size, which becomes base_batch_size.

    Each trial trains a run; its value is the validation quality of its best epoch. The test split plays no part. The
    first trial has the configuration's values. After an interruption the same call continues, the trial in progress
    from its latest checkpoint; with more trials or other ranges it goes on from the trials it has. ``trials`` counts
    pruned and failed ones too.

    Raises:
        UserError: settings that cannot work, or a folder with another study or other files.
        ProcessFailed: a trial ended otherwise than by a loss that is not finite; the next call repeats it.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    schema = Schema.load(data_dir)
    at_size = with_values(config, train={"batch_size": search.batch_size})  # on which some defaults depend
    base = search.based_on(on_data(at_size, data_dir, schema, fixed=True))
    ranges, shared = search.searched(base), search.of_trials(base, has_validation="validation" in schema.splits)
    with open_runs(output, shared, RESULTS, "study") as runs:
        study = study_of(search, ranges, runs.lines)
        while (number := len(runs.lines)) < trials:
            trial, values = _next_trial(study, search, ranges, base, runs.folder_of(f"trial-{number}"))
            shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
            say(f"\ntrial {number + 1} of {trials}: {shown}")
            line, value = _run(runs, trial, with_values(shared, optimizer=values), search.metric)
            study.tell(trial, value, state=TrialState.PRUNED if value is None else TrialState.COMPLETE)
            runs.add({"trial": number, "batch_size": search.batch_size, **values, **line})
            runs.remove_checkpoints(f"trial-{number}")  # after its line: half of them would fail the trial for ever
            result = f": {line['error']}" if "error" in line else f"  validation{_quality(line)}"
            say(f"{line['state']}{result}  {line['seconds']:.0f} s")
        best = next(iter(ranked(runs.lines, search.metric)), None)
        if best:
            comment = _comment(runs.lines, best, search, shared, ranges)
            save_config(tuned_config(config, base, best), output / TUNED, comment)
        return Outcome(runs.lines, best, ranges)


def study_of(search: Search, ranges: Mapping[str, Range], lines: list[dict[str, Any]]) -> optuna.Study:
    """Optuna's study of the trials that have ended. Trials without a value count as pruned, which it learns from."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Not after the first epoch, where values that learn fast and overfit look best.
    median = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=2)
    study = optuna.create_study(
        direction="minimize" if search.metric == "logloss" else "maximize",
        pruner=median if search.prune else optuna.pruners.NopPruner(),
    )
    key = f"validation_{search.metric}"
    for line in lines:
        values = {name: line[name] for name in ranges}
        # Ranges may have become narrower since.
        wide = {name: (min(ranges[name][0], value), max(ranges[name][1], value)) for name, value in values.items()}
        complete = line["state"] == "complete"
        epochs = {epoch["epoch"]: epoch[key] for epoch in line.get("epochs", ()) if _finite(epoch[key])}
        study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if complete else TrialState.PRUNED,
                value=line[key] if complete else None,
                params=values,
                distributions=_distributions(wide),
                intermediate_values=epochs,
            )
        )
    return study


def _distributions(ranges: Mapping[str, Range]) -> dict[str, Any]:
    return {name: FloatDistribution(*bounds, log=True) for name, bounds in ranges.items()}


def _next_trial(
    study: optuna.Study, search: Search, ranges: Mapping[str, Range], base: RunConfig, folder: Path
) -> tuple[Trial, dict[str, float]]:
    """The trial to run next and its values: the configuration's own at first, and those of an interrupted trial.

    Random numbers depend on seed and trial number: a sampler that restarts from one seed would repeat its values.
    """
    number, begun = len(study.trials), (folder / CONFIG).exists()
    optimizer = (load_config(folder / CONFIG) if begun else base).optimizer
    values = {name: getattr(optimizer, name) for name in VALUES}
    if begun or not number:
        fixed = {name: min(max(values[name], low), high) for name, (low, high) in ranges.items()}
        study.enqueue_trial(fixed)
    seed = int(np.random.SeedSequence((search.seed, number)).generate_state(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=8, multivariate=True)
        trial = study.ask(_distributions(ranges))
    if not begun:
        values |= trial.params
    elif (folder / METRICS).exists():
        for line in map(json.loads, read_lines(folder / METRICS)):
            if line["kind"] == "eval":  # an epoch before the interruption, which pruning looks at
                _report(trial, line["epoch"] + 1, line[f"validation_{search.metric}"])
    return trial, values


def _run(runs: Runs, trial: Trial, config: RunConfig, metric: str) -> tuple[dict[str, Any], float | None]:
    """Trains a trial. Returns the values of its line, and its quality if the trial is complete."""
    started, key, name, value = time.perf_counter(), f"validation_{metric}", f"trial-{trial.number}", None
    try:
        check_scaled_decay(config)
    except ValueError as error:  # too high a rate for the weight decay, which is not searched
        return {"state": "failed", "error": str(error), "seconds": 0.0}, None
    try:
        report = runs.train(config, name, partial(_prunes, trial, key))
    except ProcessFailed as error:
        if not str(error).startswith(f"{NonFiniteLoss.__name__}: "):
            raise ProcessFailed(f"trial {trial.number + 1}: {error}; the same command repeats it") from None
        line: dict[str, Any] = {"state": "failed", "error": str(error)}
    else:
        result = _result(report, metric)
        for epoch in result["epochs"]:
            _report(trial, epoch["epoch"], epoch[key])
        pruned = len(result["epochs"]) < config.train.epochs and trial.should_prune()
        line, value = {"state": "pruned" if pruned else "complete", **result}, None if pruned else result[key]
    return line | {"seconds": time.perf_counter() - started}, value


def _prunes(trial: Trial, key: str, epoch: dict[str, Any]) -> bool:
    """Whether a trial ends after an epoch; called in the process of its run, with a copy of the study."""
    _report(trial, epoch["epoch"], epoch[key])
    return trial.should_prune()


def _report(trial: Trial, epoch: int, value: float | None) -> None:
    """Reports the value of an epoch, once."""
    if _finite(value) and epoch not in trial.study.trials[trial.number].intermediate_values:
        trial.report(float(value or 0), epoch)


def _finite(value: float | None) -> bool:
    return value is not None and isfinite(value)


def _result(report: dict[str, Any], metric: str) -> dict[str, Any]:
    """Entries of a line that a report gives; none of the test split."""
    best = best_epoch(report["epochs"], metric)
    if best is None:
        why = "they have one class" if metric == "auc" else "none of them has a known label"
        raise UserError(f"the validation samples have no {metric}, because {why}; take more of them")
    keys = ("validation_auc", "validation_logloss")
    return {
        **{key: best[key] for key in keys},
        "best_epoch": best["epoch"],
        "epochs": [{key: epoch[key] for key in ("epoch", "step", *keys)} for epoch in report["epochs"]],
        **{key: report[key] for key in ("steps", "samples_per_second", "train_seconds", "wall_seconds")},
        **{key: report[key] for key in ("versions", "device", "threads", "git_commit")},
    }


def tuned_config(config: RunConfig, base: RunConfig, best: dict[str, Any]) -> RunConfig:
    """The configuration with the best values, and with as many epochs as were best.

    The epochs stay where a run ends early by itself, or where its learning rates depend on them.
    """
    stay = base.train.patience or base.optimizer.rates_follow_epochs
    train = {"epochs": base.train.epochs if stay else best["best_epoch"]}
    return with_values(base, train=train, optimizer={key: best[key] for key in VALUES}, data=vars(config.data))


def hints(best: Mapping[str, Any], ranges: Mapping[str, Range], epochs: int) -> list[str]:
    """Messages about where better values may be found.

    A message names each value of the best trial within a twentieth of its range, in logarithms, from an end of it, and
    the last of several epochs if it was the best.
    """
    found = []
    for name, (low, high) in ranges.items():
        share = log(best[name] / low) / log(high / low)
        if _EDGE < share < 1 - _EDGE:
            continue
        wider = (low / _DEFAULT_FACTOR, high) if share <= _EDGE else (low, high * _DEFAULT_FACTOR)
        found.append(
            f"the best optimizer.{name} = {best[name]:.4g} is at the edge of the searched {low:g} to {high:g};"
            f" continue with {_flag(name)} {wider[0]:g},{wider[1]:g} and more --trials"
        )
    if best["best_epoch"] == epochs > 1:
        found.append(
            f"the best epoch, {epochs}, was the last one; a study with more of them (--set train.epochs={2 * epochs},"
            " another --output) may find better values"
        )
    return found


def _comment(
    lines: list[dict[str, Any]], best: dict[str, Any], search: Search, shared: RunConfig, ranges: dict[str, Range]
) -> str:
    fraction = shared.train.validation_fraction
    samples = f"the last {fraction:g} of the training samples" if fraction else "the validation split"
    searched = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in ranges.items())
    return (
        f"found by cowrec tune at batch size {search.batch_size}: trial {best['trial'] + 1} of {len(lines)}\n"
        f"by the validation {search.metric}, on {samples}:{_quality(best)}\n"
        f"of at most {shared.train.epochs}; searched {searched}; seed {search.seed}; commit {best['git_commit']}"
    )


def _quality(line: Mapping[str, Any]) -> str:
    logloss, auc = (number_text(line[f"validation_{metric}"], ".5f") for metric in ("logloss", "auc"))
    return f" logloss {logloss}  AUC {auc}  epoch {line['best_epoch']}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
