"""Delimited text as columns of strings: pyarrow.csv reads it, after lines that pyarrow cannot set aside are removed."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from cowrec.errors import UserError

from .inputs import Block
from .layouts import Layout, encoding_problem

PARSE_BYTES = 1 << 19
"""Bytes that Arrow splits at a time; they fit into the processor's cache, which doubles its speed."""
SEPARATOR = b"\x1f"
"""Takes the place of a delimiter of several bytes: ASCII's unit separator."""
NEWLINE, RETURN = 10, 13


@dataclass(frozen=True)
class RawTable:
    """The samples of a block as typed columns, whose values are not checked yet.

    Attributes:
        table: the columns that the layout uses, R samples.
        places: number of each sample's line or row in its file, int64 [R].
        bad: by number, lines or rows that are no samples: the column, empty for the whole line, and what is wrong.
    """

    table: pa.Table
    places: np.ndarray
    bad: dict[int, tuple[str, str]]


def split_text(block: Block, layout: Layout) -> RawTable:
    """Splits a block of text into strings; an empty one is a missing value.

    Raises ValueError if a quoted value contains a newline, so that lines and samples do not correspond.
    """
    data, lines, longest, problems = filter_lines(block, layout.quote, layout.encoding)
    if layout.encoding:
        data, longest = data.decode(layout.encoding).encode(), 4 * longest
    path, columns = block.source.path, layout.columns_in(block.source)
    wanted = [name for name in layout.used_columns if name in columns]
    # Unused columns may have any name, even a repeated one.
    names = [name if name in wanted else f"unused {number}" for number, name in enumerate(columns)]
    bad = {line: ("", problem) for line, problem in problems.items()}
    wrong: list[tuple[int, int]] = []

    def on_invalid(row: pa.csv.InvalidRow) -> str:
        wrong.append((row.number - 1, row.actual_columns))
        return "skip"

    if not data:
        return RawTable(pa.table({name: pa.array([], pa.string()) for name in wanted}), lines, bad)
    delimiter = layout.delimiter
    if len(delimiter.encode()) > 1:  # which Arrow does not support
        if SEPARATOR in data:
            raise UserError(f"{path}, lines {lines[0]} to {lines[-1]}: the byte 0x1f is in the text; remove it")
        data, delimiter = data.replace(delimiter.encode(), SEPARATOR), SEPARATOR.decode()
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(data),
            pa.csv.ReadOptions(column_names=names, use_threads=False, block_size=max(PARSE_BYTES, 2 * longest)),
            pa.csv.ParseOptions(
                delimiter=delimiter,
                quote_char=layout.quote or False,
                ignore_empty_lines=False,
                invalid_row_handler=on_invalid,
            ),
            pa.csv.ConvertOptions(
                column_types=dict.fromkeys(wanted, pa.string()),
                include_columns=wanted,
                check_utf8=False,
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}, lines {lines[0]} to {lines[-1]}: {error}") from error
    if table.num_rows + len(wrong) != len(lines):
        raise UserError(_multiline_message(table, lines, path))
    hint = f" separated by {layout.delimiter!r}"
    for row, found in wrong:
        bad[int(lines[row])] = "", f"{found} columns, must be {len(names)}{hint if found == 1 else ''}"
    return RawTable(table, np.delete(lines, [row for row, _ in wrong]), bad)


def _multiline_message(table: pa.Table, lines: np.ndarray, path: str) -> str:
    first = len(lines) - 1
    for column in table.columns:
        broken = np.flatnonzero(pc.match_substring(column, "\n").to_numpy(zero_copy_only=False))
        first = min([first, *broken[:1].tolist()])
    return (
        f"{path}, line {lines[first]} or soon after: a quoted value contains a newline, which is not "
        'supported; replace such newlines in the file, or set quote = "" if quotes have no meaning'
    )


def filter_lines(block: Block, quote: str, encoding: str = "") -> tuple[bytes, np.ndarray, int, dict[int, str]]:
    """Removes lines that are empty or not of the encoding (UTF-8 by default), and lines with a lone carriage return.

    With a `quote`, lines of unbalanced quotes are removed too. Nearly always they are half of a record with a newline
    inside quotes, which is not supported: files are split at newlines, which keeps line numbers exact.

    Returns the text of the remaining lines, their numbers in the file, int64, an upper bound of the bytes of a line,
    and what is wrong with the removed lines by number.
    """
    assert isinstance(block.data, bytes)
    text = np.frombuffer(block.data, np.uint8)
    ends = np.flatnonzero(text == NEWLINE)
    problems: dict[int, str] = {}
    if quote:
        per_line = np.bincount(np.searchsorted(ends, np.flatnonzero(text == ord(quote))), minlength=len(ends))
        for line in np.flatnonzero(per_line % 2).tolist():
            problems[line] = (
                f"unbalanced quote {quote}; a newline inside quotes is not supported: replace it in the file, or set "
                'quote = "" in the schema file if quotes have no meaning'
            )
    returns = np.flatnonzero(text == RETURN)
    # Each line ends with a newline, so a byte follows each carriage return.
    for line in np.searchsorted(ends, returns[text[returns + 1] != NEWLINE]).tolist():
        problems[line] = "a carriage return inside the line; convert the file's line endings to newlines"
    starts = np.r_[0, ends[:-1] + 1]
    for line in np.flatnonzero((ends == starts) | ((ends == starts + 1) & (text[starts] == RETURN))).tolist():
        problems[line] = "the line is empty; remove it, or skip it as a bad row"
    for line, byte in _undecodable(block.data, ends, encoding or "utf-8"):
        problems[line] = encoding_problem(encoding, byte)
    lines = np.arange(block.first_place, block.first_place + len(ends))
    longest = int((ends - starts).max(initial=0)) + 1
    if not problems:
        return block.data, lines, longest, {}
    bad = np.asarray(sorted(problems))
    kept_from, kept_to = np.r_[0, ends[bad] + 1], np.r_[starts[bad], len(text)]
    data = b"".join(block.data[start:stop] for start, stop in zip(kept_from, kept_to, strict=True))
    return data, np.delete(lines, bad), longest, {int(lines[line]): problems[line] for line in bad.tolist()}


def _undecodable(data: bytes, ends: np.ndarray, encoding: str) -> list[tuple[int, int]]:
    """Returns the index and the first invalid byte of lines that are not of an encoding."""
    found: list[tuple[int, int]] = []
    if data.isascii():
        return found
    try:
        str(memoryview(data), encoding)
        return found
    except UnicodeDecodeError:
        pass
    starts = np.r_[0, ends[:-1] + 1]
    for line in np.unique(np.searchsorted(ends, np.flatnonzero(np.frombuffer(data, np.uint8) >= 0x80))).tolist():
        text = data[starts[line] : ends[line]]
        try:
            text.decode(encoding)
        except UnicodeDecodeError as error:
            found.append((line, text[error.start]))
    return found
