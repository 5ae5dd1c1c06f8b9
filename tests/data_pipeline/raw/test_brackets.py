"""Lists in brackets: the same ids as of lists, by any notation, in files, streams and requests."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import PrepareConfig, infer_schema
from cowrec.data_pipeline.codec import SampleCodec
from cowrec.data_pipeline.raw.lists import items_of, weights_of
from cowrec.data_pipeline.raw.schema_file import load_schema_file
from raw_cases import prepare_text, read_split
from refusal import refused

SCHEMA = 'label = "click"\ndelimiter = "\\t"\nquote = ""\nfields = [{name = "genres", kind = "%s", %s}]'
LISTS = [["Action", "Sci Fi"], ["Drama"], [], ["Action", "Drama", "it's"]]


def postgres(items):
    quoted = ('"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"' for item in items)
    plain = ("" if set(item) & set(' ,"\\{}()') or item[:1] in ("", "'") or item == "NULL" else item for item in items)
    return "{" + ",".join(bare or text for bare, text in zip(plain, quoted, strict=True)) + "}"


NOTATIONS = {
    "JSON": json.dumps,
    "JSON of other characters": lambda items: json.dumps(items, ensure_ascii=False, separators=(",", ":")),
    "Python": str,
    "a tuple": lambda items: str(tuple(items)),
    "NumPy": lambda items: str(np.array(items)),
    "Postgres": postgres,
    "bare": lambda items: f"[{', '.join(items)}]",
}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("abé ,:'\"()-", min_size=1, max_size=5).map(str.strip).filter(bool), max_size=4))
def test_every_notation_has_the_items(items):
    for name, write in NOTATIONS.items():
        if name == "NumPy" and len(items) < 1:
            continue
        if name != "bare" or not any({*item} & {*",'\"("} for item in items):
            assert items_of(write(items)) == items, name
    weights = {item: index / 4 for index, item in enumerate(items)}
    assert weights_of(json.dumps(weights)) == weights_of(str(weights)) == weights


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("[1, 2]", [1, 2]),
        ("[1 2\n 3]", ["1", "2", "3"]),
        ("{a,NULL}", ["a", None]),
        ("['a', None]", ["a", None]),
        ('{ a , " b "}', ["a", "b"]),
        (" [ ] ", []),
        ("{don't,b}", ["don't", "b"]),
    ],
)
def test_numbers_missing_items_and_blanks(text, items):
    assert items_of(text) == items


@pytest.mark.parametrize("text", ["a", "[a", "[[1], [2]]", "[{'id': 1}]", "{a,,b}", '["a" b]', "[", "{'a': {'b': 1}}"])
def test_other_text_is_no_list(text):
    refused(".", items_of, text)
    refused(".", weights_of, text)


@pytest.mark.parametrize("name", [*NOTATIONS])
def test_lists_in_brackets_have_the_ids_of_lists(tmp_path, name):
    lists = [[item.replace("'", "") for item in items] for items in LISTS] if name == "bare" else LISTS
    texts = [NOTATIONS[name](items) if items or name != "NumPy" else "[]" for items in lists]
    lines = [f"{row % 2}\t{text}" for row, text in enumerate(texts * 10)]
    prepare_text(tmp_path, SCHEMA % ("multi", "brackets = true"), "click\tgenres\n" + "\n".join(lines))
    joined = [f"{row % 2}\t{'|'.join(items)}" for row, items in enumerate(lists * 10)]
    schema = SCHEMA % ("multi", 'separator = "|"')
    prepare_text(tmp_path, schema, "click\tgenres\n" + "\n".join(joined), output="joined")
    expected = read_split(tmp_path / "joined", "train")["genres"]
    assert read_split(tmp_path / "out", "train")["genres"] == expected
    codec = SampleCodec.load(tmp_path / "out")
    samples = [{"genres": text} for text in texts]
    lines = [json.dumps(sample).encode() for sample in samples]
    for raw in (codec.from_json(lines, training=False), codec.from_table(pa.Table.from_pylist(samples))):
        bags = codec.encode(raw, training=False).table["genres"].to_pylist()
        assert bags == expected[:4]
    few, bad = codec.encode_request(samples)
    assert (few.bags["genres"].values.tolist(), bad) == ([id_ for bag in expected[:4] for id_ in bag], ())


def test_weights_in_brackets_and_text_without(tmp_path):
    texts = ['{"Action": 0.5, "War": 2}', "{'War': 1}", "{}", "", '["Action"]', '{"Action": "much"}']
    text = "click\tgenres\n" + "\n".join(f"{row % 2}\t{text}" for row, text in enumerate(texts))
    schema = SCHEMA % ("weighted", "brackets = true")
    message = r"line 6, column genres: must be weights in brackets, got '\[\"Action\"\]'"
    refused(message, prepare_text, tmp_path, schema, text)
    prepare_text(tmp_path, schema, text, config=PrepareConfig(test_fraction=0.0, on_bad_row="skip"))
    columns = read_split(tmp_path / "out", "train")
    assert columns["genres__weight"] == [[0.5, 2.0], [1.0], [1.0], [1.0]]
    assert [len(genre) for genre in columns["genres"]] == [2, 1, 1, 1]


def test_the_notations_of_exports_are_inferred(tmp_path):
    """As Postgres, pandas and JSON write them into a CSV file."""
    genres = ["Action", "Drama", "War", "IMAX", "Crime"]
    kinds = {"pg": "multi", "pylist": "multi", "jsonobj": "weighted"}
    lists = [[genres[row % 5], genres[(row + 1) % 5]][: 1 + row % 2] for row in range(60)]
    texts = {
        "pg": map(postgres, lists),
        "pylist": map(str, lists),
        "jsonobj": (json.dumps(dict.fromkeys(items, 0.5)) for items in lists),
    }
    for name, values in texts.items():
        lines = ['{},"{}"'.format(row // 2 % 2, text.replace('"', '""')) for row, text in enumerate(values)]
        (tmp_path / "raw.csv").write_text("clicked,genres\n" + "\n".join(lines))
        (tmp_path / "schema.toml").write_text(infer_schema(tmp_path / "raw.csv").text)
        (field,) = load_schema_file(tmp_path / "schema.toml").fields
        assert (field.kind, field.brackets) == (kinds[name], True)
        schema = prepare_text(
            tmp_path, (tmp_path / "schema.toml").read_text(), (tmp_path / "raw.csv").read_text(), output=name
        )
        assert schema.sparse[0].num_embeddings == 2 + 5


def test_items_are_trimmed_and_other_ids_with_spaces_are_told(tmp_path, caplog):
    schema = 'label = "click"\nfields = [{name = "tags", kind = "multi", separator = "|"},'
    schema += '{name = "city", kind = "categorical"}]'
    rows = [f"{row % 2},{'a | b' if row % 3 else 'a|b '},{'Rome ' if row % 5 else 'Rome'}" for row in range(30)]
    found = prepare_text(tmp_path, schema, "click,tags,city\n" + "\n".join(rows))
    assert [field.num_embeddings for field in found.sparse] == [2 + 2, 2 + 2]
    assert "field 'city': 1 of its ids differ from others by spaces at their ends only, such as 'Rome '" in caplog.text
    assert "field 'tags'" not in caplog.text
    few, _ = SampleCodec.load(tmp_path / "out").encode_request([{"tags": " b|a", "city": "Rome"}])
    assert few.bags["tags"].values.tolist() == [3, 2]
