"""JSON lines are prepared to the same data as text files with the same samples, and their bad lines are set aside."""

import gzip
import json

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import PrepareConfig, Schema, infer_schema, prepare
from cowrec.data_pipeline.codec import SampleCodec
from cowrec.data_pipeline.raw.json_lines import canonical_table, parsed_lines, uniform_table
from cowrec.data_pipeline.raw.kinds import column_types
from cowrec.data_pipeline.raw.schema_file import load_schema_file
from raw_cases import NULLS_SCHEMA, content, raw_rows, read_split, write_rows
from refusal import refused

CONFIG = PrepareConfig(test_fraction=0.0, dense="none")
NESTED = """
label = "click"
fields = [
    {name = "user.id", kind = "categorical"},
    {name = "age", column = "user.profile.age", kind = "numeric"},
    {name = "tags", kind = "multi"},
]
"""


def prepared(folder, name, files, config=CONFIG, **options):
    return prepare("tabular", files, folder / name, config, schema_file=folder / "schema.toml", **options)


def nested_lines(rows=20):
    samples = []
    for row in range(rows):
        user = {"id": row % 3, "profile": {"age": float(row), "unused": [row]}}
        samples.append({"click": row % 2, "user": user, "tags": [f"t{row % 4}"]})
    return samples


def write_lines(path, lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(raw_rows(), st.data())
def test_lines_equal_the_same_samples_as_text(tmp_path_factory, rows, data):
    """In any number of files, parsed at once or one by one, with keys left out where they are null.

    Shards may begin elsewhere: a last line without its end is a segment of its own.
    """
    folder = tmp_path_factory.mktemp("lines")
    (folder / "schema.toml").write_text('time = "seen at"\n' + NULLS_SCHEMA)
    samples = [rows[0][1]]
    samples += [{name: value for name, value in sample.items() if value is not None} for _, sample in rows[1:]]
    cut = data.draw(st.integers(1, len(rows)))
    for name, part in (("a.jsonl", slice(0, cut)), ("b.ndjson.gz", slice(cut, None))):
        if samples[part]:
            write_lines(folder / name, samples[part])
            write_rows(folder / f"{name}.csv", [text for text, _ in rows[part]])
    config = PrepareConfig(test_fraction=0.0, shard_rows=data.draw(st.integers(1, 40)), split="order")
    found = []
    for name, files in (("text", ["*.csv"]), ("json", ["*.jsonl", "*.gz"][: 1 + (cut < len(rows))])):
        prepared(folder, name, [f"{folder}/{file}" for file in files], config)
        found.append((read_split(folder / name, "train"), content(folder / name / "vocabulary")))
    assert found[0] == found[1]


def test_bad_lines_are_set_aside_with_their_numbers(tmp_path):
    (tmp_path / "schema.toml").write_text(NESTED)
    lines = nested_lines()
    bad = {3: '{"click": 1, "us', 5: "", 8: "[1, 2]", 11: lines[11] | {"user": {"profile": {"age": "old"}}}}
    bad |= {13: lines[13] | {"click": 2}, 14: lines[14] | {"tags": "a|b"}, 16: {"tags": []}}
    for row, line in bad.items():
        lines[row] = line
    raw = write_lines(tmp_path / "raw.jsonl", lines)
    found = prepared(tmp_path, "out", [raw], PrepareConfig(test_fraction=0.0, dense="none", on_bad_row="skip"))
    assert (found.splits["train"].rows, sum(found.bad_rows.values())) == (20 - len(bad), len(bad))
    assert read_split(tmp_path / "out", "train")["age"] == [row for row in range(20) if row not in bad]
    reasons = ["not JSON", "must be a JSON object", "column user.profile.age: must be a number or null"]
    reasons += ["column click: a label must be 0 or 1", "column click: the label is missing"]
    assert {*reasons} < {*found.bad_rows}
    refused(r"raw\.jsonl, line 4: not JSON, got '\{.*To skip and count bad rows", prepared, tmp_path, "no", [raw])


def test_a_column_may_lack_in_lines_and_in_files_but_not_everywhere(tmp_path):
    (tmp_path / "schema.toml").write_text(NESTED)
    lines = nested_lines()
    for row in range(0, 20, 2):
        del lines[row]["user"]
    files = [write_lines(tmp_path / "a.json", lines), write_lines(tmp_path / "b.json", [{"click": 1}, {"click": 0}])]
    prepared(tmp_path, "out", files)
    columns = read_split(tmp_path / "out", "train")
    assert columns["age"] == [row * (row % 2) for row in range(20)] + [0, 0]
    assert columns["user.id"][::2] == [1] * 11
    (tmp_path / "schema.toml").write_text(NESTED.replace("user.id", "user.name"))
    message = "no column 'user.name' among click, tags, user, user.id, .* if only later lines have it, give it as null"
    refused(message, prepared, tmp_path, "no", files)


def test_a_column_with_a_dot_in_its_name_comes_first(tmp_path):
    """In lines that are parsed at once, and in those that are not."""
    (tmp_path / "schema.toml").write_text(NESTED)
    layout = load_schema_file(tmp_path / "schema.toml")
    types = column_types(layout, layout.used_columns)
    lines = [json.dumps(line).encode() for line in nested_lines()]
    at_once = uniform_table(lines, types)
    one_by_one, *_ = canonical_table(parsed_lines(lines), types)
    assert at_once["user.profile.age"] == one_by_one["user.profile.age"]
    assert at_once["user.id"].cast(pa.string()) == one_by_one["user.id"]
    plain = [*lines[:19], json.dumps(nested_lines()[19] | {"user.id": "own"}).encode()]
    assert uniform_table(plain, types) is None
    assert canonical_table(parsed_lines(plain), types)[0]["user.id"].to_pylist()[18:] == ["0", "own"]
    inner = json.dumps({"click": 0, "user": {"profile.age": 5}}).encode()
    assert uniform_table([*lines, inner], types) is None
    assert canonical_table(parsed_lines([inner]), types)[0]["user.profile.age"].to_pylist() == [5.0]


def test_requests_and_streams_have_nested_values_too(tmp_path):
    (tmp_path / "schema.toml").write_text(NESTED)
    samples = nested_lines()
    prepared(tmp_path, "out", [write_lines(tmp_path / "raw.jsonl", samples)])
    expected = read_split(tmp_path / "out", "train")["user.id"]
    codec = SampleCodec.load(tmp_path / "out")
    few, bad = codec.encode_request(samples)
    table = codec.from_table(pa.Table.from_pylist(samples))
    lines = codec.from_json([json.dumps(sample).encode() for sample in samples], training=False)
    assert bad == ()
    for block in (few, codec.encode(table, training=False).block, codec.encode(lines, training=False).block):
        assert block.ids[:, 0].tolist() == expected
        assert block.dense[:, 0].tolist() == list(range(20))


def test_the_schema_of_lines_is_inferred(tmp_path):
    lines = [
        {
            "t": 1_700_000_000_000 + 1000 * row, "user": {"id": row % 30, "geo": {"city": "abcd"[row % 4]}},
            "clicked": row % 3 == 0, "tags": ["x", "y"][: row % 3], "seen": f"2024-01-{1 + row % 28:02d}T10:00:00Z",
            "genres": {f"g{row % 7}": 0.5, f"g{row % 5}": 1}, "code": f"0{row % 50}", "price": row % 11 / 4,
            "deep": [{"a": 1}],
        }
        for row in range(300)
    ]  # fmt: skip
    del lines[5]["price"]
    raw = write_lines(tmp_path / "raw.jsonl.gz", lines)
    found = infer_schema(raw)
    (tmp_path / "schema.toml").write_text(found.text)
    layout = load_schema_file(tmp_path / "schema.toml")
    assert {field.name: field.kind for field in layout.fields} == {
        "user.id": "categorical", "user.geo.city": "categorical", "tags": "multi", "genres": "weighted",
        "code": "categorical", "price": "numeric", "seen_hour": "categorical", "seen_weekday": "categorical",
    }  # fmt: skip
    assert (layout.labels[0].column, layout.time.columns, layout.time.unit) == ("clicked", ("t",), "ms")
    assert "'deep': values of the type list<item: struct<a: int64>>, which are not read" in found.text
    schema = prepared(tmp_path, "out", [raw], PrepareConfig())
    assert schema.splits["train"].rows + schema.splits["test"].rows == 300
    assert Schema.load(tmp_path / "out").sources[0].rows == 300


@pytest.mark.parametrize("text", ['{"a,b}\t1\t0\n', "{1,2}\t1\t0\n"])
def test_text_may_begin_with_a_brace(tmp_path, text):
    (tmp_path / "raw.tsv").write_text(text * 3)
    (tmp_path / "schema.toml").write_text(
        'delimiter = "\\t"\nquote = ""\nheader = false\ncolumns = ["c", "label", "d"]\n'
        'fields = [{name = "c", kind = "categorical"}]'
    )
    refused("the training samples are of one class", prepared, tmp_path, "out", [tmp_path / "raw.tsv"])
