"""Planted click model of synthetic data: all probabilities are known, and so is the best possible AUC.

    logit = b + sum_f a_f[id_f] + sum_{f<g} <v_f[id_f], v_g[id_g]> + sum_n c_n (x_n - E x_n)

Ids follow a power law by rank, P(rank) ~ rank^-skew. The effects a, v and c are approximately Gaussian numbers hashed
from (seed, field, id), so vocabularies of any size need no memory. Every draw is a hash of (seed, sample, purpose), so
a sample does not depend on the chunk in which it is generated.

F sparse fields, N dense fields, R samples, K interaction rank.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np

from cowrec.data_pipeline.hashing import GOLDEN, mix, uniform

WORD_SUM_MEAN = 4 * 65535 / 2
WORD_SUM_STD = math.sqrt(4 * (65536**2 - 1) / 12)
PILOT_ROWS = 1 << 16


@numba.njit(inline="always")
def gaussian(bits: np.uint64) -> float:
    """Number of mean 0 and variance 1 from the sum of a hash's four 16-bit words; identical on all machines."""
    low = np.uint64(0xFFFF)
    words = (bits & low) + ((bits >> np.uint64(16)) & low) + ((bits >> np.uint64(32)) & low) + (bits >> np.uint64(48))
    return (float(words) - WORD_SUM_MEAN) / WORD_SUM_STD


@numba.njit(inline="always")
def power_law_rank(u: float, size: int, skew: float) -> int:
    """Inverse of the distribution function of the density x^-skew on [1, size + 1): rank from 0, of u in [0, 1)."""
    power = 1.0 - skew
    if power == 0.0:
        x = math.exp(u * math.log(size + 1.0))
    else:
        x = (1.0 + u * ((size + 1.0) ** power - 1.0)) ** (1.0 / power)
    return min(int(x), size) - 1


def probability(logits: np.ndarray) -> np.ndarray:
    """Click probabilities of logits."""
    return 1.0 / (1.0 + np.exp(-logits))


def intercept_for(logits: np.ndarray, ctr: float) -> float:
    """Returns the intercept at which the mean click probability is `ctr`, by bisection."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if np.mean(probability(logits + middle)) < ctr:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class Scales(NamedTuple):
    """Sizes of the effects on the logit, and the power law of ids; see `PlantedModel`."""

    skew: float
    id_scale: float
    pair_scale: float
    rank: int
    dense_scale: float


class DrawArrays(NamedTuple):
    """Arrays that a draw fills: ids [F, R], dense [N, R], logits [R] (no intercept), uniforms [R] for the labels."""

    ids: np.ndarray
    dense: np.ndarray
    logits: np.ndarray
    uniforms: np.ndarray


def empty_arrays(fields: int, num_dense: int, rows: int, id_type: type[np.integer]) -> DrawArrays:
    """Allocates the arrays of a draw; ids are of `id_type`, dense float32, the others float64."""
    return DrawArrays(
        np.empty((fields, rows), id_type), np.empty((num_dense, rows), np.float32), np.empty(rows), np.empty(rows)
    )


@numba.njit(inline="always")
def fill_dense(logit: float, row: np.uint64, effects: np.ndarray, scale: float, dense: np.ndarray, i: int) -> float:
    """Draws the dense features of sample `i`; returns the logit with their effects, the last ones of `effects`."""
    fields = len(effects) - len(dense)
    for n in range(len(dense)):
        u = uniform(mix(row + np.uint64(fields + n + 1) * GOLDEN))
        # Like scaled counts, the cube of a uniform is mostly small: mean 1/4 and a long tail.
        x = u * u * u
        dense[n, i] = x
        logit += scale * gaussian(effects[fields + n]) * (x - 0.25)
    return logit


@numba.njit(nogil=True, cache=True)
def _draw(
    first: int, stream: np.uint64, effects: np.ndarray, sizes: np.ndarray, scales: Scales, out: DrawArrays
) -> None:
    """Fills the arrays with samples from `first`."""
    fields, rows = out.ids.shape
    sums = np.empty(scales.rank)
    for i in range(rows):
        row = mix(stream + np.uint64(first + i) * GOLDEN)
        logit = 0.0
        squares = 0.0
        sums[:] = 0.0
        for f in range(fields):
            u = uniform(mix(row + np.uint64(f + 1) * GOLDEN))
            rank_of_id = power_law_rank(u, sizes[f], scales.skew)
            out.ids[f, i] = rank_of_id
            effect = mix(effects[f] + np.uint64(rank_of_id) * GOLDEN)
            logit += scales.id_scale * gaussian(effect)
            for k in range(scales.rank):
                effect = mix(effect + GOLDEN)
                v = scales.pair_scale * gaussian(effect)
                sums[k] += v
                squares += v * v
        total = 0.0
        for k in range(scales.rank):
            total += sums[k] * sums[k]
        logit += 0.5 * (total - squares)
        out.logits[i] = fill_dense(logit, row, effects, scales.dense_scale, out.dense, i)
        out.uniforms[i] = uniform(mix(row))


@dataclass(frozen=True)
class Draw:
    """Samples of the planted model.

    Attributes:
        ids: int32 [F, R], ranks by decreasing frequency, from 0.
        dense: float32 [N, R], in [0, 1).
        logits: float64 [R], logits of the true click probabilities.
        labels: float32 [R], drawn with these probabilities.
    """

    ids: np.ndarray
    dense: np.ndarray
    logits: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class PlantedModel:
    """Parameters of the planted model.

    Attributes:
        seed: seed of all effects and draws.
        sizes: vocabulary size of each sparse field, int64 [F].
        num_dense: N.
        skew: exponent of the power law.
        id_scale: standard deviation of a_f; logit units.
        pair_scale: standard deviation of each component of v_f.
        rank: K.
        dense_scale: standard deviation of c_n.
        intercept: b.
    """

    seed: int
    sizes: np.ndarray
    num_dense: int
    skew: float
    id_scale: float
    pair_scale: float
    rank: int
    dense_scale: float
    intercept: float = 0.0

    def draw(self, stream: int, first_row: int, rows: int) -> Draw:
        """Draws samples [first_row, first_row + rows) of a stream; streams are independent draws of one model."""
        out = empty_arrays(len(self.sizes), self.num_dense, rows, np.int32)
        effects = keys((self.seed, 0), len(self.sizes) + self.num_dense)
        (row_key,) = keys((self.seed, 1, stream), 1)
        scales = Scales(self.skew, self.id_scale, self.pair_scale, self.rank, self.dense_scale)
        _draw(first_row, row_key, effects, self.sizes, scales, out)
        logits = out.logits + self.intercept
        labels = (out.uniforms < probability(logits)).astype(np.float32)
        return Draw(out.ids, out.dense, logits, labels)


def keys(seed: tuple[int, ...], count: int) -> np.ndarray:
    """Returns independent 64-bit keys: uint64 [count]."""
    return np.random.SeedSequence(seed).generate_state(count, np.uint64)
