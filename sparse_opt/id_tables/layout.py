"""Configuration of an id table, and how the tables' segments lie in the memory of the ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

import numpy as np

from .admission import COUNT, DEPTH, LINE, NONE, PROBABILISTIC, Admission
from .records import FREE, LOAD, PLACE, TABLE

RESERVED_ROWS = 2
"""OUT_OF_VOCABULARY and MISSING, the first rows of every table."""
SHARDS = 64
"""Most pieces of a table, unless the caller knows better."""
LEAST_OF_PIECE = 4096
"""Ids of a piece, at least: a table is full where its fullest piece is, and ids spread less evenly over small ones."""
_SWEEPS, _LEAST_SLICE = 1024, 64
"""Batches in which the sweep passes a table once; records that it passes at a time, at least."""
_TURNS = 16
"""A segment is swept every so many batches."""
_ADMISSIONS = {"none": NONE, "count": COUNT, "probabilistic": PROBABILISTIC}


@dataclass(frozen=True)
class IdTableConfig:
    """One table of ids, of one feature or shared by some.

    Attributes:
        capacity: ids that it holds at most, >= 1. It is cut into up to ``shards`` pieces by the ids' hash, each with an
            equal share; as ids do not spread quite evenly, the first piece is full a little before the table is (at
            some 95 % of the capacity at worst).
        features: names of the features it serves; an id of one is never the same as an id of another.
        when_full: "oldest" gives up the ids not seen for longest, "least_frequent" those that occurred least often
            (then the oldest; ids beyond 65,535 occurrences are not told apart), "refuse" lets new ids use the
            out-of-vocabulary row.
        admission: which new ids get a row.
        expire_after: seconds of sample time (batches, where samples have no time) without an occurrence after which an
            id is dead; 0: never.
    """

    capacity: int
    features: tuple[str, ...]
    when_full: Literal["oldest", "least_frequent", "refuse"] = "oldest"
    admission: Admission = field(default_factory=Admission)
    expire_after: int = 0

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity of an id table must be >= 1, got {self.capacity}")
        if not 1 <= len(self.features) < FREE:
            raise ValueError(f"an id table serves 1 to {FREE - 1} features, got {len(self.features)}")
        if len(set(self.features)) < len(self.features):
            raise ValueError(f"features of an id table must differ, got {list(self.features)}")
        if self.when_full not in ("oldest", "least_frequent", "refuse"):
            raise ValueError(f'when_full must be "oldest", "least_frequent" or "refuse", got {self.when_full!r}')
        if self.expire_after < 0:
            raise ValueError(f"expire_after must be >= 0 seconds (0: ids never expire), got {self.expire_after}")


def rows_for(capacity: int, shards: int = SHARDS) -> int:
    """Rows of the embedding table of an id table: the reserved ones, and the capacity rounded up to whole pieces."""
    pieces = _pieces(capacity, shards)
    return RESERVED_ROWS + pieces * -(-capacity // pieces)


def _pieces(capacity: int, shards: int) -> int:
    return min(shards, max(1, capacity // LEAST_OF_PIECE))


class IdLayout:
    """Which segments there are, in the order of shards, and where this rank's lie in its memory.

    Attributes:
        tables: what each table's segments share, TABLE [T].
        segments_of: number of each table's pieces among all segments, int32; a table's from its ``first_piece`` on.
        feature_table: table of each feature, -1 where none serves it, and the feature's number there, int64 [F, 2].
        first_segments: the first segment of each rank, and the number of all, int64 [ranks + 1].
        rank: this process.
        places: this rank's segments, PLACE.
        sizes: of each rank: segments, records, slots and cells, int64 [ranks, 4].
        num_embeddings: rows of each embedding table.
        fingerprint: of whatever must be the same where a checkpoint is loaded.
    """

    def __init__(
        self,
        configs: Mapping[str, IdTableConfig],
        features: Sequence[str],
        *,
        shards: int,
        rank: int,
        ranks: int,
    ) -> None:
        if not ranks <= shards:
            raise ValueError(f"id tables need at least as many shards as ranks, got {shards} for {ranks}; raise shards")
        self.rank = rank
        self.feature_table = _feature_table(configs, features)
        pieces = [_pieces(config.capacity, shards) for config in configs.values()]
        first = np.cumsum([0, *pieces])
        self.tables = np.array(
            [_settings(*each) for each in zip(configs.items(), pieces, first[:-1].tolist(), strict=True)], TABLE
        )
        table = np.repeat(np.arange(len(pieces)), pieces)
        piece = np.arange(first[-1]) - first[table]
        # Tables begin at different shards, so that small ones do not all lie on one rank.
        start = table * shards // max(len(pieces), 1)
        shard = (piece * shards // self.tables["pieces"][table] + start) % shards
        order = np.lexsort((table, shard))
        self.segments_of = np.argsort(order).astype(np.int32)
        bounds = np.arange(ranks + 1) * shards // ranks
        self.first_segments = np.searchsorted(shard[order], bounds)
        widths = np.stack(
            [
                np.ones(len(pieces), np.int64),
                self.tables["capacity"],
                self.tables["slots"],
                self.tables["blocks"] * LINE * DEPTH,
            ],
            axis=1,
        )
        begins = np.concatenate([np.zeros((1, 4), np.int64), np.cumsum(widths[table[order]], axis=0)])
        self.sizes = np.diff(begins[self.first_segments], axis=0)
        own = order[self.first_segments[rank] : self.first_segments[rank + 1]]
        self.places = np.zeros(len(own), PLACE)
        self.places["number"] = np.arange(len(own)) + self.first_segments[rank]
        self.places["table"] = table[own]
        self.places["first_row"] = RESERVED_ROWS + piece[own] * self.tables["capacity"][table[own]]
        offsets = begins[self.first_segments[rank] :][: len(own)] - begins[self.first_segments[rank]]
        for column, name in enumerate(("first_record", "first_slot", "first_cell"), 1):
            self.places[name] = offsets[:, column]
        rows = RESERVED_ROWS + self.tables["pieces"] * self.tables["capacity"]
        self.num_embeddings = dict(zip(configs, rows.tolist(), strict=True))
        described = repr((shards, [(name, c.capacity, c.features) for name, c in configs.items()], widths.tolist()))
        self.fingerprint = int.from_bytes(sha256(described.encode()).digest()[:8], "little", signed=True)


def _settings(named: tuple[str, IdTableConfig], pieces: int, first_piece: int) -> tuple[int, ...]:
    """A table's TABLE."""
    name, config = named
    capacity = -(-config.capacity // pieces)
    if capacity >= 1 << 31:
        raise ValueError(f"a shard of id table {name!r} would hold {capacity} ids, 2^31 or more; raise shards")
    admission = config.admission
    return (
        pieces,
        first_piece,
        capacity,
        capacity.bit_length(),
        int(capacity / LOAD) + 1,
        max(_LEAST_SLICE, -(-capacity * _TURNS // _SWEEPS)),
        _TURNS,
        int(config.when_full == "least_frequent"),
        int(config.when_full != "refuse"),
        config.expire_after,
        _ADMISSIONS[admission.kind],
        admission.threshold,
        admission.panes,
        admission.pane_length,
        admission.lines(pieces),
    )


def _feature_table(configs: Mapping[str, IdTableConfig], features: Sequence[str]) -> np.ndarray:
    """Table of each feature, -1 where none serves it, and the feature's number there, int64 [F, 2]."""
    served: dict[str, tuple[int, int]] = {}
    for t, (name, config) in enumerate(configs.items()):
        for number, feature in enumerate(config.features):
            if feature in served:
                raise ValueError(f"feature {feature!r} is served by id table {name!r} and by another; leave it to one")
            if feature not in features:
                raise ValueError(f"id table {name!r} serves feature {feature!r}, which is none of {list(features)}")
            served[feature] = (t, number)
    return np.array([served.get(feature, (-1, 0)) for feature in features], np.int64).reshape(-1, 2)
