"""Planted click model that drifts: ids appear and disappear, and their effects change; probabilities stay known.

    logit(t) = b + sum_f a_f[id_f](t) + sum_{f<g} <v_f[id_f](t), v_g[id_g](t)> + sum_n c_n (x_n - E x_n)

A share of a field's samples show one of a fixed set of core ids, by a power law of rank. The others show short-lived
ids, which appear at a constant rate and are numbered in that order: the age of the id shown is exponential with mean
`lifetime_days`, truncated at `LIFETIMES` of them. Each component of an effect rotates between two approximately
Gaussian numbers, a cos(s t) + b sin(s t), at the id's own speed s ~ N(0, 1 / drift_days): its variance is constant, and
its autocorrelation after d days is exp(-d^2 / (2 drift_days^2)). Everything is a hash of (seed, sample or id, purpose),
as in the planted model. F sparse fields, N dense fields, R samples, K interaction rank.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cowrec.errors import UserError

from ..dataset.schema import LABEL, TIME, Schema
from ..hashing import mix, uniform
from ..parallel import ordered_map
from ..raw.layouts import RawField
from ..splitmix import GOLDEN
from .planted import (
    PILOT_ROWS,
    Draw,
    DrawArrays,
    Scales,
    fill_dense,
    gaussian,
    intercept_for,
    keys,
    power_law_rank,
    raw_id_schema,
    require,
    scales_of,
    write_following,
)

DAY = 86400
LIFETIMES = 5.0
"""Maximum age of an id, in mean lifetimes."""

SAMPLES, PILOT = 0, 1


@dataclass(frozen=True)
class DriftConfig:
    """Settings of the drifting model. With the defaults, 13 million ids appear in a year.

    Attributes:
        rows: samples over the first `days`; later ones follow at the same rate.
        days: time over which `rows` are spread.
        start: Unix seconds of the first sample; default 1 January 2024.
        core_ids: number of core ids of each sparse field, [F].
        new_ids_per_day: short-lived ids that appear in each sparse field per day, [F].
        new_id_share: share of samples that show a short-lived id, for fields with both kinds.
        lifetime_days: mean age of a short-lived id when shown.
        drift_days: correlation time of the effects, after which their autocorrelation is exp(-1/2).
        skew: exponent of the power law in the core.
        ctr: mean click probability over the first `days`.
        id_effect: standard deviation of an id's own effect on the logit.
        interaction_effect: standard deviation of the effect of one pair of ids.
        dense_effect: standard deviation of a dense feature's slope, which does not drift.
    """

    rows: int = 1_000_000
    days: float = 10.0
    start: int = 1_704_067_200
    seed: int = 0
    core_ids: tuple[int, ...] = (20, 100, 500, 2_000, 5_000, 10_000)
    new_ids_per_day: tuple[int, ...] = (0, 10, 100, 1_000, 5_000, 30_000)
    new_id_share: float = 0.5
    lifetime_days: float = 2.0
    drift_days: float = 10.0
    num_dense: int = 4
    skew: float = 1.1
    ctr: float = 0.25
    id_effect: float = 0.4
    interaction_effect: float = 0.15
    interaction_rank: int = 2
    dense_effect: float = 0.5

    def __post_init__(self) -> None:
        require(self, "at least 1", lambda value: value >= 1, "rows", "interaction_rank")
        require(self, "at least 0", lambda value: value >= 0, "seed", "num_dense")
        require(self, "finite and above 0", lambda value: 0 < value < math.inf, "days", "lifetime_days", "drift_days")
        oldest = LIFETIMES * self.lifetime_days * DAY  # ids that are older than 1970 would be those of the core
        require(self, f"at least {oldest:g}, {LIFETIMES:g} lifetimes", lambda value: value >= oldest, "start")
        effects = ("skew", "id_effect", "interaction_effect", "dense_effect")
        require(self, "finite and at least 0", lambda value: 0 <= value < math.inf, *effects)
        require(self, "between 0 and 1", lambda value: 0 < value < 1, "ctr")
        require(self, "in [0, 1]", lambda value: 0 <= value <= 1, "new_id_share")
        counts = list(zip(self.core_ids, self.new_ids_per_day, strict=False))
        if len(self.core_ids) != len(self.new_ids_per_day) or not counts:
            raise UserError(
                "core_ids and new_ids_per_day must have one number per field and at least one field, got "
                f"{len(self.core_ids)} and {len(self.new_ids_per_day)}"
            )
        for field, (core, new_ids) in enumerate(counts, start=1):
            if min(core, new_ids) < 0 or core + new_ids < 1:
                raise UserError(f"field {field} must have core ids or new ids, got {core} and {new_ids} per day")

    @property
    def fields(self) -> int:
        return len(self.core_ids)


@dataclass(frozen=True)
class DriftingModel:
    """Drifting click model: a configuration and the intercept b."""

    config: DriftConfig
    intercept: float = 0.0

    @staticmethod
    def of(config: DriftConfig) -> "DriftingModel":
        """Returns the model whose mean click probability over the first `days` is `ctr`, by a pilot draw."""
        model = DriftingModel(config)
        moments = np.linspace(0.0, config.days, PILOT_ROWS, endpoint=False)
        return replace(model, intercept=intercept_for(model._drawn(PILOT, 0, moments).logits, config.ctr))

    def draw(self, first_row: int, rows: int) -> Draw:
        """Draws samples [first_row, first_row + rows) of the endless stream; short-lived ids are -1 - number."""
        config = self.config
        numbers = np.arange(first_row, first_row + rows)
        moments = numbers * config.days / config.rows
        times = config.start + np.floor(numbers * (config.days * DAY) / config.rows).astype(np.int64)
        return self._drawn(SAMPLES, first_row, moments).draw(self.intercept, times)

    def _drawn(self, stream: int, first_row: int, moments: np.ndarray) -> DrawArrays:
        """Draws samples at `moments`, float64 [R], in days since the start; ids int64."""
        config = self.config
        out = DrawArrays.empty(config.fields, config.num_dense, len(moments), np.int64)
        (row_key,) = keys((config.seed, 1, stream), 1)
        scales = scales_of(config)
        new_ids = np.asarray(config.new_ids_per_day, np.float64)
        pace = _Pace(config.start / DAY, config.new_id_share, config.lifetime_days, config.drift_days)
        effects = keys((config.seed, 0), config.fields + config.num_dense)
        _draw(first_row, row_key, effects, np.asarray(config.core_ids), new_ids, moments, pace, scales, out)
        return out


class _Pace(NamedTuple):
    """Start in days since 1970, and the settings of change over time."""

    start: float
    new_id_share: float
    lifetime: float
    drift: float


@numba.njit(nogil=True, cache=True)
def _draw(
    first: int,
    stream: np.uint64,
    effects: np.ndarray,
    core: np.ndarray,
    new_ids: np.ndarray,
    moments: np.ndarray,
    pace: _Pace,
    scales: Scales,
    out: DrawArrays,
) -> None:
    """Fills the arrays with samples from `first`."""
    fields, rows = out.ids.shape
    sums = np.empty(scales.rank)
    mass = 1.0 - math.exp(-LIFETIMES)
    for i in range(rows):
        row = mix(stream + np.uint64(first + i) * GOLDEN)
        logit, squares = 0.0, 0.0
        sums[:] = 0.0
        for f in range(fields):
            bits = mix(row + np.uint64(f + 1) * GOLDEN)
            share = pace.new_id_share
            if core[f] == 0 or new_ids[f] == 0:
                share = 0.0 if new_ids[f] == 0 else 1.0
            if uniform(bits) < share:
                age = -pace.lifetime * math.log(1.0 - mass * uniform(mix(bits + GOLDEN)))
                ident = -1 - math.floor((pace.start + moments[i] - age) * new_ids[f])
            else:
                ident = power_law_rank(uniform(mix(bits + GOLDEN)), core[f], scales.skew)
            out.ids[f, i] = ident
            speed_bits = mix(effects[f] + np.uint64(ident) * GOLDEN)
            angle = gaussian(speed_bits) * moments[i] / pace.drift
            across, along = math.cos(angle), math.sin(angle)
            one = mix(speed_bits + GOLDEN)
            other = mix(one + GOLDEN)
            logit += scales.id_scale * (across * gaussian(one) + along * gaussian(other))
            for k in range(scales.rank):
                one = mix(other + GOLDEN)
                other = mix(one + GOLDEN)
                v = scales.pair_scale * (across * gaussian(one) + along * gaussian(other))
                sums[k] += v
                squares += v * v
        total = 0.0
        for k in range(scales.rank):
            total += sums[k] * sums[k]
        logit += 0.5 * (total - squares)
        out.logits[i] = fill_dense(logit, row, effects, scales.dense_scale, out.dense, i)
        out.uniforms[i] = uniform(mix(row))


NAME = "drifting"
SAMPLE_ID = "sample_id"
CHUNK_ROWS = 1 << 16


def synthesize_drifting(
    output: str | os.PathLike[str],
    config: DriftConfig | None = None,
    *,
    test_rows: int = 100_000,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Schema:
    """Writes a data set of drifting samples with raw ids and times: `config.rows` for training, the next for testing.

    `test_rows` is at least 1. Other arguments, the result and the errors are those of `synthesize`.
    """
    config = config or DriftConfig()
    fields = [RawField(f"I{n + 1}", "numeric") for n in range(config.num_dense)]
    fields += [RawField(f"C{f + 1}", "categorical") for f in range(config.fields)]
    schema, drawn = raw_id_schema(NAME, fields, drift=config), partial(_drawn, DriftingModel.of(config))
    return write_following(output, schema, drawn, config.rows, test_rows, overwrite=overwrite, progress=progress)


def drift_config(data_dir: str | os.PathLike[str]) -> DriftConfig:
    """Reads the configuration from a data set of `synthesize_drifting`. Raises ValueError if it has another origin."""
    schema = Schema.load(data_dir)
    if schema.name != NAME:
        raise UserError(f"{data_dir} is no drifting data set; create one with cowrec synthesize --days")
    settings = schema.settings["drift"]
    lists = {name: tuple(value) for name, value in settings.items() if isinstance(value, list)}
    return DriftConfig(**{**settings, **lists})


def drifting_tables(config: DriftConfig, first_row: int, rows: int, chunk_rows: int = CHUNK_ROWS) -> Iterator[pa.Table]:
    """Yields samples [first_row, first_row + rows) as raw tables in time order, `chunk_rows` per table.

    Columns: sample_id (its number), time (Unix seconds), label, I1..IN (float32), C1..CF (text: "core_17", or
    "born_1234" for a short-lived id).
    """
    model, stop = DriftingModel.of(config), first_row + rows
    starts = range(first_row, stop, chunk_rows)
    return ordered_map(lambda first: _drawn(model, first, min(chunk_rows, stop - first))[0], starts)


def _drawn(model: DriftingModel, first: int, rows: int) -> tuple[pa.Table, Draw]:
    draw = model.draw(first, rows)
    columns: dict[str, Any] = {SAMPLE_ID: np.arange(first, first + rows), TIME: draw.times, LABEL: draw.labels}
    columns |= {f"I{n + 1}": values for n, values in enumerate(draw.dense)}
    columns |= {f"C{f + 1}": id_text(ids) for f, ids in enumerate(draw.ids)}
    return pa.table({name: pa.array(values) for name, values in columns.items()}), draw


def id_text(ids: np.ndarray) -> pa.Array:
    """Converts one field's ids of `Draw.ids`, int64 [R], to text."""
    number = pa.array(np.where(ids < 0, -1 - ids, ids)).cast(pa.string())
    kind = pc.if_else(pa.array(ids < 0), "born", "core")
    return pc.binary_join_element_wise(kind, number, "_")
