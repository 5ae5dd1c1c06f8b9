"""Bad rows: samples of raw files that cannot be used; they are counted, or end the work."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cowrec.errors import UserError

from .inputs import Source

SKIP_ADVICE = '. To skip and count bad rows, set prepare.on_bad_row = "skip" (--set prepare.on_bad_row=skip)'


@dataclass(frozen=True)
class BadRow:
    """One sample of a raw file that cannot be used.

    Attributes:
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

    @property
    def reason(self) -> str:
        """What is wrong without the value, to count rows by."""
        return (f"column {self.column}: " if self.column else "") + self.problem.partition(", got ")[0]


class BadRowLedger:
    """Counts bad rows and raises an error at the first one, or at the first above a limit.

    Args:
        on_bad_row: "error" raises at the first bad row, "skip" leaves bad rows out.
        max_bad_rows: largest number of skipped rows over all files.

    Attributes:
        by_path, by_reason: skipped rows by file, and by what is wrong.
    """

    def __init__(self, on_bad_row: Literal["error", "skip"], max_bad_rows: int) -> None:
        self._skip, self._most = on_bad_row == "skip", max_bad_rows
        self.by_path: Counter[str] = Counter()
        self.by_reason: Counter[str] = Counter()

    def add(self, bad: Sequence[BadRow]) -> None:
        """Adds the bad rows of a partition, in order. Raises ValueError naming the first, or that above the limit."""
        if not bad:
            return
        if not self._skip:
            raise UserError(f"{bad[0]}{bad[0].advice}")
        allowed = self._most - self.by_path.total()
        self.by_path.update(row.source.path for row in bad)
        self.by_reason.update(row.reason for row in bad)
        if len(bad) > allowed:
            raise UserError(
                f"more than prepare.max_bad_rows = {self._most} bad rows: {self.by_path.total():,} so far"
                f" ({counts_text(self.by_reason)}); one of them: {bad[max(allowed, 0)]}"
            )


def counts_text(by_reason: Mapping[str, int]) -> str:
    """The numbers of bad rows by reason, the most frequent first, as text."""
    ordered = sorted(by_reason.items(), key=lambda each: -each[1])
    return "; ".join(f"{count:,}: {reason}" for reason, count in ordered[:10])
