"""Sequence fields: the last ids in order, one vocabulary with the field they share, and what is refused."""

import json
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cowrec.data_pipeline import PrepareConfig, Reader, SampleCodec, prepare
from cowrec.data_pipeline.dataset.schema import MISSING
from cowrec.data_pipeline.hashing import string_hashes
from cowrec.data_pipeline.raw.lists import last_values
from raw_cases import prepare_text, read_split
from refusal import refused

SCHEMA = """
delimiter = ","
label = "click"
fields = [
    {name = "history", kind = "sequence", separator = "|", max_length = 3, shares = "item"},
    {name = "item", kind = "categorical", null = ["none"]},
    {name = "words", kind = "sequence", separator = " ", max_length = 2},
]
"""
ALONG = '    {name = "tags", kind = "sequence", separator = "|", max_length = 3, along = "history"},'
AGES = """
    {name = "history", kind = "sequence", separator = "|", max_length = 3},
    {name = "ages", column = "when", kind = "sequence", separator = "|", max_length = 3, along = "history", age = true},
]"""
TEXT = "click,item,history,words\n1,a,b|c|a|b,x y z\n0,b,,z\n0,,b||c,\n1,a,c|c,x x\n"
C, A, B = 2, 3, 4
"""Rows by decreasing count over items and the histories that are kept."""


def prepared_table(folder, config=None, **columns):
    """Prepares a Parquet file of these columns with the folder's schema file."""
    pq.write_table(pa.table(columns), folder / "raw.parquet")
    config, schema_file = config or PrepareConfig(test_fraction=0.0), folder / "schema.toml"
    prepare("tabular", [folder / "raw.parquet"], folder / "table", config, schema_file=schema_file)


def test_the_last_ids_are_kept_in_order_with_the_vocabulary_of_the_item(tmp_path):
    """The item is counted with its history; an empty text is an empty history, an empty id within one is missing."""
    schema = prepare_text(tmp_path, SCHEMA, TEXT)
    rows = read_split(tmp_path / "out", "train")
    assert rows["item"] == [A, B, MISSING, A]
    assert rows["history"] == [[C, A, B], [], [B, MISSING, C], [C, C]]
    assert [len(word) for word in rows["words"]] == [2, 1, 0, 2]
    assert {path.stem for path in (tmp_path / "out" / "vocabulary").iterdir()} == {"item", "words"}
    assert schema.splits["train"].values == {"history": 8, "words": 5}
    (batch,) = Reader(tmp_path / "out", "train", batch_size=4).epoch(0)
    ids = {key: jagged.to_dense() for key, jagged in batch.sparse.to_dict().items()}
    assert list(ids) == ["history[0]", "history[1]", "history[2]", "item", "words[0]", "words[1]"]
    positions = [[tensor.tolist() for tensor in ids[f"history[{position}]"]] for position in range(3)]
    assert positions == [[[C], [], [B], []], [[A], [], [MISSING], [C]], [[B], [], [C], [C]]]
    # Lists of a column are the same as text.
    lists = pa.array([["b", "c", "a", "b"], [], ["b", None, "c"], ["c", "c"]])
    words = pa.array([["x", "y", "z"], ["z"], None, ["x", "x"]], pa.large_list(pa.string()))
    prepared_table(tmp_path, click=[1, 0, 0, 1], item=["a", "b", "none", "a"], history=lists, words=words)
    assert read_split(tmp_path / "table", "train") == rows


@pytest.mark.parametrize("settings", [{"raw_ids": True}, {"hash_buckets": 500}])
def test_equal_ids_are_one_row_of_item_and_history(tmp_path, settings):
    prepare_text(tmp_path, SCHEMA, TEXT, config=PrepareConfig(test_fraction=0.0, **settings))
    rows = read_split(tmp_path / "out", "train")
    a, b, missing, _ = rows["item"]
    assert missing == MISSING != a != b
    assert rows["history"][0][1:] == [a, b]
    assert rows["history"][2][:2] == [b, MISSING]


def test_malformed_lists_are_bad_rows_and_bad_samples(tmp_path):
    prepare_text(tmp_path, SCHEMA, TEXT)
    codec = SampleCodec.load(tmp_path / "out")
    good = {"item": "a", "history": ["c", "b"], "words": "x"}
    wrong = [{"history": 5}, {"history": [["a"]]}, {"history": [{"a": 1}]}]
    block, bad = codec.encode_request(
        [good, *(good | change for change in wrong), good | {"history": ["b", None, "c"]}]
    )
    assert [bad_sample.index for bad_sample in bad] == [1, 2, 3]
    assert all("history: must be a list of strings, numbers or nulls" in bad_sample.reason for bad_sample in bad)
    assert block.bags["history"].values.tolist() == [C, B, B, MISSING, C]
    columns = {"click": [1, 0], "item": ["a", "b"], "history": [[1.0], [float("nan")]], "words": ["x", "y"]}
    config = PrepareConfig(test_fraction=0.0, on_bad_row="skip", max_bad_rows=1)
    refused("one class", prepared_table, tmp_path, config, **columns)  # of the sample that is left


def test_sequences_along_another_have_as_many_ids(tmp_path):
    """More and fewer ids than are kept; an empty text is one missing id beside one id, and none beside none."""
    text = TEXT.replace("words", "tags").replace("x y z", "p|q|r|s").replace("z\n0", "\n0").replace("x x", "p|")
    text = text.replace("c,\n", "c,p||q\n") + "0,a,a,\n1,a,a|b,p\n0,a,,p\n0,a,a|b|c|a|b,p|q|r|s\n"
    schema = SCHEMA.replace(SCHEMA.splitlines()[-2], ALONG)
    config = PrepareConfig(test_fraction=0.0, on_bad_row="skip", max_bad_rows=3)
    found = prepare_text(tmp_path, schema, text, config=config)
    assert sum(found.bad_rows.values()) == 3
    rows = read_split(tmp_path / "out", "train")
    assert [len(tag) for tag in rows["tags"]] == [len(item) for item in rows["history"]] == [3, 0, 3, 2, 1]
    assert rows["tags"][2][1] == rows["tags"][3][1] == rows["tags"][4][0] == MISSING
    codec, lines = SampleCodec.load(tmp_path / "out"), [line.split(",") for line in text.splitlines()[1:]]
    lists = [(history.split("|"), tags.split("|")) for _, _, history, tags in lines] + [(None, []), (["a"], None)]
    samples = [{"item": "a", "history": history, "tags": tags} for history, tags in lists]
    block, bad = codec.encode_request(samples)
    assert [bad_sample.index for bad_sample in bad] == [5, 6, 7, 9]
    assert bad[0].reason == "column tags: must have as many values as field 'history', got 1"
    good = [sample for number, sample in enumerate(samples) if number not in (5, 6, 7, 9)]
    for name, bags in codec.encode_request(good)[0].bags.items():
        assert torch.equal(bags.values, block.bags[name].values)
        assert torch.equal(bags.offsets, block.bags[name].offsets)


def test_ages_are_the_bits_of_seconds_before_the_sample(tmp_path):
    """As text, numbers and times; of the last times, without those that are missing; requests need the time too."""
    schema = 'delimiter = ","\nlabel = "click"\ntime = "at"\nfields = [' + AGES
    start = 1_700_000_000
    rows = [("a|b|c|d", [9, 8, 0, -5]), ("a|b|c", [3, None, 1]), ("", []), ("a", [1 << 20]), ("a", [5])]
    times = [[None if age is None else start - age for age in ages] for _, ages in rows]
    texts = ["|".join("" if value is None else str(value) for value in one) for one in times]
    texts[3] = datetime.fromtimestamp(times[3][0], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    lines = [f"{k % 2},{start},{rows[k][0]},{text}" for k, text in enumerate(texts)]
    lines += [f"1,{start},a,yesterday"]
    config = PrepareConfig(test_fraction=0.0, hash_buckets=1 << 20, dense="none", on_bad_row="skip", max_bad_rows=1)
    found = prepare_text(tmp_path, schema, "\n".join(["click,at,history,when", *lines, ""]), config=config)
    assert sum(found.bad_rows.values()) == 1
    ages = read_split(tmp_path / "out", "train")["ages"]
    row = [int(number) for number in 2 + string_hashes(pa.array([*map(str, range(25))])) % np.uint64(1 << 20)]
    assert ages == [[row[4], row[0], row[0]], [row[2], MISSING, row[1]], [], [row[21]], [row[3]]]
    codec = SampleCodec.load(tmp_path / "out")
    samples = [
        {"history": history.split("|"), "when": when, "at": start}
        for (history, _), when in zip(rows, [*texts[:2], *times[2:]], strict=True)
    ]
    block, bad = codec.encode_request(samples)
    assert not bad
    assert block.bags["ages"].values.tolist() == [age for one in ages for age in one]
    block, bad = codec.encode_request([samples[0] | {"at": None}, samples[2] | {"at": None}])
    assert [bad_sample.index for bad_sample in bad] == [0]
    assert "its times and the sample's must be known" in bad[0].reason


@pytest.mark.parametrize(
    ("replaced", "by", "message"),
    [
        ("max_length = 3, ", "", "max_length must be at least 1 for the kind sequence, got 0"),
        ('shares = "item"', 'shares = "words"', "shares must be a categorical field, got 'words'"),
        ('shares = "item"', 'shares = "item", min_count = 2', "min_count and max_ids are those of 'item'"),
        ('shares = "item"', 'along = "words"', "along must be a sequence of the same max_length = 3 .* got 'words'"),
        ('shares = "item"', "age = true", "'history': age needs the sample's time; name its column as `time`"),
    ],
)
def test_schema_files_that_are_refused(tmp_path, replaced, by, message):
    refused(message, prepare_text, tmp_path, SCHEMA.replace(replaced, by), TEXT)


def test_a_marker_alone_is_a_step_where_one_along_it_has_a_value(tmp_path):
    """As text, as lists, in lines of JSON whatever else is in them, and in requests."""
    schema = SCHEMA.replace(SCHEMA.splitlines()[-2], ALONG).replace(', shares = "item"', "")
    schema = schema.replace('"sequence", ', '"sequence", null = ["NA"], ')
    pairs = [
        ("NA", "x"),
        ("NA", "NA"),
        ("a", "NA"),
        ("a|NA", "NA|y"),
        ("NA|b", "x|y"),
        ("", "NA"),
        ("NA", ""),
        ("", ""),
    ]
    wrong = [("", "x"), ("NA", "x|y")]
    text = "click,item,history,tags\n" + "".join(f"{n % 2},i,{h},{t}\n" for n, (h, t) in enumerate(pairs))
    prepare_text(tmp_path, schema, text)
    rows = read_split(tmp_path / "out", "train")
    assert [len(item) for item in rows["history"]] == [len(tag) for tag in rows["tags"]] == [1, 0, 1, 2, 2, 0, 0, 0]
    assert rows["history"][0] == rows["tags"][2] == [MISSING]
    lists = [([*h.split("|")], [*t.split("|")]) for h, t in pairs]
    columns = {"history": [h for h, _ in lists], "tags": [t for _, t in lists]}
    prepared_table(tmp_path, click=[0, 1] * 4, item=["i"] * 8, **columns)
    assert read_split(tmp_path / "table", "train") == rows
    codec = SampleCodec.load(tmp_path / "out")
    expected = {name: [id for row in rows[name] for id in row] for name in ("history", "tags")}
    for given in (pairs, lists):
        samples = [{"item": "i", "history": h, "tags": t} for h, t in given]
        odd = {"item": 5, "history": ["a"], "tags": ["x"]}  # for which a chunk is read line by line
        lines = [json.dumps(sample).encode() for sample in [*samples, odd]]
        for encoded in (
            codec.encode_request(samples)[0],
            codec.encode(codec.from_json(lines[:-1], training=False), training=False).block,
            codec.encode(codec.from_json(lines, training=False), training=False).block,
        ):
            assert {name: bags.values.tolist()[:6] for name, bags in encoded.bags.items()} == expected
        for history, tags in wrong:
            samples[2] = {"item": "i", "history": history, "tags": tags}
            assert [found.index for found in codec.encode_request(samples)[1]] == [2]


def test_an_empty_text_beside_a_sequence_without_items_is_no_id() -> None:
    """Two empty texts are two, and so of another length."""
    assert last_values([[""], ["a", "b"]], [None, ["x", "y"]], [], 1) == [[], ["b"]]
    refused("sequences that go along with each other differ in length", last_values, [["", ""]], [None], [], 1)
