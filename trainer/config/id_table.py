"""The `[id_table]` section: how ids of the data are mapped to rows of the embedding tables."""

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Literal

from cowrec.errors import UserError
from cowrec.names import hint

from .checks import SettingError, require, require_at_least

IdKind = Literal["rows", "hash", "collisionless"]
AdmissionKind = Literal["none", "count", "probabilistic"]
WhenFull = Literal["oldest", "least_frequent", "refuse"]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True)
class TableIds:
    """`[id_table.tables.NAME]`: the settings of one table that differ from `[id_table]`, and the fields that share it.

    Attributes:
        fields: fields that share the table and its capacity; by default the field of the table's name. Equal ids of two
            fields are two ids.

    The other attributes are those of :class:`IdConfig`.
    """

    fields: tuple[str, ...] = ()
    kind: IdKind | None = None
    capacity: int | None = None
    when_full: WhenFull | None = None
    admission: AdmissionKind | None = None
    threshold: int | None = None
    window: str | None = None
    expire_after: str | None = None


@dataclass(frozen=True)
class IdConfig:
    """`[id_table]`: settings of all tables; `[id_table.tables.NAME]` overrides them for one table.

    Attributes:
        kind: "rows" uses the row numbers of the data; "hash" maps an id to row ``hash(id) % capacity``, which several
            ids may share; "collisionless" gives every id its own row until the id is evicted or expires.
        capacity: rows for ids in a table, without the two reserved rows.
        when_full: ids that a full collisionless table evicts: those not seen for longest ("oldest"), those seen least
            often ("least_frequent"), or none ("refuse": new ids use the row of unknown ids).
        admission: when a new id gets a row: at once ("none"), once it has been counted `threshold` times within
            `window` ("count"), or at each occurrence with Monolith's probability 1 - 0.05^(1 / threshold)
            ("probabilistic"). Until then it uses the row of unknown ids.
        threshold: see `admission`; at most 65,535.
        window: sample time after which a count expires on a stream, such as "7d"; empty: never.
        expire_after: sample time after which an id that was not seen is unknown, such as "30d", and loses its row on a
            stream; empty: never.
        tables: settings of single tables, by the name of their field, or by any name for fields that share a table.
    """

    kind: IdKind = "rows"
    capacity: int = 1_000_000
    when_full: WhenFull = "oldest"
    admission: AdmissionKind = "none"
    threshold: int = 1
    window: str = ""
    expire_after: str = ""
    tables: dict[str, TableIds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("", *self.tables):
            own = self.of_table(name)
            key = f"id_table.tables.{name}" if name else "id_table"
            require_at_least(key, own, "capacity threshold", 1)
            require(f"{key}.capacity", own.capacity, own.capacity < 1 << 31, "below 2^31")
            require(f"{key}.threshold", own.threshold, own.threshold < 1 << 16, "below 2^16")
            for each in ("window", "expire_after"):
                seconds(getattr(own, each), f"{key}.{each}")
            if own.window and own.admission != "count":
                raise SettingError(
                    f'{key}.window = {own.window!r} has no meaning for {key}.admission = "{own.admission}"; set that to'
                    ' "count" or leave window out',
                    f"{key}.window",
                    f"{key}.admission",
                )
            if own.kind != "collisionless":
                _refuse_without_meaning(key, self.tables[name] if name else self, own.kind)
            elif own.threshold > 1 and own.admission == "none":
                raise SettingError(
                    f'{key}.threshold = {own.threshold} has no meaning for {key}.admission = "none"; set that to'
                    ' "count" or "probabilistic", or leave threshold out',
                    f"{key}.threshold",
                    f"{key}.admission",
                )

    def of_table(self, name: str) -> "IdConfig":
        """The settings of one table, without :attr:`tables`."""
        own = copy(self)  # without the checks, which call this
        given = vars(self.tables[name]) if name in self.tables else {}
        vars(own).update(
            {key: value for key, value in given.items() if key != "fields" and value is not None}, tables={}
        )
        return own

    def table_fields(self, known: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Fields of each table; tables are in the order of their first field.

        Raises:
            ValueError: a table with an unknown field, or a field in two tables.
        """
        table_of: dict[str, str] = {}
        for table, own in self.tables.items():
            for name in own.fields or (table,):
                key = f"id_table.tables.{table}"
                if name not in known:
                    meant = hint(name, known, "sparse fields")
                    remedy = "" if own.fields else f" (fields that share a table are listed in {key}.fields)"
                    raise UserError(f"{key} names {name!r}, which is not a sparse field; {meant}{remedy}")
                if name in table_of:
                    raise UserError(f"{key} and id_table.tables.{table_of[name]} both name field {name!r}; drop one")
                table_of[name] = table
        found: dict[str, tuple[str, ...]] = {}
        for name in known:
            table = table_of.get(name, name)
            found[table] = (*found.get(table, ()), name)
        return found


def seconds(text: str, key: str) -> int:
    """Seconds of a time such as "90s", "30m", "12h", "30d" or "4w"; 0 for an empty text. Raises ValueError else."""
    if not text:
        return 0
    found = re.fullmatch(r"([1-9][0-9]*)\s*([smhdw])", text)
    if not found:
        message = f'{key} must be a whole number and a unit of s, m, h, d, w, such as "30d"; got {text!r}'
        raise SettingError(message, key)
    return int(found[1]) * _SECONDS[found[2]]


def _refuse_without_meaning(key: str, given: IdConfig | TableIds, kind: str) -> None:
    """Raises ValueError for settings that no table has, because of its kind."""
    tables = given.tables.values() if isinstance(given, IdConfig) else ()
    kinds = {kind, *(each.kind for each in tables if each.kind)}
    unused = () if "collisionless" in kinds else ("when_full", "admission", "threshold", "window", "expire_after")
    for name in (*unused, *["capacity"] * (kinds == {"rows"})):
        value = getattr(given, name)
        if value not in (None, getattr(IdConfig, name)):
            other = '"hash" or "collisionless"' if name == "capacity" else '"collisionless"'
            raise SettingError(
                f'{key}.{name} = {value!r} has no meaning for {key}.kind = "{kind}"; set it to {other} or leave {name}'
                " out",
                f"{key}.{name}",
                f"{key}.kind",
            )
