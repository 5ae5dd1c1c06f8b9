"""splitmix64 (Steele, Lea, Flood 2014), the hash behind all draws, without numba: steps on a GPU do without it."""

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix(state: np.ndarray) -> np.ndarray:
    """Applies splitmix64's output function, a bijection of the 64-bit integers, to each element; uint64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: np.ndarray = state ^ (state >> np.uint64(31))
    return found
