"""What is published: changes of a model as one blob of bytes, which shows when a byte of it was altered or is missing.

A blob is MAGIC, the SHA-256 of the rest, and the rest: a safetensors file with the header in its metadata and the
tensors `TABLE.ids`, `TABLE.rows`, `TABLE.gone`, for a table that fields share `TABLE.feature` and `TABLE.gone_feature`,
and `dense/NAME`. Sizes: n rows, m rows that are gone, P stored width of a table.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

FORMAT = 1
MAGIC = b"cowrec-published"  # of a length that leaves the tensors aligned
_DENSE = "dense/"
_ABOUT = ("version", "previous", "kind", "lineage", "created")
_DTYPES = {"I64": np.int64, "F64": np.float64, "F32": np.float32}
_HEADER = len(MAGIC) + hashlib.sha256().digest_size

Kind = Literal["full", "delta"]


class DamagedBlob(ValueError):
    """Bytes that are not what was published."""


@dataclass(frozen=True)
class TableChange:
    """What became of a table's rows; no id is in ``ids`` or ``gone`` twice, nor in both.

    Attributes:
        ids: int64 [n]: numbers of rows, or the raw ids of a collisionless table, whose reserved rows are 0 and 1.
        rows: float32 [n, P].
        gone: int64 [m], ids of a collisionless table that have no row any more.
        feature: int64 [n] where several fields share a collisionless table: the place of each id's field among them.
        gone_feature: int64 [m], likewise.
    """

    ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    gone: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    feature: NDArray[np.int64] | None = None
    gone_feature: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        n, m = len(self.ids), len(self.gone)
        of_ids = [(self.ids, n), (self.gone, m)]
        of_ids += [(each, size) for each, size in ((self.feature, n), (self.gone_feature, m)) if each is not None]
        fit = all(each.dtype == np.int64 and each.shape == (size,) for each, size in of_ids)
        if (self.feature is None) != (self.gone_feature is None):
            raise ValueError("of a table that fields share, both the written and the gone ids need their field")
        if not fit or self.rows.dtype != np.float32 or self.rows.ndim != 2 or len(self.rows) != n:
            raise ValueError(
                f"a table's change is int64 ids [n] and float32 rows [n, P], got {self.ids.dtype} {self.ids.shape} and"
                f" {self.rows.dtype} {self.rows.shape}"
            )


@dataclass(frozen=True)
class Change:
    """Everything that became of a model, or in a full publication all of it.

    Attributes:
        step: training steps that the model has taken.
        sample_time: newest sample trained on, Unix seconds; None where samples have no time.
        tables: by name.
        dense: float weights of the network by name; empty where they are not along.
    """

    step: int
    sample_time: int | None
    tables: Mapping[str, TableChange]
    dense: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows that are written, over all tables."""
        return sum(len(each.ids) for each in self.tables.values())


@dataclass(frozen=True)
class Blob:
    """A published version.

    Attributes:
        version: from 1 on.
        previous: the version that a delta goes on from.
        kind: "full" replaces everything a reader has, "delta" changes it.
        lineage: of the publisher's life that it belongs to; a delta of another one does not fit, whatever its number.
        created: Unix seconds, by the publisher's clock.
        change: what it says.
    """

    version: int
    previous: int
    kind: Kind
    lineage: str
    created: float
    change: Change


def encode(blob: Blob) -> bytes:
    """The bytes of a blob. Raises ValueError where a table's name is not one for a blob."""
    tensors: dict[str, NDArray[Any]] = {_DENSE + name: value for name, value in blob.change.dense.items()}
    for name, table in blob.change.tables.items():
        if name.startswith(_DENSE):
            raise ValueError(
                f'table {name!r} cannot be published: a name beginning with "{_DENSE}" is a dense weight\'s'
            )
        parts = {key: getattr(table, key) for key in ("ids", "rows", "gone", "feature", "gone_feature")}
        tensors |= {f"{name}.{key}": value for key, value in parts.items() if value is not None}
    about = {key: getattr(blob, key) for key in _ABOUT}
    about |= {"format": FORMAT, "step": blob.change.step, "sample_time": blob.change.sample_time}
    metadata = {key: json.dumps(value) for key, value in about.items()}
    content = safetensors.numpy.save({key: np.ascontiguousarray(each) for key, each in tensors.items()}, metadata)
    return b"".join([MAGIC, hashlib.sha256(content).digest(), content])


def decode(blob: bytes) -> Blob:
    """What :func:`encode` was given; the arrays share the memory of the bytes.

    Raises:
        DamagedBlob: the bytes are not all there, or not those that were published.
        ValueError: they are of another format.
    """
    if not blob.startswith(MAGIC):
        raise DamagedBlob(f"{len(blob):,} bytes that begin with {blob[: len(MAGIC)]!r} are no publication")
    content = memoryview(blob)[_HEADER:]
    if hashlib.sha256(content).digest() != blob[len(MAGIC) : _HEADER]:
        raise DamagedBlob(f"{len(blob):,} bytes of a publication are torn or altered: their checksum is another")
    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(bytes(content[8 : 8 + length]))
        about = {key: json.loads(each) for key, each in header.pop("__metadata__").items()}
        if about["format"] != FORMAT:
            raise ValueError(f"a publication of format {about['format']!r}; this cowrec reads {FORMAT}")
        tensors = {key: _tensor(content[8 + length :], **each) for key, each in header.items()}
        dense = {key.removeprefix(_DENSE): each for key, each in tensors.items() if key.startswith(_DENSE)}
        parts: dict[str, dict[str, NDArray[Any]]] = {}
        for key in tensors.keys() - {_DENSE + name for name in dense}:
            name, _, part = key.rpartition(".")
            parts.setdefault(name, {})[part] = tensors[key]
        tables = {name: TableChange(**parts[name]) for name in sorted(parts)}
        change = Change(about["step"], about["sample_time"], tables, dense)
        return Blob(**{key: about[key] for key in _ABOUT}, change=change)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedBlob(f"a publication without what belongs to one: {error}") from error


def merged(older: Change, newer: Change) -> Change:
    """The change that both make, one after the other."""
    tables = dict(older.tables)
    for name, table in newer.tables.items():
        tables[name] = _merged_table(tables[name], table) if name in tables else table
    return Change(newer.step, newer.sample_time, tables, {**older.dense, **newer.dense})


def _tensor(content: memoryview, dtype: str, shape: list[int], data_offsets: tuple[int, int]) -> NDArray[Any]:
    """A tensor in place; the library's reader copies each, and no other thread can run meanwhile."""
    start, stop = data_offsets
    return np.frombuffer(content[start:stop], _DTYPES[dtype]).reshape(shape)


def _merged_table(older: TableChange, newer: TableChange) -> TableChange:
    written, left = _keys(newer.ids, newer.feature), _keys(newer.gone, newer.gone_feature)
    stay = ~np.isin(_keys(older.ids, older.feature), np.concatenate([written, left]))
    gone = ~np.isin(_keys(older.gone, older.gone_feature), np.concatenate([written, left]))
    return TableChange(
        np.concatenate([older.ids[stay], newer.ids]),
        np.concatenate([older.rows[stay], newer.rows]),
        np.concatenate([older.gone[gone], newer.gone]),
        _joined(older.feature, stay, newer.feature),
        _joined(older.gone_feature, gone, newer.gone_feature),
    )


def _keys(ids: NDArray[np.int64], feature: NDArray[np.int64] | None) -> NDArray[Any]:
    """What tells rows apart: the id, with its field where several share the table."""
    if feature is None:
        return ids
    both = np.empty(len(ids), [("feature", np.int64), ("id", np.int64)])
    both["feature"], both["id"] = feature, ids
    return both


def _joined(
    older: NDArray[np.int64] | None, stay: NDArray[np.bool_], newer: NDArray[np.int64] | None
) -> NDArray[np.int64] | None:
    return None if older is None or newer is None else np.concatenate([older[stay], newer])
