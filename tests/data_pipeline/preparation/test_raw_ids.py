"""Raw ids and times, written by `prepare` and served by readers, against plain-Python hashes and datetime."""

import datetime

import pyarrow as pa
import torch
from hypothesis import given
from hypothesis import strategies as st

from cowrec.data_pipeline import MISSING, PrepareConfig, Reader, Schema, SparseField, prepare
from cowrec.data_pipeline.dataset.shards import block_from_table
from cowrec.data_pipeline.encoding.vocabulary import raw_ids
from cowrec.data_pipeline.raw.times import RawTime
from cowrec.trainer.sharded_model.step import even_slice
from raw_cases import fnv_splitmix, read_split, write_timed

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def signed(text):
    """Computes the documented raw id of a string in plain Python."""
    value = fnv_splitmix(text)
    value = value if value > 1 else value + 2
    return (value - 2**64 if value >= 2**63 else value) if text else MISSING


def test_ids_are_hashes_and_times_are_seconds(tmp_path):
    """In the files, as readers serve them, and in samples that are prepared alike."""
    rows, config = write_timed(tmp_path), PrepareConfig(raw_ids=True, split="order", test_rows=50, shard_rows=40)
    raw, schema_file = [tmp_path / "raw.csv"], tmp_path / "schema.toml"
    schema = prepare("tabular", raw, tmp_path / "out", config, schema_file=schema_file)
    assert [(field.encoding, field.num_embeddings) for field in schema.sparse] == [("raw", 0)] * 3
    assert (schema.timed, schema.has_raw_ids) == (True, True)
    assert Schema.load(tmp_path / "out") == schema
    assert list((tmp_path / "out" / "vocabulary").iterdir()) == []
    for split, part in (("train", rows[:150]), ("test", rows[150:])):
        columns = read_split(tmp_path / "out", split)
        assert columns["time"] == [row["time"] for row in part]
        assert columns["city"] == [signed(row["city"]) for row in part]
        assert columns["tags"] == [[signed(tag) for tag in row["tags"]] for row in part]
        assert columns["history"] == [[signed(key) for key, _ in row["history"]] or [MISSING] for row in part]
    for resident in (False, True):
        (batch,) = Reader(tmp_path / "out", "train", batch_size=150, window_rows=50, resident=resident).epoch(0)
        assert batch.time.dtype == batch.sparse.values().dtype == torch.int64
        assert batch.sparse.lengths().dtype == torch.int32
        assert batch.time.tolist() == [row["time"] for row in rows[:150]]
        city, tags = ([bag.tolist() for bag in batch.sparse[name].to_dense()] for name in ("city", "tags"))
        assert city == [[signed(row["city"])] for row in rows[:150]]
        assert tags == [[signed(tag) for tag in row["tags"]] for row in rows[:150]]
    # Moving and padding a batch keeps its time.
    reader = Reader(tmp_path / "out", "train", batch_size=31, rank=0, world_size=2)
    batch, padded = next(reader.epoch(0)), even_slice(next(reader.epoch(0)), 2)
    assert padded.sparse.stride() == len(batch.label) + 1
    assert padded.time.tolist() == batch.time.tolist() == batch.to(torch.device("cpu")).time.tolist()
    assert padded.sparse.values().dtype == torch.int64
    prepare("tabular", raw, tmp_path / "again", like=tmp_path / "out")
    again = read_split(tmp_path / "again", "test")
    assert again["city"] == [signed(row["city"]) for row in rows]
    assert again["time"] == [row["time"] for row in rows]


def test_a_mixed_schema_serves_all_ids_as_int64():
    schema = Schema("mixed", (), (SparseField("a", 0, encoding="raw"), SparseField("c", 9, "multi")), {})
    table = {"label": pa.array([1.0], pa.float32()), "a": [-5], "c": pa.array([[4, 5]], pa.list_(pa.int32()))}
    batch = block_from_table(pa.table(table), schema, "").batch(schema, 1)
    assert batch.sparse.values().tolist() == [-5, 4, 5]


@given(st.lists(st.text(max_size=4), max_size=20))
def test_raw_ids_equal_the_documented_hashes(values):
    assert raw_ids(pa.array(values, pa.string())).tolist() == [signed(value) for value in values]


def test_avazu(tmp_path):
    columns = "C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    columns += "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
    hours = ["14102100", "14102123", "14022823", "16022900"]
    lines = [f"id,click,hour,{columns}"] + [f"{n},{n % 2},{hour}" + ",v" * 21 for n, hour in enumerate(hours)]
    (tmp_path / "train").write_text("\n".join(lines))
    config = PrepareConfig(raw_ids=True, test_fraction=0.0)
    schema = prepare("avazu", [tmp_path / "train"], tmp_path / "out", config)
    assert ([field.name for field in schema.sparse], schema.dense) == (lines[0].split(",")[2:], ())
    expected = [datetime.datetime.strptime(hour, "%y%m%d%H").replace(tzinfo=datetime.UTC) for hour in hours]
    columns = read_split(tmp_path / "out", "train")
    assert columns["time"] == [int(time.timestamp()) for time in expected]
    assert columns["hour"] == [signed(hour) for hour in hours]


@given(
    st.datetimes(datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30)),
    st.sampled_from(["", "Z", "+02:00", "-0530", "+14"]),
    st.sampled_from(" T"),
)
def test_iso_times_equal_those_of_datetime(moment, zone, between):
    text = moment.isoformat(sep=between) + zone
    known = datetime.datetime.fromisoformat(text)
    known = known if known.tzinfo else known.replace(tzinfo=datetime.UTC)
    expected = (known - EPOCH) // datetime.timedelta(seconds=1)
    values, wrong = RawTime(("t",)).of_texts(pa.array(["7", text, "nonsense"]))
    assert (values.tolist(), wrong.tolist()) == ([7, expected, 0], [False, False, True])


def test_fractions_of_seconds_are_rounded_down_and_bad_times_are_wrong():
    values, wrong = RawTime(("t",)).of_texts(pa.array(["1.75", "-0.25", "1e3", "2014-10-21T07:00:00.999Z"]))
    assert (values.tolist(), wrong.any()) == ([1, -1, 1000, 1413874800], False)
    bad = ["", "soon", "1700000000000", "nan", "inf", "2014-02-30", "2014-10-21T25:00", "14:00", "2014-10-21 07"]
    assert RawTime(("t",)).of_texts(pa.array(bad))[1].all()
