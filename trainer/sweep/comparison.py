"""Measures of a sweep's runs, compared with the base: the runs at the base batch size, where all rules are one run."""

from collections.abc import Sequence
from math import isnan, nan
from statistics import mean, stdev
from typing import Any, NamedTuple

Lines = Sequence[dict[str, Any]]

FEW_STEPS = 200
"""With fewer steps than this, a large batch shows how short the run is, not how good its scaling rule."""

_CLEARLY = 0.001
"""AUC by which the best epoch must exceed the last one to be shown: 0.1 points, which 100,000 test samples resolve."""


class Measure(NamedTuple):
    """How a measure is shown.

    Attributes:
        label: its name.
        unit: unit of the values.
        unit_of_difference: unit of differences from the base.
        factor: shown values are the lines' values times this.
        form: format of the shown values.
        best_possible: key of the value of the true probabilities.
        higher_is_better: whether a higher value is better.
    """

    label: str
    unit: str
    unit_of_difference: str
    factor: float
    form: str
    best_possible: str
    higher_is_better: bool


MEASURES = {
    "auc": Measure("test AUC", " (%)", " in points", 100, ".2f", "auc", True),
    "best_epoch_auc": Measure("test AUC of the best epoch", " (%)", " in points", 100, ".2f", "auc", True),
    "logloss": Measure("test logloss", "", "", 1, ".4f", "logloss", False),
    "expected_logloss": Measure("expected logloss", "", "", 1, ".4f", "expected_logloss", False),
}

Curve = tuple[str, str]
"""Scaling rule, and clip: "on" or "off"."""

Series = dict[Curve, dict[int, list[float]]]
"""Curve -> batch size -> values of the seeds whose runs succeeded."""


def shown_measures(lines: Lines) -> list[str]:
    """The measures worth showing: AUC and logloss, and the others if a run has them or differs in them."""
    shown = ["auc", "logloss"]
    if any((line.get("best_epoch_auc") or 0) > (line.get("auc") or 1) + _CLEARLY for line in lines):
        shown.insert(1, "best_epoch_auc")
    if any(line.get("expected_logloss") is not None for line in lines):
        shown.append("expected_logloss")
    return shown


def series(lines: Lines, measure: str) -> Series:
    """A measure of a sweep's lines by curve and batch size; a batch size whose runs all failed has no values."""
    found: Series = {}
    for line in lines:
        values = found.setdefault((line["rule"], line["clip"]), {}).setdefault(line["batch_size"], [])
        if line.get(measure) is not None:
            values.append(line[measure])
    return found


def base_batch_size(lines: Lines) -> int | None:
    """The base batch size, or None if the lines are older than this value."""
    return next((line["base_batch_size"] for line in lines if "base_batch_size" in line), None)


def base_values(lines: Lines, measure: str) -> dict[str, list[float]]:
    """The base's values of a measure over seeds, for clip on and off. Empty if no run at the base batch succeeded."""
    size = base_batch_size(lines)
    # The lines of all rules are copies of one run here.
    by_seed = {
        (line["clip"], line["seed"]): line[measure]
        for line in lines
        if line["batch_size"] == size and line.get(measure) is not None
    }
    values: dict[str, list[float]] = {}
    for (clip, _), value in by_seed.items():
        values.setdefault(clip, []).append(value)
    return values


def steps_by_batch_size(lines: Lines) -> dict[int, int]:
    """Training steps at each batch size; without those whose runs all failed."""
    steps = dict.fromkeys(sorted({line["batch_size"] for line in lines}), 0)
    for line in lines:
        steps[line["batch_size"]] = max(steps[line["batch_size"]], line.get("steps") or 0)
    return {size: number for size, number in steps.items() if number}


def too_few_steps(batch_size: int, steps: int, base: int | None) -> bool:
    """Whether a batch larger than the base has too few steps to judge a scaling rule."""
    return steps < FEW_STEPS and base is not None and batch_size > base


def deviation(values: Sequence[float]) -> float:
    """The standard deviation over seeds; NaN for a single one."""
    return stdev(values) if len(values) > 1 else nan


def verdict(values: Sequence[float], base: Sequence[float], *, higher_is_better: bool) -> str:
    """Whether a mean is outside one standard deviation of the base: "lost", "better", or "within" if it is not.

    Empty if the base has a single value, so that its deviation is unknown.
    """
    difference, spread = mean(values) - mean(base), deviation(base)
    if isnan(spread):
        return ""
    if abs(difference) <= spread:
        return "within"
    return "better" if (difference > 0) == higher_is_better else "lost"
