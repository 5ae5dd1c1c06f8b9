"""The beginning of a raw file as columns of text, and how it is delimited."""

import csv
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

from cowrec.data_pipeline.raw.numbers import NUMBER_PATTERN
from cowrec.data_pipeline.raw_files.inputs import find_inputs
from cowrec.data_pipeline.raw_files.reading import look
from cowrec.data_pipeline.raw_files.text import BYTE_ORDER_MARK, RawText

SAMPLE_BYTES = 8 << 20
SAMPLE_ROWS = 50_000
DELIMITERS = ",\t;|"
PROBED_LINES = 200


@dataclass(frozen=True)
class RawSample:
    """The first rows of a file.

    Attributes:
        columns: names, possibly repeated; invented if the file has no header.
        rows: values as text, empty where null; None for a list.
        delimiter, quote, header: as in a schema file; of Parquet and Arrow files the defaults.
        notes: what is unsure.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str | None, ...]]
    delimiter: str = ","
    quote: str = '"'
    header: bool = True
    notes: tuple[str, ...] = ()


def read_sample(path: str | os.PathLike[str]) -> RawSample:
    """Reads the first rows of a text, Parquet or Arrow file.

    Raises:
        ValueError: the file cannot be read, or is text without columns.
    """
    files = find_inputs([os.fspath(path)])
    source, types = look(files[0])
    if types is None:
        return _text_sample(source.path)
    if source.format == "parquet":
        batches = pq.ParquetFile(source.path).iter_batches(SAMPLE_ROWS)
        table = pa.Table.from_batches([next(batches)]) if types and (batches := iter(batches)) else pa.table({})
    else:
        table = pa.feather.read_table(source.path, memory_map=True).slice(0, SAMPLE_ROWS)
    columns = [_texts(column) for column in table.columns]
    return RawSample(tuple(table.column_names), list(zip(*columns, strict=True)))


def _texts(column: pa.ChunkedArray) -> list[str | None]:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_nested(column.type):
        return [None] * len(column)
    return ["" if value is None else value for value in column.cast(pa.string()).to_pylist()]


def _text_sample(path: str) -> RawSample:
    with RawText(path) as text:
        data = text.read(SAMPLE_BYTES)
        complete = len(data) < SAMPLE_BYTES
    data = data.removeprefix(BYTE_ORDER_MARK)
    data = data if complete else data[: data.rfind(b"\n") + 1]
    lines = [line.removesuffix("\r") for line in data.decode(errors="replace").split("\n") if line.strip("\r")]
    if not lines:
        raise ValueError(f"input file {path} has no samples")
    notes = _encoding_notes(data, path)
    odd = sum(line.count('"') % 2 for line in lines)
    quote = "" if odd > len(lines) / 100 else '"'
    if odd:
        meaning = "so quotes seem to have no meaning" if not quote else "which `prepare` reports as bad lines"
        notes.append(f"{odd} lines of the sample have an odd number of quotes, {meaning}")
    delimiter, width = _delimiter(lines[:PROBED_LINES], quote, path)
    rows = [row for row in _split(lines[: SAMPLE_ROWS + 1], delimiter, quote) if len(row) == width]
    wrong = min(len(lines), SAMPLE_ROWS + 1) - len(rows)
    if wrong:
        notes.append(f"{wrong} lines of the sample do not have {width} columns; `prepare` reports them as bad lines")
    header, sure = _header(rows)
    if not sure:
        notes.append(f"the first line {'looks like a header' if header else 'looks like a sample'}, but check `header`")
    columns = rows[0] if header else tuple(f"column{number}" for number in range(1, width + 1))
    return RawSample(columns, [*rows[header:]], delimiter, quote, header, tuple(notes))


def _encoding_notes(data: bytes, path: str) -> list[str]:
    """A note on lines that are not UTF-8. Raises ValueError if that is the first one, which may be a header."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        problem = f"line {number}: not UTF-8 (byte 0x{data[error.start]:02x})"
        if number == 1:
            raise ValueError(f"{path}, {problem}; convert the file to UTF-8 first") from error
        return [f"{problem}; `prepare` refuses such lines, convert the file to UTF-8 first"]
    return []


def _split(lines: Sequence[str], delimiter: str, quote: str) -> list[tuple[str, ...]]:
    rows = []
    for line in lines:
        if quote and quote in line:
            rows.append(tuple(next(csv.reader([line], delimiter=delimiter, quotechar=quote), [])))
        else:
            rows.append(tuple(line.split(delimiter)))
    return rows


def _delimiter(lines: Sequence[str], quote: str, path: str) -> tuple[str, int]:
    """Returns the delimiter that divides most lines alike, into most columns, and their number."""
    found = []
    for delimiter in DELIMITERS:
        width, count = Counter(len(row) for row in _split(lines, delimiter, quote)).most_common(1)[0]
        if width > 1:
            found.append((count, width, delimiter))
    if not found:
        raise ValueError(f"{path}: no delimiter found among {DELIMITERS!r}; write the schema file by hand")
    _, width, delimiter = max(found, key=lambda each: each[:2])
    return delimiter, width


def _header(rows: Sequence[Sequence[str]]) -> tuple[bool, bool]:
    """Returns whether the first row is a header, and whether that is sure."""
    first, others = rows[0], rows[1 : PROBED_LINES + 1]
    if not all(first) or any(NUMBER_PATTERN.fullmatch(text) for text in first):
        return False, True
    if not others:
        return len(set(first)) == len(first), False
    columns = list(zip(*others, strict=True))
    numbers = [all(NUMBER_PATTERN.fullmatch(text) or not text for text in column) for column in columns]
    if any(numbers):
        return True, True
    if len(set(first)) < len(first):
        return False, True
    return not any(name in column for name, column in zip(first, columns, strict=True)), False
