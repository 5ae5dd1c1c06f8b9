"""The measures of groups of samples as a text table."""

from collections.abc import Mapping
from math import isnan
from typing import Any

from .text_table import aligned

_COLUMNS = {
    "rows": ("samples", ",d"),
    "ctr": ("ctr", ".4f"),
    "auc": ("AUC", ".4f"),
    "logloss": ("logloss", ".4f"),
    "normalized_entropy": ("norm. entropy", ".4f"),
    "calibration": ("calibration", ".3f"),
}
_LONGEST = 40


def segments_table(column: str, measured: Mapping[str, Any]) -> str:
    """A line for each listed group and for the rest, below a line with GAUC.

    Args:
        column: that the samples are grouped by.
        measured: of ``Segments.measure``.
    """
    rest = measured["rest"]
    others = f"other {measured['groups'] - len(measured['largest']):,}"
    lines = [*measured["largest"], *([{"id": others, **rest}] if rest else [])]
    rows = [[column, *(title for title, _ in _COLUMNS.values())]]
    rows += [[_short(line["id"]), *(_number(line[key], how) for key, (_, how) in _COLUMNS.items())] for line in lines]
    return (
        f"GAUC by {column} {measured['gauc']:.4f}: {measured['groups_in_gauc']:,} of {measured['groups']:,} groups have"
        f" clicks and non-clicks, with {100 * measured['share_in_gauc']:.1f} % of the samples\n{aligned(rows)}"
    )


def _number(value: float, how: str) -> str:
    return "-" if isnan(value) else f"{value:{how}}"


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."
