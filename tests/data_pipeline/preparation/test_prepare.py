"""`prepare` against a plain-Python oracle: the csv module, dictionaries and loops."""

import collections
import math
import random

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import PrepareConfig, Schema, prepare, work_bytes
from cowrec.data_pipeline.encoding.numbers import bucket_ids
from raw_cases import NULLS_SCHEMA, fnv_splitmix, prepare_text, raw_rows, read_split, write_criteo, write_rows
from refusal import refused

ONE_FIELD = "header = false\ncolumns = ['label', 'x']\nfields = [{{name = 'x', kind = '{}'}}]"


def write_mixed(folder, rows, name="raw.csv"):
    write_rows(folder / name, rows, random.choice(["\n", "\r\n"]))
    (folder / "schema.toml").write_text(NULLS_SCHEMA.replace('":",', '":", min_count = "2", max_ids = 3,'))
    return folder / name


def elements(field, row):
    """Returns the ids of a field in a sample, with weights; the empty id is missing."""
    if field == "city":
        return [(known(row["city"]), None)]
    if field == "tags":
        return [(known(tag), None) for tag in row["tags"].split("|")]
    pairs = [pair.rsplit(":", 1) for pair in row["past views"].split(" ") if pair]
    return [("" if tag == "none" else tag, float(weight)) for tag, weight in pairs] or [("", 1.0)]


def known(value):
    return "" if value in ("NA", "-1") else value


def number(row):
    return 0.0 if row["price"] in ("", "NA", "-1", "-1.0") else float(row["price"])


def vocabulary_of(rows, field, min_count, max_ids):
    min_count, max_ids = (2, 3) if field == "history" else (min_count, max_ids)
    counts = collections.Counter(value for row in rows for value, _ in elements(field, row) if value)
    kept = sorted((-count, value.encode()) for value, count in counts.items() if count >= min_count)
    return {value.decode(): position + 2 for position, (_, value) in enumerate(kept[: max_ids or None])}


def check_mixed(folder, split, rows, train, config):
    columns = read_split(folder, split)
    assert columns["label"] == [float(row["click"]) for row in rows]
    numbers = [number(row) for row in train]
    low, high = min(numbers), max(numbers)
    scaled = [(number(row) - low) / (high - low) if high > low else 0.0 for row in rows]
    np.testing.assert_allclose(columns["price"], np.clip(scaled, -100, 100), rtol=1e-6, atol=1e-30)
    for field in ("city", "tags", "history"):
        table = vocabulary_of(train, field, config.min_count, config.max_ids)
        expected = [[table.get(value, 0) if value else 1 for value, _ in elements(field, row)] for row in rows]
        assert columns[field] == ([ids[0] for ids in expected] if field == "city" else expected), field
        assert {sparse.name: sparse.num_embeddings for sparse in Schema.load(folder).sparse}[field] == len(table) + 2
    expected = [[weight for _, weight in elements("history", row)] for row in rows]
    assert [np.float32(value).tolist() for value in expected] == columns["history__weight"]


@settings(max_examples=15, deadline=None)
@given(raw_rows(), st.data())
def test_any_table_is_encoded_like_the_oracle(tmp_path_factory, rows, data):
    folder, rows = tmp_path_factory.mktemp("mixed"), [text for text, _ in rows]
    test_rows = data.draw(st.integers(0, len(rows) - 2))
    limits = {"min_count": data.draw(st.integers(1, 3)), "max_ids": data.draw(st.sampled_from([0, 1, 4]))}
    shard_rows = data.draw(st.integers(1, 9))
    config = PrepareConfig(split="order", test_rows=test_rows, dense="minmax", shard_rows=shard_rows, **limits)
    first = data.draw(st.integers(1, len(rows)))
    paths = [write_mixed(folder, rows[:first], "a.csv")]
    if first < len(rows):
        paths.append(write_mixed(folder, rows[first:], "b.csv"))
    prepare("tabular", paths, folder / "out", config, schema_file=folder / "schema.toml")
    train, test = rows[: len(rows) - test_rows], rows[len(rows) - test_rows :]
    check_mixed(folder / "out", "train", train, train, config)
    check_mixed(folder / "out", "test", test, train, config)
    prepare("tabular", paths, folder / "again", like=folder / "out")
    check_mixed(folder / "again", "test", rows, train, config)


def test_criteo(tmp_path):
    raw = write_criteo(tmp_path / "train.txt", 300)
    schema = prepare("criteo", [tmp_path / "train.txt"], tmp_path / "out", PrepareConfig(split="order", test_rows=60))
    assert [field.name for field in schema.dense if field.transform != "missing"] == [f"I{n}" for n in range(1, 14)]
    assert [field.name for field in schema.sparse] == [f"C{n}" for n in range(1, 27)]
    assert (schema.splits["train"].rows, schema.splits["test"].rows) == (240, 60)
    (source,) = schema.sources
    assert (source.bytes, source.rows, source.bad_rows) == ((tmp_path / "train.txt").stat().st_size, 300, 0)
    assert schema.splits["train"].positives == (sum(row[0] == "1" for row in raw[:240]),)
    assert Schema.load(tmp_path / "out") == schema
    columns = read_split(tmp_path / "out", "test")
    for n in range(26):
        counts = collections.Counter(row[14 + n] for row in raw[:240])
        order = sorted((-count, value) for value, count in counts.items() if value)
        table = {value: position + 2 for position, (_, value) in enumerate(order)} | {"": 1}
        assert columns[f"C{n + 1}"] == [table.get(row[14 + n], 0) for row in raw[240:]]
        kept = pq.read_table(tmp_path / "out" / "vocabulary" / f"C{n + 1}.parquet").to_pydict()
        assert kept == {"value": [value for _, value in order if value], "count": [-count for count, _ in order]}
    # The same test samples without labels, prepared like the data set.
    (tmp_path / "test.txt").write_text("".join("\t".join(row[1:]) + "\n" for row in raw[240:]))
    schema = prepare("criteo", [tmp_path / "test.txt"], tmp_path / "new", like=tmp_path / "out")
    assert (schema.splits["test"].labelled, schema.splits["train"].rows) == (False, 0)
    new = read_split(tmp_path / "new", "test")
    assert all(math.isnan(label) for label in new.pop("label"))
    del columns["label"]
    assert new | {"sample_number": columns["sample_number"]} == columns
    refused("39 columns, must be 40", prepare, "criteo", [tmp_path / "test.txt"], tmp_path / "trained on it")


@pytest.mark.parametrize(
    ("settings_", "values", "train", "test"),
    [
        ({"dense": "minmax"}, ["5", "", "10", "40"], [0.5, 0, 1], 4),
        ({"dense": "minmax", "fit_on": "all"}, ["5", "", "10", "40"], [0.125, 0, 0.25], 1),
        ({"dense": "log"}, ["-3", "", "10", "-7"], [0, math.log(4), math.log(14)], 0),  # from the fitted minimum on
        ({"dense": "none"}, ["-3", "", "1e9", "5"], [-3, 0, 1e9], 5),
    ],
)
def test_numbers_are_transformed_by_the_training_samples_or_all(tmp_path, settings_, values, train, test):
    text = "".join(f"{n % 2},{value}\n" for n, value in enumerate(values))
    config = PrepareConfig(split="order", test_rows=1, **settings_)
    prepare_text(tmp_path, ONE_FIELD.format("numeric"), text, config=config)
    for split, expected in (("train", train), ("test", [test])):
        np.testing.assert_allclose(read_split(tmp_path / "out", split)["x"], expected, rtol=1e-6)


@given(st.lists(st.one_of(st.none(), st.integers(-5, 10**7), st.just(-0.0)), max_size=20))
@settings(deadline=None)
@example([-0.0])
def test_buckets_equal_those_of_the_criteo_winners(values):
    """libffm's "3 idiots": the value itself, marked, up to 2; above, its squared logarithm, rounded down."""
    expected = ["" if v is None else str(math.floor(math.log(v) ** 2)) if v > 2 else f"={int(v)}" for v in values]
    got = bucket_ids(np.array([np.nan if value is None else value for value in values], dtype=float))
    assert got.to_pylist() == expected


def test_hashed_ids_need_no_vocabulary(tmp_path):
    values = ["x", "yy", "", "longer than eight bytes", "é", "x"]
    text = "".join(f"{n % 2},{value}\n" for n, value in enumerate(values))
    config = PrepareConfig(hash_buckets=10, test_fraction=0)
    schema = prepare_text(tmp_path, ONE_FIELD.format("categorical"), text, config=config)
    expected = [2 + fnv_splitmix(value) % 10 if value else 1 for value in values]
    assert read_split(tmp_path / "out", "train")["x"] == expected
    assert {field.num_embeddings for field in schema.sparse} == {12}
    assert list((tmp_path / "out" / "vocabulary").iterdir()) == []
    prepare("tabular", [tmp_path / "raw.csv"], tmp_path / "again", like=tmp_path / "out")
    assert read_split(tmp_path / "again", "test")["x"] == expected


def test_a_data_set_prepared_like_another_can_be_imitated(tmp_path):
    write_criteo(tmp_path / "raw", 50)
    raw, done, done_again = [tmp_path / "raw"], [], []
    first = prepare("criteo", raw, tmp_path / "a", progress=done.append)
    second = prepare("criteo", raw, tmp_path / "b", like=tmp_path / "a", progress=done_again.append)
    assert (sum(done), sum(done_again)) == (work_bytes(raw), work_bytes(raw, like=tmp_path / "a"))
    third = prepare("criteo", raw, tmp_path / "c", like=tmp_path / "b")
    assert first.sparse == second.sparse == third.sparse
    assert read_split(tmp_path / "b", "test") == read_split(tmp_path / "c", "test")
    message = "has the layout 'criteo', and these files have 'avazu'"
    refused(message, prepare, "avazu", raw, tmp_path / "d", like=tmp_path / "a")
    (tmp_path / "a" / "vocabulary" / "C3.parquet").unlink()
    refused(r"C3\.parquet is missing or damaged", prepare, "criteo", raw, tmp_path / "d", like=tmp_path / "a")
