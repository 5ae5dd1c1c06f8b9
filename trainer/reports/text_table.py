"""Text tables and numbers for the terminal."""

from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

_OF_SEGMENTS = {
    "rows": ("samples", ",d"),
    "ctr": ("ctr", ".4f"),
    "auc": ("AUC", ".4f"),
    "logloss": ("logloss", ".4f"),
    "normalized_entropy": ("norm. entropy", ".4f"),
    "calibration": ("calibration", ".3f"),
}
_LONGEST = 40


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Aligns a table: the first column to the left, the others to the right, with two spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def speed_text(samples_per_second: float | None) -> str:
    """A run's speed; NaN or None is that of a run of one step, whose first step, which compiles kernels, is all."""
    if samples_per_second is None or isnan(samples_per_second):
        return "too few steps to measure the speed"
    return f"{samples_per_second:,.0f} samples/s"


def segments_table(column: str, measured: Mapping[str, Any]) -> str:
    """A line for each listed group and for the rest, below a line with GAUC.

    Args:
        column: that the samples are grouped by.
        measured: of ``Segments.measure``.
    """
    rest = measured["rest"]
    others = f"other {measured['groups'] - len(measured['largest']):,}"
    lines = [*measured["largest"], *([{"id": others, **rest}] if rest else [])]
    rows = [[column, *(title for title, _ in _OF_SEGMENTS.values())]]
    rows += [
        [_short(line["id"]), *(_number(line[key], how) for key, (_, how) in _OF_SEGMENTS.items())] for line in lines
    ]
    return (
        f"GAUC by {column} {measured['gauc']:.4f}: {measured['groups_in_gauc']:,} of {measured['groups']:,} groups have"
        f" clicks and non-clicks, with {100 * measured['share_in_gauc']:.1f} % of the samples\n{aligned(rows)}"
    )


def _number(value: float, how: str) -> str:
    return "-" if isnan(value) else f"{value:{how}}"


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."
