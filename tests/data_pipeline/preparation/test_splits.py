"""Splits by random numbers, order and time, against a plain sorting of the same samples."""

import datetime
import logging
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import PrepareConfig, prepare
from cowrec.errors import UserError
from raw_cases import prepare_text, read_split
from refusal import refused

SCHEMA = 'time = "at"\nfields = [{name = "shop", kind = "categorical"}]'
SPLITS = ("train", "validation", "test")
DAY = 86_400


def prepared(folder, times, output="out", schema=SCHEMA, files=1, **config):
    """Prepares a sample at each time; returns the schema and the sample numbers of each split."""
    lines = [f"{n % 2},s{n % 3},{time}" for n, time in enumerate(times)]
    parts = [lines[n * len(lines) // files :][: len(lines) // files] for n in range(files)]
    texts = ["\n".join(["label,shop,at", *part]) for part in parts]
    config = PrepareConfig(shard_rows=max(7, len(lines) // 20), **config)
    made = prepare_text(folder, schema, *texts, output=output, config=config, overwrite=True)
    return made, {name: read_split(folder / output, name)["sample_number"] for name in made.splits}


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_time_divides_samples_whatever_their_order(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("split")
    times = data.draw(st.lists(st.integers(0, 40).map(lambda day: day * DAY), min_size=8, max_size=60))
    times[:6] = [-DAY, -DAY, -DAY, 90 * DAY, 91 * DAY, 92 * DAY]  # both classes in training; three more times
    test, validation = data.draw(st.sampled_from([(0.2, 0.0), (0.1, 0.2), (0.0, 0.1), (0.3, 0.3)]))
    made, found = prepared(folder, times, split="time", test_fraction=test, validation_fraction=validation)
    ends = {}
    for name, share in (("test", test), ("validation", test + validation)):
        # The time from which on the share of samples is nearest to the wanted one; the earliest of equally near ones.
        before = [moment for moment in sorted(set(times))[1:] if moment < ends.get("test", 10**12)]
        shares = {moment: abs(sum(time >= moment for time in times) - share * len(times)) for moment in before}
        wanted = (validation if name == "validation" else test) > 0
        ends[name] = min(shares, key=shares.get) if wanted else ends.get("test", 10**12)
    expected = {name: [] for name in SPLITS}
    for number, time in enumerate(times):
        name = "test" if time >= ends["test"] else "validation" if time >= ends["validation"] else "train"
        expected[name].append(number)
    assert ("validation" in found) == (validation > 0)
    assert found == {name: expected[name] for name in found}
    if test:
        date = datetime.datetime.fromtimestamp(ends["test"], datetime.UTC)
        assert made.settings["split"]["test_from"] == date.strftime("%Y-%m-%dT%H:%M:%SZ")
        _, again = prepared(folder, times, split="time", **made.settings["split"])
        assert again == found


def test_dates_divide_samples(tmp_path, caplog):
    times = ["2024-04-30", "2024-05-03T12:00:00Z", "2024-05-01", "2024-04-30T23:59:59", "1714608000", "2024-04-01"]
    config = {"split": "time", "validation_from": "2024-05-01", "test_from": "2024-05-02"}
    made, found = prepared(tmp_path, times, **config)
    assert found == {"train": [0, 3, 5], "validation": [2], "test": [1, 4]}
    assert made.splits.keys() == set(SPLITS)
    _, found = prepared(tmp_path, times, split="time", test_from=1714521600)
    assert found == {"train": [0, 3, 5], "test": [1, 2, 4]}
    message = "no sample is in the split test; check test_from"
    refused(message, prepared, tmp_path, times, split="time", test_from="2030-01-01")
    refused("6 samples have 1 different times, too few", prepared, tmp_path, ["2024-04-30"] * 6, split="time")
    refused("no training sample.*or choose a later test_from", prepared, tmp_path, times, split="time", test_from=0)
    digits = r"test_from = 20240501: a time must be Unix seconds .* or ISO 8601"
    refused(digits, prepared, tmp_path, times, split="time", test_from=20240501)
    assert "Unix seconds" not in caplog.text
    prepared(tmp_path, ["20240430", "20240501", "20240502"] * 5, split="order")
    assert "has the time 20240502, which is read as Unix seconds: 1970-08-23T06:21:42Z; if it means a" in caplog.text
    untimed = SCHEMA.replace('time = "at"', "")
    refused("needs the times of samples: name their column", prepared, tmp_path, times, split="time", schema=untimed)


def test_order_and_random_splits_have_validation_samples(tmp_path):
    times = range(50)
    _, found = prepared(tmp_path, times, split="order", test_fraction=0.1, validation_fraction=0.2)
    assert found == {"train": list(range(35)), "validation": list(range(35, 45)), "test": list(range(45, 50))}
    _, found = prepared(tmp_path, times, split="order", test_rows=3, validation_rows=4)
    assert found["validation"] == list(range(43, 47))
    _, without = prepared(tmp_path, times, test_fraction=0.3)
    _, found = prepared(tmp_path, times, test_fraction=0.3, validation_fraction=0.3)
    assert found["test"] == without["test"], "validation samples come from the training split"
    assert sorted(number for numbers in found.values() for number in numbers) == list(range(50))
    # Binomial: 15 expected, standard deviation 3.2.
    assert 4 <= len(found["validation"]) <= 26


def test_many_samples_have_validation_samples_by_default(tmp_path):
    """They are a tenth, at most 200,000, unless the test split has a given beginning or ids stay raw."""

    def sizes(rows, **config):
        made, _ = prepared(tmp_path, range(rows), **config)
        return {name: split.rows for name, split in made.splits.items()}

    assert sizes(10_000, split="order") == {"train": 8_000, "validation": 1_000, "test": 1_000}
    assert sizes(9_999, split="order") == {"train": 8_999, "test": 1_000}
    assert sizes(10_000, split="time", test_fraction=0.2) == {"train": 7_000, "validation": 1_000, "test": 2_000}
    for config in ({"split": "order", "test_rows": 5}, {"split": "time", "test_from": 5}, {"validation_fraction": 0}):
        assert "validation" not in sizes(10_000, **config), config
    assert PrepareConfig().validation_share(8_000_000) == 200_000 / 8_000_000
    assert PrepareConfig(raw_ids=True).validation_share(8_000_000) == 0


def test_a_random_split_depends_on_its_fraction_and_seed_and_not_on_files_and_blocks(tmp_path, monkeypatch):
    def split(**config):
        return prepared(tmp_path, range(2000), **config)[1]["test"]

    default = split()
    # Binomial: 200 expected, standard deviation 13.
    assert 130 <= len(default) <= 270
    assert 900 <= len(split(test_fraction=0.5)) <= 1100
    assert split(seed=1) != default
    assert not prepared(tmp_path, range(2000), test_fraction=0.0)[1].get("test")
    monkeypatch.setattr("cowrec.data_pipeline.raw.reading.survey.__kwdefaults__", {"block_bytes": 900})
    assert split() == split(files=2) == default


def test_a_share_of_the_negatives_is_kept_in_training(tmp_path):
    times = range(400)
    _, full = prepared(tmp_path, times, test_fraction=0.2, validation_fraction=0.2)
    config = {"test_fraction": 0.2, "validation_fraction": 0.2, "negative_fraction": 0.25}
    made, found = prepared(tmp_path, times, **config)
    assert (found["test"], found["validation"]) == (full["test"], full["validation"])
    negatives = [number for number in full["train"] if number % 2 == 0]
    kept = [number for number in found["train"] if number % 2 == 0]
    assert set(kept) < set(negatives)
    assert [number for number in found["train"] if number % 2] == [number for number in full["train"] if number % 2]
    # Binomial: a quarter of about 120, standard deviation 4.7.
    assert abs(len(kept) - len(negatives) / 4) < 20
    assert (made.negative_fraction, made.logit_shift) == (0.25, pytest.approx(-1.3862943611))
    assert made.splits["train"].rows == len(found["train"])
    assert prepared(tmp_path, times, **config)[1] == found
    assert prepared(tmp_path, times, seed=1, **config)[1] != found
    several = SCHEMA.replace("fields", 'labels = ["label", "at"]\nfields').replace('time = "at"', "")
    refused("negative_fraction takes one label", prepared, tmp_path, times, schema=several, negative_fraction=0.5)


def test_only_training_samples_are_fitted(tmp_path):
    times = [0, 0, 0, 5, 5, 9]
    made, _ = prepared(tmp_path, times, split="time", validation_from=5, test_from=9)
    assert made.sparse[0].num_embeddings == 5, "shops s0, s1 and s2 occur in training"
    made, _ = prepared(tmp_path, times, split="order", validation_rows=2, test_rows=2)
    assert made.sparse[0].num_embeddings == 4, "shops s0 and s1 only"


def test_an_order_that_leaks_the_future_is_reported(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    times = list(range(1_700_000_000, 1_700_000_100))
    prepared(tmp_path, times, split="order", test_rows=20)
    prepared(tmp_path, random.Random(0).sample(times, 100), split="time")
    assert caplog.messages == []
    times[90], times[3] = times[3], times[90]
    prepared(tmp_path, times, split="order", test_rows=20)
    (message,) = caplog.messages
    # The newest training sample is number 3, of time 90; older than it are 80 to 89 and that of time 3.
    assert "not sorted by time: 55 % of those for validation and testing are older" in message
    assert 'use split = "time"' in message


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from(["1700000000", "1700000060", "soon"]), st.integers(0, 1)), max_size=3),
    split=st.sampled_from(["random", "order", "time"]),
    skip=st.booleans(),
)
def test_files_of_few_or_bad_rows_end_with_a_message(tmp_path_factory, rows, split, skip):
    """Of no, one, a few or bad rows alone: a bad row is named, unless it may be skipped, whatever the pass."""
    folder = tmp_path_factory.mktemp("few")
    lines = [f"{label},s,{time}" for time, label in rows]
    given_keys = {"on_bad_row": "skip" if skip else "error", "split": split}
    message = ""
    try:
        prepare_text(folder, SCHEMA, "\n".join(["label,shop,at", *lines]), config=PrepareConfig(**given_keys))
    except UserError as error:  # and no other one
        message = str(error)
    if not skip and any(time == "soon" for time, _ in rows):
        assert "column at: a time must be Unix seconds" in message


def test_a_time_before_1990_is_told(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    prepared(tmp_path, range(100))
    assert caplog.messages == [
        "column 'at': 100 samples have a time before 1990; check the unit or the format of `time` in the schema file"
    ]


@pytest.mark.parametrize("time", [np.int64(50), np.datetime64("1970-01-01T00:00:50", "ns"), "1970-01-01T00:00:50"])
def test_values_of_a_dataframe_are_settings(tmp_path, time):
    """numpy's numbers and times, which JSON does not have, give the data of plain ones."""
    _, expected = prepared(tmp_path, range(100), split="time", test_from=50)
    assert prepared(tmp_path, range(100), split="time", test_from=time, seed=np.int32(3))[1] == expected
    assert PrepareConfig(split="time", test_from=datetime.date(2024, 5, 1)).test_from == "2024-05-01"


def test_files_of_splits(tmp_path, monkeypatch):
    (tmp_path / "schema.toml").write_text(SCHEMA)
    day = {name: tmp_path / f"{name}.csv" for name in ("a", "b", "c", "d")}
    for number, (name, rows) in enumerate(zip(day, (5, 4, 3, 2), strict=True)):
        lines = [f"{row % 2},s{name},{number * DAY}" for row in range(rows)]
        day[name].write_text("\n".join(["label,shop,at", *lines]))
    arguments = {"schema_file": tmp_path / "schema.toml", "overwrite": True}

    def split(inputs, **files):
        prepare("tabular", inputs, tmp_path / "out", PrepareConfig(shard_rows=2), **arguments, **files)
        made = {name: tmp_path / "out" / name for name in SPLITS if (tmp_path / "out" / name).exists()}
        return {name: read_split(tmp_path / "out", name)["sample_number"] for name in made}

    expected = {"train": list(range(9)), "validation": [9, 10, 11], "test": [12, 13]}
    assert split([day["a"], day["b"]], validation=[day["c"]], test=[day["d"]]) == expected
    expected = {"train": list(range(5)), "test": list(range(5, 14))}
    assert split([day["a"]], test=[tmp_path / "[bcd].csv"]) == expected

    message = "files of the splits are for a new data set; give those of the test split"
    refused(message, split, [day["a"]], validation=[day["b"]])
    refused(r"a\.csv is given twice", split, [day["a"]], test=[day["a"]])
