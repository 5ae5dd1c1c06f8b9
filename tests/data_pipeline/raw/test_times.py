"""Times as people write them, against Python's `datetime`: units, formats, zones, parts in several columns."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import PrepareConfig, SampleCodec, infer_schema
from cowrec.data_pipeline.raw.schema_file import load_schema_file
from cowrec.data_pipeline.raw.times import RawTime
from raw_cases import prepare_text, read_split
from refusal import refused

FORMATS = (
    "%m/%d/%Y", "%d/%m/%Y %H:%M", "%d.%m.%Y", "%Y%m%d", "%Y%m%d%H", "%Y%m%d%H%M%S%f", "%y%m%d%H", "%d-%b-%y %H:%M:%S",
    "%b %d, %Y %I:%M %p", "%a, %d %b %Y %H:%M:%S %z", "%d/%b/%Y:%H:%M:%S %z", "%Y/%m/%d %H:%M:%S.%f",
)  # fmt: skip


def seconds(time: RawTime, *columns: pa.Array) -> list[int | None]:
    """Unix seconds; None where a value is wrong."""
    found = time.seconds(columns)
    assert found is not None
    return [None if wrong else value for value, wrong in zip(found[0].tolist(), found[1].tolist(), strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    moments=st.lists(st.datetimes(datetime(1970, 1, 1), datetime(2037, 1, 1)), min_size=1, max_size=5),
    form=st.sampled_from(FORMATS),
    zone=st.sampled_from(["", "Europe/Berlin", "America/New_York", "Asia/Kolkata"]),
)
def test_formats_are_read_as_by_strptime(moments: list[datetime], form: str, zone: str) -> None:
    """Up to 2037, to which Arrow knows when clocks change; an hour that they skip has no time to compare."""
    texts = [moment.replace(tzinfo=UTC).strftime(form) for moment in moments]
    found = seconds(RawTime(("t",), format=form, zone=zone), pa.array(texts))
    for text, got in zip(texts, found, strict=True):
        read = datetime.strptime(text, form)
        read = read if read.tzinfo else read.replace(tzinfo=ZoneInfo(zone or "UTC"))
        exists = read.astimezone(UTC).astimezone(read.tzinfo).replace(fold=0) == read
        assert got == int(read.timestamp() // 1) or not exists


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("%m/%d/%Y", "02/30/2024"),
        ("%H:%M %Y", "24:00 2024"),
        ("%I %p %Y", "13 PM 2024"),
        ("%d %b %Y", ""),
    ],
)
def test_what_strptime_refuses_is_wrong(form: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"match format|day is out of range|unconverted data"):
        datetime.strptime(text, form)
    assert seconds(RawTime(("t",), format=form), pa.array([text])) == [None]


def test_units_typed_times_and_zones() -> None:
    moment = datetime(2024, 1, 31, 7, 0, 1, tzinfo=UTC)
    whole = int(moment.timestamp())
    for unit, scale in {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}.items():
        numbers = pa.array([whole * scale + scale // 3, None])
        for values in (numbers, numbers.cast(pa.string())):
            assert seconds(RawTime(("t",), unit=unit), values) == [whole, None]
    berlin = RawTime(("t",), zone="Europe/Berlin")
    assert seconds(berlin, pa.array(["2024-01-31T08:00:01", "2024-01-31T07:00:01Z", str(whole)])) == [whole] * 3
    assert seconds(berlin, pa.array([moment.replace(tzinfo=None) + timedelta(hours=1)])) == [whole]
    assert seconds(berlin, pa.array([moment], pa.timestamp("ns", "UTC"))) == [whole]
    at = pa.array([whole]).to_numpy()
    parts = [berlin.part(at, part).to_pylist() for part in ("hour", "weekday", "day", "month")]
    assert parts == [["8"], ["Wed"], ["31"], ["1"]]


def test_parts_in_several_columns() -> None:
    time = RawTime(("year", "month", "day"))
    columns = pa.array([2015, 2016, 2016, None]), pa.array(["July", "2", "2", "2"]), pa.array([1.0, 29.0, 30.0, 1.0])
    days = [int(datetime(*day, tzinfo=UTC).timestamp()) for day in ((2015, 7, 1), (2016, 2, 29))]
    assert seconds(time, *columns) == [*days, None, None]
    joined = RawTime(("day", "clock"), format="%d.%m.%Y %H:%M")
    assert seconds(joined, pa.array(["1.7.2015"]), pa.array(["12:30"])) == [days[0] + 12 * 3600 + 1800]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RawTime(("t",), format="%H:%M"), "has no year"),
        (lambda: RawTime(("t",), unit="ms", format="%Y"), "give unit or format, not both"),
        (lambda: RawTime(("t",), zone="Mars"), "zone 'Mars' is not known"),
        (lambda: RawTime(("a", "b"), unit="s"), "unit is for one column"),
    ],
)
def test_wrong_keys_are_refused(make: Callable[[], RawTime], message: str) -> None:
    refused(message, make)


SCHEMA = """
label = "click"
time = {columns = ["year", "month", "day"]}
fields = [
    {name = "shop", kind = "categorical"},
    {name = "hour", column = "seen", kind = "categorical", part = "hour", format = "%d/%m/%Y %H:%M"},
]
"""


def test_times_of_files_and_of_requests_are_equal(tmp_path: Path) -> None:
    """A part of a time is one id in files and in requests; a missing time is a missing id, another one is bad."""
    rows = [f"{n % 2},s{n % 3},2024,5,{1 + n % 28},{1 + n % 28:02d}/05/2024 {n % 24}:30" for n in range(96)]
    header = "click,shop,year,month,day,seen"
    prepare_text(tmp_path, SCHEMA, "\n".join([header, *rows]), config=PrepareConfig(split="time", test_fraction=0.25))
    found = read_split(tmp_path / "out", "train")
    assert max(found["time"]) < min(read_split(tmp_path / "out", "test")["time"])
    codec = SampleCodec.load(tmp_path / "out")
    samples = [{"shop": "s0", "seen": f"01/05/2024 {hour}:30"} for hour in range(24)]
    block, bad = codec.encode_request([*samples, {"shop": "s0", "seen": None}, {"shop": "s0", "seen": "soon"}])
    assert [bad_sample.index for bad_sample in bad] == [25]
    by_hour = dict(
        zip((row.rpartition(" ")[2].partition(":")[0] for row in rows), read_all_hours(tmp_path), strict=False)
    )
    assert len(set(by_hour.values())) == 24
    of_requests = block.ids[:, 1].tolist()
    assert of_requests[:24] == [by_hour[str(hour)] for hour in range(24)]
    assert of_requests[24] not in by_hour.values()


def read_all_hours(folder: Path) -> list[int]:
    """Ids of the field `hour` of all samples in their order."""
    numbered = [
        (number, value)
        for split in ("train", "test")
        for number, value in zip(
            *(read_split(folder / "out", split)[name] for name in ("sample_number", "hour")), strict=True
        )
    ]
    return [value for _, value in sorted(numbered)]


DATES = {
    "%m/%d/%Y": "{m}/{d}/2024", "%d/%m/%Y %H:%M": "{d}/{m}/2024 {h}:30", "%d.%m.%Y": "{d}.{m}.2024",
    "%Y%m%d%H": "2024{m:02d}{d:02d}{h:02d}", "%d-%b-%y %H:%M:%S": "{d}-Jan-24 {h}:00:00",
}  # fmt: skip


@pytest.mark.parametrize("form", DATES)
def test_inference_proposes_the_form(tmp_path: Path, form: str) -> None:
    """And `prepare` reads all that the proposed schema names."""
    texts = [DATES[form].format(m=1 + n % 12, d=1 + n % 28, h=n % 24) for n in range(60)]
    text = "\n".join(["click,date,shop", *(f"{n // 2 % 2},{written},s{n % 3}" for n, written in enumerate(texts))])
    (tmp_path / "raw.csv").write_text(text)
    found = infer_schema(tmp_path / "raw.csv").text
    assert f'time = {{column = "date", format = "{form}"}}' in found
    (tmp_path / "schema.toml").write_text(found)
    assert load_schema_file(tmp_path / "schema.toml").time == RawTime(("date",), format=form)


def test_inference_names_both_readings_of_days_and_months(tmp_path: Path) -> None:
    rows = [f"{n // 2 % 2},{1 + n % 12}/{1 + n % 11}/2024,s{n % 3}" for n in range(60)]
    (tmp_path / "raw.csv").write_text("\n".join(["click,date,shop", *rows]))
    assert "unsure: %m/%d/%Y; %d/%m/%Y fits all values too" in infer_schema(tmp_path / "raw.csv").text


def test_inference_proposes_columns_of_parts(tmp_path: Path) -> None:
    rows = [f"{n // 2 % 2},{2020 + n % 3},{['May', 'June'][n % 2]},{1 + n % 28},s{n % 3}" for n in range(60)]
    header = "click,arrival_date_year,arrival_date_month,arrival_date_day_of_month,shop"
    (tmp_path / "raw.csv").write_text("\n".join([header, *rows]))
    names = [f"arrival_date_{part}" for part in ("year", "month", "day_of_month")]
    (tmp_path / "schema.toml").write_text(infer_schema(tmp_path / "raw.csv").text)
    assert load_schema_file(tmp_path / "schema.toml").time_columns == tuple(names)
