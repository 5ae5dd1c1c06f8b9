"""Clicks that depend on the item and on the order of the items before it, with known true probabilities.

Every item belongs to one of G groups. The true logit of a sample is

    b + a[item] + e * (sum over the history's items j of the item's group: 2^(-age_j / half_life) - its mean)

where age 0 is the newest item's. Items are drawn from a power law; a user likes one group, of which every second item
of the history is. Networks that average a history see the groups, but not their order. R samples, L items of the
longest history.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from cowrec.errors import UserError

from ..dataset.schema import LABEL, TIME, Schema
from ..raw.layouts import RawField
from .planted import PILOT, PILOT_ROWS, Draw, intercept_for, probability, raw_id_schema, require, write_following

NAME = "histories"
SAMPLE_ID, ITEM, HISTORY = "sample_id", "item", "history"
SAMPLES, EFFECTS = 0, 2
START, SECONDS = 1_704_067_200, 60
"""Unix seconds of the first sample, and from one to the next."""


@dataclass(frozen=True)
class HistoryConfig:
    """Settings of the model.

    Attributes:
        rows: training samples.
        max_length: L; the lengths of histories are uniform from 0 to L.
        item_effect: standard deviation of an item's own effect on the logit.
        history_effect: e.
        half_life: age, in items, at which an item of the history counts half.
        skew: exponent of the items' power law.
    """

    rows: int = 200_000
    seed: int = 0
    items: int = 1_000
    groups: int = 10
    max_length: int = 20
    ctr: float = 0.25
    item_effect: float = 0.4
    history_effect: float = 1.0
    half_life: float = 3.0
    skew: float = 1.1

    def __post_init__(self) -> None:
        require(self, "at least 1", lambda value: value >= 1, "rows", "groups", "max_length")
        require(self, "at least 0", lambda value: value >= 0, "seed", "item_effect", "history_effect", "skew")
        require(self, "above 0", lambda value: value > 0, "half_life")
        require(self, "between 0 and 1", lambda value: 0 < value < 1, "ctr")
        if self.items < self.groups:
            raise UserError(f"items must be at least groups = {self.groups}, got {self.items}")

    @cached_property
    def intercept(self) -> float:
        """b, at which the mean click probability is `ctr`, from a pilot draw."""
        return intercept_for(self._drawn(PILOT, 0, PILOT_ROWS)[2], self.ctr)

    def draw(self, first: int, rows: int) -> tuple[pa.Table, Draw]:
        """Draws the raw samples of the block that begins with sample `first`, in time order.

        Columns: sample_id, time (Unix seconds), label, item (text), history (lists of text).
        """
        items, histories, logits, uniforms = self._drawn(SAMPLES, first, rows)
        logits += self.intercept
        times = START + SECONDS * np.arange(first, first + rows)
        draw = Draw(items[None], np.empty((0, rows), np.float32), logits, uniforms < probability(logits), times)
        columns = {SAMPLE_ID: np.arange(first, first + rows), TIME: times, LABEL: draw.labels.astype(np.float32)}
        columns |= {ITEM: _names(items), HISTORY: histories}
        return pa.table({name: pa.array(values) for name, values in columns.items()}), draw

    def _drawn(self, stream: int, first: int, rows: int) -> tuple[np.ndarray, pa.Array, np.ndarray, np.ndarray]:
        """Returns items [R], histories, logits without the intercept, and the uniforms of the labels."""
        rng = np.random.default_rng((self.seed, stream, first))
        weights = np.arange(1, self.items + 1) ** -self.skew
        cumulative, length = np.cumsum(weights) / weights.sum(), self.max_length
        chosen = np.searchsorted(cumulative, rng.random((rows, length + 1))).clip(max=self.items - 1)
        liked = rng.integers(self.groups, size=(rows, 1))
        # An item of the liked group close in rank; the last column is the scored item.
        of_group = chosen - chosen % self.groups + liked
        of_group = np.where(of_group < self.items, of_group, liked)
        chosen = np.where(rng.random(chosen.shape) < 0.5, of_group, chosen)
        lengths = rng.integers(0, length + 1, size=rows)
        items, history = chosen[:, -1], chosen[:, :-1]
        present = np.arange(length) >= length - lengths[:, None]
        recency = 0.5 ** (np.arange(length)[::-1] / self.half_life)
        matches = present & (history % self.groups == items[:, None] % self.groups)
        effects = np.random.default_rng((self.seed, EFFECTS)).normal(size=self.items) * self.item_effect
        attention = matches @ recency - recency.sum() / (2 * self.groups)
        offsets = pa.array(np.r_[0, np.cumsum(lengths)].astype(np.int32))
        histories = pa.ListArray.from_arrays(offsets, _names(history[present]))
        return items, histories, effects[items] + self.history_effect * attention, rng.random(rows)


def synthesize_histories(
    output: str | os.PathLike[str],
    config: HistoryConfig | None = None,
    *,
    test_rows: int = 50_000,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Schema:
    """Writes a data set of `config.rows` training samples, and the next samples for testing.

    `test_rows` is at least 1. Other arguments, the result and the errors are those of `synthesize`.
    """
    config = config or HistoryConfig()
    history = RawField(HISTORY, "sequence", max_length=config.max_length, shares=ITEM)
    schema = raw_id_schema(NAME, [RawField(ITEM, "categorical"), history], histories=config)
    return write_following(output, schema, config.draw, config.rows, test_rows, overwrite=overwrite, progress=progress)


def _names(items: np.ndarray) -> pa.Array:
    # Arrow divides an array of millions of NumPy texts into chunks, which no list array takes.
    return pa.array([f"item_{item}" for item in range(items.max(initial=-1) + 1)], pa.string()).take(pa.array(items))
