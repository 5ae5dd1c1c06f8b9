"""Bad input is reported with file, line and column, or skipped and counted."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cowrec.data_pipeline import PrepareConfig, Schema, prepare
from raw_cases import MIXED_SCHEMA, prepare_text, read_split
from refusal import refused

GOOD = "1,2.5,x,a|b,k:1 l:2\n"
NEGATIVE = b"0" + GOOD.encode()[1:]
SCHEMA = 'header = false\ncolumns = ["click", "price", "city", "tags", "past views"]\n' + MIXED_SCHEMA
ONE_FIELD = '[[fields]]\nname = "x"\nkind = "categorical"'
BAD_LINES = {
    "too few columns": (b"1,2.5,x\n", ": 3 columns, must be 5"),
    "another delimiter": (b"1;2;3;4;5\n", ": 1 columns, must be 5 separated by ','"),
    "an empty line": (b"\n", ": the line is empty"),
    "a label of 2": (b"2,2.5,x,a,k:1\n", ", column click: a label must be 0 or 1, got '2'. Name the positive"),
    "no label": (b",2.5,x,a,k:1\n", ", column click: the label is missing, got ''. To skip"),
    "a word for a number": (b"1,much,x,a,k:1\n", ", column price: must be a finite number or empty, got 'much'"),
    "an infinite number": (b"1,inf,x,a,k:1\n", "set null = [\"inf\"] in the schema file, got 'inf'"),
    "no weight": (b"1,2.5,x,a,k:1 l\n", ", column past views: must be id:weight, joined by ' ', got 'l'"),
    "a bad weight": (b"1,2.5,x,a,k:1 l:w\n", ", column past views: must be id:weight, joined by ' ', got 'l:w'"),
    "Latin-1": ("1,2.5,é,a,k:1\n".encode("latin-1"), ": not UTF-8 (byte 0xe9); convert the file to UTF-8 first"),
    "half a quoted record": (b'1,2.5,"x,a,k:1\n', ": unbalanced quote"),
    "a lone carriage return": (b"1,2.5,x\ry,a,k:1\n", ": a carriage return inside the line"),
}


@pytest.fixture
def prepared(tmp_path):
    return lambda content, **config: prepare_text(
        tmp_path, SCHEMA, content, config=PrepareConfig(test_fraction=0.0, **config)
    )


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if path.name not in ("raw.csv", "schema.toml"))


@pytest.mark.parametrize("delimiter", ["||", "::", "§"])
def test_a_delimiter_of_several_characters(tmp_path, delimiter):
    schema = f'delimiter = "{delimiter}"\nquote = ""\nlabel = "click"\n' + ONE_FIELD.replace("x", "city")
    rows = [["id", "click", "city"], ["1", "0", '"b'], ["2", "1", ""], ["3", "1", ":c"]]
    text = "\n".join(delimiter.join(row) for row in rows)
    prepare_text(tmp_path, schema, text)
    columns = read_split(tmp_path / "out", "train")
    assert (columns["label"], columns["city"]) == ([0, 1, 1], [2, 1, 3])
    for bad, message in (("4;1;c", "line 5: 1 columns, must be 3 separated by"), ("\x1f", "the byte 0x1f is in the")):
        refused(message, prepare_text, tmp_path, schema, f"{text}\n{bad}", output="new")


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_row_raises_with_its_location(prepared, tmp_path, case):
    line, message = BAD_LINES[case]
    with pytest.raises(ValueError, match=r"raw\.csv, line 4") as error:
        prepared(GOOD.encode() * 3 + line + GOOD.encode() * 3)
    assert message in str(error.value)
    assert leftovers(tmp_path) == []


def test_bad_rows_can_be_skipped_and_are_counted(prepared, tmp_path):
    content, good = b"", 0
    for line, _ in BAD_LINES.values():
        content += f"{good % 2},{good},x,a,k:1\n".encode() + line
        good += 1
    schema = prepared(content, on_bad_row="skip", dense="none")
    (source,) = schema.sources
    assert (source.bad_rows, source.rows, schema.splits["train"].rows) == (len(BAD_LINES), 2 * good, good)
    columns = read_split(tmp_path / "out", "train")
    assert columns["price"] == list(range(good))
    assert columns["history"] == [[2]] * good
    assert columns["history__weight"] == [[1.0]] * good


def test_line_numbers_are_right_after_skipped_lines(prepared):
    """Lines removed by the filter and by the parser precede a bad number in the same block."""
    content = b"\n" + b"1,2\n" + GOOD.encode() + b"\xff\n" + b"1,2,3\n" + NEGATIVE + b"1,bad,x,a,k:1\n"
    with pytest.raises(ValueError, match=r"max_bad_rows = 4 bad rows: 5 so far .* them: .*line 7, column price"):
        prepared(content, on_bad_row="skip", max_bad_rows=4)
    schema = prepared(content, on_bad_row="skip", max_bad_rows=5)
    assert (schema.splits["train"].rows, sum(schema.bad_rows.values())) == (2, 5)


def test_the_first_bad_row_is_that_of_the_first_file(tmp_path):
    """Though one of another file, in the same partition, has a smaller number."""
    texts = [GOOD * 5 + "1,bad,x,a,k:1\n1,2\n", "0" + GOOD[1:] + "1,bad,x,a,k:1\n"]
    with pytest.raises(ValueError, match=r"raw\.csv, line 6, column price"):
        prepare_text(tmp_path, SCHEMA, *texts)
    config = PrepareConfig(test_fraction=0.0, on_bad_row="skip", max_bad_rows=2)
    with pytest.raises(ValueError, match=r"one of them: .*raw1\.csv, line 2"):
        prepare_text(tmp_path, SCHEMA, *texts, config=config)


def test_line_numbers_are_right_across_blocks(prepared, monkeypatch):
    monkeypatch.setattr("cowrec.data_pipeline.raw.reading.survey.__kwdefaults__", {"block_bytes": 100})
    with pytest.raises(ValueError, match=r"raw\.csv, line 778, column click"):
        prepared(GOOD.encode() * 777 + b"7,2.5,x,a,k:1\n" + GOOD.encode() * 100)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((GOOD + '1,2.5,x"y,"a,k:1\n' + GOOD * 3).encode(), r"raw\.csv, line"),  # a quoted newline; quotes are even
        (b"", r"input file .*raw\.csv is empty"),
        (b"\xff\xfe1\x00", r"raw\.csv, line 1: not UTF-8"),
    ],
)
def test_files_that_are_no_lines_of_text_are_refused(prepared, tmp_path, content, message):
    refused(message, prepared, content)
    assert leftovers(tmp_path) == []


def test_headers_are_checked(tmp_path):
    (tmp_path / "a.csv").write_text("id,click\n1,2\n")
    refused(r"a\.csv, line 1: no column 'C1', 'C14'", prepare, "avazu", [tmp_path / "a.csv"], tmp_path / "out")
    for second, message in (
        ("y,label\n1,0\n", r"raw1\.csv, line 1: no column 'x' among y, label"),
        ("label,x\n", r"raw1\.csv has no samples"),
        ("label,x,x\n1,2,2\n", "column 'x' occurs more than once"),
    ):
        refused(message, prepare_text, tmp_path, ONE_FIELD, "label,x\n1,2\n", second)


def test_a_byte_order_mark_is_not_part_of_the_header(tmp_path):
    assert prepare_text(tmp_path, ONE_FIELD, b"\xef\xbb\xbflabel,x\n1,2\n0,2\n").splits["train"].rows == 2


def test_a_data_set_without_training_samples_is_refused(prepared, tmp_path):
    message = "no training sample: 3 of the 3 samples in the files would be for validation and testing; lower the rows"
    refused(message, prepare_text, tmp_path, SCHEMA, GOOD * 3, config=PrepareConfig(split="order", test_rows=3))
    refused("no training sample", prepared, b"2,2,x,a,k:1\n", on_bad_row="skip")
    (tmp_path / "schema.toml").write_text(ONE_FIELD)
    table = pa.table({"label": [0, 1], "x": ["a", "b"]})
    for name, rows in (("train", 0), ("test", 2)):
        pq.write_table(table.slice(0, rows), tmp_path / f"{name}.parquet")
    files = [tmp_path / "train.parquet"], tmp_path / "out_of_files"
    message = r"the files of the training split have no samples: .*train\.parquet"
    refused(message, prepare, "tabular", *files, schema_file=tmp_path / "schema.toml", test=[tmp_path / "test.parquet"])


def test_a_failed_run_keeps_the_existing_data_set(prepared, tmp_path):
    prepared(GOOD.encode() + NEGATIVE)
    refused("exists and is not empty", prepared, GOOD.encode())
    refused("line 2", prepare_text, tmp_path, SCHEMA, GOOD + "bad\n", overwrite=True)
    (tmp_path / "schema.toml").write_text(ONE_FIELD.replace('"x"', '"city"'))
    for name in ("train", "./train/00000.parquet"):
        message = r"00000\.parquet is in .*out, which would be overwritten; choose another output"
        inputs, schema_file = [tmp_path / "out" / name], tmp_path / "schema.toml"
        refused(message, prepare, "tabular", inputs, tmp_path / "out", schema_file=schema_file, overwrite=True)
    assert Schema.load(tmp_path / "out").splits["train"].rows == 2
    # The data set that the new one is like may be the one that is replaced, but not lie in it.
    inner, raw = shutil.copytree(tmp_path / "out", tmp_path / "out" / "inner"), tmp_path / "raw.csv"
    raw.write_text(GOOD)
    message = "input .*inner is in .*out, which would be overwritten"
    refused(message, prepare, "tabular", [raw], tmp_path / "out", like=inner, overwrite=True)
    shutil.rmtree(inner)
    prepare("tabular", [raw], tmp_path / "out", like=tmp_path / "out", overwrite=True)
    assert Schema.load(tmp_path / "out").splits["test"].rows == 1
    assert leftovers(tmp_path) == ["out"]
