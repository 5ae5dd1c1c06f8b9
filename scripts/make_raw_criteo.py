"""Generator of raw files of any length in the layout of Criteo's Kaggle train.txt, to test and time `prepare`.

    python scripts/make_raw_criteo.py --rows 45840617 --output train.txt      # 11 GB, like the real one

Ids have the frequencies of the real rows (data_pipeline/synthetic/criteo_ids.py), so 45,840,617 rows contain 33.8
million ids; numbers have similar lengths and shares of missing values. Labels are drawn from a planted model, whose
best possible AUC is printed:

    logit = b + s (sum_f a_f[id_f] + sum_{f<g} <v_f[id_f], v_g[id_g]> + sum_n c_n[x_n])

Effects are Gaussian numbers hashed from seed, field and id; the rarer an id, the larger (see `_effect_size`). Fields
are independent, so that numbers of samples with several rare ids differ from the real ones. The scale s gives the AUC,
b the click rate. A row depends on the seed and its number, not on the length of the file.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.hashing import mix, uniform
from cowrec.data_pipeline.parallel import ordered_map
from cowrec.data_pipeline.splitmix import GOLDEN
from cowrec.data_pipeline.synthetic.criteo_frequencies import CRITEO_FREQUENCIES
from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.data_pipeline.synthetic.planted import best_quality, gaussian, intercept_for, probability

CHUNK_ROWS = 1 << 16
CLICKS, BEST_AUC = 0.2562, 0.81
PILOT = range(1 << 40, (1 << 40) + (1 << 18))
"""Rows from which scale and intercept are found; no file reaches them."""
# Share of missing values, median, and standard deviation of the logarithm of I1..I13 in the Kaggle file.
NUMBERS = (
    (0.45, 1, 1.2), (0.0, 3, 2.2), (0.21, 6, 1.3), (0.22, 4, 1.0), (0.03, 2800, 2.2), (0.22, 32, 1.7), (0.04, 3, 1.7),
    (0.001, 7, 1.1), (0.04, 38, 1.3), (0.45, 1, 0.7), (0.04, 1, 1.0), (0.77, 1, 1.2), (0.22, 4, 1.0),
)  # fmt: skip
# Frequency rank of the missing value, for fields that have one; C1 is 0.
MISSING_IDS = {2: 0, 3: 2, 5: 3, 11: 0, 15: 0, 18: 0, 19: 0, 20: 0, 21: 0, 23: 4, 24: 0, 25: 0}
NUMBER_CHOICES = 1 << 16
MAX_NUMBER = 8
MAX_ROW = 1 + len(NUMBERS) * (1 + MAX_NUMBER) + 26 * 9 + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True, help="compressed if it ends in .gz or .zst")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-ids", type=int, help="maximum ids per field [unlimited]")
    arguments = parser.parse_args()
    if arguments.rows < 1:
        parser.error(f"--rows must be at least 1, got {arguments.rows}")
    chunk, best = raw_chunks(arguments.seed, arguments.max_ids)
    spans = [(first, min(CHUNK_ROWS, arguments.rows - first)) for first in range(0, arguments.rows, CHUNK_ROWS)]
    with pa.output_stream(arguments.output) as file:
        for data in ordered_map(lambda span: chunk(*span), spans):
            file.write(data)
    print(f"{arguments.output}: {arguments.rows:,} rows, {arguments.output.stat().st_size:,} bytes")
    print(f"best possible AUC {best['expected_auc']:.4f}, logloss {best['expected_logloss']:.4f}")


class _Effects(NamedTuple):
    """The planted model: scale and intercept; first rank and size of the effects of each class of ids, [26, classes];
    effects of the choices of each number, [13, NUMBER_CHOICES]."""

    scale: float
    intercept: float
    firsts: np.ndarray
    sizes: np.ndarray
    numbers: np.ndarray


def _effect_size(share: np.ndarray) -> np.ndarray:
    """Standard deviation of the effects of ids with a share of their field's lookups, before the scale.

    In 80,000 rows of Criteo the labels of two rows with the same id have a covariance that gives, in logits, 1.2 for
    ids that occur twice, 1.04 for 3 or 4 times, 0.88 to 8, 0.86 to 16, 0.74 to 32, 0.70 to 64, 0.66 to 128, 0.58 to
    512, 0.59 to 2048, 0.36 to 8192 and 0.15 above. Rarer ids cannot be measured there; they are taken to be like those.
    """
    found: np.ndarray = np.interp(
        np.log2(share * 80_000), [1, 3, 5, 7, 10, 12, 14.5], [1.2, 0.88, 0.74, 0.66, 0.58, 0.36, 0.15]
    )
    return found


def raw_chunks(seed: int, max_ids: int | None = None) -> tuple[Callable[[int, int], np.ndarray], dict[str, float]]:
    """Returns a function of (first, rows) that generates the text of rows [first, first + rows), uint8 [bytes].

    The second result is the quality of the true probabilities, on rows that no file has.

    Raises:
        ValueError: `max_ids` is below 2.
    """
    ids = CriteoIds(seed, max_ids)
    key, *field_keys = np.random.SeedSequence((seed, 1)).generate_state(27, np.uint64)
    draw = ids.values if max_ids is None else ids.rows
    missing = np.array([MISSING_IDS.get(field, -1) for field in range(26)])
    texts, lengths, numbers = _number_texts(seed)
    classes = [np.array(each).T for each in CRITEO_FREQUENCIES]
    firsts, sizes = np.full((26, 65), 1 << 31), np.zeros((26, 65))
    for field, (count, share) in enumerate(classes):
        firsts[field, : len(count)] = np.cumsum(count) - count
        sizes[field, : len(count)] = _effect_size(share / count)
    keys = np.array(field_keys)
    effects = _Effects(1.0, 0.0, firsts, sizes, numbers)
    sums = _logits(np.ascontiguousarray(draw(PILOT[0], len(PILOT)).T), key, keys, effects, PILOT[0])
    uniforms = np.random.default_rng((seed, 3)).random(len(PILOT))
    low, high = 0.0, 4.0
    for _ in range(30):
        scale = (low + high) / 2
        logits = scale * sums + intercept_for(scale * sums, CLICKS)
        quality = best_quality(logits, (uniforms < probability(logits)).astype(np.float32))
        low, high = (low, scale) if quality["expected_auc"] > BEST_AUC else (scale, high)
    effects = effects._replace(scale=scale, intercept=intercept_for(scale * sums, CLICKS))
    return partial(_chunk, draw, key, keys, effects, missing, texts, lengths), quality


def _chunk(
    draw: Callable[[int, int], np.ndarray],
    key: np.uint64,
    field_keys: np.ndarray,
    effects: _Effects,
    missing: np.ndarray,
    texts: np.ndarray,
    lengths: np.ndarray,
    first: int,
    rows: int,
) -> np.ndarray:
    text = np.empty(rows * MAX_ROW, np.uint8)
    values = np.ascontiguousarray(draw(first, rows).T)
    logits = _logits(values, key, field_keys, effects, first)
    return text[: _write(text, values, logits, key, field_keys.astype(np.uint32), missing, texts, lengths, first)]


def _number_texts(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns equally likely texts of each number, uint8 [13, NUMBER_CHOICES, MAX_NUMBER], lengths and effects."""
    random, planted = np.random.default_rng((seed, 2)), np.random.default_rng((seed, 4))
    texts = np.zeros((len(NUMBERS), NUMBER_CHOICES), f"S{MAX_NUMBER}")
    effects = np.zeros(texts.shape)
    for column, (missing, median, spread) in enumerate(NUMBERS):
        drawn = median * np.exp(spread * random.standard_normal(NUMBER_CHOICES))
        integers = np.floor(np.minimum(drawn, 10**MAX_NUMBER - 1)).astype(np.int64)
        absent = random.random(NUMBER_CHOICES) < missing
        texts[column] = np.where(absent, b"", integers.astype(f"S{MAX_NUMBER}"))
        size, slope = np.log1p(integers), planted.normal(0, 0.3)
        effects[column] = np.where(absent, planted.normal(0, 0.3), slope * (size - size.mean()) / size.std())
    return texts[..., None].view(np.uint8), np.char.str_len(texts).astype(np.int64), effects


# Not cached: numba's cache depends on the module's name, which differs between a script and an import.
@numba.njit(nogil=True)
def _logits(values: np.ndarray, key: np.uint64, field_keys: np.ndarray, effects: _Effects, first: int) -> np.ndarray:
    """Logits of the rows from `first` with the ids `values`, int32 [rows, 26]."""
    logits = np.empty(len(values))
    for row in range(len(values)):
        bits = mix(key + np.uint64(first + row) * GOLDEN)
        total, one, other, squares = 0.0, 0.0, 0.0, 0.0
        for column in range(len(effects.numbers)):
            bits = mix(bits + np.uint64(column))
            total += effects.numbers[column, bits >> np.uint64(48)]
        for field in range(values.shape[1]):
            ident = values[row, field]
            size = effects.sizes[field, np.searchsorted(effects.firsts[field], ident, side="right") - 1]
            own = mix(field_keys[field] + np.uint64(ident) * GOLDEN)
            total += size * gaussian(own)
            own = mix(own + GOLDEN)
            v, w = 0.4 * size * gaussian(own), 0.4 * size * gaussian(mix(own + GOLDEN))
            one, other, squares = one + v, other + w, squares + v * v + w * w
        total += 0.5 * (one * one + other * other - squares)
        logits[row] = effects.scale * total + effects.intercept
    return logits


@numba.njit(nogil=True)
def _write(
    text: np.ndarray,
    values: np.ndarray,
    logits: np.ndarray,
    key: np.uint64,
    field_keys: np.ndarray,
    missing: np.ndarray,
    number_texts: np.ndarray,
    number_lengths: np.ndarray,
    first: int,
) -> int:
    """Writes the rows with the ids `values`, int32 [rows, 26], and these logits; returns the number of bytes."""
    at = 0
    for row in range(len(values)):
        bits = mix(key + np.uint64(first + row) * GOLDEN)
        text[at] = 48 + (uniform(bits) < 1 / (1 + np.exp(-logits[row])))
        at += 1
        for column in range(len(number_texts)):
            bits = mix(bits + np.uint64(column))
            choice = bits >> np.uint64(48)
            text[at] = 9
            at += 1
            for k in range(number_lengths[column, choice]):
                text[at] = number_texts[column, choice, k]
                at += 1
        for field in range(values.shape[1]):
            text[at] = 9
            at += 1
            if values[row, field] != missing[field]:
                code = _scrambled(np.uint32(values[row, field]) + field_keys[field])
                for k in range(8):
                    digit = (code >> np.uint32(28 - 4 * k)) & np.uint32(15)
                    text[at] = digit + (48 if digit < 10 else 87)
                    at += 1
        text[at] = 10
        at += 1
    return at


@numba.njit(inline="always")
def _scrambled(code: np.uint32) -> np.uint32:
    """A bijection of the 32-bit integers (Mueller's integer hash), which gives different ids different texts."""
    code = (code ^ (code >> np.uint32(16))) * np.uint32(0x45D9F3B)
    code = np.uint32(code)
    code = np.uint32((code ^ (code >> np.uint32(16))) * np.uint32(0x45D9F3B))
    return np.uint32(code ^ (code >> np.uint32(16)))


if __name__ == "__main__":
    main()
