"""The first rows of a raw file as columns of text: delimiter, quotes, header, and what types of columns say."""

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cowrec.errors import UserError

from ..raw.columns import UNMARKED, label_value
from ..raw.inputs import Source, find_inputs, partition_of
from ..raw.json_lines import parsed_lines
from ..raw.reading import look, naming_file, open_groups
from ..raw.schema_file import unescaped
from ..raw.tables import flattened, require_offsets
from ..raw.text import BYTE_ORDER_MARK, RawText
from ..raw.values import LOOKS_MISSING, NUMBER_PATTERN, as_id_text, is_text, plain_array, with_point
from .columns import ID_NAME, LABEL_NAMES, TIME_NAME, VECTORS

SAMPLE_BYTES = 8 << 20
SAMPLE_ROWS = 50_000
DELIMITERS = ",\t;|\x01"
SVM_LINE = re.compile(r"[-+]?[0-9.]+([ \t]+(qid:)?[0-9]+:[-+0-9.eE:]+)+ *(#.*)?")
"""A line of libsvm, `label index:value ...`, or of libffm, `label field:index:value ...`."""
PROBED_LINES = 200
LONG_TEXT = 60
"""Characters of a value that a message shows."""
ESCAPED = '\\", which CSV does not know; write the file with such quotes twice, "" (Spark: escape = "\\"")'


@dataclass(frozen=True)
class RawSample:
    """The first rows of a file.

    Attributes:
        columns: names, possibly repeated; invented if the file has no header.
        values: for each column, its values as text, empty where null, None for a list; numbers have a decimal point.
        delimiter, quote, header, encoding, decimal: as in a schema file; the defaults for Parquet and Arrow files.
        notes: what is unsure.
        types: what the types of columns say: "time", "id", a kind of lists, `VECTORS` with a width, or that the values
            are not read.
        path: the file, the first one of a folder.
        whole: True if these are all rows of the only file.
        is_text: whether delimiter, quote, header and encoding mean something for the file.
        partition: further columns that the folders of all files give, with a value for each file, see `partition_of`.
    """

    columns: tuple[str, ...]
    values: Sequence[Sequence[str | None]]
    delimiter: str = ","
    quote: str = '"'
    header: bool = True
    notes: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    path: str = ""
    whole: bool = True
    partition: Mapping[str, list[str]] = field(default_factory=dict)
    encoding: str = ""
    decimal: str = "."
    is_text: bool = True

    @property
    def rows(self) -> int:
        return len(self.values[0]) if self.values else 0

    @property
    def scope(self) -> str:
        """What the rows are, in words; empty if they are all."""
        return "" if self.whole else f" in the first {self.rows:,} rows"


def read_sample(path: str | os.PathLike[str], label: str = "", delimiter: str = "") -> RawSample:
    """Reads the first rows of a file, or of the first one of a folder; a first line with the label's name is a header.

    The `delimiter` of text is found if it is empty. Raises ValueError if the file cannot be read or has no columns.
    """
    files = find_inputs([os.fspath(path)])
    source, types = look(files[0])
    if source.format == "json":
        found = _json_sample(source.path, label)
    else:
        found = _text_sample(source.path, label, delimiter) if types is None else _table_sample(source, types, label)
    given = [dict(partition_of(file)) for file in files]
    partition = {name: [own.get(name) or "" for own in given] for name in given[0] if name not in found.columns}
    return replace(
        found,
        path=source.path,
        is_text=source.format == "text",
        whole=found.whole and len(files) == 1,
        partition=partition,
    )


def _table_sample(source: Source, types: pa.Schema, label: str) -> RawSample:
    batches, rows = list[pa.RecordBatch](), 0
    with naming_file(source.path), closing(open_groups(source.path, source.format)) as file:
        for batch in file.iter_batches(SAMPLE_ROWS):  # an Arrow file may have batches of a few rows
            require_offsets(pa.Table.from_batches([batch]))
            batches.append(batch)
            if (rows := rows + batch.num_rows) > SAMPLE_ROWS:
                break
    table = flattened(pa.Table.from_batches(batches, batches[0].schema if batches else types)).slice(0, SAMPLE_ROWS)
    values = dict(zip(table.column_names, table.columns, strict=True))
    said = {column.name: _said(column.type, values[column.name]) for column in types}
    # Text beside numbers is no number. Where no field is one, whoever wrote the file may have kept no types.
    keeps_types = any(_is_number(column.type) for column in types if not _is_label(column.name, label))
    by_pandas = (types.pandas_metadata or {}).get("columns", ())  # Parquet keeps categories of text alone
    categories = {column.get("field_name") for column in by_pandas if column.get("pandas_type") == "categorical"}
    for name, kind in zip(types.names, types.types, strict=True):
        if name in categories or pa.types.is_dictionary(kind) or (keeps_types and is_text(kind)):
            said[name] = said[name] or "id"
    texts = [_texts(column) for column in table.columns]
    return RawSample(tuple(table.column_names), texts, types=said, whole=rows <= SAMPLE_ROWS)


def _is_label(name: str, label: str) -> bool:
    return name == label or name.lower() in LABEL_NAMES


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _said(kind: pa.DataType, values: pa.ChunkedArray) -> str:
    """Returns what a type says of its values, see `RawSample`; "" if it says nothing."""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "time"
    if pa.types.is_map(kind) and _are_ids(kind.key_type) and _is_number(kind.item_type):
        return "weighted"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        types = {part.name: part.type for part in kind.value_type} if pa.types.is_struct(kind.value_type) else {}
        if {"id", "weight"} <= types.keys() and _are_ids(types["id"]) and _is_number(types["weight"]):
            return "weighted"
        if not types and _are_ids(kind.value_type):
            return _said_of_floats(kind, values) if pa.types.is_floating(kind.value_type) else "multi"
    return "" if _are_ids(kind) else f"values of the type {kind}, which are not read"


def _said_of_floats(kind: pa.DataType, values: pa.ChunkedArray) -> str:
    """Returns what lists of floats are: ids if all are whole, else vectors if all lists have one width."""
    if pa.types.is_fixed_size_list(kind):
        return f"{VECTORS}{kind.list_size}"
    numbers = pc.list_flatten(values).cast(pa.float32() if pa.types.is_float16(kind.value_type) else kind.value_type)
    if pc.all(pc.equal(pc.floor(numbers), numbers)).as_py() is not False:
        return "multi"
    widths = {*pc.list_value_length(values).drop_null().unique().to_pylist()} - {0}
    return (
        f"{VECTORS}{widths.pop()}" if len(widths) == 1 else "lists of different numbers of floats, which are not read"
    )


def _are_ids(kind: pa.DataType) -> bool:
    return as_id_text(plain_array(pa.nulls(0, kind))) is not None


def _texts(column: pa.ChunkedArray) -> list[str | None]:
    """Returns values as text; None for lists and for bytes that are no UTF-8."""
    try:
        found = [_text(plain_array(chunk)).to_pylist() for chunk in column.chunks]
        return ["" if value is None else value for values in found for value in values]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return [None] * len(column)


def _text(values: pa.Array) -> pa.Array:
    """Returns values as text; whole numbers have no exponents, as in the ids that they become."""
    ids = as_id_text(values) if _is_number(values.type) else None
    return values.cast(pa.string()) if ids is None else ids[0]


@contextmanager
def _values_of_any_length() -> Iterator[None]:
    """Lifts the limit of Python's reader of CSV."""
    limit = csv.field_size_limit(SAMPLE_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _beginning(path: str) -> tuple[bytes, bool]:
    """Returns the first lines of text, and whether they are all."""
    with closing(RawText(path)) as text:
        data = text.read(SAMPLE_BYTES)
    complete = len(data) < SAMPLE_BYTES
    data = data.removeprefix(BYTE_ORDER_MARK)
    return data if complete or b"\n" not in data else data[: data.rfind(b"\n") + 1], complete


def _json_sample(path: str, label: str) -> RawSample:
    data, complete = _beginning(path)
    lines = [line for line in data.split(b"\n") if line.strip()]
    objects = [sample for sample in parsed_lines(lines[:SAMPLE_ROWS]) if isinstance(sample, dict)]
    if not objects:
        raise UserError(f"{path}: none of its first lines is a JSON object")
    columns = _columns(objects)
    said = {name: _said_by(values) for name, values in columns.items()}
    keeps_types = any(said[name] == "number" for name in columns if not _is_label(name, label))
    meaning = {"number": "", "text": "id" if keeps_types else ""}
    types = {name: meaning.get(kind, kind) for name, kind in said.items()}
    malformed = len(lines[:SAMPLE_ROWS]) - len(objects)
    notes = (f"{malformed} lines of the sample are no JSON objects",) * bool(malformed)
    texts = [[_json_text(value) for value in values] for values in columns.values()]
    whole = complete and len(lines) <= SAMPLE_ROWS
    return RawSample(tuple(columns), texts, notes=notes, types=types, whole=whole)


def _columns(objects: Sequence[Mapping[str, Any] | None]) -> dict[str, list[Any]]:
    """Returns the values of each column of objects, and of objects within them, unless these are weights by id."""
    names = dict.fromkeys(name for sample in objects for name in sample or ())
    found: dict[str, list[Any]] = {}
    for name in names:
        values = [sample and sample.get(name) for sample in objects]
        given = [value for value in values if value is not None]
        if given and all(isinstance(value, dict) for value in given) and not _are_maps(given):
            inner = _columns([value or None for value in values]).items()
            found |= {f"{name}.{key}": within for key, within in inner if f"{name}.{key}" not in names}
        else:
            found[name] = values
    return found


def _are_maps(objects: Sequence[Mapping[str, Any]]) -> bool:
    """True if the keys of objects differ so much that they are no names of columns."""
    keys = {key for sample in objects for key in sample}
    return (2 if _have_numbers(objects) else 20) * sum(map(len, objects)) < len(keys) * len(objects)


def _have_numbers(objects: Sequence[Mapping[str, Any]]) -> bool:
    return all(type(value) in (int, float) for sample in objects for value in sample.values())


def _said_by(values: Sequence[Any]) -> str:
    """Returns what the types of JSON values say: "number", "text", or as in `RawSample`."""
    types = {type(value) for value in values if value is not None}
    if types <= {int, float, bool}:
        return "number" if types - {bool} else ""
    if types == {dict}:
        return "weighted" if _have_numbers([value for value in values if value]) else "objects, which are not read"
    if not types & {list, dict}:
        return "text"
    try:
        found = pa.array([value for value in values if value])
        return _said(found.type, pa.chunked_array([found]))
    except pa.ArrowInvalid:
        items = [item for value in values if isinstance(value, list) for item in value]
        of_scalars = not any(isinstance(item, (list, dict)) for item in items)
        return "multi" if of_scalars and dict not in types else "values of several types, which are not read"


def _json_text(value: Any) -> str | None:
    """Returns a value of JSON as text; None for lists and objects."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, (list, dict)):
        return None
    return label_value(int(value) if isinstance(value, float) and value.is_integer() else value, UNMARKED)


@_values_of_any_length()
def _text_sample(path: str, label: str, asked: str) -> RawSample:
    data, complete = _beginning(path)
    encoding = _encoding(data)
    text = data.decode(encoding or "utf-8", errors="replace")
    lines = [line.removesuffix("\r") for line in text.split("\n") if line.strip("\r")]
    if not lines:
        raise UserError(f"input file {path} has no samples")
    notes = list[str]()
    if encoding:
        notes.append(
            f"the text is not UTF-8 and was read as {encoding}, of Western Europe; if words look wrong, name another"
            ' encoding, such as "cp1250", "cp1251", "gbk" or "shift_jis"'
        )
    if "\r" in lines[0]:
        raise UserError(f"{path}, line 1: a carriage return inside the line; convert its line endings to newlines")
    odd = sum(line.count('"') % 2 for line in lines)
    quote = "" if odd > len(lines) / 100 else '"'
    if odd:
        _refuse_newlines(lines, path)
    if odd and not quote:
        notes.append(f"{odd} lines of the sample have an odd number of quotes, so quotes seem to have no meaning")
    if not asked and all(map(SVM_LINE.fullmatch, lines[:PROBED_LINES])):
        raise UserError(
            f"{path} is in the format of libsvm or libffm; write a table with a column for each field, such as a"
            " Parquet file, in which the field's value of a sample is the index of its feature"
        )
    delimiter, width = _delimiter(lines[:PROBED_LINES], quote, path, unescaped(asked))
    quote = "" if len(delimiter) > 1 else quote
    if quote and (escaped := sum('\\"' in line for line in lines)):
        notes.append(f"{escaped} lines of the sample have {ESCAPED}")
    rows = [row for row in _split(lines[: SAMPLE_ROWS + 1], delimiter, quote) if len(row) == width]
    if (first := len(_split(lines[:1], delimiter, quote)[0])) != width:
        raise UserError(f"{path}, line 1: {first} columns, but {width} in most lines; remove what is above the table")
    header, sure = (True, True) if label and label in rows[0] else _header(rows)
    if not sure:
        notes.append(f"the first line {'looks like a header' if header else 'looks like a sample'}, but check `header`")
    columns = rows[0] if header else tuple(f"column{number}" for number in range(1, width + 1))
    whole = complete and len(lines) <= SAMPLE_ROWS + 1
    values, decimal = _with_points([*zip(*rows[header:], strict=True)] or [()] * width)
    found = RawSample(columns, values, delimiter, quote, header, tuple(notes), whole=whole)
    return replace(found, encoding=encoding, decimal=decimal)


def _encoding(data: bytes) -> str:
    """Returns the likeliest encoding of text. The name is empty for UTF-8, even if single lines are damaged."""
    try:
        data.decode()
        return ""
    except UnicodeDecodeError:
        lines = [line for line in data.split(b"\n") if not line.isascii()]
    if 2 * sum("\ufffd" in line.decode(errors="replace") for line in lines) <= len(lines):
        return ""
    try:
        data.decode("cp1252")
        return "cp1252"
    except UnicodeDecodeError:
        return "latin-1"


def _with_points(columns: Sequence[Sequence[str]]) -> tuple[list[Sequence[str | None]], str]:
    """Returns columns with a decimal point in their numbers, and the decimal sign that they had."""
    commas = [index for index, values in enumerate(columns) if _have_commas(values)]
    others = {text for index, values in enumerate(columns) if index not in commas for text in values if "." in text}
    if not commas or any(map(NUMBER_PATTERN.fullmatch, others)):
        return [*columns], "."
    pointed: list[Sequence[str | None]] = [*columns]
    for index in commas:
        pointed[index] = [text if text.lower() in LOOKS_MISSING else with_point(text) for text in columns[index]]
    return pointed, ","


def _have_commas(values: Sequence[str]) -> bool:
    """Returns whether values are numbers, some of which have a decimal comma and not only commas between thousands."""
    known = [text for text in {*values} if text and text.lower() not in LOOKS_MISSING]
    fractions = [text for text in known if "," in text]
    numbers = all(NUMBER_PATTERN.fullmatch(with_point(text)) for text in known)
    return numbers and not all(re.fullmatch(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+", text) for text in fractions)


def _refuse_newlines(lines: Sequence[str], path: str) -> None:
    """Raises ValueError if the lines are parts of records with newlines inside quotes, by any delimiter."""
    for delimiter in DELIMITERS:
        records = list(csv.reader(io.StringIO("\n".join(lines)), delimiter=delimiter))[:-1]  # the last may be cut
        broken = next((value for record in records for value in record if "\n" in value), "")
        if broken and len({len(record) for record in records} - {1}) == 1 < len(records[0]):
            if '\\"' in broken:
                raise UserError(f"{path}: quotes within quotes are written as {ESCAPED}")
            raise UserError(
                f"{path}: a quoted value contains a newline ({broken[:LONG_TEXT]!r}), which is not supported; replace"
                " such newlines in the file, or write it as Parquet"
            )


def _split(lines: Sequence[str], delimiter: str, quote: str) -> list[tuple[str, ...]]:
    def split(line: str) -> Sequence[str]:
        quoted = quote and quote in line
        return next(csv.reader([line], delimiter=delimiter, quotechar=quote), []) if quoted else line.split(delimiter)

    return [tuple(split(line)) for line in lines]


def _delimiter(lines: Sequence[str], quote: str, path: str, asked: str) -> tuple[str, int]:
    """Returns the delimiter that divides most lines alike, or the one asked for, and the number of columns."""
    long = [] if quote and any(quote in line for line in lines) else [", ", "; ", "::"]  # quotes need one character
    among = [asked] if asked else [*long, *DELIMITERS]
    widths = {
        tried: Counter(map(len, _split(lines, tried, quote if len(tried) == 1 else ""))).most_common(1)[0]
        for tried in among
    }
    delimiter = max(among, key=lambda tried: (widths[tried][0] > 1, widths[tried][1], widths[tried][0]))
    width, _ = widths[delimiter]
    if width == 1:
        raise UserError(
            f"{path}: no delimiter found among {', '.join(map(repr, among))}; name it with --delimiter,"
            " such as --delimiter ' '; if it has no samples, name the files that do"
        )
    return delimiter, width


def _header(rows: Sequence[Sequence[str]]) -> tuple[bool, bool]:
    """Returns whether the first row is a header, and whether that is sure."""
    # Names may be empty: pandas writes none for the index, and a delimiter at the end of lines gives an empty column.
    first, others = [name for name in rows[0] if name], rows[1 : PROBED_LINES + 1]
    named = [not NUMBER_PATTERN.fullmatch(text) and text.lower() not in LOOKS_MISSING for text in first]
    if not any(named) or (not others and not all(named)):
        return False, True
    if not others:
        return len(set(first)) == len(first), False
    columns = [column for name, column in zip(rows[0], zip(*others, strict=True), strict=True) if name]
    numbers = [any(column) and all(NUMBER_PATTERN.fullmatch(text) or not text for text in column) for column in columns]
    above = {name for name, number, is_name in zip(first, numbers, named, strict=True) if number and is_name}
    known = any(ID_NAME.search(name) or TIME_NAME.search(name) or name.lower() in LABEL_NAMES for name in above)
    # One unknown word above numbers may be a value, and so may few among many words, such as hexadecimal ids.
    if known or (len(above) > 1 and 2 * len(above) >= sum(named)):
        return True, all(named)
    if 2 * sum(named) < len(first):
        return False, True
    if above:
        # A name may be a number, such as a year, but none of its own column's values.
        others_named = zip(first, columns, named, strict=True)
        return not any(name in column for name, column, is_name in others_named if not is_name), all(named)
    if not all(named) or len(set(first)) < len(first):
        return False, True
    return not any(name in column for name, column in zip(first, columns, strict=True)), False
