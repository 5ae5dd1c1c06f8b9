"""The kinds of raw values: the canonical type of each, what its values must be, and how they become canonical.

Values become canonical in one of two ways, by the same rules. `read_fields` takes whole columns of any Arrow type that
can hold them. `RawType.canonical_value` takes single values: a column of JSON may have values of several types, and a
wrong value must leave other samples whole.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..dataset.schema import MISSING
from .columns import UNMARKED, SampleColumns, ValueType, id_value, label_value, number_value, time_value, vector_value
from .layouts import FIELD_KINDS, Layout, RawField, ValueKind
from .lists import MARKER, PAIR, ListColumns, ids_value, pairs_value
from .times import RawTime


class Kind(NamedTuple):
    """One kind of values.

    Attributes:
        rule: what a value must be; {0} is the form of text.
        value: converts a single value that is not None, or raises WrongValue.
        in_json: Arrow type that a value of JSON is read as, unless it is text, null or [].
    """

    canonical: pa.DataType
    rule: str
    value: Callable[[Any, ValueType], Any]
    in_json: Callable[[Any], pa.DataType]


def _label_in_json(value: Any) -> pa.DataType:
    return pa.bool_() if isinstance(value, bool) else pa.int64() if isinstance(value, int) else pa.float64()


def _id_in_json(value: Any) -> pa.DataType:
    return pa.int64() if isinstance(value, int) else pa.string()


def _ids_in_json(value: Any) -> pa.DataType:
    return pa.list_(_id_in_json(value[0]) if isinstance(value, list) else pa.string())


def _pairs_in_json(value: Any) -> pa.DataType:
    first = value[0] if isinstance(value, list) else None
    item = _id_in_json(first.get("id") if isinstance(first, dict) else first)
    return pa.list_(pa.struct([("id", item), ("weight", pa.float64())]))


KINDS: Mapping[ValueKind, Kind] = {
    "number": Kind(pa.float64(), "must be a number or null", number_value, lambda _: pa.float64()),
    "time": Kind(pa.float64(), "must be Unix seconds or ISO 8601 text", time_value, lambda _: pa.float64()),
    "vector": Kind(
        pa.list_(pa.float64()),
        "must be a list of numbers, their joined text, or null",
        vector_value,
        lambda _: pa.list_(pa.float64()),
    ),
    "label": Kind(pa.string(), "must be true, false, a number or a string", label_value, _label_in_json),
    "id": Kind(pa.string(), "must be a string, a number, true, false or null", id_value, _id_in_json),
    "ids": Kind(
        pa.list_(pa.string()),
        "must be a list of strings, numbers or nulls, its text {0}, or null",
        ids_value,
        _ids_in_json,
    ),
    "weighted": Kind(
        pa.list_(PAIR),
        'must be a list of {{"id": string or number, "weight": number}}, an object of weights by id, text'
        " ({0}) or null",
        pairs_value,
        _pairs_in_json,
    ),
}
_NUMBERS, _TEXTS = {int, float, type(None)}, {str, type(None)}


@dataclass(frozen=True)
class RawType:
    """Type of a raw column: the kind of its values, and the keys by which single values are read."""

    kind: ValueKind
    values: ValueType = UNMARKED

    @staticmethod
    def of(field: RawField, decimal: str = ".") -> "RawType":
        return RawType(
            "time" if field.part else FIELD_KINDS[field.kind].values,
            ValueType(field.separator, field.weight_separator, field.null, field.brackets, decimal),
        )

    @staticmethod
    def of_all(types: Sequence["RawType"]) -> "RawType":
        """Returns the type of a column of several fields, whose values may be those of any of them."""
        first = types[0]
        null = tuple(text for text in first.values.null if all(text in other.values.null for other in types))
        if len({(other.kind, replace(other.values, null=())) for other in types}) > 1:
            return RawType("id", ValueType(null=null))
        return replace(first, values=replace(first.values, null=null))

    @property
    def arrow(self) -> pa.DataType:
        return KINDS[self.kind].canonical

    def arrow_of(self, value: Any) -> pa.DataType | None:
        """Returns the Arrow type that a value of JSON, even a wrong one, is read as; None if the value tells none."""
        kind = KINDS[self.kind]
        if value is None or value == []:
            return None
        if isinstance(value, str):
            is_joined = self.values.separator or self.values.brackets
            return kind.canonical if pa.types.is_list(kind.canonical) and not is_joined else pa.string()
        return kind.in_json(value)

    @property
    def rule(self) -> str:
        of_text = "in brackets" if self.values.brackets else f"by {self.values.separator!r}"
        if self.kind == "weighted" and not self.values.brackets:
            of_text = f"id{self.values.weight_separator}weight, {of_text}"
        return KINDS[self.kind].rule.format(of_text)

    def canonical_value(self, value: Any) -> Any:
        """Converts a value to a float (or the text of a time), a string, or a list of floats, strings or {id, weight}.

        Returns None for None. Raises WrongValue if the value is of another kind.
        """
        return None if value is None else KINDS[self.kind].value(value, self.values)

    def canonical(self, values: Sequence[Any]) -> Sequence[Any]:
        """Converts values of a field to the input of `Encoder.encode_few`, fast if they need no conversion.

        Texts may have surrogates, which Arrow refuses later. Raises ValueError if a value is of another kind.
        """
        types, null = {*map(type, values)}, self.values.null
        if types <= _NUMBERS and self.kind == "number":
            nulls = self.values.null_numbers
            return (
                [None if value is not None and float(value) in nulls else value for value in values]
                if nulls
                else values
            )
        if types <= _TEXTS and self.kind == "id":
            return ["" if value in null else value for value in values] if null else values
        found = [self.canonical_value(value) for value in values]
        if self.kind == "ids" and null:
            found = [items and [MARKER if item in null else item for item in items] for items in found]
        return found


def column_types(layout: Layout, columns: Iterable[str], time: RawTime | None = None) -> dict[str, RawType]:
    """Returns the types of columns by name; `time` is by default that of the layout."""
    of_fields: dict[str, list[RawType]] = {}
    for field in layout.fields:
        of_fields.setdefault(field.column, []).append(RawType.of(field, layout.decimal))
    types = {layout.weight: RawType("number", ValueType(decimal=layout.decimal))}
    types |= dict.fromkeys(layout.keep, RawType("id"))
    if time := time or layout.time:
        types |= dict.fromkeys(time.columns, RawType("id" if time.format else "time"))
    types |= {column: RawType("label") for label in layout.labels for column in label.columns}
    types |= {column: RawType.of_all(own) for column, own in of_fields.items()}
    return {name: types[name] for name in columns}


def read_fields(
    columns: SampleColumns,
    fields: Iterable[RawField],
    tables: Mapping[str, int] | None = None,
    time: np.ndarray | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, pa.Array], dict[str, np.ndarray]]:
    """Returns the numbers, ids and weights of fields, by name, as `Parsed` has them.

    Args:
        columns: the columns of the table, which record what is wrong.
        tables: numbers of embedding rows of the fields whose ids are row numbers already; their ids become int32.
        time: times of the samples [R], which ages need; NaN where unknown.
    """
    numbers: dict[str, np.ndarray] = {}
    ids: dict[str, pa.Array] = {}
    weights: dict[str, np.ndarray] = {}
    ordered, lists = sorted(fields, key=lambda field: bool(field.along)), ListColumns(columns, time)
    for field in ordered:
        if field.kind == "numeric":
            numbers[field.name] = columns.numbers(field.column, field.null)
        elif field.kind == "vector":
            vectors = columns.vectors(field.column, field.width, field.separator, field.null)
            numbers |= dict(zip(field.numbers, vectors, strict=True))
        elif tables and field.name in tables:
            ids[field.name] = pa.array(columns.row_numbers(field.column, MISSING, tables[field.name]))
        elif field.part:
            ids[field.name] = columns.parts_of_times(field.time, field.part, field.null)
        elif field.kind == "categorical":
            ids[field.name] = columns.texts(field.column, field.null)
        else:
            along = [other for other in ordered if other.along == field.name]
            ids[field.name], of_pairs = lists.read(field, along)
            if of_pairs is not None:
                weights[field.name] = of_pairs
    return numbers, ids, weights
