"""Order, duplicates, late and malformed samples and the present by plain loops; identical batches after a crash."""

import json
import random
import re

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import Position, PrepareConfig, SampleCodec, SampleStream, prepare
from cowrec.data_pipeline.streams.chunks import MissingValues
from cowrec.data_pipeline.streams.directory import DirectorySource
from cowrec.data_pipeline.streams.malformed import MalformedPolicy
from cowrec.data_pipeline.streams.reorder import follow
from raw_cases import prepare_text
from refusal import refused
from stream_cases import (
    SCHEMA,
    RandomSource,
    all_numbers,
    arrivals,
    as_table,
    lines,
    make_codec,
    numbered,
    numbers,
    returned,
    sample,
    write_all,
    write_file,
)

FAST = settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return make_codec(tmp_path_factory.mktemp("codec"))


@pytest.fixture
def opened(tmp_path, codec):
    defaults = {"batch_size": 4, "journal": tmp_path / "journal"}
    return lambda **options: SampleStream(DirectorySource(tmp_path / "in"), codec, **{**defaults, **options})


@st.composite
def arriving(draw):
    count = draw(st.integers(0, 60))
    times = [draw(st.integers(0, 40)) for _ in range(count)]
    known = [draw(st.one_of(st.none(), st.integers(0, 15))) for _ in range(count)]
    samples = [sample(n, times[n], None if known[n] is None else f"s{known[n]}") for n in range(count)]
    sizes = []
    while sum(sizes) < count:
        sizes.append(draw(st.integers(1, count - sum(sizes))))
    return samples, sizes


@FAST
@given(arriving(), st.integers(1, 9), st.integers(0, 20), st.integers(0, 6), st.sampled_from(["drop", "train"]))
def test_samples_are_returned_once_by_time_in_full_batches(
    tmp_path_factory, codec, case, batch_size, lateness, window, late
):
    samples, sizes = case
    folder = tmp_path_factory.mktemp("stream") / "in"
    write_all(folder, samples, sizes)
    options = {"batch_size": batch_size, "lateness_seconds": lateness, "duplicates_window": window, "late": late}
    stream = SampleStream(DirectorySource(folder), codec, **options)
    batches = list(stream)
    good, counts = arrivals(samples, lateness, window)
    expected = [number for _, number in sorted(good, key=lambda pair: pair[0])]  # stable: equal times as they arrived
    returned = all_numbers(batches)
    on_time = {number for _, number in good}
    assert [number for number in returned if number in on_time] == expected, "samples on time keep their order"
    assert len(set(returned)) == len(returned) == len(expected) + counts["late"] * (late == "train")
    assert [len(batch.block) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    for batch in batches:
        for index, number in enumerate(numbers(batch)):
            assert batch.block.time[index] == samples[number]["time"]
            assert batch.block.label[index] == number % 2
            assert batch.batch.sparse["tags"].lengths()[index] == max(1, number % 3)
    counters = stream.counters
    assert (counters["samples"], counters["malformed"], counters["lost"]) == (len(samples), 0, 0)
    assert (counters["duplicates"], counters["late"]) == (counts["duplicates"], counts["late"])
    assert (counters["handed_out"], counters["batches"]) == (len(returned), len(batches))
    assert stream.ended


def same(one, other):
    """Asserts that two lists of batches are identical: samples, batching, tensors and counters."""
    assert [numbers(batch) for batch in one] == [numbers(batch) for batch in other]
    for first, second in zip(one, other, strict=True):
        for name in ("dense", "label", "ids", "time"):
            assert torch.equal(getattr(first.block, name), getattr(second.block, name))
        assert torch.equal(first.block.bags["tags"].values, second.block.bags["tags"].values)
        assert first.end.counters == second.end.counters
        assert first.end.partitions == second.end.partitions


@FAST
@given(arriving(), st.data())
def test_batches_are_identical_after_a_crash(tmp_path_factory, codec, case, data):
    """Crashes at any batch with the newest snapshot at any batch before: later batches are returned again."""
    samples, sizes = case
    folder = tmp_path_factory.mktemp("crash")
    write_all(folder / "in", samples, sizes)
    options = {
        "journal": folder / "journal",
        "batch_size": data.draw(st.integers(1, 9)),
        "lateness_seconds": data.draw(st.integers(0, 20)),
        "duplicates_window": data.draw(st.integers(0, 6)),
        "late": data.draw(st.sampled_from(["drop", "train"])),
        "most_waiting": data.draw(st.sampled_from([10, 1000])),
    }

    def opened(position=None):
        return SampleStream(DirectorySource(folder / "in"), codec, position=position, **options)

    reference = opened()
    uninterrupted = list(reference)
    (folder / "journal").unlink()
    crashed = data.draw(st.integers(0, len(uninterrupted)))
    snapshot = data.draw(st.integers(0, crashed))
    stream = opened()
    first = []
    for _ in range(crashed):
        first.append(stream.next_batch(0))
        if len(first) == snapshot:
            (folder / "snapshot").mkdir()
            stream.position.save(folder / "snapshot")
            stream.trim(stream.position)
    same(first, uninterrupted[:crashed])
    torn = data.draw(st.sampled_from([b"", b"12", b"00000000 {}"]))
    with (folder / "journal").open("ab") as file:
        file.write(torn)
    stream = opened(Position.load(folder / "snapshot") if snapshot else None)
    same(list(stream), uninterrupted[snapshot:])
    # Samples after the last batch may be late; they count too.
    assert stream.counters == {**reference.counters, **stream._source.counters}


@pytest.mark.parametrize("seed", range(3))
def test_random_events_are_repeated_from_the_journal_before_the_stream_continues(tmp_path, codec, seed):
    """Three partitions are polled in random order with random flushes, which only the journal records."""
    chance = random.Random(seed)
    partitions = {
        name: lines(sample(p * 100 + n, n + chance.randint(0, 5)) for n in range(60)) for p, name in enumerate("abc")
    }
    options = {"batch_size": 7, "lateness_seconds": 3, "max_wait_seconds": 1e-9, "late": "train"}
    options["journal"] = tmp_path / "journal"
    stream = SampleStream(RandomSource(partitions, chance), codec, **options)
    returned, kept = [], {0: None}
    while len(returned) < 20:
        batch = stream.next_batch(0)
        if batch is not None:
            returned.append(batch)
            kept[len(returned)] = batch.end
    assert stream.counters["flushes"] > 0, "otherwise the test shows nothing"
    for snapshot in (0, 1, 5, 12, 20):
        again = SampleStream(RandomSource(partitions, random.Random(99)), codec, **options, position=kept[snapshot])
        same([again.next_batch(0) for _ in range(20 - snapshot)], returned[snapshot:])
        again.close()
    remaining = list(SampleStream(RandomSource(partitions, chance), codec, **options, position=kept[20]))
    expected = [p * 100 + n for p in range(3) for n in range(60)]
    assert sorted(all_numbers(returned + remaining)) == expected


def test_without_a_journal_nothing_is_lost_or_repeated(tmp_path, opened):
    write_all(tmp_path / "in", numbered(50), [20, 30])
    stream = opened(batch_size=8, journal=None)
    first = [stream.next_batch(0) for _ in range(3)]
    again = opened(batch_size=8, journal=None, position=first[1].end)
    assert all_numbers([*first[:2], *again]) == list(range(50))


def test_an_ended_stream_continues_with_new_samples(tmp_path, opened):
    """Holds after an opening in between, and from a position before the end."""
    write_all(tmp_path / "in", numbered(10), [10])
    first = list(opened())
    assert [len(batch.block) for batch in first] == [4, 4, 2]
    assert list(opened(position=first[2].end)) == []
    write_file(tmp_path / "in", "more.arrow", numbered(10, 13))
    for start in (1, 2, 3):
        assert all_numbers([*first[:start], *opened(position=first[start - 1].end)]) == list(range(13))


def test_samples_of_the_journal_missing_from_the_source_are_an_error(tmp_path, opened):
    write_all(tmp_path / "in", numbered(20), [20])
    next(iter(opened()))
    (tmp_path / "in" / "0000.arrow").unlink()
    refused("the journal has 3 samples from .* the source only 0.* Continue .*on_lost_samples", opened().next_batch, 0)
    stream = opened(lost="continue")
    assert list(stream) == []
    assert (stream.counters["samples"], stream.counters["lost"]) == (0, 6)
    write_all(tmp_path / "in", numbered(2), [2])
    refused(r"the journal has 3 samples from .* the source only 2", opened().next_batch, 0)


def test_a_journal_of_another_run_is_an_error(tmp_path, opened):
    write_all(tmp_path / "in", numbered(20), [20])
    stream = opened()
    early, late = stream.next_batch(0).end, list(stream)[-1].end
    stream.trim(late)
    refused("has the entries 7 to 7, but the position needs 2 on", opened, position=early)
    (tmp_path / "journal").unlink()
    assert all_numbers(opened(position=early)) == list(range(4, 20))
    (tmp_path / "journal").write_bytes(b"x" + (tmp_path / "journal").read_bytes())
    refused("line 1 is damaged", opened, position=early)


def test_waiting_samples_above_the_limit_are_returned_early_and_counted(tmp_path, opened):
    """Returns the oldest ones though older samples could still arrive."""
    write_all(tmp_path / "in", [sample(n, 1000 - n) for n in range(100)], [100])
    stream = opened(batch_size=10, lateness_seconds=10**6, most_waiting=30)
    while (batch := stream.next_batch(0)) is not None:
        assert len(batch.end.waiting) <= 30 + 3, "plus those of one poll, here a record batch of 3"
    assert (stream.counters["forced"], stream.counters["handed_out"]) == (70, 100)


def test_malformed_samples_are_counted_and_logged(codec, caplog):
    good, future = lines([sample(1, 5), sample(2, 4_000_000_000)])
    source = RandomSource({"p": [b"{", good, b'{"label": 7}', future, good]}, random.Random(0))
    stream = SampleStream(source, codec, batch_size=9, ahead_seconds=60)
    assert all_numbers(stream) == [1, 1]
    assert (stream.counters["malformed"], stream.counters["samples"]) == (3, 5)
    for text in ("is dropped: not JSON", "in the future", "of partition p"):
        assert text in caplog.text


@pytest.mark.parametrize("wrong", [{"id": [None]}, {"id": [{"id": 1}]}, {"number": [None]}, {"number": [{}]}])
def test_a_list_for_a_single_value_is_malformed_alone(codec, wrong):
    """Also as the first value of its column, by which the types of lines are guessed."""
    others = [sample(number, number) | dict.fromkeys(wrong) | {"sample_id": str(number)} for number in range(2, 40)]
    source = RandomSource({"p": lines([sample(1, 1) | wrong, *others])}, random.Random(0))
    stream = SampleStream(source, codec, batch_size=9)
    assert sum(len(batch.table) for batch in stream) == len(others)
    assert stream.counters["malformed"] == 1


def test_a_key_that_is_left_out_is_a_missing_value_however_polls_divide_the_stream(codec, caplog):
    """Of JSON, of which programs leave out what is null; a table without a column is of another kind."""
    without = {key: value for key, value in sample(1, 1).items() if key != "tags"}
    other = {key: value for key, value in sample(3, 3).items() if key in ("label", "time", "sample_id")}
    for seed in range(5):
        given = lines([without, sample(2, 2), other, without | {"number": 4, "sample_id": "4"}])
        stream = SampleStream(RandomSource({"p": given}, random.Random(seed)), codec, batch_size=1, lateness_seconds=9)
        assert sorted(all_numbers(stream)) == [1, 2, 4]
        assert stream.counters["malformed"] == 1
    for text in ("has the column 'tags', whose values count as missing", "has a value in no column of the features"):
        assert text in caplog.text
    table = as_table([sample(1, 1)]).drop_columns(["tags"])
    stream = SampleStream(RandomSource({"p": table, "q": lines([sample(2, 2)])}, random.Random(0)), codec, batch_size=1)
    assert all_numbers(stream) == [2]
    assert "no sample has the column 'tags'" in caplog.text


def not_utf8(texts):
    """The texts as Parquet gives them unchecked, with an invalid byte in the fourth."""
    texts = pa.array([b"\xff" if index == 3 else text.encode() for index, text in enumerate(texts.to_pylist())])
    return pa.StringArray.from_buffers(len(texts), *texts.buffers()[1:])


UNREADABLE = {
    "a time that Python does not have": (
        "time",
        lambda times: at(times, 1 << 53).cast(pa.timestamp("ms")),
        "[ms] 9007",
    ),
    "a negative time": ("time", lambda times: at(times, -1), "must be in [0, 2^32) Unix seconds"),
    "text that is not UTF-8": ("label", lambda labels: not_utf8(labels.cast(pa.string())), "label: not UTF-8"),
    "a feature that is not UTF-8": ("id", not_utf8, "column id: not UTF-8"),
    "a column that occurs twice": (None, lambda numbers: numbers, "several columns have the name 'number'"),
    "a list of numbers": ("number", lambda numbers: pa.array([[1.0]] * 10), "has the type list"),
}


def at(times, wrong):
    """The times, the fourth of which is wrong."""
    return pa.array([wrong if index == 3 else time for index, time in enumerate(times.to_pylist())])


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_encoded_is_malformed_and_the_stream_continues(codec, caplog, case):
    """One sample, or all of a column of the wrong type; equally in chunks of any sizes."""
    name, change, message = UNREADABLE[case]
    table = as_table(numbered(10))
    column = change(table[name or "number"].combine_chunks())
    place = table.column_names.index(name) if name else table.num_columns
    table = table.set_column(place, name, column) if name else table.append_column("number", column)
    whole = case.startswith("a column") or "list" in case
    for seed in range(3):
        partitions = {"p": table, "q": lines([sample(20, 20)])}
        stream = SampleStream(RandomSource(partitions, random.Random(seed)), codec, batch_size=1, lateness_seconds=99)
        assert all_numbers(stream) == [number for number in range(10) if number != 3 and not whole] + [20]
        assert stream.counters["malformed"] == (10 if whole else 1)
    assert message in caplog.text


def test_a_damaged_position_and_bad_settings_are_refused(tmp_path, codec):
    Position().save(tmp_path)
    assert Position.load(tmp_path).counters == Position().counters
    (tmp_path / "recent.arrow").write_bytes(b"")
    refused(r"position in .* cannot be read", Position.load, tmp_path)
    for change, message in (
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"most_waiting": 3}, "most_waiting must be at least batch_size, got 3 and 4"),
        ({"lateness_seconds": -1}, "must be at least 0"),
        ({"late": "keep"}, "late must be drop or train, got 'keep'"),
    ):
        refused(message, SampleStream, DirectorySource(tmp_path), codec, **{"batch_size": 4, **change})


HOUR, START = 3600, 1_700_000_000


times_of_partitions = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=60)


@settings(max_examples=50, deadline=None)
@given(times_of_partitions, st.lists(st.integers(0, 60), max_size=4))
def test_the_present_is_that_of_a_plain_loop_in_any_chunks(arriving, cuts):
    """Of one partition the newest time so far; of several with a backlog the earliest of their newest times."""
    for own in ("a", "abc"):
        samples = [(name, time) for name, time in arriving if name in own]
        newest, present, expected = dict.fromkeys(own), None, []
        for name, time in samples:
            newest[name] = time if newest[name] is None else max(newest[name], time)
            if None not in newest.values():
                present = max(min(newest.values()), -1 if present is None else present)
            expected.append(present)
        newest, present, found = dict.fromkeys(own), None, []
        for name, time in samples:
            others = [newest[partition] for partition in own if partition != name]
            followed = follow(np.array([time]), present, newest[name], behind=others, has_backlog=len(own) > 1)
            newest[name], present = followed.newest, followed.after
            found.append(present)
        assert found == expected
    times, present, newest, found = np.array([time for _, time in arriving], np.int64), None, None, []
    for part in np.split(times, sorted(min(cut, len(times)) for cut in cuts)):
        followed = follow(part, present, newest)
        found += followed.present.tolist()
        present, newest = followed.after, followed.newest
    assert found == np.maximum.accumulate(times).tolist()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=300), st.integers(0, 99), st.sampled_from([0, 20]))
def test_a_backlog_of_ordered_partitions_is_returned_in_order(codec, tmp_path_factory, owners, seed, lateness):
    """Whichever partition is read first, and again from its journal; its times are hours apart."""
    samples = [sample(number, START + number * HOUR) for number in range(len(owners))]
    names = ["0", "1", "2", "3"]
    partitions = {
        name: lines(found for found, own in zip(samples, owners, strict=True) if own == int(name)) for name in names
    }
    journal = tmp_path_factory.mktemp("journal") / "journal"
    for attempt in range(2):
        source = RandomSource(partitions, random.Random(seed + attempt), has_backlog=True)
        stream = SampleStream(source, codec, batch_size=5, lateness_seconds=lateness, journal=journal)
        assert all_numbers(stream) == list(range(len(owners)))
        assert (stream.counters["late"], stream.counters["forced"]) == (0, 0)
        stream.close()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40), st.integers(3, 7), st.booleans(), st.integers(0, 99))
def test_no_batch_is_of_a_single_sample_where_two_are_the_fewest(codec, tmp_path_factory, count, size, flushes, seed):
    """One that is left at the end waits for those that come after a resume."""
    options = {"batch_size": size, "fewest": 2, "max_wait_seconds": 1e-9 if flushes else 0}
    source, folder = RandomSource({"p": lines(numbered(count))}, random.Random(seed)), tmp_path_factory.mktemp("saved")
    stream = SampleStream(source, codec, **options)
    batches = list(map(numbers, stream))
    left = count - sum(map(len, batches))
    assert left in (0, 1)
    assert stream.ended
    stream.position.save(folder)
    source.partitions["p"] += lines(numbered(count, count + 2))
    batches += map(numbers, SampleStream(source, codec, position=Position.load(folder), **options))
    found = [number for batch in batches for number in batch]
    assert found == list(range(len(found)))
    assert count + 2 - len(found) in (0, 1)
    assert all(2 <= len(batch) <= size for batch in batches)


@pytest.mark.parametrize("kind", ["json", "table"])
def test_malformed_samples_are_kept_as_samples_that_prepare_reads(tmp_path, codec, kind):
    """A producer renames the field `id` and writes the time as text; a schema file with these names reads the rest."""
    wrong = [fields | {"time": f"at {fields['number']}"} for fields in numbered(1, 20)]
    given = lines(wrong) if kind == "json" else pa.Table.from_pylist(wrong)
    chunks = {"p": given, "q": [*lines(numbered(20, 22)), b"\xff", b"[1]"]}
    policy = MalformedPolicy(path=tmp_path / "malformed.jsonl", max_bytes=1000)
    stream = SampleStream(RandomSource(chunks, random.Random(1)), codec, batch_size=1, malformed=policy)
    assert sorted(all_numbers(stream)) == [20, 21]
    files = [path for path in (tmp_path / "malformed.jsonl.1", policy.path) if path.exists()]
    assert all(path.stat().st_size <= 1000 for path in files)
    kept = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    found = [line["number"] for line in kept if "number" in line]
    assert found == [*range(20)][-len(found) :]
    assert all("column time" in line["malformed"] for line in kept if "number" in line)
    assert {str(line["text"]) for line in kept if "text" in line} <= {"\ufffd", "[1]"}
    (tmp_path / "schema.toml").write_text(re.sub("(?m)^(time|header|columns) =.*$", "", SCHEMA))
    config = PrepareConfig(raw_ids=True, dense="none", test_fraction=0.0, on_bad_row="skip", max_bad_rows=2)
    schema = prepare("tabular", [policy.path], tmp_path / "out", config, schema_file=tmp_path / "schema.toml")
    assert schema.split("train").rows == policy.path.read_text().count('"label"') > 1


def test_too_many_malformed_samples_are_waited_for_or_end_the_run(tmp_path, codec, monkeypatch):
    """The position is kept: once the samples are mended, each is trained on."""
    monkeypatch.setattr("cowrec.data_pipeline.streams.stream.CORRECTION_SECONDS", 0.0)
    monkeypatch.setattr("cowrec.data_pipeline.streams.malformed.RECENT", 50)
    for action in ("stop", "wait"):
        source = RandomSource({"p": [*lines(numbered(100)), *[b"{"] * 100]}, random.Random(3))
        policy = MalformedPolicy(0.2, action)
        stream = SampleStream(
            source, codec, batch_size=1, malformed=policy, journal=tmp_path / action, max_wait_seconds=0.01
        )
        found = returned(stream, 90)
        if action == "stop":
            refused("of the last .* samples are malformed, more than online.max_malformed_share = 0.2", list, stream)
            continue
        for _ in range(40):
            batch = stream.next_batch(0.02)
            found += numbers(batch) if batch else []
        assert stream.waits_for_correction
        position = stream.position.partitions["p"]
        assert 100 <= position < 130
        source.partitions["p"][position:] = lines(numbered(position, 200))
        found += all_numbers(stream)
        assert found == [*range(100), *range(position, 200)]
        assert stream.counters["malformed"] == position - 100
        assert not stream.waits_for_correction


def test_missing_values_are_counted_by_field(codec, tmp_path_factory):
    """As in the data set: a missing number is encoded as 0, which a number may be too."""
    without = {"label": 1, "number": 0, "time": 3}
    given = lines([*numbered(1, 3), without, {**without, "tags": ["t"]}, {**without, "number": None, "id": "i"}])
    stream = SampleStream(RandomSource({"p": given}, random.Random(0)), codec, batch_size=9)
    assert len(all_numbers(stream)) == 5
    assert stream.missing == {"number": 3, "id": 2, "tags": 2}
    folder = tmp_path_factory.mktemp("shares")
    config = PrepareConfig(raw_ids=True, dense="none", test_fraction=0.0)
    prepare_text(folder, SCHEMA, "1,1,a,b,1\n0,2,,c,2\n1,3,,,2\n1,4,e,,2\n", config=config)
    shares = MissingValues(SampleCodec.load(folder / "out")).usual_shares(folder / "out")
    assert shares == {"number": 0.0, "id": 0.5, "tags": 0.5}
