"""Stable 64-bit hashes of integers and strings, compiled: splitmix64 and FNV-1a. R values."""

from typing import Any

import numba
import numpy as np
import pyarrow as pa

from .splitmix import GOLDEN, splitmix

FNV_OFFSET = np.uint64(0xCBF29CE484222325)
FNV_PRIME = np.uint64(0x100000001B3)


mix: Any = numba.njit(inline="always")(splitmix)
"""`splitmix` of a uint64 in a compiled function."""


@numba.njit(inline="always")
def uniform(bits: np.uint64) -> float:
    """Maps the top 53 bits to [0, 1)."""
    return (bits >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@numba.njit(nogil=True, cache=True)
def uniforms(seed: int, numbers: np.ndarray) -> np.ndarray:
    """Draws a number in [0, 1) for each integer, float64 [R] from int64 [R], by (seed, integer) alone."""
    key, out = mix(np.uint64(seed)), np.empty(len(numbers))
    for i in range(len(numbers)):
        out[i] = uniform(mix(key + np.uint64(numbers[i]) * GOLDEN))
    return out


@numba.njit(nogil=True, cache=True)
def bytes_hashes(offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Computes `string_hashes` of strings stored in `data`, uint8, between consecutive `offsets`, int [R + 1]."""
    out = np.empty(len(offsets) - 1, np.uint64)
    for i in range(len(out)):
        state = FNV_OFFSET
        for k in range(offsets[i], offsets[i + 1]):
            state = (state ^ np.uint64(data[k])) * FNV_PRIME
        out[i] = mix(state)
    return out


def string_hashes(text: pa.Array) -> np.ndarray:
    """Hashes strings: uint64 [R] = splitmix64's mix of FNV-1a (64 bits) over the UTF-8 bytes.

    Part of the data format (`hash_buckets`): it must never change.
    """
    return bytes_hashes(*string_buffers(text))


def string_buffers(text: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns the buffers of strings without nulls: offsets, int32 or int64 [R + 1], and bytes, uint8."""
    wide = pa.types.is_large_string(text.type)
    _, offsets, data = text.buffers()
    dtype = np.dtype(np.int64 if wide else np.int32)
    if offsets is None:  # Arrow leaves out buffers that would be empty
        return np.zeros(1, dtype), np.zeros(0, np.uint8)
    starts = np.frombuffer(offsets, dtype, len(text) + 1, text.offset * dtype.itemsize)
    return starts, np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
