"""Distinct strings, numbered in the order of their arrival, in memory of some 40 bytes and their length each.

R strings asked for, U in the table.
"""

import numba
import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.hashing import bytes_hashes, string_buffers, string_hashes

FEWEST_SLOTS = 8


class StringTable:
    """Finds a string's place in constant time; can be pickled."""

    def __init__(self) -> None:
        self._size = 0
        # Bytes of string p: _data[_starts[p] : _starts[p + 1]].
        self._starts = np.zeros(1, np.int64)
        self._data = np.zeros(0, np.uint8)
        # Open addressing: the upper half of the hash, and the place + 1 of the string; 0 is an empty slot.
        self._slots = np.zeros(FEWEST_SLOTS, np.uint64)

    def __len__(self) -> int:
        return self._size

    def insert(self, text: pa.Array) -> np.ndarray:
        """Places of strings, int64 [R]; those that are not there yet are added."""
        offsets, data = string_buffers(text)
        hashes = string_hashes(text)
        self._reserve(len(text), int(offsets[-1] - offsets[0]))
        places, self._size = _find(hashes, offsets, data, self._slots, self._starts, self._data, self._size, True)
        return places

    def find(self, text: pa.Array) -> np.ndarray:
        """Places of strings, int64 [R]; -1 where they are not there."""
        return self.find_hashed(string_hashes(text), *string_buffers(text))

    def find_hashed(self, hashes: np.ndarray, offsets: np.ndarray, data: np.ndarray) -> np.ndarray:
        """`find` for strings as `string_buffers` gives them, whose hashes are known: uint64 [R]."""
        return _find(hashes, offsets, data, self._slots, self._starts, self._data, self._size, False)[0]

    def strings(self) -> pa.Array:
        """All strings in order, large_string [U], without a copy: valid until the next `insert`."""
        buffers = [None, pa.py_buffer(self._starts[: self._size + 1]), pa.py_buffer(self._data)]
        return pa.Array.from_buffers(pa.large_string(), self._size, buffers)

    def _reserve(self, strings: int, size: int) -> None:
        """Room for so many more strings of so many bytes together, and twice as many slots as strings."""
        most, used = self._size + strings, int(self._starts[self._size])
        self._starts = _grown(self._starts, self._size + 1, most + 1)
        self._data = _grown(self._data, used, used + size)
        if 2 * most > len(self._slots):
            self._slots = np.zeros(1 << (2 * most - 1).bit_length(), np.uint64)
            _fill(bytes_hashes(self._starts[: self._size + 1], self._data), self._slots)


def _grown(array: np.ndarray, used: int, needed: int) -> np.ndarray:
    """An array of at least `needed` elements with the first `used` ones of `array`; the rest takes no memory yet."""
    if needed <= len(array):
        return array
    larger = np.empty(max(needed, 2 * len(array)), array.dtype)
    larger[:used] = array[:used]
    return larger


@numba.njit(nogil=True, cache=True)
def _fill(hashes: np.ndarray, slots: np.ndarray) -> None:
    """Slots of the strings 0, 1, ... with these hashes: the first free one from the hash's lower bits on."""
    mask = np.uint64(len(slots) - 1)
    for place in range(len(hashes)):
        slot = hashes[place] & mask
        while slots[slot] != 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = _entry(hashes[place], place)


@numba.njit(nogil=True, cache=True)
def _find(
    hashes: np.ndarray,
    offsets: np.ndarray,
    data: np.ndarray,
    slots: np.ndarray,
    starts: np.ndarray,
    known: np.ndarray,
    size: int,
    insert: bool,
) -> tuple[np.ndarray, int]:
    """Compares the strings themselves, so that no two share a place, not even with equal hashes."""
    mask = np.uint64(len(slots) - 1)
    places = np.full(len(hashes), -1, np.int64)
    for i in range(len(hashes)):
        length = offsets[i + 1] - offsets[i]
        slot = hashes[i] & mask
        while slots[slot] != 0:
            place = np.int64(slots[slot] & np.uint64(0xFFFFFFFF)) - 1
            if slots[slot] == _entry(hashes[i], place) and starts[place + 1] - starts[place] == length:
                k = 0
                while k < length and data[offsets[i] + k] == known[starts[place] + k]:
                    k += 1
                if k == length:
                    places[i] = place
                    break
            slot = (slot + np.uint64(1)) & mask
        if insert and places[i] < 0:
            slots[slot] = _entry(hashes[i], size)
            for k in range(length):
                known[starts[size] + k] = data[offsets[i] + k]
            starts[size + 1] = starts[size] + length
            places[i] = size
            size += 1
    return places, size


@numba.njit(inline="always")
def _entry(string_hash: np.uint64, place: int | np.int64) -> np.uint64:
    return (string_hash & np.uint64(0xFFFFFFFF00000000)) | np.uint64(place + 1)
