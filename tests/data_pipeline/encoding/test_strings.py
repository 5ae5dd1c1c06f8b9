"""`StringTable` against a dictionary, and `string_order` against Python's sort."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cowrec.data_pipeline.encoding as strings_module
from cowrec.data_pipeline.encoding import StringTable, string_order

# Zero bytes, prefixes of each other, and lengths around the eight bytes of a word.
strings = st.one_of(
    st.text("ab\0é", max_size=4),
    st.text("ab", min_size=6, max_size=18),
    st.sampled_from(["12345678", "12345678\0", "12345678\0\0", "1234567890123456", "12345678901234567"]),
)
wide = st.booleans()


def array(values, wide):
    return pa.array(values, pa.large_string() if wide else pa.string())


@settings(deadline=None)
@given(st.lists(st.tuples(strings, wide), max_size=60), st.lists(st.lists(strings, max_size=30), max_size=5))
def test_a_table_numbers_strings_in_order_of_insertion(asked, chunks):
    table, known = StringTable(), {}
    for chunk in chunks:
        expected = [known.setdefault(value, len(known)) for value in chunk]
        assert table.insert(array(chunk, len(chunk) % 2)).tolist() == expected
        assert len(table) == len(known)
        assert table.strings().to_pylist() == list(known)
    again = pickle.loads(pickle.dumps(table))
    text = array([value for value, _ in asked], False)
    assert again.find(text).tolist() == table.find(text).tolist() == [known.get(value, -1) for value, _ in asked]


def test_only_the_strings_of_a_slice_are_inserted():
    text = array([f"{n % 700}" for n in range(5000)], False)
    table = StringTable()
    assert table.insert(text.slice(1300, 900)).tolist() == [*range(700), *range(200)]
    assert table.strings().to_pylist() == [f"{n % 700}" for n in range(1300, 2000)]
    assert table.find(text.slice(4999)).tolist() == [(4999 - 1300) % 700]


def test_strings_with_equal_hashes_stay_distinct(monkeypatch):
    monkeypatch.setattr(strings_module, "string_hashes", lambda text: np.full(len(text), 7 << 60, np.uint64))
    monkeypatch.setattr(strings_module, "bytes_hashes", lambda starts, _: np.full(len(starts) - 1, 7 << 60, np.uint64))
    table, values = StringTable(), [f"{n}" for n in range(90)]
    assert table.insert(array(values, False)).tolist() == list(range(90))
    assert table.insert(array(values[::-1], True)).tolist() == list(range(90))[::-1]
    assert table.find(array(["5", "x"], False)).tolist() == [5, -1]


@settings(deadline=None)
@given(st.dictionaries(strings, st.integers(-3, 3), max_size=60), wide)
def test_strings_are_sorted_by_key_and_bytes(numbers, wide):
    order = string_order(array(list(numbers), wide), np.array(list(numbers.values()), np.int64))
    expected = sorted(numbers, key=lambda value: (numbers[value], value.encode()))
    assert [list(numbers)[index] for index in order] == expected


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_long_strings_among_short_ones_are_sorted(size):
    values = [f"{n:05d}" for n in range(size)] + ["x" * 100_000 + "b", "x" * 100_000 + "a"]
    assert string_order(array(values, False), np.zeros(len(values), np.int64)).tolist() == [
        *range(size),
        size + 1,
        size,
    ]
