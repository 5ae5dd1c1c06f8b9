"""Layout of id tables: their segments, and the rank and the place in memory of each segment."""

from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np

from cowrec.errors import UserError

from .config import IdTableConfig
from .kernels import memory

MAX_SEGMENTS = 64
"""Largest number of segments of a table, unless the caller sets another."""
MIN_SEGMENT_CAPACITY = 4096
"""Least capacity of a segment. A table is full with its first segment, and ids spread less evenly over small ones."""
_SWEEP_BATCHES, _MIN_SWEEP_RECORDS = 1024, 64
"""Number of batches in which the sweep passes a table once; least number of records of a sweep."""
_SWEEP_INTERVAL = 16
"""Number of batches between two sweeps of a segment."""
_ADMISSIONS = {"none": memory.ADMIT_ALL, "count": memory.ADMIT_BY_COUNT, "probabilistic": memory.ADMIT_BY_DRAW}


def rows_for(capacity: int, max_segments: int = MAX_SEGMENTS) -> int:
    """Rows of an id table's embedding table: reserved rows, and the capacity rounded up to equal segments."""
    segments = _segments_for(capacity, max_segments)
    return memory.RESERVED_ROWS + segments * -(-capacity // segments)


def _segments_for(capacity: int, max_segments: int) -> int:
    return min(max_segments, max(1, capacity // MIN_SEGMENT_CAPACITY))


class IdLayout:
    """Segments of all tables, their order, and the places of this rank's segments in its memory.

    Attributes:
        first_segments: first segment of each rank, and the number of all segments, int64 [ranks + 1].
        locations: this rank's segments, SEGMENT_LOCATION.
        sizes: numbers of segments, records, slots and cells of each rank, int64 [ranks, 4].
        fingerprint: hash of the settings that must be equal to load a checkpoint.
    """

    def __init__(
        self,
        configs: Mapping[str, IdTableConfig],
        features: Sequence[str],
        *,
        max_segments: int,
        rank: int,
        ranks: int,
    ) -> None:
        if ranks > max_segments:
            raise UserError(
                f"id tables need at least as many segments as ranks, got {max_segments} for {ranks} ranks; raise"
                " max_segments"
            )
        self.rank = rank
        counts = [_segments_for(config.capacity, max_segments) for config in configs.values()]
        first = np.cumsum([0, *counts])
        tables = np.array(
            [_settings(*table) for table in zip(configs.items(), counts, first[:-1].tolist(), strict=True)],
            memory.TABLE_SETTINGS,
        )
        table = np.repeat(np.arange(len(counts)), counts)
        number = np.arange(first[-1]) - first[table]
        # Segments have positions in [0, max_segments), which are divided among the ranks. Tables begin at different
        # positions, so that not all small tables are on one rank.
        start = table * max_segments // max(len(counts), 1)
        position = (number * max_segments // tables["segments"][table] + start) % max_segments
        order = np.lexsort((table, position))
        self.mapping = memory.IdMapping(_features(configs, features), tables, np.argsort(order).astype(np.int32))
        self.first_segments = np.searchsorted(position[order], np.arange(ranks + 1) * max_segments // ranks)
        sketch = tables["lines"] * memory.LINE * memory.DEPTH
        widths = np.stack([np.ones(len(counts), np.int64), tables["capacity"], tables["slots"], sketch], 1)
        begins = np.concatenate([np.zeros((1, 4), np.int64), np.cumsum(widths[table[order]], axis=0)])
        self.sizes = np.diff(begins[self.first_segments], axis=0)
        own = order[self.first_segments[rank] : self.first_segments[rank + 1]]
        self.locations = np.zeros(len(own), memory.SEGMENT_LOCATION)
        self.locations["number"] = np.arange(len(own)) + self.first_segments[rank]
        self.locations["table"] = table[own]
        self.locations["first_row"] = memory.RESERVED_ROWS + number[own] * tables["capacity"][table[own]]
        offsets = begins[self.first_segments[rank] :][: len(own)] - begins[self.first_segments[rank]]
        for column, name in enumerate(("first_record", "first_slot", "first_cell"), 1):
            self.locations[name] = offsets[:, column]
        rows = memory.RESERVED_ROWS + tables["segments"] * tables["capacity"]
        self.num_embeddings = dict(zip(configs, rows.tolist(), strict=True))
        described = [
            (name, config.capacity, config.features, config.admission.panes, config.admission.pane_length)
            for name, config in configs.items()
        ]
        described_sizes = repr((max_segments, described, widths.tolist()))
        self.fingerprint = int.from_bytes(sha256(described_sizes.encode()).digest()[:8], "little", signed=True)


def _settings(named: tuple[str, IdTableConfig], segments: int, first_segment: int) -> tuple[int, ...]:
    """One element of TABLE_SETTINGS."""
    name, config = named
    capacity = -(-config.capacity // segments)
    if capacity >= 1 << 31:
        raise UserError(f"a segment of id table {name!r} would hold {capacity} ids, 2^31 or more; raise max_segments")
    admission = config.admission
    return (
        segments,
        first_segment,
        capacity,
        capacity.bit_length(),
        int(capacity / memory.MAX_LOAD) + 1,
        max(_MIN_SWEEP_RECORDS, -(-capacity * _SWEEP_INTERVAL // _SWEEP_BATCHES)),
        _SWEEP_INTERVAL,
        int(config.when_full == "least_frequent"),
        int(config.when_full != "refuse"),
        config.expire_after,
        _ADMISSIONS[admission.kind],
        admission.threshold,
        admission.panes,
        admission.pane_length,
        admission.lines(segments),
    )


def _features(configs: Mapping[str, IdTableConfig], features: Sequence[str]) -> np.ndarray:
    """Returns the table of each feature, or -1, and the feature's number in that table, int64 [F, 2]."""
    served: dict[str, tuple[int, int]] = {}
    for t, (name, config) in enumerate(configs.items()):
        for number, feature in enumerate(config.features):
            if feature in served:
                raise UserError(f"feature {feature!r} is served by id table {name!r} and by another; list it in one")
            if feature not in features:
                raise UserError(f"id table {name!r} serves feature {feature!r}, which is not one of {list(features)}")
            served[feature] = (t, number)
    return np.array([served.get(feature, (-1, 0)) for feature in features], np.int64).reshape(-1, 2)
