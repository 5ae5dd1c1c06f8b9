"""Raw text to a typed table: Arrow splits the lines of a block into columns of strings."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from cowrec.data_pipeline.raw_files.segments import Block

from .bad_rows import BadRow
from .layouts import Layout
from .line_filter import filter_lines

PARSE_BYTES = 1 << 19
"""Bytes that Arrow splits at a time; they fit into the processor's cache, which doubles its speed."""

SEPARATOR = b"\x1f"
"""Takes the place of a delimiter of several bytes: ASCII's unit separator."""


@dataclass(frozen=True)
class RawTable:
    """The samples of a block as typed columns, whose values are not checked yet.

    Attributes:
        table: the columns that the layout uses, R samples.
        places: number of each sample's line or row in its file, int64 [R].
        bad: lines or rows that are no samples.
    """

    table: pa.Table
    places: np.ndarray
    bad: list[BadRow]


def split_text(block: Block, layout: Layout) -> RawTable:
    """Splits a block of text into strings; an empty one is a missing value.

    Raises:
        ValueError: a quoted value contains a newline, so that lines and samples do not correspond.
    """
    filtered = filter_lines(block, layout.quote)
    lines, path, columns = filtered.lines, block.source.path, layout.columns_in(block.source)
    wanted = [name for name in layout.used_columns if name in columns]
    # Unused columns may have any name, even a repeated one.
    names = [name if name in wanted else f"unused {number}" for number, name in enumerate(columns)]
    wrong: list[tuple[int, int]] = []

    def on_invalid(row: pa.csv.InvalidRow) -> str:
        wrong.append((row.number - 1, row.actual_columns))
        return "skip"

    if not filtered.data:
        return RawTable(pa.table({name: pa.array([], pa.string()) for name in wanted}), lines, filtered.bad)
    data, delimiter = filtered.data, layout.delimiter
    if len(delimiter.encode()) > 1:  # which Arrow does not support
        if SEPARATOR in data:
            raise ValueError(f"{path}, lines {lines[0]} to {lines[-1]}: the byte 0x1f is in the text; remove it")
        data, delimiter = data.replace(delimiter.encode(), SEPARATOR), SEPARATOR.decode()
    try:
        table = pa.csv.read_csv(
            pa.BufferReader(data),
            pa.csv.ReadOptions(
                column_names=names, use_threads=False, block_size=max(PARSE_BYTES, 2 * filtered.longest)
            ),
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
        raise ValueError(f"{path}, lines {lines[0]} to {lines[-1]}: {error}") from error
    if table.num_rows + len(wrong) != len(lines):
        raise ValueError(_multiline_message(table, lines, path))
    hint = f" separated by {layout.delimiter!r}"
    bad = [
        BadRow(block.source, int(lines[row]), "", f"{found} columns, must be {len(names)}{hint if found == 1 else ''}")
        for row, found in wrong
    ]
    return RawTable(table, np.delete(lines, [row for row, _ in wrong]), filtered.bad + bad)


def _multiline_message(table: pa.Table, lines: np.ndarray, path: str) -> str:
    first = len(lines) - 1
    for column in table.columns:
        broken = np.flatnonzero(pc.match_substring(column, "\n").to_numpy(zero_copy_only=False))
        first = min([first, *broken[:1].tolist()])
    return (
        f"{path}, line {lines[first]} or soon after: a quoted value contains a newline, which is not "
        'supported; replace such newlines in the file, or set quote = "" if quotes have no meaning'
    )
