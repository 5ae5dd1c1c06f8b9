"""Parquet and Arrow files are prepared to the same bytes as text files with the same samples, which pyarrow writes."""

import datetime
import decimal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import PrepareConfig, infer_schema, prepare
from cowrec.data_pipeline.dataset.schema import MISSING
from cowrec.data_pipeline.raw.values import as_id_text
from raw_cases import TIMED_SCHEMA, content, read_split
from refusal import refused

DAY = datetime.date(2024, 2, 29)
UTC = pa.timestamp("us", "UTC")
LETTERS = st.text("ab é", max_size=3)
INTEGERS = st.integers(0, 40)
# Values of ids, and Arrow types that hold them.
IDS = [
    (LETTERS, [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())]),
    (INTEGERS, [pa.int8(), pa.uint16(), pa.int64(), pa.float32(), pa.float64(), pa.decimal128(9, 2)]),
    (st.integers(2**52, 2**53 - 1), [pa.int64(), pa.uint64(), pa.float64(), pa.string()]),
    (st.integers(-(2**63), -(2**62)), [pa.int64(), pa.decimal256(40, 0)]),
    (st.booleans(), [pa.bool_()]),
    (st.integers(0, 3).map(lambda days: DAY + datetime.timedelta(days)), [pa.date32(), pa.date64()]),
    (st.integers(0, 3).map(lambda hours: datetime.datetime(2024, 2, 29, hours)), [pa.timestamp("s"), UTC]),
    (st.sampled_from([0.5, 2.25]), [pa.float64(), pa.float32(), pa.decimal128(5, 3)]),
]
NUMBERS = [
    (INTEGERS, [pa.int16(), pa.uint32(), pa.float32(), pa.string()]),
    (st.integers(-(2**63), 2**63 - 1), [pa.int64(), pa.decimal128(20, 0)]),
    (st.floats(-1e9, 1e9), [pa.float64()]),
    (st.decimals(-1000, 1000, places=3).map(lambda number: number + decimal.Decimal(0)), [pa.decimal128(9, 3)]),
]
TIMES = [pa.int64(), pa.timestamp("s"), pa.timestamp("s", "UTC")]
WEIGHTS = st.sampled_from([0.5, 1.0, -2.0])


def typed(draw, values, kind):
    """Returns an array of one of the types, of values some of which are null."""
    values = [None if draw(st.integers(0, 4)) == 0 else value for value in values]
    if pa.types.is_string(kind):
        values = [None if value is None else str(value) for value in values]
    if pa.types.is_dictionary(kind):
        return pa.array(values, pa.string()).cast(kind)
    if pa.types.is_decimal(kind):
        values = [None if value is None else decimal.Decimal(value) for value in values]
    return pa.array(values, kind)


@st.composite
def tables(draw):
    """Draws a table, and the same samples with lists as text."""
    rows = draw(st.integers(2, 12))

    def flat(kinds):
        values, types = draw(st.sampled_from(kinds))
        return typed(draw, draw(st.lists(values, min_size=rows, max_size=rows)), draw(st.sampled_from(types)))

    def lists(values, least=0):
        one = st.none() | st.lists(values, min_size=least, max_size=max(least, 3 - least))
        return draw(st.lists(one, min_size=rows, max_size=rows))

    words = st.one_of(st.none(), st.text("ab-é", min_size=1, max_size=2))  # items of text are trimmed
    number_lists = draw(st.booleans())
    fixed = draw(st.integers(0, 3)) == 0
    tags = lists(INTEGERS if number_lists else words, least=2 * fixed)
    inner = draw(st.sampled_from([pa.int8(), pa.float32()] if number_lists else [pa.string(), pa.large_string()]))
    kinds = [pa.list_(inner, 2)] if fixed else [pa.list_(inner), pa.large_list(inner)]
    history = lists(st.tuples(st.text("xyz", min_size=1, max_size=1), WEIGHTS))
    if draw(st.booleans()):
        pairs = pa.array(history, pa.map_(pa.string(), pa.float32()))
    else:
        pairs = [item and [{"id": key, "weight": weight} for key, weight in item] for item in history]
        pairs = pa.array(pairs, pa.list_(pa.struct([("weight", pa.float64()), ("id", pa.string())])))
    times = draw(st.lists(st.integers(0, 2**31), min_size=rows, max_size=rows))
    label = [False, True, *draw(st.lists(st.booleans(), min_size=rows - 2, max_size=rows - 2))]
    columns = {
        "unused": pa.array([{"deep": [1]}] * rows),
        "click": pa.array(label).cast(draw(st.sampled_from([pa.int32(), pa.bool_(), pa.float64(), pa.int8()]))),
        "seen at": pa.array(times).cast(draw(st.sampled_from(TIMES))),
        "price": flat(NUMBERS),
        "city": flat(IDS),
        "tags": pa.array(tags, draw(st.sampled_from(kinds))),
        "past views": pairs,
    }
    text = {
        "past views": [" ".join(f"{key}:{weight}" for key, weight in item or []) for item in history],
        "click": [str(int(value)) for value in label],
        "seen at": [str(time) for time in times],
        "tags": ["|".join("" if value is None else str(value) for value in tag or []) for tag in tags],
    }
    return pa.table(columns), pa.table(text | {name: as_csv(columns[name]) for name in ("price", "city")})


def as_csv(values):
    """Leaves the conversion to text to pyarrow's CSV writer, which does not know all types."""
    kind = values.type
    if pa.types.is_dictionary(kind) or pa.types.is_string_view(kind) or pa.types.is_binary(kind):
        return pa.array([value.decode() if isinstance(value, bytes) else value for value in values.to_pylist()])
    if pa.types.is_decimal(kind):
        return pa.array(
            [None if value is None else f"{value.normalize():f}" for value in values.to_pylist()], pa.string()
        )
    if pa.types.is_floating(kind) and all(value is None or value == int(value) for value in values.to_pylist()):
        # The writer gives large ones an exponent, and text stays as it is.
        return pa.array([None if value is None else str(int(value)) for value in values.to_pylist()], pa.string())
    if pa.types.is_timestamp(kind):
        return values.cast(pa.timestamp("s"))
    return values.cast(pa.date32()) if pa.types.is_date64(kind) else values


def prepared(folder, inputs, name, config):
    (folder / "schema.toml").write_text(TIMED_SCHEMA)
    prepare("tabular", inputs, folder / name, config, schema_file=folder / "schema.toml")
    return {path: checksum for path, checksum in content(folder / name).items() if path != "schema.json"}


@settings(max_examples=30, deadline=None)
@given(tables(), st.data())
def test_columns_of_any_type_equal_their_text(tmp_path_factory, tables, data):
    """In row groups and pages of any size, in one file or two, Parquet or Arrow, columns in another order in each.

    A column of a file that has no value at all may have the null type.
    """
    folder = tmp_path_factory.mktemp("columns")
    table, text = tables
    rows = table.num_rows
    first = data.draw(st.integers(1, rows))
    parts = [(table.slice(0, first), text.slice(0, first))]
    if first < rows:
        parts.append((table.slice(first).select(table.column_names[::-1]), text.slice(first)))
    for number, (part, text_part) in enumerate(parts):
        pa.csv.write_csv(text_part, folder / f"{number}.csv")
        for name in ("price", "city", "tags", "past views"):
            if part[name].null_count == part.num_rows and data.draw(st.booleans()):
                part = with_column(part, name, pa.nulls(part.num_rows))
        group = data.draw(st.integers(1, rows))
        if data.draw(st.booleans()):
            pq.write_table(part, folder / f"{number}.data", row_group_size=group, data_page_size=50)
        else:
            codec = data.draw(st.sampled_from(["lz4", "uncompressed", "zstd"]))
            pyarrow.feather.write_feather(part, folder / f"{number}.data", chunksize=group, compression=codec)
    config = PrepareConfig(
        split="order",
        test_rows=data.draw(st.integers(0, rows - 2)),
        shard_rows=data.draw(st.integers(1, 9)),
        dense=data.draw(st.sampled_from(["minmax", "buckets"])),
        hash_buckets=data.draw(st.sampled_from([0, 0, 7])),
    )
    expected = prepared(folder, [f"{folder}/*.csv"], "text", config)
    assert prepared(folder, [f"{folder}/*.data"], "columns", config) == expected


@pytest.fixture
def samples(tmp_path):
    """A Parquet file of 100 samples in ten row groups, and its table."""
    rows = range(100)
    columns = {
        "click": [row % 2 for row in rows],
        "seen at": [1_700_000_000 + row for row in rows],
        "price": [float(row) for row in rows],
        "city": [f"c{row % 7}" for row in rows],
        "tags": [[f"t{row % 3}"] for row in rows],
        "past views": [[{"id": row % 5, "weight": 1.0}] for row in rows],
    }
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    (tmp_path / "schema.toml").write_text(TIMED_SCHEMA)
    return table


def with_column(table, name, values):
    return table.set_column(table.column_names.index(name), name, values)


def with_value(table, name, row, value, kind=None):
    values = table[name].to_pylist()
    values[row] = value
    return with_column(table, name, pa.array(values, kind))


def run(folder, *inputs, **options):
    inputs, config = [folder / name for name in inputs], PrepareConfig(test_fraction=0.0, **options)
    return prepare("tabular", inputs, folder / "out", config, schema_file=folder / "schema.toml")


def test_new_samples_have_the_ids_of_the_vocabulary(tmp_path, samples):
    run(tmp_path, "a.parquet")
    for name, table in (("a", samples), ("b", samples.drop_columns(["click"]))):
        pq.write_table(table, tmp_path / f"{name}.parquet")
        schema = prepare("tabular", [tmp_path / f"{name}.parquet"], tmp_path / name, like=tmp_path / "out")
        assert schema.splits["test"].labelled == (name == "a")
        found, expected = read_split(tmp_path / name, "test"), read_split(tmp_path / "out", "train")
        assert all(found[name] == expected[name] for name in expected if name != "label")
    message, both = r"b\.parquet has no label 'click', but other files have", [f"{tmp_path}/?.parquet"]
    refused(message, prepare, "tabular", both, tmp_path / "c", like=tmp_path / "out")


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_the_columns_of_hive_partitions(tmp_path, kind):
    (tmp_path / "schema.toml").write_text(
        'label = "click"\ntime = "day"\n'
        'fields = [{name = "city", kind = "categorical"}, {name = "x", kind = "numeric"}]'
    )
    for day, city, x in (("2024-03-01", "K%C3%B6ln", 1), ("2024-03-02", "__HIVE_DEFAULT_PARTITION__", 2)):
        folder = tmp_path / "logs" / f"day={day}" / f"city={city}"
        folder.mkdir(parents=True)
        table = pa.table({"click": [0, 1], "x": [x, x + 10]})
        write = pq.write_table if kind == "parquet" else pa.csv.write_csv
        write(table, folder / f"part-0.{kind}")
        (folder / "_SUCCESS").touch()
    schema = run(tmp_path, "logs", dense="none")
    columns = read_split(tmp_path / "out", "train")
    assert columns["time"] == [1709251200] * 2 + [1709337600] * 2
    assert columns["city"] == [2, 2, 1, 1]
    assert columns["x"] == [1, 11, 2, 12]
    assert pq.read_table(tmp_path / "out" / "vocabulary" / "city.parquet")["value"].to_pylist() == ["Köln"]
    assert [source.rows for source in schema.sources] == [2, 2]


DOUBTS = {
    "text": (pa.array(["212", "212.0", "7.0", "x"] * 25), {}, "field 'city': 50 of its ids are whole numbers"),
    "hashed": (pa.array(["212", "212.0", "7.0", "x"] * 25), {"raw_ids": True}, "field 'city': 50 of its ids are"),
    "fractions": (pa.array([1.0, 2.0, 0.5, 1.5] * 25), {}, "column 'city': 50 of its ids are no whole numbers"),
    "large": (pa.array([2.0**53, 1.0] * 50), {}, "column 'city': 50 of its ids are floating point numbers too large"),
    "whole": (pa.array([1.0, None] * 50), {}, ""),
    "pointed": (pa.array(["212.0", "7.0", "x", None] * 25), {}, "field 'city': 50 of its ids are whole numbers"),
    "versions": (pa.array(["2.0"] * 50 + ["2.0", "2.5"] * 25), {}, ""),
}


@pytest.mark.parametrize("case", DOUBTS)
def test_suspicious_ids_are_counted_in_a_warning(tmp_path, samples, caplog, case):
    values, options, message = DOUBTS[case]
    pq.write_table(with_column(samples, "city", values), tmp_path / "a.parquet")
    run(tmp_path, "a.parquet", shard_rows=30, **options)
    assert [record.getMessage().startswith(message) for record in caplog.records] == [True] * bool(message)


def test_new_ids_of_another_form_than_the_vocabulary_are_reported(tmp_path, samples, caplog):
    forms = {"text": pa.array(["212.0", "7.0"] * 50), "whole": pa.array([212, 7] * 50)}
    for name, values in forms.items():
        pq.write_table(with_column(samples, "city", values), tmp_path / f"{name}.parquet")
    run(tmp_path, "text.parquet")
    assert [record.getMessage()[:24] for record in caplog.records] == ["field 'city': 100 of its"]
    prepare("tabular", [tmp_path / "text.parquet"], tmp_path / "same", like=tmp_path / "out")
    assert len(caplog.records) == 1
    caplog.clear()
    prepare("tabular", [tmp_path / "whole.parquet"], tmp_path / "new", like=tmp_path / "out")
    assert caplog.records[0].getMessage().startswith("field 'city': 100 of its ids were not seen in training")


@pytest.mark.parametrize("scale", [0, 6, 8, 12])
def test_ids_that_are_decimals_have_no_exponent(scale):
    texts = ["0", "7", None, "0", "1200", "0.000000001" if scale == 12 else "-3"]
    values = pa.array([text and decimal.Decimal(text) for text in texts], pa.decimal128(20, scale))
    assert as_id_text(values)[0].to_pylist() == texts


def test_types_that_do_not_mean_the_same_are_refused(tmp_path, samples):
    for name, values in (("b", [True] * 100), ("c", [1] * 100)):
        pq.write_table(with_column(samples, "city", pa.array(values)), tmp_path / f"{name}.parquet")
    message = r"c\.parquet: column 'city' has the type int64, but bool in .*b\.parquet: a number there is another value"
    refused(message, run, tmp_path, "a.parquet", "b.parquet", "c.parquet")
    run(tmp_path, "a.parquet", "b.parquet")


BAD_VALUES = {
    "an infinite number": ("price", float("inf"), None, 'if inf means a missing value, set null = ["inf"] in the'),
    "not a number": ("price", float("nan"), None, "finite number or null; if NaN means a missing value, set null"),
    "no time": ("seen at", None, None, "a time must be Unix seconds"),
    "an infinite weight": ("past views", [{"id": 3, "weight": float("inf")}], None, 'must be a list of {"id"'),
    "bytes that are no text": ("city", b"\xff", pa.binary(), "not UTF-8"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_has_its_file_row_and_column(tmp_path, samples, case):
    name, value, kind, message = BAD_VALUES[case]
    pq.write_table(with_value(samples, name, 56, value, kind), tmp_path / "a.parquet", row_group_size=10)
    with pytest.raises(ValueError, match=rf"a\.parquet, row 57, column {name}: ") as error:
        run(tmp_path, "a.parquet")
    assert message in str(error.value)
    schema = run(tmp_path, "a.parquet", on_bad_row="skip")
    assert (schema.splits["train"].rows, schema.sources[0].bad_rows) == (99, 1)
    assert read_split(tmp_path / "out", "train")["time"] == [1_700_000_000 + row for row in range(100) if row != 56]


TYPES_OF_ITEMS = {
    "bytes": lambda values: values,
    "dictionary of views": lambda values: pa.DictionaryArray.from_arrays(range(100), values.cast(pa.binary_view())),
}


@pytest.mark.parametrize("case", TYPES_OF_ITEMS)
def test_text_that_is_not_utf8_costs_its_own_row_at_any_depth(tmp_path, samples, case):
    """Also beside types of which Arrow takes no rows: views and runs."""
    texts = [b"t", b"u"] * 28 + [b"\xff"] + [b"u", b"t"] * 21 + [b"v"]
    tags, ids = (TYPES_OF_ITEMS[case](pa.array(column, pa.binary())) for column in (texts, texts[::-1]))
    cities = pa.array([b"c"] * 20 + [b"\xfe"] + [b"d"] * 79, pa.binary())
    table = with_column(samples, "tags", pa.ListArray.from_arrays(range(101), tags))
    table = with_column(table, "city", pc.run_end_encode(cities))
    pairs = pa.StructArray.from_arrays([ids, pa.array([1.0] * 100)], ["id", "weight"])
    table = with_column(table, "past views", pa.LargeListArray.from_arrays(range(101), pairs))
    pyarrow.feather.write_feather(table, tmp_path / "a.arrow", compression="uncompressed")
    schema = run(tmp_path, "a.arrow", on_bad_row="skip")
    assert schema.sources[0].bad_rows == 3
    columns = read_split(tmp_path / "out", "train")
    assert columns["time"] == [1_700_000_000 + row for row in range(100) if row not in (20, 43, 56)]


def test_nan_can_mean_a_missing_value(tmp_path, samples):
    (tmp_path / "schema.toml").write_text('null = ["NaN"]\n' + TIMED_SCHEMA)
    table = with_column(samples, "city", pa.array([float("nan"), 7.0] * 50))
    pq.write_table(with_value(table, "price", 56, float("nan")), tmp_path / "a.parquet")
    run(tmp_path, "a.parquet", dense="none")
    columns = read_split(tmp_path / "out", "train")
    assert columns["city"] == [1, 2] * 50
    assert columns["price"] == [0 if row == 56 else row for row in range(100)]


@pytest.mark.parametrize("write", [pq.write_table, pyarrow.feather.write_feather])
def test_fields_of_structs_are_columns(tmp_path, write):
    """At any depth; null in a null struct. A column with the name of such a field comes first."""
    users = [
        None if row == 3 else {"id": f"u{row % 5}", "age": row, "home": {"city": "ab"[row % 2]}} for row in range(60)
    ]
    table = pa.table(
        {"user": users, "ad.id": [f"a{row % 7}" for row in range(60)], "click": [row % 2 for row in range(60)]}
    )
    table = table.append_column("ad", pa.array([{"id": "no", "kind": f"k{row % 4}"} for row in range(60)]))
    write(table, tmp_path / "raw.data")
    found = infer_schema(tmp_path / "raw.data", label="click")
    assert {"user.id", "user.home.city", "ad.id", "ad.kind"} <= {
        field.keys.get("column", field.keys["name"]) for field in found.fields
    }
    (tmp_path / "schema.toml").write_text(
        'label = "click"\nfields = [{name = "age", column = "user.age", kind = "numeric"},'
        '{name = "user.id", kind = "categorical"}, {name = "ad.id", kind = "categorical"},'
        '{name = "city", column = "user.home.city", kind = "categorical"}]'
    )
    schema = run(tmp_path, "raw.data", dense="none", shard_rows=7)
    columns = read_split(tmp_path / "out", "train")
    assert columns["age"] == [0 if row == 3 else row for row in range(60)]
    assert (columns["user.id"][3], columns["city"][3], columns["city"].count(MISSING)) == (MISSING, MISSING, 1)
    assert {field.name: field.num_embeddings - 2 for field in schema.sparse} == {"user.id": 5, "ad.id": 7, "city": 2}
    (tmp_path / "schema.toml").write_text('label = "click"\nfields = [{name = "user", kind = "categorical"}]')
    refused(
        "no column 'user' among user.id, user.age, user.home.city",
        prepare,
        "tabular",
        [tmp_path / "raw.data"],
        tmp_path / "no",
        schema_file=tmp_path / "schema.toml",
    )


def rewritten(change):
    return lambda folder, table: pq.write_table(change(table), folder / "a.parquet")


def truncated(folder, _):
    data = (folder / "a.parquet").read_bytes()
    (folder / "a.parquet").write_bytes(data[: len(data) // 2])


def damaged(folder, table):
    pq.write_table(table, folder / "a.parquet", write_page_checksum=True, compression="none")
    data = bytearray((folder / "a.parquet").read_bytes())
    data[data.index(b"c3")] ^= 0xFF
    (folder / "a.parquet").write_bytes(data)


def cast(name, kind):
    return rewritten(lambda table: with_column(table, name, pa.nulls(100, kind)))


WRONG_FILES = {
    "no column": (rewritten(lambda table: table.drop_columns(["city"])), "a.parquet: no column 'city' among click"),
    "none": (rewritten(lambda _: pa.table({"x": [1]})), "no column 'city', 'click', 'past views', 'price', 'seen at',"),
    "twice": (rewritten(lambda table: table.append_column("city", table["city"])), "'city' occurs more than once"),
    "lists of ids": (cast("city", pa.list_(pa.int8())), "a.parquet: column 'city' has the type list<"),
    "one id for a list": (cast("tags", pa.int8()), "a.parquet: column 'tags' has the type int8; it must hold lists"),
    "a truncated file": (truncated, "a.parquet: truncated or damaged"),
    "a damaged page": (damaged, "a.parquet, rows 1 to 100: truncated or damaged"),
    "no rows": (rewritten(lambda table: table.slice(0, 0)), "a.parquet has no samples, and neither has any other"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_file_is_refused(tmp_path, samples, case):
    write, message = WRONG_FILES[case]
    write(tmp_path, samples)
    with pytest.raises(ValueError, match=r"a\.parquet") as error:
        run(tmp_path, "a.parquet")
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()
