"""Bad input is reported with file, line and column, or skipped and counted."""

import gzip

import pyarrow.parquet as pq
import pytest

from cowrec.data_pipeline import PrepareConfig, Schema, prepare
from cowrec.data_pipeline.raw.layouts import load_csv_schema

GOOD = "1,2.5,x,a|b,k:1 l:2\n"
SCHEMA = """
header = false
columns = ["click", "price", "city", "tags", "history"]
label = "click"
fields = [
    {name = "price", kind = "numeric"},
    {name = "city", kind = "categorical"},
    {name = "tags", kind = "multi", separator = "|"},
    {name = "history", kind = "weighted", separator = " ", weight_separator = ":"},
]
"""
BAD_LINES = {
    "too few columns": (b"1,2.5,x\n", ": 3 columns, must be 5"),
    "too many columns": (b"1,2.5,x,a,k:1,9\n", ": 6 columns, must be 5"),
    "another delimiter": (b"1;2;3;4;5\n", ": 1 columns, must be 5 separated by ','"),
    "an empty line": (b"\n", ": the line is empty"),
    "an empty line of Windows": (b"\r\n", ": the line is empty"),
    "a label of 2": (b"2,2.5,x,a,k:1\n", ", column click: a label must be 0 or 1, got '2'"),
    "no label": (b",2.5,x,a,k:1\n", ", column click: a label must be 0 or 1, got ''"),
    "a word for a number": (b"1,much,x,a,k:1\n", ", column price: must be a finite number or empty, got 'much'"),
    "an infinite number": (b"1,inf,x,a,k:1\n", ", column price: must be a finite number or empty, got 'inf'"),
    "not a number": (b"1,nan,x,a,k:1\n", ", column price: must be a finite number or empty, got 'nan'"),
    "a long bad number": (b"1," + b"9x" * 99 + b",x,a,k:1\n", "9x9x..."),
    "no weight": (b"1,2.5,x,a,k:1 l\n", ", column history: must be id:weight, joined by ' ', got 'l'"),
    "an empty weight": (b"1,2.5,x,a,k:\n", ", column history: must be id:weight, joined by ' ', got 'k:'"),
    "a bad weight": (b"1,2.5,x,a,k:1 l:w\n", ", column history: must be id:weight, joined by ' ', got 'l:w'"),
    "Latin-1": ("1,2.5,é,a,k:1\n".encode("latin-1"), ": not UTF-8 (byte 0xe9); convert the file to UTF-8 first"),
    "half a quoted record": (b'1,2.5,"x,a,k:1\n', ": unbalanced quote"),
    "a lone carriage return": (b"1,2.5,x\ry,a,k:1\n", ": a carriage return inside the line"),
}


@pytest.fixture
def prepared(tmp_path):
    """Prepares raw bytes; returns the schema."""
    (tmp_path / "schema.toml").write_text(SCHEMA)

    def run(content, name="raw.csv", **config):
        (tmp_path / name).write_bytes(content)
        settings = PrepareConfig(test_fraction=0.0, **config)
        return prepare("csv", [tmp_path / name], tmp_path / "out", settings, csv_schema=tmp_path / "schema.toml")

    return run


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if path.name not in ("raw.csv", "schema.toml"))


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_row_raises_with_its_location(prepared, tmp_path, case):
    line, message = BAD_LINES[case]
    with pytest.raises(ValueError, match=r"raw\.csv, line 4") as error:
        prepared(GOOD.encode() * 3 + line + GOOD.encode() * 3)
    assert message in str(error.value)
    assert leftovers(tmp_path) == []


def test_bad_rows_can_be_skipped_and_are_counted(prepared, tmp_path):
    """All kinds of bad rows at once, between numbered good ones."""
    content, good = b"", 0
    for line, _ in BAD_LINES.values():
        content += f"0,{good},x,a,k:1\n".encode() + line
        good += 1
    schema = prepared(content, on_bad_row="skip", dense="none")
    assert schema.sources[0].bad_rows == len(BAD_LINES)
    assert schema.sources[0].rows == 2 * good
    assert schema.splits["train"].rows == good
    columns = pq.read_table(tmp_path / "out" / "train" / "00000.parquet").to_pydict()
    assert columns["price"] == list(range(good))
    assert columns["history"] == [[2]] * good
    assert columns["history__weight"] == [[1.0]] * good


def test_line_numbers_are_right_after_skipped_lines(prepared):
    """Lines removed by the filter and by the parser precede a bad number in the same block."""
    content = b"\n" + b"1,2\n" + GOOD.encode() + b"\xff\n" + b"1,2,3\n" + GOOD.encode() + b"1,bad,x,a,k:1\n"
    with pytest.raises(ValueError, match=r"more than max_bad_rows = 4 bad rows; the last: .*line 7, column price"):
        prepared(content, on_bad_row="skip", max_bad_rows=4)
    assert prepared(content, on_bad_row="skip", max_bad_rows=5).splits["train"].rows == 2


def test_line_numbers_are_right_across_blocks(prepared, monkeypatch):
    monkeypatch.setattr("cowrec.data_pipeline.raw.partitions.survey.__kwdefaults__", {"block_bytes": 100})
    with pytest.raises(ValueError, match=r"raw\.csv, line 778, column click"):
        prepared(GOOD.encode() * 777 + b"7,2.5,x,a,k:1\n" + GOOD.encode() * 100)


def test_quoted_newlines_are_noticed_when_quotes_are_even(prepared):
    with pytest.raises(ValueError, match=r"raw\.csv, line"):
        prepared((GOOD + '1,2.5,x"y,"a,k:1\n' + GOOD * 3).encode())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"input file .*raw\.csv is empty"),
        (b"\xff\xfe1\x00", r"raw\.csv, line 1: not UTF-8"),
        (b"\x00" * 50_000_000, r"raw\.csv, line 1: longer than .* is this a text file\?"),
    ],
)
def test_files_that_are_not_text_are_refused(prepared, tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        prepared(content)
    assert leftovers(tmp_path) == []


def test_missing_and_irregular_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        prepare("criteo", [tmp_path / "nowhere"], tmp_path / "out")
    with pytest.raises(ValueError, match="not a regular file"):
        prepare("criteo", [tmp_path], tmp_path / "out")
    with pytest.raises(ValueError, match="no input file"):
        prepare("criteo", [], tmp_path / "out")


def test_an_empty_archive_has_no_samples(tmp_path):
    (tmp_path / "raw.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match=r"raw\.gz has no samples"):
        prepare("criteo", [tmp_path / "raw.gz"], tmp_path / "out")
    with pytest.raises(ValueError, match=r"raw\.gz, line 1: no column"):
        prepare("avazu", [tmp_path / "raw.gz"], tmp_path / "out")


def test_headers_are_checked(tmp_path):
    (tmp_path / "a.csv").write_text("id,click\n1,2\n")
    with pytest.raises(ValueError, match=r"a\.csv, line 1: no column 'C1', 'C14'"):
        prepare("avazu", [tmp_path / "a.csv"], tmp_path / "out")
    (tmp_path / "schema.toml").write_text('[[fields]]\nname = "x"\nkind = "categorical"')
    (tmp_path / "a.csv").write_text("label,x\n1,2\n")
    (tmp_path / "b.csv").write_text("x,label\n1,2\n")
    with pytest.raises(ValueError, match=r"b\.csv, line 1: header differs"):
        prepare("csv", [tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out", csv_schema=tmp_path / "schema.toml")
    (tmp_path / "b.csv").write_text("label,x\n")
    with pytest.raises(ValueError, match=r"b\.csv has no samples"):
        prepare("csv", [tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out", csv_schema=tmp_path / "schema.toml")
    (tmp_path / "b.csv").write_text("label,x,x\n1,2,2\n")
    with pytest.raises(ValueError, match="column 'x' occurs more than once"):
        prepare("csv", [tmp_path / "b.csv"], tmp_path / "out", csv_schema=tmp_path / "schema.toml")


def test_a_byte_order_mark_is_not_part_of_the_header(tmp_path):
    (tmp_path / "schema.toml").write_text('[[fields]]\nname = "x"\nkind = "categorical"')
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbflabel,x\n1,2\n")
    schema = prepare(
        "csv",
        [tmp_path / "a.csv"],
        tmp_path / "out",
        PrepareConfig(test_fraction=0.0),
        csv_schema=tmp_path / "schema.toml",
    )
    assert schema.splits["train"].rows == 1


def test_a_data_set_without_training_samples_is_refused(prepared, tmp_path):
    (tmp_path / "raw.csv").write_bytes(GOOD.encode() * 3)
    config = PrepareConfig(split="tail", test_rows=3)
    with pytest.raises(ValueError, match="test_rows must be less than the 3 samples in the files, got 3"):
        prepare("csv", [tmp_path / "raw.csv"], tmp_path / "out", config, csv_schema=tmp_path / "schema.toml")
    with pytest.raises(ValueError, match="no training sample"):
        prepared(b"2,2,x,a,k:1\n", on_bad_row="skip")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_count": 0}, "min_count must be at least 1, got 0"),
        ({"hash_buckets": -1}, "hash_buckets must be from 0 to"),
        ({"hash_buckets": 9, "min_count": 2}, "min_count has no effect with hash_buckets"),
        ({"dense": "standard"}, "dense must be one of minmax, log, buckets, none, got 'standard'"),
        ({"split": "tail"}, "needs test_rows"),
        ({"split": "tail", "test_rows": 5, "test_fraction": 0.1}, "test_fraction is for"),
        ({"test_rows": 5}, 'test_rows is for split = "tail"'),
        ({"test_fraction": 1.0}, r"test_fraction must be in \[0, 1\), got 1.0"),
        ({"on_bad_row": "ignore"}, "on_bad_row must be one of error, skip"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        PrepareConfig(**settings)


FIELD = '[[fields]]\nname = "x"\nkind = "categorical"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("delimiter = ';;'\n" + FIELD, "delimiter must be one ASCII character"),
        ("separator = ';'\n" + FIELD, "unknown key 'separator'; the keys are delimiter"),
        ("header = 'no'\n" + FIELD, "header must be a bool, got 'no'"),
        ("header = false\n" + FIELD, "give `columns` if, and only if, header = false"),
        ("header = false\ncolumns = ['label', 'y']\n" + FIELD, "no column 'x' among label, y"),
        ("", "at least one field"),
        ("[[fields]]\nname = 'x'\n", "fields entry 1 needs a name and a kind"),
        (
            "[[fields]]\nname = 'x'\nkind = 'date'",
            "kind must be one of numeric, categorical, multi, weighted, got 'date'",
        ),
        ("[[fields]]\nname = 'x'\nkind = 'multi'", "separator must be given"),
        (FIELD + "separator = '|'", "separator is for list kinds only"),
        (FIELD + "pooling = 'mean'", "pooling is for the kinds multi and weighted"),
        (FIELD + "size = 3", "fields entry 1: unknown key 'size'"),
        (FIELD + FIELD, "field names must differ"),
        ("[[fields]]\nname = 'a b'\nkind = 'numeric'", "field 'a b': a name is made of letters"),
        ("[[fields]]\nname = 'label'\nkind = 'numeric'", "this name is taken"),
        ("label = 'x'\n" + FIELD, "column 'x' is the label"),
        ("label = ", "is not valid TOML"),
    ],
)
def test_schema_files_are_checked(tmp_path, text, message):
    (tmp_path / "schema.toml").write_text(text)
    with pytest.raises(ValueError, match=r"schema\.toml.*" + message):
        load_csv_schema(tmp_path / "schema.toml")


def test_a_failed_run_keeps_the_existing_data_set(prepared, tmp_path):
    prepared(GOOD.encode())
    (tmp_path / "raw.csv").write_bytes(b"bad\n")
    with pytest.raises(ValueError, match="exists and is not empty"):
        prepared(GOOD.encode())
    (tmp_path / "raw.csv").write_bytes(GOOD.encode() + b"bad\n")
    with pytest.raises(ValueError, match="line 2"):
        prepare("csv", [tmp_path / "raw.csv"], tmp_path / "out", csv_schema=tmp_path / "schema.toml", overwrite=True)
    assert Schema.load(tmp_path / "out").splits["train"].rows == 1
    assert leftovers(tmp_path) == ["out"]
