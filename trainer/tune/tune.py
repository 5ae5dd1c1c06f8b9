"""A search for the learning rates and the L2 of one batch size, by validation quality.

Files of its folder: config.toml, tune.journal, tune.jsonl, tuned.toml, tune.png, runs/trial-0/ and so on.
"""

import dataclasses
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.files import locked_folder
from cowrec.trainer.config.run import RunConfig, save_config, with_defaults
from cowrec.trainer.runs.checkpoint_folder import best_epoch
from cowrec.trainer.runs.run_dir import CHECKPOINTS, CONFIG, VOCABULARY
from cowrec.trainer.runtime.errors import NonFiniteLoss, ProcessFailed
from cowrec.trainer.runtime.subprocess_call import Subprocess
from cowrec.trainer.sweep.run_group import keep_config, require_own, write_lines
from cowrec.trainer.sweep.run_process import train_in

from .search import Range, Search, with_values
from .study import Study

RESULTS, JOURNAL, TUNED, RUNS = "tune.jsonl", "tune.journal", "tuned.toml", "runs"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a study has found so far.

    Attributes:
        lines: of the finished trials, in their order.
        best: the line of the best complete trial; None if there is none.
        ranges: that were searched last.
    """

    lines: list[dict[str, Any]]
    best: dict[str, Any] | None
    ranges: dict[str, Range]


def tune(
    config: RunConfig, data_dir: Path, output: Path, search: Search, trials: int, timeout: float | None = None
) -> Outcome:
    """Searches `[optimizer]`'s embedding_lr, dense_lr and l2 at one batch size, which becomes base_batch_size.

    Each trial trains a run; its value is the validation quality of its best epoch. The test split is measured at the
    end of a trial, but not looked at. The first trial has the configuration's own values. After an interruption the
    same call continues, the trial in progress from its latest checkpoint; with more trials or other ranges it goes on
    from the trials it has.

    Args:
        config: shared by all trials.
        data_dir: prepared data set.
        output: folder of the study.
        search: what is searched.
        trials: number of trials that the study shall have, pruned and failed ones included.
        timeout: seconds after which no further trial starts.

    Raises:
        ValueError: settings that cannot work, or a folder with another study or other files.
        ProcessFailed: a trial ended otherwise than by a loss that is not finite; the next call repeats it.
        Interrupted: by Ctrl-C or SIGTERM.
    """
    started = time.monotonic()
    if trials < 1:
        raise ValueError(f"--trials must be at least 1, got {trials}")
    schema = Schema.load(data_dir)
    has_validation = "validation" in schema.splits
    with_data = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(data_dir)))
    with_data = with_defaults(with_data, schema.split("train").rows)
    base = search.based_on(with_data)
    ranges, shared = search.searched(base), search.of_trials(base, has_validation=has_validation)
    with locked_folder(output), Subprocess() as process:
        require_own(output, "study")
        config_hash = keep_config(shared, output / CONFIG)
        study = Study(output / JOURNAL, search, ranges, dataclasses.asdict(base.optimizer))
        run = _Trials(study, shared, search.metric, output, config_hash, process)
        while len(study.lines) < trials and (timeout is None or time.monotonic() - started < timeout):
            run.next_one(trials)
        lines = study.lines
        _keep_results(output, lines)
        best = best_line(lines, search.metric)
        if best:
            tuned, comment = tuned_config(config, base, best), _comment(lines, best, search, shared, ranges)
            save_config(tuned, output / TUNED, comment)
    return Outcome(lines, best, ranges)


class _Trials:
    """Runs the trials of a study."""

    def __init__(
        self, study: Study, shared: RunConfig, metric: str, output: Path, config_hash: str, process: Subprocess
    ) -> None:
        self.study, self.shared, self.metric, self.output = study, shared, metric, output
        self.config_hash, self.process = config_hash, process

    def next_one(self, trials: int) -> None:
        """Trains the next trial, or goes on with the interrupted one, and stores its line."""
        trial, values = self.study.next_trial()
        optimizer = with_values(self.shared, values).optimizer
        values = {name: getattr(optimizer, name) for name in ("embedding_lr", "dense_lr", "l2")}
        shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        _say(f"\ntrial {trial.number + 1} of {trials}: {shown}")
        run_dir, started, pruned = self.output / RUNS / f"trial-{trial.number}", time.perf_counter(), False

        def after_epoch(epoch: dict[str, Any]) -> bool:
            nonlocal pruned
            self.study.report(trial, epoch["epoch"], epoch[f"validation_{self.metric}"])
            pruned = trial.should_prune()
            return pruned

        line: dict[str, Any] = {"trial": trial.number, "batch_size": self.shared.train.batch_size, **values}
        value = None
        try:
            report = train_in(self.process, with_values(self.shared, values), run_dir, after_epoch)
        except ProcessFailed as error:
            if not str(error).startswith(f"{NonFiniteLoss.__name__}: "):
                raise ProcessFailed(f"trial {trial.number + 1}: {error}; the same command repeats it") from None
            line |= {"state": "failed", "error": str(error)}
        else:
            result = self._result(report)
            for epoch in result["epochs"]:
                self.study.report(trial, epoch["epoch"], epoch[f"validation_{self.metric}"])
            value = None if pruned else result[f"validation_{self.metric}"]
            line |= {"state": "pruned" if pruned else "complete", **result}
        seconds = time.perf_counter() - started
        self.study.finish(trial, {**line, "seconds": seconds, "config_sha256": self.config_hash}, value)
        for large in (CHECKPOINTS, VOCABULARY):
            shutil.rmtree(run_dir / large, ignore_errors=True)
        _keep_results(self.output, self.study.lines)
        _say(f"{line['state']}{_in_short(line)}  {seconds:.0f} s")

    def _result(self, report: dict[str, Any]) -> dict[str, Any]:
        """The entries of a line that a report gives; none of the test split."""
        best = best_epoch(report["epochs"], self.metric)
        if best is None:
            raise ValueError(
                f"the validation samples have no {self.metric}, because they have one class; take more of them"
            )
        keys = ("validation_auc", "validation_logloss")
        return {
            **{key: best[key] for key in keys},
            "best_epoch": best["epoch"],
            "epochs": [{key: each[key] for key in ("epoch", "step", *keys)} for each in report["epochs"]],
            **{key: report[key] for key in ("steps", "samples_per_second", "train_seconds", "wall_seconds")},
            **{key: report[key] for key in ("versions", "device", "threads", "git_commit")},
        }


def ranked(lines: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """The complete trials, the best one first."""
    complete = [line for line in lines if line["state"] == "complete"]
    return sorted(complete, key=lambda line: line[f"validation_{metric}"], reverse=metric == "auc")


def best_line(lines: list[dict[str, Any]], metric: str) -> dict[str, Any] | None:
    """The line of the best complete trial, the first of equal ones."""
    return next(iter(ranked(lines, metric)), None)


def tuned_config(config: RunConfig, base: RunConfig, best: dict[str, Any]) -> RunConfig:
    """The configuration with the best values, and with as many epochs as were best.

    The epochs stay where a run ends early by itself, or where its learning rates depend on them.
    """
    train = base.train
    if not train.patience and not base.optimizer.rates_follow_epochs:
        train = dataclasses.replace(train, epochs=best["best_epoch"])
    values = {key: best[key] for key in ("embedding_lr", "dense_lr", "l2")}
    return dataclasses.replace(with_values(base, values), train=train, data=config.data)


def _comment(
    lines: list[dict[str, Any]], best: dict[str, Any], search: Search, shared: RunConfig, ranges: dict[str, Range]
) -> str:
    states = [line["state"] for line in lines]
    counts = ", ".join(f"{states.count(each)} {each}" for each in ("complete", "pruned", "failed"))
    fraction = shared.train.validation_fraction
    samples = f"the last {fraction:g} of the training samples" if fraction else "the validation split"
    searched = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in ranges.items())
    return (
        f"found by cowrec tune at batch size {search.batch_size}: trial {best['trial'] + 1} of {len(lines)}"
        f" ({counts})\n"
        f"by the validation {search.metric}, on {samples}:"
        f" logloss {best['validation_logloss']:.5f}, AUC {best['validation_auc']:.5f}\n"
        f"after epoch {best['best_epoch']} of at most {shared.train.epochs}; searched {searched}; seed {search.seed};"
        f" commit {best['git_commit']}"
    )


def _keep_results(output: Path, lines: list[dict[str, Any]]) -> None:
    write_lines(output / RESULTS, lines)


def _in_short(line: dict[str, Any]) -> str:
    if "error" in line:
        return f": {line['error']}"
    return (
        f"  validation logloss {line['validation_logloss']:.5f}  AUC {line['validation_auc']:.5f}  epoch"
        f" {line['best_epoch']}"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
