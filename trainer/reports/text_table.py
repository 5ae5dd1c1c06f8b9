"""Text tables for the terminal."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Aligns a table: the first column to the left, the others to the right, with two spaces between columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
