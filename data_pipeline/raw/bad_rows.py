"""Bad rows of raw files: their location, their problem, and the limit on how many are skipped."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cowrec.data_pipeline.raw_files.segments import Source

SKIP_ADVICE = '. To skip and count bad rows, set on_bad_row = "skip"'

OnBadRow = Literal["error", "skip"]


@dataclass(frozen=True)
class BadRow:
    """One sample of a raw file that cannot be used.

    Attributes:
        source: the raw file.
        number: number of its line in the file, from 1, counting the header; in Parquet and Arrow files of its row.
        column: raw column, or empty if the line as a whole is invalid.
        problem: what is wrong, with the value and what was expected.
        advice: what else to do than to correct the file; may be empty.
    """

    source: Source
    number: int
    column: str
    problem: str
    advice: str = SKIP_ADVICE

    def __str__(self) -> str:
        column = f", column {self.column}" if self.column else ""
        return f"{self.source.path}, {self.source.place} {self.number}{column}: {self.problem}"


class BadRowLedger:
    """Counts bad rows and raises an error at the first one, or at the first above a limit.

    Args:
        on_bad_row: "error" raises at the first bad row, "skip" leaves bad rows out.
        max_bad_rows: largest number of skipped rows over all files.
    """

    def __init__(self, on_bad_row: OnBadRow, max_bad_rows: int) -> None:
        self._skip = on_bad_row == "skip"
        self._most = max_bad_rows
        self.by_path: Counter[str] = Counter()

    def add(self, bad: Sequence[BadRow]) -> None:
        """Adds the bad rows of a block. Raises ValueError naming the first one, or the first above the limit."""
        if not bad:
            return
        ordered = sorted(bad, key=lambda row: row.number)
        if not self._skip:
            raise ValueError(f"{ordered[0]}{ordered[0].advice}")
        allowed = self._most - self.by_path.total()
        self.by_path.update(row.source.path for row in ordered)
        if len(ordered) > allowed:
            raise ValueError(f"more than max_bad_rows = {self._most} bad rows; the last: {ordered[max(allowed, 0)]}")
