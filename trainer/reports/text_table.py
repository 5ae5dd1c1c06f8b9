"""Text tables and numbers for the terminal."""

from collections.abc import Sequence
from math import isnan


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
