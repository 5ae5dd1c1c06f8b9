"""Generator of raw files of any length in the layout of Criteo's Kaggle train.txt, to test and time `prepare`.

    python scripts/make_raw_criteo.py --rows 45840617 --output train.txt      # 11 GB, like the real one

Ids have the frequencies of the real rows (data_pipeline/synthetic/criteo_ids.py), so 45,840,617 rows contain 33.8
million ids; numbers have similar lengths and shares of missing values. Labels are random, so there is nothing to learn.
A row depends on the seed and its number, not on the length of the file.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numba
import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.hashing import GOLDEN, mix
from cowrec.data_pipeline.parallel import ordered_map
from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds

CHUNK_ROWS = 1 << 16
CLICKS = 0.2562
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
    chunk = raw_chunks(arguments.seed, arguments.max_ids)
    spans = [(first, min(CHUNK_ROWS, arguments.rows - first)) for first in range(0, arguments.rows, CHUNK_ROWS)]
    with pa.output_stream(arguments.output) as file:
        for data in ordered_map(lambda span: chunk(*span), spans):
            file.write(data)
    print(f"{arguments.output}: {arguments.rows:,} rows, {arguments.output.stat().st_size:,} bytes")


def raw_chunks(seed: int, max_ids: int | None = None) -> Callable[[int, int], np.ndarray]:
    """Returns a function of (first, rows) that generates the text of rows [first, first + rows), uint8 [bytes].

    Raises:
        ValueError: `max_ids` is below 2.
    """
    ids = CriteoIds(seed, max_ids)
    key, *field_keys = np.random.SeedSequence((seed, 1)).generate_state(27, np.uint64)
    draw = ids.values if max_ids is None else ids.rows
    missing = np.array([MISSING_IDS.get(field, -1) for field in range(26)])
    return partial(_chunk, draw, key, np.array(field_keys).astype(np.uint32), missing, *_number_texts(seed))


def _chunk(
    draw: Callable[[int, int], np.ndarray],
    key: np.uint64,
    field_keys: np.ndarray,
    missing: np.ndarray,
    texts: np.ndarray,
    lengths: np.ndarray,
    first: int,
    rows: int,
) -> np.ndarray:
    text = np.empty(rows * MAX_ROW, np.uint8)
    values = np.ascontiguousarray(draw(first, rows).T)
    return text[: _write(text, values, key, field_keys, missing, texts, lengths, first)]


def _number_texts(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns equally likely texts of each number, uint8 [13, NUMBER_CHOICES, MAX_NUMBER], and their lengths."""
    random = np.random.default_rng((seed, 2))
    texts = np.zeros((len(NUMBERS), NUMBER_CHOICES), f"S{MAX_NUMBER}")
    for column, (missing, median, spread) in enumerate(NUMBERS):
        drawn = median * np.exp(spread * random.standard_normal(NUMBER_CHOICES))
        integers = np.floor(np.minimum(drawn, 10**MAX_NUMBER - 1)).astype(np.int64)
        texts[column] = np.where(random.random(NUMBER_CHOICES) < missing, b"", integers.astype(f"S{MAX_NUMBER}"))
    return texts[..., None].view(np.uint8), np.char.str_len(texts).astype(np.int64)


# Not cached: numba's cache depends on the module's name, which differs between a script and an import.
@numba.njit(nogil=True)
def _write(
    text: np.ndarray,
    values: np.ndarray,
    key: np.uint64,
    field_keys: np.ndarray,
    missing: np.ndarray,
    number_texts: np.ndarray,
    number_lengths: np.ndarray,
    first: int,
) -> int:
    """Writes the rows with the ids `values`, int32 [rows, 26]; returns the number of bytes."""
    at = 0
    for row in range(len(values)):
        bits = mix(key + np.uint64(first + row) * GOLDEN)
        text[at] = 48 + ((bits >> np.uint64(11)) * (1.0 / 9007199254740992.0) < CLICKS)
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
