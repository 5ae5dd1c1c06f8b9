"""Configuration of an id table: its capacity, and the admission and removal of ids."""

import math
from dataclasses import dataclass, field
from typing import Literal

from cowrec.errors import UserError

from .kernels.memory import DEPTH, FREE, LINE, MAX_COUNT, PANES


@dataclass(frozen=True)
class Admission:
    """Rule by which a new id gets a row of its own; until then the id uses the out-of-vocabulary row.

    Attributes:
        kind: "none" admits an id at once. "count" admits it at the ``threshold``-th occurrence within ``window``, with
            the guarantees in kernels/sketch.py. "probabilistic" admits it at an occurrence with p = 1 -
            0.05^(1/threshold), so that 95 % of ids are admitted after ``threshold`` occurrences (Monolith, arXiv
            2209.07663). Occurrences in one batch count together.
        threshold: number of occurrences, 1 to 65,535.
        window: length of the window of "count", in seconds of sample time, or in batches if samples have no time.
            Earlier occurrences do not count, and those of its last three quarters always count. 0 counts all.
        counters: number of uint16 cells of a table under "count". e * N / W (see kernels/sketch.py), which
            ``filter_excess`` of ``IdTables.counters`` reports, should stay well below the threshold. W is a quarter of
            the cells without a window, and 7/128 of the cells with a window.
    """

    kind: Literal["none", "count", "probabilistic"] = "none"
    threshold: int = 1
    window: int = field(default=0, kw_only=True)
    counters: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.kind not in ("none", "count", "probabilistic"):
            raise UserError(f'admission.kind must be "none", "count" or "probabilistic", got {self.kind!r}')
        if not 1 <= self.threshold <= MAX_COUNT:
            raise UserError(
                f"admission.threshold must be in [1, {MAX_COUNT}], where counters saturate, got {self.threshold}"
            )
        if self.kind != "count" and (self.window or self.counters):
            raise UserError(f'admission.window and counters belong to kind "count", got kind {self.kind!r}')
        if self.window < 0:
            raise UserError(f"admission.window must be >= 0 (0: occurrences never expire), got {self.window}")
        if self.kind == "count" and self.counters < LINE * DEPTH:
            raise UserError(
                f"admission.counters must be at least {LINE * DEPTH}, got {self.counters}; use several times the number"
                " of distinct ids in the window"
            )

    @property
    def panes(self) -> int:
        return PANES if self.window else 1

    @property
    def pane_length(self) -> int:
        """Length of a pane in units of the clock; 0 without a window."""
        return -(-self.window // PANES)

    def lines(self, segments: int) -> int:
        """Lines in a row of the sketch of one of a table's segments."""
        return max(1, self.counters // (segments * DEPTH * LINE)) if self.kind == "count" else 0

    def excess_bound(self, counted: float, lines: int) -> float:
        """Returns e * N / W, by which an id's estimate is too high with probability exp(-DEPTH) at most."""
        from .kernels.sketch import counters_per_line  # compiled by numba, which checking a configuration does not need

        return math.e * counted / (lines * counters_per_line(self.panes)) if lines else 0.0


@dataclass(frozen=True)
class IdTableConfig:
    """A table of ids of one feature or of several features.

    Attributes:
        capacity: largest number of ids, >= 1, in segments with equal shares. Ids do not spread quite evenly, so that
            the first segment is full a little before the table (at 95 % of the capacity or later).
        features: names of the features that share the table; equal ids of two features are two ids.
        when_full: "oldest" evicts the ids not seen for longest. "least_frequent" evicts those that occurred least
            often, the oldest first among equals; counts saturate at 65,535. "refuse" gives new ids the
            out-of-vocabulary row.
        expire_after: time without an occurrence after which an id expires, in seconds of sample time, or in batches if
            samples have no time; 0 for never.
    """

    capacity: int
    features: tuple[str, ...]
    when_full: Literal["oldest", "least_frequent", "refuse"] = "oldest"
    admission: Admission = field(default_factory=Admission)
    expire_after: int = 0

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise UserError(f"capacity of an id table must be >= 1, got {self.capacity}")
        if not 1 <= len(self.features) < FREE:
            raise UserError(f"an id table serves 1 to {FREE - 1} features, got {len(self.features)}")
        if len(set(self.features)) < len(self.features):
            raise UserError(f"features of an id table must differ, got {list(self.features)}")
        if self.when_full not in ("oldest", "least_frequent", "refuse"):
            raise UserError(f'when_full must be "oldest", "least_frequent" or "refuse", got {self.when_full!r}')
        if self.expire_after < 0:
            raise UserError(f"expire_after must be >= 0 seconds (0: ids never expire), got {self.expire_after}")


TIME_LIMIT = 1 << 32
"""Seconds below which sample times must be."""
