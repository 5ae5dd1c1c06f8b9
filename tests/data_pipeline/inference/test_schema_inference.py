"""Inferred schema files: any table's loads and prepares it; known columns are recognised; what is unsure is said."""

import csv
import lzma
import random
import re
import shutil
import tomllib
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import PrepareConfig, infer_schema, prepare
from cowrec.data_pipeline.codec import SampleCodec
from cowrec.data_pipeline.inference.columns import REMARKS, RULES, Column, guess_column, unsure
from cowrec.data_pipeline.raw.schema_file import load_schema_file
from cowrec.data_pipeline.raw.times import RawTime
from raw_cases import read_split
from refusal import refused

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"

words = st.text("abé #'\"{}=\\", min_size=1, max_size=4).filter(str.strip)
COLUMNS = st.sampled_from(
    [
        st.floats(-1e6, 1e6).map(repr),
        st.integers(-5, 10**6).map(str),
        st.integers(0, 3).map(str),
        st.sampled_from(["", "1.5", "NA", "-7"]),
        st.sampled_from(["\\N", "x", "y", ""]),
        words,
        st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4).map("|".join),
        st.lists(st.sampled_from("abc").map("{}:0.5".format), max_size=3).map(" ".join),
        st.datetimes().map(lambda moment: moment.isoformat(timespec="seconds")),
        st.sampled_from(["", "constant"]),
        st.integers(10**9, 2 * 10**9).map(str),
        st.sampled_from(["007", "08", "1"]),
        st.sampled_from(["1e999", "inf", "5"]),
        st.text("ab ", min_size=70, max_size=80),
    ]
)
NAMES = ["time", "label", "x__weight", "é", "-", "label_y", "kept_z", "user_id", "ts", "created_at", "#", "a b", 'q"u']
NAMES.append("\t")
LABELS = st.sampled_from([("0", "1"), ("1.0", "0.0"), ("no", "yes"), ("-1", "1"), ("False", "True"), ("2", "5")])


def inferred(path, label=None):
    """The text of the inferred schema file, which is written beside the raw file, its layout, and its fields' kinds."""
    text = infer_schema(path, label=label or "").text
    path.with_name("columns.toml").write_text(text, encoding="utf-8")
    layout = load_schema_file(path.with_name("columns.toml"))
    return text, layout, {field.name: field.kind for field in layout.fields}


def prepared(raw, **settings):
    """Prepares a file with the schema file beside it, by default all of it for training."""
    config, schema_file = (
        PrepareConfig(**settings or {"test_fraction": 0, "validation_fraction": 0}),
        raw.with_name("columns.toml"),
    )
    return prepare("tabular", [raw], raw.with_name("data"), config, schema_file=schema_file)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_the_schema_of_any_table_prepares_it(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("infer")
    rows, classes = data.draw(st.integers(6, 40)), data.draw(LABELS)
    names = data.draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=6))
    delimiter = data.draw(st.sampled_from(",;\t"))
    names = [name for name in names if delimiter not in name]
    columns = {name: [data.draw(strategy) for _ in range(rows)] for name in names for strategy in [data.draw(COLUMNS)]}
    columns |= {"click": [classes[n % 2] for n in range(rows)], "shop": [f"s{n % 3}" for n in range(rows)]}
    with (folder / "raw.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    _, layout, _ = inferred(folder / "raw.csv", "click")
    assert (layout.delimiter, layout.header, layout.labels[0].column) == (delimiter, True, "click")
    schema = prepared(folder / "raw.csv")
    assert schema.splits["train"].rows == rows
    first = read_split(folder / "data", "train")["label"][:2]
    assert sorted(first) == [0, 1]
    assert "shop" in [field.name for field in schema.sparse]


def test_known_columns_are_recognised(tmp_path):
    random = np.random.default_rng(0)
    header = "row_id,when,bought,price,age,zip,genres,history,note,empty,sex"
    lines = [
        f"{n},2024-05-0{1 + n % 9} 10:00:00,{'yes' if n % 3 else 'no'},{np.exp(3 * random.standard_normal()):.2f},"
        f"{20 + n % 50},0{n % 90:04d},{'|'.join(random.permutation(list('abcde'))[: 1 + n % 3])},"
        f"h{n % 7}:1.5 h{n % 5}:2,{'a long note ' * 6}{n},,{random.choice(['m', 'f', 'NULL'])}"
        for n in range(300)
    ]
    (tmp_path / "raw.csv").write_text("\n".join([header, *lines]))
    text, layout, found = inferred(tmp_path / "raw.csv")
    assert found == {
        "price": "numeric", "age": "numeric", "age_id": "categorical", "zip": "categorical", "genres": "multi",
        "history": "weighted", "sex": "categorical",
    }  # fmt: skip
    assert layout.time == RawTime(("when",))
    assert (layout.labels[0].column, layout.labels[0].positive) == ("bought", ("yes",))
    assert layout.fields[0].null == ("NULL",)
    by_column = {line.split('"')[1]: line for line in text.splitlines() if line.startswith("    {")}
    assert "integers, which may be ids" in by_column["age"]
    assert "remove the field that is wrong" in by_column["age_id"]
    assert "leading zeros" in by_column["zip"]
    assert 'kind = "multi"' in by_column["genres"]
    assert 'a history, the oldest first: kind = "sequence", max_length = 50' in by_column["genres"]
    for column, why in (("row_id", "identifies the row"), ("note", "long text"), ("empty", "no value at all")):
        assert f"# left out: '{column}': {why}" in text or f"# left out: '{column}': another" in text


def test_files_without_header_label_or_delimiter(tmp_path):
    raw = tmp_path / "raw.tsv"
    raw.write_text("".join(f"{n % 2}\t{n / 7}\tc{n % 4}\n" for n in range(40)))
    _, layout, found = inferred(raw)
    assert (layout.header, layout.labels[0].column) == (False, "column1")
    assert layout.columns == ("column1", "column2", "column3")
    assert found == {"column2": "numeric", "column3": "categorical"}
    raw.write_text("a\tb\n" + "".join(f"x{n % 3}\t{n}.5\n" for n in range(30)))
    refused("no column looks like a label; name it with --label COLUMN", infer_schema, raw)
    raw.write_text("".join(f"{n}\tx\t{n}\n" for n in range(9)))
    refused("first line was taken as a sample and not as a header: no column 'y' for", infer_schema, raw, label="y")
    raw.write_text("a\tb\n" + "".join(f"x{n % 3}\t{n}.5\n" for n in range(30)))
    refused("no column 'c' for the label among a, b", infer_schema, raw, label="c")
    refused("column 'a' cannot be the label", infer_schema, raw, label="a")
    assert "threshold = 15.5  # unsure" in infer_schema(raw, label="b").text
    raw.write_text("click,#\n" + "".join(f"{('no', 'yes')[n % 2]},{'#b'[n % 2]}\n" for n in range(6)))
    assert inferred(raw, "click")[1].header, "a line with the label's name is a header"
    raw.write_text("".join(f"{('no', 'yes')[n % 2]},{('', 'a', 'b')[n % 3]}\n" for n in range(6)))
    assert not inferred(raw)[1].header
    raw.write_text("1,guest,book,3.5,web\n" + "".join(f"{n % 2},{n},toy,{n}.25,app\n" for n in range(30)))
    text, layout, _ = inferred(raw)
    assert (layout.header, "looks like a sample, but check `header`" in text) == (False, True), "1 is a label"
    raw.write_text("word\nword\n")
    refused("no delimiter found", infer_schema, raw)


@pytest.mark.parametrize(
    ("first", "header"),
    [
        ("user_id,item_id,0,1,2", True),
        ("guest,1,0,1,2", False),
        ("1,7,0,1,2", False),
    ],
)
def test_names_above_numbers_are_a_header_whatever_the_other_names(tmp_path: Path, first: str, header: bool) -> None:
    """Names that are numbers, as pandas gives them, may be values of their columns too."""
    lines = [first, *(f"{n % 2},{n},{n % 3},{n % 5},{n / 4}" for n in range(30))]
    (tmp_path / "raw.csv").write_text("\n".join(lines))
    text, layout, _ = inferred(tmp_path / "raw.csv", "" if header else "column4")
    assert layout.header == header
    assert not header or "the first line looks like a header, but check `header`" in text


def test_an_arrow_file_of_polars(tmp_path: Path) -> None:
    """It has views, also in dictionaries; names may be repeated."""
    shops = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 1] * 10), pa.array(list("abc"), pa.string_view()))
    table = pa.table([[n % 2 for n in range(40)], shops, shops, shops], ["click", "shop", "x", "x"])
    with pa.ipc.new_file(tmp_path / "raw.arrow", table.schema) as writer:
        writer.write_table(table)
    assert inferred(tmp_path / "raw.arrow")[2] == {"shop": "categorical"}
    assert prepared(tmp_path / "raw.arrow").splits["train"].rows == 40


@pytest.mark.parametrize("header", [True, False])
def test_the_columns_of_folders(tmp_path: Path, header: bool) -> None:
    """As Hive names them, of all files; without a header `prepare` knows no further columns."""
    for day in range(1, 31):
        file = tmp_path / "raw" / f"day=2024-03-{day:02d}" / f"site=s{day % 2}" / "part.csv"
        file.parent.mkdir(parents=True)
        file.write_text("click,price\n" * header + "0,1.5\n1,2.25\n1,0.5\n")
    text, layout, found = inferred(tmp_path / "raw")
    assert "from the first 3 rows of " + str(tmp_path / "raw/day=2024-03-01/site=s1/part.csv.") in text
    assert text.count("# left out: ") == (0 if header else 2)
    assert (layout.time_columns, found.get("site")) == ((("day",), "categorical") if header else ((), None))
    assert prepared(tmp_path / "raw").splits["train"].rows == 90


@pytest.mark.parametrize(
    ("classes", "positive"),
    [
        (("converted", "not converted"), '["converted"]'),
        (("no click", "click"), '["click"]'),
        (("Clicked ", "Not Clicked"), '["Clicked "]'),
        (("-1", "1"), '["1"]'),
        (("a", "b"), '["b"]  # unsure: which values are positive?'),
    ],
)
def test_which_of_two_words_is_positive(tmp_path: Path, classes: tuple[str, str], positive: str) -> None:
    for words in (classes, classes[::-1]):
        (tmp_path / "raw.csv").write_text("end,shop\n" + "".join(f"{words[n % 2]},s{n % 3}\n" for n in range(9)))
        assert f"positive = {positive}" in infer_schema(tmp_path / "raw.csv", label="end").text.splitlines()


def test_real_files(tmp_path):
    """MovieLens as in its hand-written schema; Avazu's label and its unique ids."""
    if not DATA.is_dir():
        pytest.skip(f"needs {DATA}")
    with lzma.open(DATA / "ml1m_labelled.csv.xz") as file:
        (tmp_path / "ml.csv").write_bytes(file.read(1 << 20).rpartition(b"\n")[0])
    _, layout, found = inferred(tmp_path / "ml.csv")
    assert layout.labels[0].column == "label_ge4"
    assert (found["genres"], found["gender"], found["zip"]) == ("multi", "categorical", "categorical")
    shutil.copy(DATA / "avazu_9k.csv.xz", tmp_path)
    _, layout, found = inferred(tmp_path / "avazu_9k.csv.xz")
    assert layout.labels[0].column == "click"
    assert "id" not in found
    assert found["device_id"] == "categorical"


def test_repeated_names_and_other_encodings_are_named_as_the_cause(tmp_path):
    """As `prepare` names them; a header with a repeated name is one, and only the columns of that name are left out."""
    path = tmp_path / "table.csv"
    path.write_text("label,a,a,b\n1,2,3,x\n0,3,4,y\n")
    text = infer_schema(path).text
    assert 'label = "label"' in text
    assert "# left out: 'a': several columns have this name" in text
    assert tomllib.loads(text)["fields"] == [{"name": "b", "kind": "categorical"}]
    path.write_text("label,label,b\n1,1,x\n0,1,y\n0,0,z\n")
    refused(r"looks like a label \(those that share a name are left out: 'label'; rename", infer_schema, path)
    refused("several columns are called 'label'; rename all but the label's", infer_schema, path, label="label")
    path.write_bytes("label,größe\n1,x\n0,y\n".encode("latin1"))
    text, layout, _ = inferred(path)
    assert layout.encoding == "cp1252"
    assert "# unsure: the text is not UTF-8 and was read as cp1252" in text
    assert tomllib.loads(text)["fields"][0]["name"] == "größe"


def test_types_of_parquet_are_believed_and_nulls_are_bad_rows(tmp_path: Path) -> None:
    """As pandas writes it: a label of floats, times, each with a null, and an index."""
    rows = 200
    label = pa.array([float(row % 3 == 0) for row in range(rows)]).to_pylist()
    times = [datetime(2024, 1, 1) + timedelta(minutes=row) for row in range(rows)]
    label[5] = times[7] = times[9] = None
    table = pa.table(
        {
            "clicked": pa.array(label, pa.float64()),
            "ts": pa.array(times, pa.timestamp("ns")),
            "city": [f"c{row % 7}" for row in range(rows)],
            "__index_level_0__": [row % 50 for row in range(rows)],
        }
    )
    pq.write_table(table, tmp_path / "raw.parquet")
    text, _, found = inferred(tmp_path / "raw.parquet")
    assert re.findall(r'^(label|time) = "(.*?)"', text, re.MULTILINE) == [("label", "clicked"), ("time", "ts")]
    assert text.count("of the rows have none, and are bad rows") == 2
    assert [*found] == ["city"]
    schema = prepared(tmp_path / "raw.parquet", on_bad_row="skip")
    assert sum(split.rows for split in schema.splits.values()) == rows - 3


@pytest.mark.parametrize(
    ("names", "is_id"),
    [
        ("userId movieId SearchID AdID userid movieids visitorid itemid cms_segid ADID user_id", True),
        ("country ad signup_date_id", True),
        ("paid valid bid Grid humid covid AMID price", False),
        ("num_ads spend_per_country n_items total_users hour account_age_days months", False),
    ],
)
def test_names_of_ids(tmp_path: Path, names: str, is_id: bool) -> None:
    """Camel case, and nouns with "id"; other integers are numbers and ids at once, unless they seldom repeat."""
    columns = names.split()
    for distinct in (50, 120):
        lines = [",".join(["click", *columns]), *(f"{n % 2}" + f",{n % distinct}" * len(columns) for n in range(200))]
        (tmp_path / "raw.csv").write_text("\n".join(lines))
        text, _, found = inferred(tmp_path / "raw.csv")
        also = dict.fromkeys([f"{name}_id" for name in columns], "categorical") if distinct == 50 and not is_id else {}
        assert found == dict.fromkeys(columns, "categorical" if is_id else "numeric") | also
        assert ("# unsure: training needs a field of ids" in text) == (not is_id and not also)


def test_integers_that_may_be_ids_are_both(tmp_path: Path) -> None:
    """Their frequent values have ids too, under a name that no column has; a further time has its parts."""
    rows = 3000
    slot = [n % 70 if n % 4 else n for n in range(rows)]
    columns = {"click": [n // 2 % 2 for n in range(rows)], "slot": slot, "slot_id": [f"s{n % 7}" for n in range(rows)]}
    columns |= {"whole": [float(n % 50) for n in range(rows)], "time": [1_700_000_000 + n for n in range(rows)]}
    columns |= {"opened_at": [1_700_000_000 + n % 99 for n in range(rows)]}
    pq.write_table(pa.table(columns), tmp_path / "raw.parquet")
    _, _, found = inferred(tmp_path / "raw.parquet")
    ids = ["slot_id_", "slot_id", "whole_id", "opened_at_hour", "opened_at_weekday"]
    assert found == {"slot": "numeric", "whole": "numeric"} | dict.fromkeys(ids, "categorical")
    schema = prepared(tmp_path / "raw.parquet")
    shutil.rmtree(tmp_path / "data")
    frequent = [value for value in set(slot) if slot.count(value) >= 10]
    assert next(field for field in schema.sparse if field.name == "slot_id_").num_embeddings == len(frequent) + 2
    assert len(set(slot)) > 10 * len(frequent) > 0
    for ends, remark in (
        (["", ""], ""),
        ([".0", ".0"], "unsure: 0.0 is another id"),
        (["", ".0"], "integers, amounts or"),
    ):
        whole = [f"{n % 50}{ends[n // 50 % 2]}" for n in range(rows)]
        pq.write_table(pa.table({"click": columns["click"], "whole": whole}), tmp_path / "raw.parquet")
        described, _, found = inferred(tmp_path / "raw.parquet")
        assert remark in described
        assert ("whole_id" in found) == (ends[0] == ends[1])
    for distinct, of_all, of_first in ((0.4, True, True), (0.8, False, True), (0.99, False, False)):
        values = [str(n % int(distinct * rows) * 1000) for n in range(rows)]
        assert guess_column(Column("slot", values)).also_ids == of_all
        assert guess_column(Column("slot", values, scope=" in the first rows")).also_ids == of_first


def test_unsure_numbers_and_times(tmp_path: Path) -> None:
    """Large numbers that are all different identify the row, as the same numbers as text do."""
    rows = [
        f"{n % 2},{n % 3},{10**17 + 7 * n**2},{10**17 + 7 * n**2:x},2019-10-{1 + n % 28:02d} 00:00:{n % 60:02d} UTC,"
        f"{1 + n % 12}/{1 + n % 28}/2024"
        for n in range(300)
    ]
    (tmp_path / "raw.csv").write_text("\n".join(["click,weight,request,as_text,event_time,date", *rows]))
    text, layout, found = inferred(tmp_path / "raw.csv")
    assert found == {"weight": "numeric", "date_weekday": "categorical", "date_month": "categorical"}
    assert layout.time == RawTime(("event_time",))
    assert 'unsure: weights of the samples? then remove it here, and add weight = "weight" above' in text
    field = '{name = "date_month", column = "date", kind = "categorical", part = "month", format = "%m/%d/%Y"}'
    assert f"{field},  # the month of a time: %m/%d/%Y" in text


NUMERIC = {"2020": "numeric"}
STRANGE = {
    "a long text": ("shop,note", f's{{m}},"{"a, " * 44_000}{{n}}"', {"shop": "categorical"}),
    "a pandas index": (",shop,price", "{n},s{m},{n}.5", {"shop": "categorical", "price": "numeric"}),
    "commas at the ends of lines": ("shop,price,", "s{m},{n}.5,", {"shop": "categorical", "price": "numeric"}),
    "spaces after delimiters": ("shop, price", "s{m}, {n}.5", {"shop": "categorical", "price": "numeric"}),
    "ids with decimals": ("item,price", "{k}.0,{n}.5", {"item": "categorical", "price": "numeric"}),
    "ids beyond 2 ** 53": ("tag,price", "9{k:020d},{n}.5", {"tag": "categorical", "price": "numeric"}),
    "years as names": ("2019,2020,shop", "{m},{k}.5,s{m}", dict.fromkeys(["2019", "shop"], "categorical") | NUMERIC),
    "infinity": ("shop,price", "s{m},{d}", {"shop": "categorical", "price": "numeric"}),
    "hours as digits": ("seen_at,shop", "2024031{m}1{m},s{m}", {"shop": "categorical"}),
    "days as digits": ("date,shop", "2024031{m},s{m}", {"shop": "categorical"}),
    "milliseconds": ("seen_at,shop", "1700000000{k:03d},s{m}", {"shop": "categorical"}),
    "other notations": ("shop,a,b,c", 's{m},"1,{n:03d}.5","{n},5",$3.{n}', {"shop": "categorical", "b": "numeric"}),
}


TIMES_OF_STRANGERS = {
    "hours as digits": RawTime(("seen_at",), format="%Y%m%d%H"),
    "days as digits": RawTime(("date",), format="%Y%m%d"),
    "milliseconds": RawTime(("seen_at",), unit="ms"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_files_as_strangers_have_them(tmp_path: Path, kind: str) -> None:
    """What is guessed of them is prepared; numbers that would become ids are left out, with a remedy."""
    header, line, expected = STRANGE[kind]
    space = " " * (", " in header)
    rows = [(n, line.format(n=n, m=n % 3, k=n % 50, d="inf" if n % 9 == 0 else n / 7)) for n in range(100)]
    lines = [f"clicked,{space}{header}", *(f"{n // 2 % 2},{space}{text}" for n, text in rows)]
    (tmp_path / "raw.csv").write_text("\n".join(lines))
    text, layout, found = inferred(tmp_path / "raw.csv")
    assert (layout.header, found, text.count("write them as 1234.5")) == (True, expected, 2 * (kind[:5] == "other"))
    assert layout.time == TIMES_OF_STRANGERS.get(kind)
    assert ("unsure: YYYYMMDDHH; Unix seconds fits all values too" in text) == (kind == "hours as digits")
    assert text.count("unsure: 0.0 is another id than the same number") == (kind == "ids with decimals")
    assert prepared(tmp_path / "raw.csv").splits["train"].rows == 100


def test_files_that_are_no_table_are_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "raw.csv"
    for text, problem in (
        ("click,a\n", "raw.csv has no samples"),
        ("# by a tool\nclick,a\n1,x\n0,y\n", "line 1: 1 columns, but 2 in most lines; remove what is above the table"),
        ('[{"click": 1, "a": 2},\n{"click": 0, "a": 3}]\n', "is one JSON document; write an object a line, as pandas"),
        ('{\n  "click": {"0": 1, "1": 0}}\n', "is one JSON document"),
        ('{"click": {"0": 1, "1": 0}, "a": {"0": "x", "1": "y"}}', "is one JSON document"),
        ('click,a\n1,"x\ny"\n0,z\n1,"u\nv"\n', r"a quoted value contains a newline \('x\\ny'\)"),
        ("click,a\r1,x\r0,y\r", "line 1: a carriage return inside the line; convert its line endings to newlines"),
        ("-1 35:1 47:1\n1 26:1\n", "is in the format of libsvm or libffm; write a table with a column for each field"),
        ("1 0:34:1 1:46:0.5\n0 0:1:1\n", "is in the format of libsvm or libffm"),
        ("u1\tN9 N2\tN3-1 N4-0\nu2\tN9\tN5-0\n", "several items with a label each, such as 'N[35]-.*write a row for"),
        ("click,a\n1,x\n1,y\n1,z\n", "'click' has one value only, so nothing can be learned"),
    ):
        path.write_text(text, newline="")
        refused(problem, infer_schema, path)
    refused("column 'click' cannot be the label: it has one value", infer_schema, path, label="click")
    pq.write_table(pa.table({"click": ["no", "yes"] * 99}), path)
    path.write_bytes(path.read_bytes().replace(b"PAR1\x15", b"PAR1\xff"))
    refused(r"raw\.csv: truncated or damaged", infer_schema, path)


@pytest.mark.parametrize("rows", [150, 900])
@pytest.mark.parametrize("label", ["clk", "stars", "end"])
def test_columns_that_say_what_the_label_is_are_left_out(tmp_path: Path, rows: int, label: str) -> None:
    """As nonclk beside clk in Taobao's data; in a few samples it may be chance, and so may a column of many values."""
    values = {"clk": "01101", "stars": "15324", "end": "nyyny"}[label]  # 2 of 5 are negative
    lines = [f"{values[n % 5]},{n % 5 in (0, 3)},c{n % 10},{n % 7},{n % 25},{n}.5\n" for n in range(rows)]
    (tmp_path / "raw.csv").write_text(f"{label},nonclk,kind,cate_id,user_id,price\n" + "".join(lines))
    text, _, found = inferred(tmp_path / "raw.csv", label)
    left_out = [name for name in ("nonclk", "kind") if f"# left out: '{name}': it says what the label is\n" in text]
    assert left_out == ([] if rows == 150 else ["nonclk", "kind"])
    assert {*found} == {"nonclk", "kind", "cate_id", "user_id", "price"} - {*left_out}


@pytest.mark.parametrize(("form", "joints"), [("{}", (", ", ",")), ("[{}]", (", ", ",")), ("{{{}}}", (",", ","))])
def test_lists_with_blanks_or_brackets(tmp_path: Path, form: str, joints: tuple[str, str]) -> None:
    """An id is the same wherever it is in a list, also where it has blanks of its own."""
    lists = [sorted({n % 5, n % 7, n % 11}, key=lambda item: item * n % 13) for n in range(300)]
    texts = [form.format(joints[n % 2].join(f"tag {number}" for number in ids)) for n, ids in enumerate(lists)]
    lines = ["click\ttags", *(f"{n // 2 % 2}\t{text}" for n, text in enumerate(texts))]
    (tmp_path / "raw.tsv").write_text("\n".join(lines))
    text, layout, found = inferred(tmp_path / "raw.tsv")
    separators = ("", True) if form != "{}" else (",", False)
    assert (found, layout.fields[0].separator, layout.fields[0].brackets) == ({"tags": "multi"}, *separators)
    assert " become part of the ids" not in text
    assert prepared(tmp_path / "raw.tsv").sparse[0].num_embeddings == 2 + 11


@pytest.mark.parametrize(
    ("values", "threshold"),
    [
        ("0 0 0 1 5 2", "1.0  # unsure: which values are positive?"),
        ("-1 0 1 1 -1 -1", "1.0  # unsure: which values are positive? Is -1 a missing label?"),
        ("0 1 2 3 3 3", "2.0  # unsure: which values are positive?"),
        ("0 0 0.5 0.7 1.9", "0.7  # unsure: which values are positive?"),
    ],
)
def test_thresholds_of_numbers(tmp_path: Path, values: str, threshold: str) -> None:
    """Numbers of events, most of them 0, are positive from 1 on."""
    lines = [f"{word},s{n % 2}\n" for n, word in enumerate(values.split())]
    (tmp_path / "raw.csv").write_text("clicks,shop\n" + "".join(lines))
    assert f"threshold = {threshold}\n" in inferred(tmp_path / "raw.csv", "clicks")[0]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("classes", [("0", "1"), ("False", "True"), ("no", "yes")])
def test_a_file_that_is_sorted_by_label(tmp_path: Path, kind: str, classes: tuple[str, str]) -> None:
    """Its first rows have one class, and they are not all rows, which the messages say."""
    raw, rows, first = tmp_path / f"raw.{kind}", 60_000, " in the first 50,000 rows"
    columns = {"clicked": [classes[n > 55_000] for n in range(rows)], "shop": [f"s{n % 7}" for n in range(rows)]}
    columns["campaign"] = ["a"] * 55_000 + ["b"] * 5_000
    if kind == "csv":
        raw.write_text("\n".join(map(",".join, [(*columns,), *zip(*columns.values(), strict=True)])))
    else:
        pq.write_table(pa.table(columns), raw)
    refused(f"with --label COLUMN; 'clicked' has one value only{first}$", infer_schema, raw)
    if classes == ("no", "yes"):
        refused(f"it has one value{first}; shuffle the rows, or write", infer_schema, raw, label="clicked")
        return
    text, _, found = inferred(raw, "clicked")
    assert f'label = "clicked"  # unsure: one value only{first}\n' in text
    assert f"# left out: 'campaign': one value only{first}\n" in text
    assert found == {"shop": "categorical"}
    assert prepared(raw).splits["train"].positives == (4999,)


def test_columns_of_parquet_are_recognised_or_left_out(tmp_path: Path) -> None:
    columns = {
        "click": [True, False] * 20,
        "shop": pa.array([f"s{n % 4}" for n in range(40)]).dictionary_encode(),
        "tags": [[f"t{n % 3}", "u"] for n in range(40)],
        "score": [1.5, float("inf"), float("nan"), -2.0] * 10,
        "bytes": [b"\xff"] * 40,
        "time of day": pa.array([1] * 40, pa.time32("s")),
        "record": [{"a": 1}] * 40,
        "nested": [[[1, 2], [3]]] * 40,
        "weights": [[{"id": "x", "weight": 0.5}]] * 40,
        "counts": pa.array([[("x", n % 3)] for n in range(40)], pa.map_(pa.string(), pa.int8())),
        "attributes": pa.array([[("os", "ios")]] * 40, pa.map_(pa.string(), pa.string())),
        "named": [[{"id": "x", "weight": "heavy"}]] * 40,
        "user_id": [None if n % 9 == 0 else 1e10 + n % 7 for n in range(40)],
        "seller_id": pa.array([Decimal(n % 5) for n in range(40)], pa.decimal128(38, 18)),
    }
    pq.write_table(pa.table(columns), tmp_path / "raw.parquet")
    text, _, found = inferred(tmp_path / "raw.parquet")
    numbers = {"score": "numeric", "user_id": "categorical", "seller_id": "categorical"}
    assert found == numbers | {"shop": "categorical", "tags": "multi", "weights": "weighted", "counts": "weighted"}
    assert text.count("# left out: ") == 6
    assert text.count('kind = "sequence"') == 1
    assert prepared(tmp_path / "raw.parquet").splits["train"].positives == (20,)
    assert read_split(tmp_path / "data", "train")["score"].count(0.0) == 20


RULE_EXAMPLES = {
    "vectors": Column("a", [None], "vectors of width 8"),
    "joined numbers": Column("a", ["[0.5, 1]", "[-2, 3e-1]", ""]),
    "lists": Column("a", [None], "multi"),
    "weighted lists": Column("a", [None], "weighted"),
    "type that is not read": Column("a", [None], "values of the type time32[s], which are not read"),
    "bytes": Column("a", [None]),
    "index": Column("__index_level_0__", ["1", "2"]),
    "times": Column("a", ["2024-05-01", "2024-05-02"], "time"),
    "times of few rows": Column("a", ["2024-05-01", "2024-05-02", ""], "time"),
    "no value": Column("a", ["", "NA"]),
    "one value": Column("a", ["x", "x", ""]),
    "leading zeros": Column("a", ["01", "2"]),
    "row numbers": Column("a", [str(n) for n in range(30)]),
    "named ids": Column("user_id", ["1", "2", "1"]),
    "large integers": Column("a", [str(2**53), "1", "1"]),
    "weights of samples": Column("weight", ["1", "2"]),
    "codes": Column("a", ["1", "2", "1"]),
    "decimals": Column("a", ["1", "2.5"]),
    "numbers or ids": Column("a", [str(n % 30) for n in range(60)]),
    "integers": Column("a", [str(n * n) for n in range(30)]),
    "other notation": Column("a", ["$1", "$2"]),
    "weights in brackets": Column("a", ['{"x": 1, "y": 0.5}', "{'x': 2}", "{}"]),
    "lists in brackets": Column("a", ['["x", "y"]', "['y']", "{x,NULL}"]),
    "joined weights": Column("a", [f"x:{n} y:{n + 30}" for n in range(30)]),
    "joined lists": Column("a", ["x|y", "y|x", "x", "y", "x|y|x", "y|x|y"]),
    "long text": Column("a", ["x" * 70, "y" * 70]),
    "row ids": Column("a", [f"x{n}" for n in range(30)]),
    "rare ids": Column("a", [f"x{n}" for n in [0, *range(29)] * 2][:45] + [f"y{n}" for n in range(20)]),
    "ids": Column("a", ["x", "y", "x"]),
}
REMARK_EXAMPLES = {
    "order": (RULE_EXAMPLES["joined lists"], 'a history, the oldest first: kind = "sequence", max_length = 50'),
    "brackets": (Column("a", ["[{'id': 1}]", "[{'id': 2}]"]), "brackets become part of the ids"),
    "integers with points": (Column("a", ["1.0", "2.0"]), "1.0 is another id than the same number without a point"),
    "dates that are not read": (Column("date", ["1 May 2024", "2/5/2024"]), "seem to be times, such as 1 May 2024"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_decides_about_its_columns(rule):
    column = RULE_EXAMPLES[rule.name]
    guess = guess_column(column)
    assert (guess.rule, guess.kind, guess.also_ids) == (rule.name, rule.kind, rule.also_ids)
    assert (guess.remarks[0].text, guess.remarks[0].unsure) == (rule.why.format(c=column), rule.unsure)


@pytest.mark.parametrize("remark", REMARKS, ids=lambda remark: remark.name)
def test_each_remark_is_made_of_its_columns(remark):
    column, text = REMARK_EXAMPLES[remark.name]
    (found,) = (found for found in guess_column(column).remarks if found.text.startswith(text))
    assert found.unsure == remark.unsure
    assert str(unsure(text)) == f"unsure: {text}"


def test_of_two_complementary_columns_the_label_is_the_positive_one(tmp_path: Path) -> None:
    """As Taobao's display ads have them."""
    rows = [f"u{n % 9},{n // 3 % 2},{1 - n // 3 % 2}" for n in range(300)]
    (tmp_path / "raw.csv").write_text("\n".join(["user,nonclk,clk", *rows]))
    text, layout, found = inferred(tmp_path / "raw.csv")
    assert (layout.labels[0].column, found) == ("clk", {"user": "categorical"})
    assert "# left out: 'nonclk': it says what the label is" in text


def test_several_columns_that_are_as_likely_are_no_label(tmp_path: Path) -> None:
    """A column of Yes and No weighs as much as one of 0 and 1."""
    rows = [f"h{n % 3},{['No', 'Yes'][n // 2 % 2]},{n % 2}" for n in range(60)]
    (tmp_path / "raw.csv").write_text("\n".join(["hotel,is_canceled,is_repeated_guest", *rows]))
    message = "several columns could be the label: 'is_canceled', 'is_repeated_guest'; name it with --label"
    refused(message, infer_schema, tmp_path / "raw.csv")
    assert inferred(tmp_path / "raw.csv", "is_canceled")[1].labels[0].positive == ("Yes",)


def test_of_several_words_the_positive_ones_are_named(tmp_path: Path) -> None:
    rows = [f"u{n % 3},{['pv', 'pv', 'cart', 'buy'][n % 4]}" for n in range(60)]
    (tmp_path / "raw.csv").write_text("\n".join(["user,action", *rows]))
    raw = tmp_path / "raw.csv"
    message = (
        "its values are neither two nor all numbers: 'pv', 'cart', 'buy'; say which are positive, as in --positive buy"
    )
    refused(message, infer_schema, raw, label="action")
    text = infer_schema(raw, label="action", positive=["buy", "cart"]).text
    assert 'positive = ["buy", "cart"]  # the others are negative: \'pv\'\n' in text
    (tmp_path / "columns.toml").write_text(text)
    assert load_schema_file(tmp_path / "columns.toml").labels[0].positive == ("buy", "cart")
    refused("no row whose value is 'bye'; did you mean 'buy'", infer_schema, raw, label="action", positive=["bye"])
    refused("no value besides the positive ones", infer_schema, raw, label="action", positive=["buy", "pv", "cart"])
    refused("needs the label", infer_schema, raw, positive=["buy"])


@pytest.mark.parametrize("delimiter", ["::", "\x01", " ", "\t"])
def test_delimiters_that_are_named_or_found(tmp_path, delimiter):
    rows = [
        delimiter.join(line)
        for line in [("user", "click", "city"), *((f"u{n % 7}", f"{n % 2}", f"c{n % 3}") for n in range(60))]
    ]
    (tmp_path / "raw.txt").write_text("\n".join(rows))
    written = {"\x01": "\\x01", "\t": "\\t"}.get(delimiter, delimiter)
    named = infer_schema(tmp_path / "raw.txt", delimiter=written)
    if delimiter != " ":
        assert infer_schema(tmp_path / "raw.txt").text == named.text
    (tmp_path / "columns.toml").write_text(named.text)
    assert load_schema_file(tmp_path / "columns.toml").delimiter == delimiter
    assert prepared(tmp_path / "raw.txt").splits["train"].rows == 60
    literal = f"delimiter = '{written}'"
    text = re.sub("delimiter = .*", lambda _: literal, named.text)
    (tmp_path / "columns.toml").write_text(text)
    assert load_schema_file(tmp_path / "columns.toml").delimiter == delimiter


def test_a_decimal_comma_and_another_encoding(tmp_path):
    """As German spreadsheets are exported; points separate thousands, in requests too."""
    prices = ["1,5", "1.234,25", "", "-0,75", "1.234", "7"]
    lines = [f"{n % 2};{prices[n % 6]};{'Köln' if n % 3 else 'Bonn'};1{n % 4},{n % 3};0,5" for n in range(60)]
    (tmp_path / "raw.csv").write_bytes("\n".join(["click;preis;größe;wert;weight", *lines]).encode("cp1252"))
    text, layout, found = inferred(tmp_path / "raw.csv")
    assert (layout.delimiter, layout.decimal, layout.encoding) == (";", ",", "cp1252")
    assert found["preis"] == found["wert"] == "numeric"
    (tmp_path / "columns.toml").write_text('weight = "weight"\n' + text, encoding="utf-8")
    prepared(tmp_path / "raw.csv", test_fraction=0, dense="none")
    columns = read_split(tmp_path / "data", "train")
    assert columns["preis"][:6] == [1.5, 1234.25, 0, -0.75, 1234, 7]
    assert columns["sample_weight"] == [0.5] * 60
    codec = SampleCodec.load(tmp_path / "data")
    names = [field.name for field in codec.schema.dense]
    samples = [
        {"preis": "1.234,5", "größe": "Köln", "wert": 3.5, "weight": 1},
        {"preis": 2.5, "größe": "", "wert": "0,5", "weight": 1},
    ]
    few, bad = codec.encode_request(samples)
    assert bad == ()
    assert few.dense[:, names.index("preis")].tolist() == [1234.5, 2.5]
    (tmp_path / "raw.csv").write_bytes((tmp_path / "raw.csv").read_bytes() + b"\n1;1.5;Bonn;1;1")
    shutil.rmtree(tmp_path / "data")
    refused(
        r"line 62, column preis: must be a finite number or empty, got '1\.5'",
        prepared,
        tmp_path / "raw.csv",
        test_fraction=0,
    )
    (tmp_path / "raw.csv").write_bytes("click;preis;größe;wert;weight\n1;1,5;K\x81;1;1\n0;1;b;1;1".encode("latin-1"))
    refused(
        r"line 2: not cp1252 \(byte 0x81\); convert the file to UTF-8 first",
        prepared,
        tmp_path / "raw.csv",
        test_fraction=0,
    )


def test_a_history_of_the_ids_of_another_column_is_remarked(tmp_path: Path) -> None:
    """Whoever takes the advice gets one table for both; few ids, such as of weekdays, prove nothing."""
    draw, lines = random.Random(0), ["click,item,seen,day,days"]
    for n in range(600):
        seen, days = (
            [f"{kind}{draw.randrange(size)}" for _ in range(1 + n % 4)] for kind, size in (("i", 60), ("d", 7))
        )
        lines.append(f"{n % 2},i{n % 60},{'|'.join(seen)},d{n % 7},{'|'.join(days)}")
    (tmp_path / "raw.csv").write_text("\n".join(lines))
    text = infer_schema(tmp_path / "raw.csv").text
    assert text.count("has ids of 'item': shares = \"item\" gives both one table") == text.count("shares = ") == 1
    taken = text.replace(
        '{name = "seen", kind = "multi"', '{name = "seen", kind = "sequence", max_length = 9, shares = "item"'
    )
    (tmp_path / "columns.toml").write_text(taken)
    fields = {field.name: field for field in prepared(tmp_path / "raw.csv").sparse}
    assert (fields["seen"].kind, fields["seen"].shares) == ("sequence", "item")
