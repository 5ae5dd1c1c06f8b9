"""Counts of numbers, normal scores and tables of strings, against Counter, SciPy's ranks and dictionaries."""

import collections
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm, rankdata

import cowrec.data_pipeline.encoding.vocabulary as strings_module
from cowrec.data_pipeline import PrepareConfig, SampleCodec, Schema
from cowrec.data_pipeline.encoding.numbers import MOST_VALUES, NumberStatistics, Transforms, ValueCounts, fitted
from cowrec.data_pipeline.encoding.vocabulary import StringTable, VocabularyCounter, counted_values
from cowrec.data_pipeline.hashing import string_buffers
from cowrec.data_pipeline.raw.layouts import RawField
from raw_cases import prepare_text, read_split
from refusal import refused

finite = st.floats(allow_nan=False, allow_infinity=False)


def transformed(field, values):
    return Transforms([field]).apply(values[None])[0]


def counted(parts, most=MOST_VALUES):
    total = ValueCounts(most)
    for part in parts:
        of_part = ValueCounts(most)
        of_part.add(np.array(part, float))
        total.merge(pickle.loads(pickle.dumps(of_part)))
    return total


@given(st.lists(st.lists(finite | st.sampled_from([0.0, -0.0, 1.0, -1.0, 5e-324]), max_size=9), max_size=5))
def test_distinct_numbers_are_counted(parts):
    expected = sorted(collections.Counter(value + 0.0 for part in parts for value in part).items())
    found = counted(parts)
    assert list(zip(found.values.tolist(), found.counts.tolist(), strict=True)) == expected
    assert found.total == sum(map(len, parts))


@given(st.lists(st.lists(st.floats(1, 2), max_size=30), max_size=5), st.integers(1, 20))
def test_counts_in_bounded_memory_do_not_depend_on_the_order(parts, most):
    one, other = counted(parts, most), counted([[x for part in parts[::-1] for x in part]], most)
    assert len(one.values) <= most
    assert one.values.tolist() == other.values.tolist()
    assert one.counts.tolist() == other.counts.tolist()
    assert one.total == sum(map(len, parts))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1.6e9])
def test_quantiles_of_many_numbers_are_close(scale):
    values = scale + scale / 50 * np.random.default_rng(0).standard_normal(200_000)
    found = counted(np.split(values, 8))
    assert len(found.values) <= MOST_VALUES
    for share in (0.0, 0.01, 0.5, 0.9, 1.0):
        exact = np.quantile(values, share, method="inverted_cdf")
        # 32,768 cells over the range, which is nine deviations wide.
        ours = found.values[np.searchsorted(np.cumsum(found.counts), max(share * found.total, 1))]
        assert ours == pytest.approx(exact, abs=scale / 50 * 9 * 4 / MOST_VALUES)


@given(st.lists(st.none() | st.integers(-9, 9) | finite, min_size=1, max_size=60))
def test_the_quantile_transform_gives_normal_scores(values):
    column = np.array([np.nan if value is None else value for value in values])
    present = column[~np.isnan(column)]
    statistics = NumberStatistics()
    statistics.add(column)
    field, *others = fitted(RawField("x", "numeric"), "quantile", {"x": statistics})
    assert [other.name for other in others] == ["x_missing"] * (0 < len(present) < len(column))
    for other in others:
        np.testing.assert_array_equal(transformed(other, column), np.isnan(column))
    expected = norm.ppf((rankdata(present) - 0.5) / max(len(present), 1))
    found = transformed(field, column)
    np.testing.assert_allclose(found[~np.isnan(column)], expected, atol=1e-6)
    assert (found[np.isnan(column)] == 0).all()
    beyond = transformed(field, np.finfo(float).max * np.array([-1, 1]))
    np.testing.assert_allclose(beyond, [expected.min(), expected.max()] if len(present) else [0, 0], atol=1e-6)


SCHEMA = """
fields = [
    {name = "price", kind = "numeric"},
    {name = "height", kind = "numeric", transform = "log"},
    {name = "views", kind = "numeric", transform = "buckets"},
    {name = "shop", kind = "categorical"},
]
"""


def test_each_field_has_its_own_transform(tmp_path):
    prices = np.exp(2 * np.random.default_rng(0).standard_normal(1600))
    lines = [f"{n % 2},{price},{n},3,s" for n, price in enumerate(prices)]
    schema = prepare_text(tmp_path, SCHEMA, "\n".join(["label,price,height,views,shop", *lines]))
    assert [field.transform for field in schema.dense] == ["quantile", "log", "minmax"]
    assert [field.name for field in schema.sparse] == ["views_bucket", "shop"]
    assert Schema.load(tmp_path / "out") == schema
    stored = np.array(read_split(tmp_path / "out", "train")["price"])
    np.testing.assert_allclose(stored, norm.ppf((rankdata(prices) - 0.5) / 1600), atol=0.06)


def test_a_field_tells_where_numbers_are_often_missing(tmp_path):
    """As the codec of streams and requests does, and data prepared like these; its name is reserved."""
    often, seldom = [n % 3 == 0 for n in range(1600)], [n % 200 == 0 for n in range(1600)]
    lines = [f"{n % 2},{'' if often[n] else n},{'' if seldom[n] else n},{'' if often[n] else n},s" for n in range(1600)]
    text = "\n".join(["label,price,age,height,shop", *lines])
    fields = (
        '{name = "price", kind = "numeric"}, {name = "age", kind = "numeric"}, {name = "shop", kind = "categorical"}'
    )
    schema = prepare_text(
        tmp_path, f'fields = [{fields}, {{name = "height", kind = "numeric", transform = "log"}}]', text
    )
    assert [field.name for field in schema.dense] == ["price", "price_missing", "age", "height"]
    stored = read_split(tmp_path / "out", "train")
    prices = [lines[number].split(",")[1] for number in stored["sample_number"]]
    assert stored["price_missing"] == [float(price == "") for price in prices]
    samples = [{"price": float(price) if price else None, "age": 1.0, "height": 1.0, "shop": "s"} for price in prices]
    codec = SampleCodec.load(tmp_path / "out")
    block, problems = codec.encode_request(samples)
    assert not problems
    assert block.dense[:, :2].T.tolist() == [stored["price"], stored["price_missing"]]
    taken = "field 'price_missing': this name is reserved for where field 'price' has no value"
    other = f'fields = [{fields}, {{name = "price_missing", column = "height", kind = "numeric"}}]'
    refused(taken, prepare_text, tmp_path, other, text, output="two")


@pytest.mark.parametrize("dense", ["quantile", "minmax", "log", "none"])
def test_numbers_far_outside_of_the_training_range_are_bounded_and_reported(tmp_path, caplog, dense):
    """The largest numbers of float64 too; the codec of streams and requests gives the same numbers."""
    far = ["1e39", "1e25", "-1e25", "1e308", "-1e308", "2e6", "1"]
    text = "\n".join(["label,price", "0,0", "1,1", *(f"{number % 2},{value}" for number, value in enumerate(far))])
    config = PrepareConfig(dense=dense, split="order", test_rows=len(far))
    prepare_text(tmp_path, 'fields = [{name = "price", kind = "numeric"}]', text, config=config)
    stored = np.array(read_split(tmp_path / "out", "test")["price"])
    largest = {"quantile": 1.0, "minmax": 100.0, "log": 100.0, "none": 1e6}[dense]
    numbers = np.array(far, float)
    scaled = np.log1p(numbers.clip(0)) if dense == "log" else numbers
    if dense != "quantile":
        np.testing.assert_allclose(stored, scaled.clip(-largest, largest), rtol=1e-6)
    assert np.abs(stored).max() <= largest
    count = {"quantile": 0, "minmax": 6, "log": 1, "none": 6}[dense]
    assert caplog.messages == [] if not count else f"'price': {count} of its numbers" in caplog.text
    codec = SampleCodec.load(tmp_path / "out")
    samples = [{"price": value} for value in numbers.tolist()]
    assert codec.encode_request(samples)[0].dense[:, 0].tolist() == stored.tolist()
    many = codec.encode(codec.from_objects(samples, training=False), training=False)
    assert many.block.dense[:, 0].tolist() == stored.tolist()


def test_ids_that_look_missing_are_reported(tmp_path, caplog):
    schema = "{}fields = [{{name = 'shop', kind = 'categorical'}}, {{name = 'city', kind = 'categorical'}}]"
    for number, null in enumerate(["", "null = ['\\N', 'NULL']\n"]):
        caplog.clear()
        text = "label,shop,city\n1,\\N,a\n0,a,b\n1,NULL,a"
        prepare_text(tmp_path, schema.format(null), text, output=f"{number}")
        assert len(caplog.messages) == 1 - number
        expected = r"""field 'shop' has the ids NULL, \N; if they mean a missing value, set null = ["NULL", "\\N"]"""
        assert number or expected in caplog.messages[0]


# Zero bytes, prefixes of each other, and lengths around the eight bytes of a word.
strings = st.one_of(
    st.text("ab\0é", max_size=4),
    st.text("ab", min_size=6, max_size=18),
    st.sampled_from(["12345678", "12345678\0", "12345678\0\0", "1234567890123456", "12345678901234567"]),
)
wide = st.booleans()


def array(values, wide):
    """A slice, before and after which there are other strings."""
    return pa.array(["before", *values, "a"], pa.large_string() if wide else pa.string()).slice(1, len(values))


def found(table, text):
    return table.find(strings_module.string_hashes(text), *string_buffers(text)).tolist()


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
    assert found(again, text) == found(table, text) == [known.get(value, -1) for value, _ in asked]


def test_strings_with_equal_hashes_stay_distinct(monkeypatch):
    monkeypatch.setattr(strings_module, "string_hashes", lambda text: np.full(len(text), 7 << 60, np.uint64))
    monkeypatch.setattr(strings_module, "bytes_hashes", lambda starts, _: np.full(len(starts) - 1, 7 << 60, np.uint64))
    table, values = StringTable(), [f"{n}" for n in range(90)]
    assert table.insert(array(values, False)).tolist() == list(range(90))
    assert table.insert(array(values[::-1], True)).tolist() == list(range(90))[::-1]
    assert found(table, array(["5", "x"], False)) == [5, -1]


@settings(deadline=None)
@given(st.dictionaries(strings.filter(bool), st.integers(1, 4), max_size=60), st.integers(1, 3), st.integers(0, 9))
def test_a_vocabulary_is_sorted_by_count_and_bytes(counts, min_count, max_ids):
    counter = VocabularyCounter()
    for part in range(4):
        values = [value for value, count in counts.items() if count > part]
        counter.add(counted_values(array(values, False)))
    vocabulary = counter.finish(min_count, max_ids)
    kept = [value for value in counts if counts[value] >= min_count]
    expected = sorted(kept, key=lambda value: (-counts[value], value.encode()))[: max_ids or None]
    assert vocabulary.rows(array(expected, True)).tolist() == [2 + index for index in range(len(expected))]
    assert vocabulary.counts.tolist() == [counts[value] for value in expected]
