"""Encoding of raw samples: equal to `prepare` on the same values in a text file; errors in samples."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import PrepareConfig, SynthesizeConfig, prepare, synthesize
from cowrec.data_pipeline.codec import SampleCodec
from cowrec.data_pipeline.dataset.schema import MISSING
from cowrec.data_pipeline.dataset.shards import load_shards
from cowrec.data_pipeline.raw.values import as_id_text
from raw_cases import NULLS_SCHEMA, RECENT, prepare_text, raw_rows, write_rows
from refusal import refused

TIMED = 'time = "seen at"\n' + NULLS_SCHEMA.replace('"-1"', f'"-1", "{2**63 - 1}"').replace("\n]", f"\n{RECENT}\n]")


def prepared(folder, texts, config, schema=TIMED):
    write_rows(folder / "raw.csv", texts)
    (folder / "schema.toml").write_text(schema)
    config = PrepareConfig(test_fraction=0.0, **config)
    return prepare("tabular", [folder / "raw.csv"], folder / "out", config, schema_file=folder / "schema.toml")


def check_equal(one, other, *, labelled=True):
    for name, bags in (("", one), *one.bags.items()):
        for part in ("values", "offsets", "weights") if name else ("dense", "ids"):
            first, second = getattr(bags, part), getattr(other.bags[name] if name else other, part)
            assert first is second is None or (torch.equal(first, second) and first.dtype == second.dtype)
    assert one.bags.keys() == other.bags.keys()
    if labelled:
        assert torch.equal(one.label, other.label)
        assert torch.equal(one.time, other.time)
    else:
        assert one.label.isnan().all()
        assert one.time is None


CONFIGS = [{}, {"raw_ids": True, "dense": "none"}, {"hash_buckets": 7, "dense": "log"}]
CONFIGS += [{"min_count": 2, "dense": "buckets"}]


@pytest.mark.parametrize("config", CONFIGS, ids=["vocabulary", "raw", "hash", "buckets"])
@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(rows=raw_rows())
def test_samples_are_encoded_like_a_text_file(tmp_path_factory, config, rows):
    """Encodes samples as JSON, as dictionaries and, a few at a time, for prediction."""
    folder = tmp_path_factory.mktemp("samples")
    schema = prepared(folder, [text for text, _ in rows], config)
    expected = load_shards(folder / "out", schema, "train", range(len(schema.splits["train"].shards)))
    samples = [sample for _, sample in rows]
    codec = SampleCodec.load(folder / "out")
    encoded = codec.encode(codec.from_json([json.dumps(sample).encode() for sample in samples]))
    assert encoded.bad == ()
    check_equal(encoded.block, expected)
    assert encoded.time.tolist() == expected.time.tolist()
    one_by_one = codec.encode(codec.from_objects(samples))
    check_equal(one_by_one.block, expected)
    for start in range(0, len(samples), 7):
        part = samples[start : start + 7]
        few, bad = codec.encode_request(part)
        assert bad == ()
        check_equal(few, expected.take(torch.arange(start, start + len(part))), labelled=False)
    assert codec.columns == ("price", "city", "tags", "past views")


def good_sample(**changes):
    sample = {"seen at": 5, "past views": [{"id": "a", "weight": 1}], "click": 1, "price": 2.5, "tags": ["t"]}
    return {**sample, "city": "c", **changes}


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("codec")
    text = {"seen at": "5", "past views": "a:1", "unused": "", "click": "1", "price": "2.5", "tags": "t", "city": "c"}
    prepared(folder, [text, {**text, "price": "0", "city": "d", "click": "0"}], CONFIGS[0])
    return SampleCodec.load(folder / "out")


@pytest.fixture(scope="module")
def codec_of_both(tmp_path_factory):
    """Of a column whose values are numbers and ids at once."""
    folder = tmp_path_factory.mktemp("both")
    text = {"seen at": "5", "past views": "a:1", "unused": "", "click": "1", "price": "2.5", "tags": "t", "city": "c"}
    both = TIMED.replace("\n]", '\n{name = "p", column = "price", kind = "categorical", null = ["0"]}, \n]')
    prepared(folder, [text, {**text, "price": "0", "city": "d", "click": "0"}], CONFIGS[0], both)
    return SampleCodec.load(folder / "out")


def views(*names):
    return [{"id": name, "weight": 1} for name in names]


@pytest.mark.parametrize(
    "values",
    [[True, False], [0.5, -0.0, 1e19, 1e-7, 5.0, 2.0**53], [1, 5.0, -2e9], ["a", 5.0], [2.5, 3, "x", True]],
)
def test_an_id_of_json_is_that_of_the_value_in_parquet(codec, values):
    """The first lines, whose ids are texts or integers, decide how lines are parsed."""
    samples = [good_sample(city=value, tags=[value], **{"past views": views(value)}) for value in values]
    samples[-1]["sample_id"] = 9.0
    samples.append(good_sample(city=values[0], tags=values, **{"past views": views(*values)}))
    expected = [as_id_text(pa.array([value]))[0][0].as_py() for value in values]
    for raw in (codec.from_json([json.dumps(sample).encode() for sample in samples]), codec.from_objects(samples)):
        assert raw.bad == ()
        assert [str(value) for value in raw.table["city"].to_pylist()] == [*expected, expected[0]]
        assert codec.encode(raw).sample_ids.to_pylist()[-2] == "9"
        assert [str(value) for tags in raw.table["tags"].to_pylist() for value in tags] == expected * 2
        assert [str(view["id"]) for value in raw.table["past views"].to_pylist() for view in value] == expected * 2


def test_a_map_from_ids_to_weights_equals_its_list(codec):
    """As it does in Parquet; beside samples with lists, too."""
    maps = [{}, {"a": 2, "7": 0.5}, {"new": 1e-3, "": 3}]
    lists = [[{"id": name, "weight": weight} for name, weight in views.items()] for views in maps]
    expected = codec.encode(codec.from_objects([good_sample(**{"past views": views}) for views in lists])).block
    samples = [good_sample(**{"past views": views}) for views in maps]
    table = pa.Table.from_pylist(samples)
    views = pa.array([[*views.items()] for views in maps], pa.map_(pa.string(), pa.float64()))
    table = table.set_column(table.column_names.index("past views"), "past views", views)
    raws = [codec.from_objects(samples), codec.from_table(table)]
    raws += [
        codec.from_json([json.dumps(sample).encode() for sample in samples[start:] + samples[:start]])
        for start in (0, 1)
    ]
    for raw in raws[:3]:
        check_equal(codec.encode(raw).block, expected)
    check_equal(codec.encode(raws[3]).block, expected.take(torch.tensor([1, 2, 0])))
    check_equal(codec.encode_request(samples)[0], expected, labelled=False)


def test_null_in_a_list_is_a_missing_id(codec):
    """In JSON and requests as in a table, which `prepare` reads alike; where an id has a weight, null is refused."""
    samples = [good_sample(tags=tags) for tags in (["t", None], [None], ["t"])]
    expected = codec.encode(codec.from_table(pa.Table.from_pylist(samples)))
    assert expected.bad == ()
    for raw in (codec.from_objects(samples), codec.from_json([json.dumps(sample).encode() for sample in samples])):
        check_equal(codec.encode(raw).block, expected.block)
    check_equal(codec.encode_request(samples)[0], expected.block, labelled=False)


def test_a_missing_value_by_its_text_keeps_its_place_in_a_list(tmp_path):
    """A history of it alone has one missing id, as in `prepare`; one of an empty text has none."""
    seen = [["a", "b"], ["NA"], ["NA", "a"], [""], [None], [], None, [-1], ["b", -1]]
    texts = [None if value is None else [None if one is None else str(one) for one in value] for value in seen]
    rows = range(len(seen))
    long = ["|".join("NA" if one is None else str(one) for one in value or []) for value in seen]
    table = pa.table({"click": [row % 2 for row in rows], "time": rows, "seen": pa.array(texts), "long": long})
    pq.write_table(table, tmp_path / "raw.parquet")
    kind = 'kind = "sequence"\nmax_length = 3\nnull = ["NA", "-1"]'
    fields = f'[[fields]]\nname = "seen"\n{kind}\n[[fields]]\nname = "long"\n{kind}\nseparator = "|"\n'
    (tmp_path / "columns.toml").write_text(f'label = "click"\ntime = "time"\n{fields}')
    prepare("tabular", [tmp_path / "raw.parquet"], tmp_path / "data", schema_file=tmp_path / "columns.toml")
    codec = SampleCodec.load(tmp_path / "data")
    samples = [{"click": row % 2, "time": row, "seen": seen[row], "long": long[row]} for row in rows]
    expected = codec.encode(codec.from_table(table)).block
    check_equal(codec.encode(codec.from_objects(samples)).block, expected)
    check_equal(codec.encode_request(samples)[0], expected, labelled=False)
    lines = [json.dumps(sample).encode() for sample in samples]
    for part in (slice(0, 7), slice(0, 9)):  # of uniform types, and not
        check_equal(codec.encode(codec.from_json(lines[part])).block, expected.take(torch.arange(9)[part]))


WRONG = {
    "a word for a number": ({"price": "much"}, "column price: must be a"),
    "a long text for a number": ({"price": "1" * 300_000 + "x"}, "column price: must be a"),  # hours if quadratic
    "a truth value for a number": ({"price": True}, "column price: must be a"),
    "an infinite number": ({"price": math.inf}, "column price: must be a finite number"),
    "NaN for an id": ({"city": math.nan}, "column city: must be a string, a number, true, false or null, got NaN"),
    "half a character": ({"city": "\ud800"}, "column city: must be a string"),
    "a number for a list": ({"tags": 7}, "column tags: must be a list of strings, numbers or nulls"),
    "lists in a list": ({"tags": [["a"]]}, "column tags: must be a list of strings, numbers or nulls"),
    "an id without a weight": ({"past views": [{"id": "a"}]}, 'column past views: must be a list of {"id"'),
    "a weight without an id": ({"past views": [{"weight": 1}]}, 'column past views: must be a list of {"id"'),
    "a large weight": ({"past views": [{"id": "a", "weight": -1e39}]}, "column past views: weights must be at most"),
    "a pair for a list": ({"past views": {"id": 5, "weight": 1}}, 'column past views: must be a list of {"id"'),
    "text without a weight": ({"past views": "a"}, "text (id:weight, by ' ')"),
    "a label of 2": ({"click": 2}, "column click: a label must be 0 or 1, got"),
    "no label": ({"click": None}, "column click: the label is missing, got None"),
    "milliseconds": ({"seen at": 1.7e12}, "column seen at: a time must be Unix seconds (not milliseconds)"),
    "no time": ({"seen at": None}, "column seen at: a time must be Unix seconds"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_reported_without_affecting_other_samples(codec, case):
    change, message = WRONG[case]
    samples = [good_sample(), good_sample(**change), good_sample(city="d")]
    for raw in (codec.from_json([json.dumps(sample).encode() for sample in samples]), codec.from_objects(samples)):
        encoded = codec.encode(raw)
        assert [bad_sample.index for bad_sample in encoded.bad] == [1]
        assert encoded.bad[0].reason.startswith(message) or message in encoded.bad[0].reason
        assert encoded.index.tolist() == [0, 2]
        assert encoded.block.ids[:, 0].tolist() == [2, 3]
    alone = codec.encode(codec.from_json([json.dumps(samples[1]).encode()]))
    assert (alone.table.num_rows, len(alone.bad)) == (0, 1)
    rows, bad = codec.encode_request(samples)
    only_for_training = not change.keys().isdisjoint({"click", "seen at"})
    assert [bad_sample.index for bad_sample in bad] == ([] if only_for_training else [1])
    assert len(rows) == 3 - len(bad)


numbers = st.sampled_from([0, 2.5, -1, 10**400, 2**63 - 1, -(2**70), 1e-320, math.nan, math.inf, 1e7])
texts = st.sampled_from(["", "NA", "-1", "2.5", "t", "\ud800"])
anything = st.one_of(
    st.none(), st.booleans(), numbers, texts, st.just({}), st.lists(st.none() | numbers | texts, max_size=3),
    st.lists(st.fixed_dictionaries({"id": st.none() | numbers | texts, "weight": numbers}), max_size=2),
    st.dictionaries(texts, numbers, max_size=2),
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    changes=st.lists(st.dictionaries(st.sampled_from(["price", "city", "tags", "past views"]), anything), max_size=3)
)
def test_a_request_of_any_values_is_encoded_like_columns(codec, codec_of_both, changes):
    """The same samples are good, with the same values, whether or not there are bad ones beside them."""
    samples = [good_sample(), *(good_sample(**change) for change in changes)]
    for each_codec in (codec, codec_of_both):
        expected = each_codec.encode(each_codec.from_objects(samples, training=False), training=False)
        wrong = {bad_sample.index for bad_sample in expected.bad}
        good = [sample for index, sample in enumerate(samples) if index not in wrong]
        for given_samples in (samples, good):
            rows, bad = each_codec.encode_request(given_samples)
            check_equal(rows, expected.block, labelled=False)
            assert [bad_sample.index for bad_sample in bad] == (sorted(wrong) if given_samples is samples else [])


GOOD = json.dumps(good_sample()).encode()
NO_OBJECTS = [b"", b" ", b"{", b"null", b"[]", b'"text"', b"{} {}", b'{"city": "x"', b'{"city": "\xff"}', b"{}}"]
MALFORMED = [([GOOD, line, GOOD], [1]) for line in (*NO_OBJECTS, b"not JSON", b"\x00")]
# What Arrow reads and Python does not, in a column that is ignored, after the lines that decide how lines are parsed.
for value in (b"1" * 5000, b"[" * 20_000 + b"]" * 20_000):
    MALFORMED.append(([GOOD] * 20 + [GOOD[:-1] + b', "surplus": ' + value + b"}"] + [GOOD] * 9, [20]))
# Objects that are split over lines or share a line; there are as many of them as lines.
MALFORMED.append(([GOOD + GOOD, b" ", GOOD, GOOD[:-1], b"}"], [0, 1, 3, 4]))


@pytest.mark.parametrize(("lines", "bad"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_lines_do_not_affect_others(codec, lines, bad):
    encoded = codec.encode(codec.from_json(lines))
    assert [bad_sample.index for bad_sample in encoded.bad] == bad
    assert encoded.index.tolist() == [index for index in range(len(lines)) if index not in bad]
    assert encoded.block.ids[:, 0].tolist() == [2] * (len(lines) - len(bad))


def test_a_column_that_no_sample_has_is_an_error(codec):
    samples = [{key: value for key, value in good_sample().items() if key != "tags"}] * 40
    lines = [json.dumps(sample).encode() for sample in samples]
    for raw in (codec.from_json(lines), codec.from_objects(samples)):
        refused("no sample has the column 'tags'", codec.encode, raw)
    for part in (samples, samples * 2, [{}]):
        refused("no sample has the column", codec.encode_request, part)
    lines[-1] = json.dumps(good_sample(tags=None)).encode()
    encoded = codec.encode(codec.from_json(lines))
    assert encoded.block.bags["tags"].values.tolist() == [MISSING] * 40
    with pytest.raises(ValueError, match="no sample has the column 'click', 'seen at'"):
        codec.encode(codec.from_objects([dict.fromkeys(codec.columns)]))


def test_tables_of_any_suitable_type(codec):
    count = 3
    table = pa.table(
        {
            "seen at": pa.array([1, 2, 3], pa.timestamp("ms", "UTC")),
            "click": pa.array([0, 1, 0], pa.int8()),
            "price": pa.array([None, 1, 2], pa.int32()),
            "city": pa.array(["c", None, "d"]).dictionary_encode(),
            "tags": pa.array([["t"], [], None], pa.large_list(pa.large_string())),
            "past views": pa.array([[{"weight": 1.0, "id": 7}], None, []]),
            "sample_id": pa.array([1, None, 3]),
            "more": pa.array([1] * count),
        }
    )
    encoded = codec.encode(codec.from_table(table))
    assert encoded.bad == ()
    assert encoded.sample_ids.to_pylist() == ["1", "", "3"]
    assert encoded.time.tolist() == [0, 0, 0]
    assert encoded.block.ids[:, 0].tolist() == [2, MISSING, 3]
    assert encoded.block.bags["tags"].offsets.tolist() == [0, 1, 2, 3]
    assert encoded.block.bags["history"].values.tolist() == [0, MISSING, MISSING]
    assert encoded.batch.time.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="column 'price' has the type list"):
        codec.encode(codec.from_table(table.set_column(2, "price", pa.array([[1.0]] * count))))


def test_synthetic_samples_have_row_numbers(tmp_path):
    schema = synthesize(tmp_path / "out", SynthesizeConfig(rows=50, test_rows=5))
    stored = load_shards(tmp_path / "out", schema, "train", [0])
    codec = SampleCodec.load(tmp_path / "out")
    columns = {"label": stored.label.int(), "time": torch.arange(50)}
    columns |= {f"I{n + 1}": column for n, column in enumerate(stored.dense.T)}
    columns |= {f"C{n + 1}": column for n, column in enumerate(stored.ids.T)}
    samples = [{name: values[row].item() for name, values in columns.items()} for row in range(50)]
    rows = codec.encode(codec.from_json([json.dumps(sample).encode() for sample in samples])).block
    for name in ("dense", "label", "ids"):
        assert torch.equal(getattr(rows, name), getattr(stored, name))
    assert rows.time.tolist() == list(range(50))
    samples[1]["C1"] = schema.sparse[0].num_embeddings
    samples[2]["C1"] = None
    encoded = codec.encode(codec.from_objects(samples))
    assert [bad_sample.index for bad_sample in encoded.bad] == [1]
    assert encoded.block.ids[1, 0] == MISSING
    few, bad = codec.encode_request(samples[2:4])
    assert np.array_equal(few.ids, encoded.block.ids[1:3])
    assert not bad


def test_no_samples(codec):
    assert codec.encode(codec.from_json([])).table.num_rows == 0
    rows, bad = codec.encode_request([])
    assert (len(rows), bad) == (0, ())


def test_a_column_of_several_fields_has_the_values_of_each(tmp_path):
    """As an id and as a number, of which each has missing values of its own, in all ways and for one sample or more."""
    toml = """
    time = "time"
    fields = [
    {name = "n", kind = "numeric", column = "x", null = ["-1"]}, {name = "c", kind = "categorical", column = "x"},
    {name = "d", kind = "categorical", column = "y", null = ["-1"]}, {name = "m", kind = "numeric", column = "y"}]
    """
    values = [(0, 0), (1, -1), (-1, 2), (5.5, 3), (None, None), (7, 0)]
    rows = [f"{n % 2},{x},{y},7".replace("None", "") for n, (x, y) in enumerate(values)]
    text = "\n".join(["label,x,y,time", *rows])
    config = PrepareConfig(test_fraction=0.0, split="order", dense="none")
    schema = prepare_text(tmp_path, toml, text, config=config)
    expected = load_shards(tmp_path / "out", schema, "train", [0])
    codec = SampleCodec.load(tmp_path / "out")
    samples = [{"x": x, "y": y, "label": n % 2, "time": 7} for n, (x, y) in enumerate(values)]
    for raw in (codec.from_json([json.dumps(sample).encode() for sample in samples]), codec.from_objects(samples)):
        encoded = codec.encode(raw)
        assert encoded.bad == ()
        check_equal(encoded.block, expected)
    for number, sample in enumerate(samples):
        few, bad = codec.encode_request([sample])
        assert bad == ()
        check_equal(few, expected.take(torch.tensor([number])), labelled=False)


@pytest.mark.parametrize(("true", "false"), [("True", "False"), ("FALSE", "TRUE"), ("1", "0"), ("false", "true")])
def test_a_truth_value_is_the_same_id_however_it_is_written(tmp_path, true, false):
    """pandas writes True to CSV, an application sends true in JSON, and Parquet has booleans."""
    schema = 'label = "y"\nfields = [{name = "a", kind = "categorical"}, {name = "b", kind = "categorical"}]'
    rows = "".join(f"{n % 2},{(true, false)[n % 3 == 0]},{(true, false, 'x')[n % 3]}\n" for n in range(30))
    prepare_text(tmp_path, schema, f"y,a,b\n{rows}")
    codec = SampleCodec.load(tmp_path / "out")

    def ids(name, *values):
        block, bad = codec.encode_request([{"a": "x", "b": "x", name: value} for value in values])
        assert not bad
        columns = pa.table({"a": ["x"] * len(values), "b": ["x"] * len(values)} | {name: pa.array(values)})
        np.testing.assert_array_equal(codec.encode(codec.from_table(columns), training=False).block.ids, block.ids)
        return block.ids[:, "ab".index(name)].tolist()

    assert sorted(ids("a", true, false)) == [2, 3]
    assert ids("a", "true", "false") == ids("a", True, False) == ids("a", "True", "False") == ids("a", "TRUE", "FALSE")
    assert ids("a", 1, 0) == ids("a", True, False)
    assert ids("a", "yes", "troo") == [0, 0]
    spelled = ids("b", "True", "TRUE", "true", "1")
    assert spelled.count(0) == 3, "with a third id, texts are ids of their own"
