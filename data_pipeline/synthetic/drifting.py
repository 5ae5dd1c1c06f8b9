"""Click samples over time whose ids come and go and whose tastes drift; every probability is known at every moment.

    logit(t) = b + sum_f a_f[id_f](t) + sum_{f<g} <v_f[id_f](t), v_g[id_g](t)> + sum_n c_n (x_n - E x_n)

A share of a field's ids are drawn from a lasting core, by a power law of rank. The others were born: numbered births
happen at a steady rate, and a sample shows one of an age that is exponential with the mean `lifetime_days`, cut at
`LIFETIMES` of them: popularity decays with age and ends. Each component of an effect turns between two Gaussian-like
numbers, a cos(s t) + b sin(s t), at its id's own speed s ~ N(0, 1 / drift_days): its variance stays, and its
correlation with itself after d days is exp(-d^2 / (2 drift_days^2)).

As in the planted model, everything is a hash of (seed, row or id, purpose): no table exists, and row i is the same
whatever the chunk it is made in. F sparse fields, N dense fields, R rows, K interaction rank.
"""

import math
from dataclasses import dataclass, replace

import numba
import numpy as np

from cowrec.data_pipeline.hashing import GOLDEN, mix, uniform

from .planted import PILOT_ROWS, gaussian, keys

DAY = 86400
LIFETIMES = 5.0
"""An id is never seen again after so many mean lifetimes."""

SAMPLES, PILOT = 0, 1


@dataclass(frozen=True)
class DriftConfig:
    """What drifts and how. By the defaults 13 million ids are born in a year.

    Attributes:
        rows: samples over the first `days`; later ones come at the same pace.
        days: that `rows` are spread over.
        start: Unix seconds of the first sample; by default the first of January 2024.
        seed: of everything.
        core_ids: lasting ids of each sparse field, [F].
        births_per_day: ids that are born in each sparse field in a day, [F].
        born_share: share of a field's samples that show a born id, where it has both kinds.
        lifetime_days: mean age of a born id when it is seen.
        drift_days: correlation time of the effects: after so many days it is exp(-1/2).
        num_dense: N.
        skew: exponent of the power law in the core.
        ctr: mean click probability over the first `days`.
        id_effect: standard deviation of an id's own effect on the logit.
        interaction_effect: of one interaction of two ids on the logit.
        interaction_rank: K.
        dense_effect: of a dense feature's slope, which does not drift.
    """

    rows: int = 1_000_000
    days: float = 10.0
    start: int = 1_704_067_200
    seed: int = 0
    core_ids: tuple[int, ...] = (20, 100, 500, 2_000, 5_000, 10_000)
    births_per_day: tuple[int, ...] = (0, 10, 100, 1_000, 5_000, 30_000)
    born_share: float = 0.5
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
        for name in ("rows", "interaction_rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("start", "seed", "num_dense"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("days", "lifetime_days", "drift_days"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number above 0, got {getattr(self, name)}")
        for name in ("skew", "id_effect", "interaction_effect", "dense_effect"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, got {getattr(self, name)}")
        if not 0 < self.ctr < 1:
            raise ValueError(f"ctr must be between 0 and 1, got {self.ctr}")
        if not 0 <= self.born_share <= 1:
            raise ValueError(f"born_share must be in [0, 1], got {self.born_share}")
        counts = list(zip(self.core_ids, self.births_per_day, strict=False))
        if len(self.core_ids) != len(self.births_per_day) or not counts:
            raise ValueError(
                "core_ids and births_per_day must name one number for each field, at least one field; got "
                f"{len(self.core_ids)} and {len(self.births_per_day)}"
            )
        for field, (core, births) in enumerate(counts, start=1):
            if min(core, births) < 0 or core + births < 1:
                raise ValueError(f"field {field} must have core ids or births, got {core} and {births} a day")

    @property
    def fields(self) -> int:
        """F."""
        return len(self.core_ids)


@dataclass(frozen=True)
class DriftDraw:
    """Rows of the drifting model.

    Attributes:
        ids: int64 [F, R]; from 0 a core id by decreasing frequency, below 0 the born id of number -1 - id.
        dense: float32 [N, R], in [0, 1).
        logits: float64 [R], of the true click probability at that moment.
        labels: float32 [R], drawn with it.
        times: int64 [R], Unix seconds, not decreasing.
    """

    ids: np.ndarray
    dense: np.ndarray
    logits: np.ndarray
    labels: np.ndarray
    times: np.ndarray


@dataclass(frozen=True)
class DriftingModel:
    """The drifting click model: a configuration and the intercept b that gives its click rate."""

    config: DriftConfig
    intercept: float = 0.0

    @staticmethod
    def of(config: DriftConfig) -> "DriftingModel":
        """The model whose mean click probability over the first `days` is `ctr`, by bisection over a pilot draw."""
        model = DriftingModel(config)
        moments = np.linspace(0.0, config.days, PILOT_ROWS, endpoint=False)
        logits = model._drawn(PILOT, 0, moments)[2]
        low, high = -50.0, 50.0
        for _ in range(60):
            middle = (low + high) / 2
            if np.mean(_chance(logits + middle)) < config.ctr:
                low = middle
            else:
                high = middle
        return replace(model, intercept=(low + high) / 2)

    def draw(self, first_row: int, rows: int) -> DriftDraw:
        """Rows [first_row, first_row + rows) of the endless stream."""
        config = self.config
        numbers = np.arange(first_row, first_row + rows)
        moments = numbers * config.days / config.rows
        times = config.start + np.floor(numbers * (config.days * DAY) / config.rows).astype(np.int64)
        ids, dense, logits, uniforms = self._drawn(SAMPLES, first_row, moments)
        logits += self.intercept
        labels = (uniforms < _chance(logits)).astype(np.float32)
        return DriftDraw(ids, dense, logits, labels, times)

    def _drawn(self, stream: int, first_row: int, moments: np.ndarray) -> tuple[np.ndarray, ...]:
        """Ids, dense, logits without intercept and uniforms at `moments`, float64 [R], days since the start."""
        config, rows = self.config, len(moments)
        ids = np.empty((config.fields, rows), np.int64)
        dense = np.empty((config.num_dense, rows), np.float32)
        logits, uniforms = np.empty(rows), np.empty(rows)
        (row_key,) = keys((config.seed, 1, stream), 1)
        _draw(
            first_row, row_key, keys((config.seed, 0), config.fields + config.num_dense),
            np.asarray(config.core_ids), np.asarray(config.births_per_day, np.float64), moments, config.start / DAY,
            config.born_share, config.lifetime_days, config.drift_days, config.skew, config.id_effect,
            # A product of K pairs of components of deviation s has deviation sqrt(K) * s^2.
            (config.interaction_effect / config.interaction_rank**0.5) ** 0.5, config.interaction_rank,
            config.dense_effect, ids, dense, logits, uniforms,
        )  # fmt: skip
        return ids, dense, logits, uniforms


def _chance(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits))


@numba.njit(inline="always")
def _rank(u: float, size: int, skew: float) -> int:
    """Inverse of the distribution function of the density x^-skew on [1, size + 1), from 0."""
    power = 1.0 - skew
    if power == 0.0:
        x = math.exp(u * math.log(size + 1.0))
    else:
        x = (1.0 + u * ((size + 1.0) ** power - 1.0)) ** (1.0 / power)
    return min(int(x), size) - 1


@numba.njit(nogil=True, cache=True)
def _draw(
    first: int,
    stream: np.uint64,
    effects: np.ndarray,
    core: np.ndarray,
    births: np.ndarray,
    moments: np.ndarray,
    start: float,
    born_share: float,
    lifetime: float,
    drift: float,
    skew: float,
    id_scale: float,
    pair_scale: float,
    rank: int,
    dense_scale: float,
    ids: np.ndarray,
    dense: np.ndarray,
    logits: np.ndarray,
    uniforms: np.ndarray,
) -> None:
    """Fills ids [F, R], dense [N, R], logits [R] (no intercept) and uniforms [R], which decide the labels."""
    fields, rows = ids.shape
    sums = np.empty(rank)
    cut = 1.0 - math.exp(-LIFETIMES)
    for i in range(rows):
        row = mix(stream + np.uint64(first + i) * GOLDEN)
        logit, squares = 0.0, 0.0
        sums[:] = 0.0
        for f in range(fields):
            bits = mix(row + np.uint64(f + 1) * GOLDEN)
            share = born_share
            if core[f] == 0 or births[f] == 0:
                share = 0.0 if births[f] == 0 else 1.0
            if uniform(bits) < share:
                age = -lifetime * math.log(1.0 - cut * uniform(mix(bits + GOLDEN)))
                ident = -1 - math.floor((start + moments[i] - age) * births[f])
            else:
                ident = _rank(uniform(mix(bits + GOLDEN)), core[f], skew)
            ids[f, i] = ident
            speed_bits = mix(effects[f] + np.uint64(ident) * GOLDEN)
            angle = gaussian(speed_bits) * moments[i] / drift
            across, along = math.cos(angle), math.sin(angle)
            one = mix(speed_bits + GOLDEN)
            other = mix(one + GOLDEN)
            logit += id_scale * (across * gaussian(one) + along * gaussian(other))
            for k in range(rank):
                one = mix(other + GOLDEN)
                other = mix(one + GOLDEN)
                v = pair_scale * (across * gaussian(one) + along * gaussian(other))
                sums[k] += v
                squares += v * v
        total = 0.0
        for k in range(rank):
            total += sums[k] * sums[k]
        logit += 0.5 * (total - squares)
        for n in range(dense.shape[0]):
            u = uniform(mix(row + np.uint64(fields + n + 1) * GOLDEN))
            x = u * u * u
            dense[n, i] = x
            logit += dense_scale * gaussian(effects[fields + n]) * (x - 0.25)
        logits[i] = logit
        uniforms[i] = uniform(mix(row))
