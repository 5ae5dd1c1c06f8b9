"""A filter for lines that the CSV parser would misread or miscount."""

from dataclasses import dataclass

import numpy as np

from cowrec.data_pipeline.raw_files.segments import Block

from .bad_rows import BadRow

NEWLINE, RETURN = 10, 13


@dataclass(frozen=True)
class FilteredLines:
    """The lines of a block that the CSV parser can read.

    Attributes:
        data: text of the remaining lines.
        lines: their line numbers in the file, int64.
        longest: upper bound of the bytes of a line.
        bad: the removed lines.
    """

    data: bytes
    lines: np.ndarray
    longest: int
    bad: list[BadRow]


def filter_lines(block: Block, quote: str) -> FilteredLines:
    """Removes lines that are empty, not UTF-8, contain a lone carriage return or, given a `quote`, unbalanced quotes.

    A line with unbalanced quotes is nearly always half of a record with a newline inside quotes. Such records are not
    supported: files are split into blocks at newlines, which keeps line numbers exact.
    """
    assert isinstance(block.data, bytes)
    text = np.frombuffer(block.data, np.uint8)
    ends = np.flatnonzero(text == NEWLINE)
    problems: dict[int, str] = {}
    if quote:
        for line in _unbalanced(text, ends, ord(quote)):
            problems[line] = (
                f"unbalanced quote {quote}; a newline inside quotes is not supported: replace it in the file, or set "
                'quote = "" in the schema file if quotes have no meaning'
            )
    for line in _lone_returns(text, ends):
        problems[line] = "a carriage return inside the line; convert the file's line endings to newlines"
    for line in _empty(text, ends):
        problems[line] = "the line is empty; remove it, or skip it as a bad row"
    for line, byte in _not_utf8(block.data, ends):
        problems[line] = f"not UTF-8 (byte 0x{byte:02x}); convert the file to UTF-8 first"
    lines = np.arange(block.first_place, block.first_place + len(ends))
    starts = np.r_[0, ends[:-1] + 1]
    longest = int((ends - starts).max(initial=0)) + 1
    if not problems:
        return FilteredLines(block.data, lines, longest, [])
    bad = np.asarray(sorted(problems))
    kept_from, kept_to = np.r_[0, ends[bad] + 1], np.r_[starts[bad], len(text)]
    data = b"".join(block.data[start:stop] for start, stop in zip(kept_from, kept_to, strict=True))
    rows = [BadRow(block.source, int(lines[line]), "", problems[line]) for line in bad.tolist()]
    return FilteredLines(data, np.delete(lines, bad), longest, rows)


def _unbalanced(text: np.ndarray, ends: np.ndarray, quote: int) -> list[int]:
    """Returns the indices of lines with an odd number of quotes."""
    per_line = np.bincount(np.searchsorted(ends, np.flatnonzero(text == quote)), minlength=len(ends))
    return np.flatnonzero(per_line % 2).tolist()


def _lone_returns(text: np.ndarray, ends: np.ndarray) -> list[int]:
    """Returns the indices of lines with a carriage return before their end."""
    returns = np.flatnonzero(text == RETURN)
    # Each line ends with a newline, so a byte follows each carriage return.
    lone = returns[text[returns + 1] != NEWLINE]
    return np.unique(np.searchsorted(ends, lone)).tolist()


def _empty(text: np.ndarray, ends: np.ndarray) -> list[int]:
    """Returns the indices of lines without text."""
    starts = np.r_[0, ends[:-1] + 1]
    lengths = ends - starts
    return np.flatnonzero((lengths == 0) | ((lengths == 1) & (text[starts] == RETURN))).tolist()


def _not_utf8(data: bytes, ends: np.ndarray) -> list[tuple[int, int]]:
    """Returns (line index, first invalid byte) of lines that are not UTF-8; decodes again after each of them."""
    found: list[tuple[int, int]] = []
    start = 0
    if data.isascii():
        return found
    while start < len(data):
        try:
            str(memoryview(data)[start:], "utf-8")
            break
        except UnicodeDecodeError as error:
            position = start + error.start
            line = int(np.searchsorted(ends, position))
            found.append((line, data[position]))
            start = int(ends[line]) + 1
    return found
