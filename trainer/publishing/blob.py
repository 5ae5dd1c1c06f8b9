"""Binary format of published versions: changes of a model in one blob of bytes, protected by a checksum.

A blob is MAGIC, the SHA-256 of its content, and the content: an Arrow stream of one record batch with one row. Each
column is a list with the numbers of an array, whose shape is in the metadata of the column: `TABLE.ids`, `TABLE.rows`,
`TABLE.deleted`, for a table that fields share `TABLE.feature` and `TABLE.deleted_feature`, and `dense/NAME`. The
metadata of the schema has the header. Sizes: n rows, m deleted ids, P stored width of a table.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cowrec.errors import UserError

_NAME = b"cowrec-"
MAGIC = _NAME + b"version-2"  # with the number of the format; its length keeps the arrays aligned
_DENSE = "dense/"
_ABOUT = ("version", "previous", "kind", "lineage", "created", "fingerprint")
_HEADER = len(MAGIC) + hashlib.sha256().digest_size

Kind = Literal["full", "delta"]


class DamagedBlob(UserError):
    """Raised for bytes that differ from what was published."""


class OtherFormat(UserError):
    """Raised for bytes of another version of cowrec."""


@dataclass(frozen=True)
class TableChange:
    """Changed rows of a table; each id is at most once in ``ids`` and ``deleted`` together.

    Attributes:
        ids: int64 [n]: row numbers, or the raw ids of a collisionless table, whose reserved rows are 0 and 1.
        rows: float32 [n, P].
        deleted: int64 [m], ids of a collisionless table that no longer have a row.
        feature, deleted_feature: int64 [n] and [m] where fields share a collisionless table: number of each id's field.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    deleted: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    feature: NDArray[np.int64] | None = None
    deleted_feature: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Change:
    """Changes of a model, or in a full version all of it.

    Attributes:
        sample_time: newest sample trained on, Unix seconds; None where samples have no time.
        dense: float weights of the network by name; empty where they are not included.
    """

    step: int
    sample_time: int | None
    tables: Mapping[str, TableChange]
    dense: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(len(table.ids) for table in self.tables.values())

    def without_deleted(self) -> "Change":
        """The same without deleted ids, as a full version is."""
        empty = np.empty(0, np.int64)
        tables = {
            name: TableChange(table.ids, table.rows, empty, table.feature, None if table.feature is None else empty)
            for name, table in self.tables.items()
        }
        return replace(self, tables=tables)


@dataclass(frozen=True)
class Blob:
    """A published version.

    Attributes:
        version: number, from 1 on.
        previous: the version that a delta is based on.
        kind: "full" replaces everything a reader has, "delta" changes it.
        lineage: identifies the publisher's session; a delta of another lineage never fits, whatever its number.
        created: Unix seconds, by the publisher's clock.
        fingerprint: of the network and the data, without which the content has no meaning.
    """

    version: int
    previous: int
    kind: Kind
    lineage: str
    created: float
    change: Change
    fingerprint: str


def encode(blob: Blob) -> bytes:
    """Encodes a blob; :func:`decode` reads it."""
    arrays: dict[str, NDArray[Any]] = {_DENSE + name: value for name, value in blob.change.dense.items()}
    for name, table in blob.change.tables.items():
        parts = {key: getattr(table, key) for key in ("ids", "rows", "deleted", "feature", "deleted_feature")}
        arrays |= {f"{name}.{key}": value for key, value in parts.items() if value is not None}
    about = {key: getattr(blob, key) for key in _ABOUT}
    about |= {"step": blob.change.step, "sample_time": blob.change.sample_time}
    fields, columns = [], []
    for name, array in arrays.items():
        ends = pa.array([0, array.size], pa.int64())
        columns.append(pa.LargeListArray.from_arrays(ends, pa.array(array.reshape(-1))))
        fields.append(pa.field(name, columns[-1].type, metadata={"shape": json.dumps(array.shape)}))
    schema, sink = pa.schema(fields, metadata={"about": json.dumps(about)}), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.record_batch(columns, schema))
    content = sink.getvalue()
    return b"".join([MAGIC, hashlib.sha256(content).digest(), content])


def decode(blob: bytes) -> Blob:
    """Decodes the bytes of :func:`encode`, after verifying their checksum; the arrays share their memory.

    Raises DamagedBlob: bytes are missing or differ from what was published; OtherFormat: another format.
    """
    with pa.ipc.open_stream(pa.py_buffer(_verified(blob))) as stream:
        about, batch = json.loads(stream.schema.metadata[b"about"]), stream.read_next_batch()
    dense: dict[str, NDArray[Any]] = {}
    parts: dict[str, dict[str, NDArray[Any]]] = {}
    for column, written in zip(batch.schema, batch.columns, strict=True):
        shape = json.loads(column.metadata[b"shape"])
        array = written.values.to_numpy(zero_copy_only=False).reshape(shape)  # bool takes a copy
        if column.name.startswith(_DENSE):
            dense[column.name.removeprefix(_DENSE)] = array
        else:
            name, _, part = column.name.rpartition(".")
            parts.setdefault(name, {})[part] = array
    tables = {name: TableChange(**parts[name]) for name in sorted(parts)}
    change = Change(about["step"], about["sample_time"], tables, dense)
    return Blob(**{key: about[key] for key in _ABOUT}, change=change)


def merged(older: Change, newer: Change) -> Change:
    """Merges two successive changes into one with the same effect."""
    tables = dict(older.tables)
    for name, table in newer.tables.items():
        tables[name] = _merged_table(tables[name], table) if name in tables else table
    return Change(newer.step, newer.sample_time, tables, {**older.dense, **newer.dense})


def joined(older: Change | None, newer: Change | None) -> Change | None:
    """Merges two successive changes, of which either may be none."""
    return merged(older, newer) if older and newer else older or newer


def _verified(blob: bytes) -> memoryview:
    if not blob.startswith(MAGIC):
        if blob.startswith(_NAME):
            raise OtherFormat("a published version has another format; publish and read with one version of cowrec")
        raise DamagedBlob(f"not a published version: {len(blob):,} bytes that begin with {blob[: len(MAGIC)]!r}")
    content = memoryview(blob)[_HEADER:]
    if hashlib.sha256(content).digest() != blob[len(MAGIC) : _HEADER]:
        raise DamagedBlob(f"a published version of {len(blob):,} bytes is truncated or altered")
    return content


def _merged_table(older: TableChange, newer: TableChange) -> TableChange:
    replaced = np.concatenate([row_keys(newer.ids, newer.feature), row_keys(newer.deleted, newer.deleted_feature)])
    kept = ~np.isin(row_keys(older.ids, older.feature), replaced)
    still_deleted = ~np.isin(row_keys(older.deleted, older.deleted_feature), replaced)
    numbers = np.flatnonzero(kept)
    rows = np.empty((len(numbers) + len(newer.ids), newer.rows.shape[1]), np.float32)
    np.take(older.rows, numbers, 0, out=rows[: len(numbers)], mode="clip")  # other modes make a copy of the result
    rows[len(numbers) :] = newer.rows
    return TableChange(
        np.concatenate([older.ids[kept], newer.ids]),
        rows,
        np.concatenate([older.deleted[still_deleted], newer.deleted]),
        _features(older.feature, kept, newer.feature),
        _features(older.deleted_feature, still_deleted, newer.deleted_feature),
    )


def row_keys(ids: NDArray[np.int64], feature: NDArray[np.int64] | None) -> NDArray[Any]:
    """Keys of rows: ids, with their fields where several share the table."""
    if feature is None:
        return ids
    both = np.empty(len(ids), [("feature", np.int64), ("id", np.int64)])
    both["feature"], both["id"] = feature, ids
    return both


def _features(
    older: NDArray[np.int64] | None, kept: NDArray[np.bool_], newer: NDArray[np.int64] | None
) -> NDArray[np.int64] | None:
    return None if older is None or newer is None else np.concatenate([older[kept], newer])
