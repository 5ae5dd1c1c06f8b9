"""Rows that cannot be used: where they are, what is wrong with them, and what is done about it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

OnBadRow = Literal["error", "skip"]


@dataclass(frozen=True)
class BadRow:
    """One row that is left out.

    Attributes:
        path: the raw file.
        line: in the file, from 1, the header counted.
        column: name of the raw column, empty where the whole line is at fault.
        problem: what is wrong, with the value and what was expected.
    """

    path: str
    line: int
    column: str
    problem: str

    def __str__(self) -> str:
        column = f", column {self.column}" if self.column else ""
        return f"{self.path}, line {self.line}{column}: {self.problem}"


class BadRowLedger:
    """Counts bad rows, and stops at the first one or at one too many.

    Args:
        on_bad_row: "error" stops at the first, "skip" goes on.
        max_bad_rows: how many may be skipped over all files.
    """

    def __init__(self, on_bad_row: OnBadRow, max_bad_rows: int) -> None:
        self._skip = on_bad_row == "skip"
        self._most = max_bad_rows
        self.by_path: Counter[str] = Counter()

    def add(self, bad: Sequence[BadRow]) -> None:
        """Takes the bad rows of a block. Raises ValueError naming the first in the file, or the one too many."""
        if not bad:
            return
        ordered = sorted(bad, key=lambda row: row.line)
        if not self._skip:
            raise ValueError(f'{ordered[0]}. To leave bad rows out and count them, set on_bad_row = "skip"')
        left = self._most - self.by_path.total()
        self.by_path.update(row.path for row in ordered)
        if len(ordered) > left:
            raise ValueError(f"more than max_bad_rows = {self._most} bad rows; the last: {ordered[max(left, 0)]}")
