"""Results of a sweep as text: measures by batch size, mean and deviation over seeds, and differences from the base."""

from collections.abc import Sequence
from math import isfinite
from statistics import mean

from cowrec.trainer.reports.plotting import size_name
from cowrec.trainer.reports.text_table import aligned

from .comparison import (
    FEW_STEPS,
    MEASURES,
    Lines,
    base_batch_size,
    base_values,
    deviation,
    series,
    shown_measures,
    steps_by_batch_size,
    too_few_steps,
    verdict,
)


def table(lines: Lines) -> str:
    """Two tables for each measure, its values and their differences from the base, and notes on how to read them.

    AUC is in percent, its differences are in points of 100 * AUC. Lines are curves, columns are batch sizes.
    """
    blocks = []
    for number, measure in enumerate(shown_measures(lines)):
        blocks += [_values(lines, measure, with_steps=number == 0), _differences(lines, measure)]
    return "\n\n".join(filter(None, [*blocks, _notes(lines)]))


def few_steps_warning(batch_size: int, steps: int) -> str:
    return f"warning: batch {size_name(batch_size)} has {steps} steps, below {FEW_STEPS}: too few steps to judge a rule"


def _values(lines: Lines, measure: str, *, with_steps: bool) -> str:
    """Mean and standard deviation over seeds of each curve and batch size."""
    how, seeds = MEASURES[measure], len({line["seed"] for line in lines})
    sizes = sorted({line["batch_size"] for line in lines})
    rows = [[how.label + how.unit, *map(size_name, sizes)]]
    if with_steps:
        steps = steps_by_batch_size(lines)
        rows.append(["steps", *(f"{steps[size]:,}" if size in steps else "" for size in sizes)])
    for (rule, clip), by_size in series(lines, measure).items():
        cells = [[how.factor * value for value in by_size.get(size, [])] for size in sizes]
        rows.append([f"{rule}, clip {clip}", *(_with_spread(cell, how.form, seeds) for cell in cells)])
    return aligned(rows)


def _differences(lines: Lines, measure: str) -> str:
    """Mean of each curve and batch size minus the mean of the base with the same clip; empty without a base."""
    how, base, values_of_base = MEASURES[measure], base_batch_size(lines), base_values(lines, measure)
    sizes = sorted({line["batch_size"] for line in lines} - {base})
    if base is None or not values_of_base or not sizes:
        return ""
    rows = [[f"{how.label} minus batch {size_name(base)}'s{how.unit_of_difference}", *map(size_name, sizes)]]
    for (rule, clip), by_size in series(lines, measure).items():
        at_base = values_of_base.get(clip, [])
        cells = []
        for size in sizes:
            values = by_size.get(size)
            if not values or not at_base:
                cells.append("")
                continue
            difference = how.factor * (mean(values) - mean(at_base))
            cells.append(
                f"{difference:+{how.form}} {verdict(values, at_base, higher_is_better=how.higher_is_better)}".strip()
            )
        rows.append([f"{rule}, clip {clip}", *cells])
    return aligned(rows)


def _notes(lines: Lines) -> str:
    base = base_batch_size(lines)
    if base is None:
        return ""
    notes = [
        few_steps_warning(size, steps)
        for size, steps in steps_by_batch_size(lines).items()
        if too_few_steps(size, steps, base)
    ]
    at_base = base_values(lines, "auc")
    if not any(line["batch_size"] == base for line in lines):
        notes.append(f"The base, batch {size_name(base)}, is not in this sweep; add it to see what a batch loses.")
    elif not at_base:
        notes.append(f"No run of the base, batch {size_name(base)}, has an AUC, so there are no differences.")
    else:
        notes.append(f"At the base, batch {size_name(base)}, all rules are one run, trained once for each seed.")
        if max(map(len, at_base.values())) > 1:
            notes.append(
                "within: the mean is within one standard deviation of the base over its seeds, else lost or better"
            )
        else:
            notes.append(
                "The base has one seed, so its spread is unknown; give --seeds 3 or more to judge differences."
            )
    return "\n".join(notes)


def _with_spread(values: Sequence[float], form: str, seeds: int) -> str:
    """Text such as ``80.90 ± 0.02``, with the number of seeds if some failed."""
    if not values:
        return "failed"
    spread = deviation(values)
    text = f"{mean(values):{form}}" + (f" ± {spread:{form}}" if isfinite(spread) else "")
    return text if len(values) == seeds else f"{text} ({len(values)} of {seeds})"
