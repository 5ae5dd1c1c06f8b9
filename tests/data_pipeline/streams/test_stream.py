"""Streams of samples: order, duplicates, late ones and counts against a plain loop; the same again after a crash."""

import json
import random

import pyarrow as pa
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import Position, SampleStream
from cowrec.data_pipeline.streams.directory import END, DirectorySource
from stream_cases import arrivals, make_codec, numbers, sample, write_file

FAST = settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return make_codec(tmp_path_factory.mktemp("codec"))


def write_all(folder, samples, sizes):
    """Files of the given sizes, then the end."""
    folder.mkdir(exist_ok=True)
    start = 0
    for place, size in enumerate(sizes):
        write_file(folder, f"{place:04d}.{'parquet' if place % 2 else 'arrow'}", samples[start : start + size])
        start += size
    (folder / END).touch()


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
@given(arriving(), st.integers(1, 9), st.integers(0, 20), st.integers(0, 6))
def test_samples_come_once_by_time_and_in_whole_batches(tmp_path_factory, codec, case, batch_size, lateness, window):
    samples, sizes = case
    folder = tmp_path_factory.mktemp("stream") / "in"
    write_all(folder, samples, sizes)
    options = {"batch_size": batch_size, "lateness_seconds": lateness, "duplicates_window": window}
    stream = SampleStream(DirectorySource(folder), codec, **options)
    batches = list(stream)
    good, counts, _ = arrivals(samples, lateness, window)
    expected = [number for _, number in sorted(good, key=lambda each: each[0])]  # stable: equal times as they arrived
    assert [number for batch in batches for number in numbers(batch)] == expected
    assert [len(batch.rows) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    for batch in batches:
        for place, number in enumerate(numbers(batch)):
            assert batch.rows.time[place] == samples[number]["time"]
            assert batch.rows.label[place] == number % 2
            assert batch.batch.sparse["tags"].lengths()[place] == max(1, number % 3)
    told = stream.counters
    assert (told["samples"], told["malformed"], told["lost"]) == (len(samples), 0, 0)
    assert (told["duplicates"], told["late"]) == (counts["duplicates"], counts["late"])
    assert (told["handed_out"], told["batches"]) == (len(expected), len(batches))
    assert stream.ended


@FAST
@given(arriving(), st.integers(1, 5), st.integers(0, 8))
def test_late_samples_can_be_trained_on(tmp_path_factory, codec, case, batch_size, lateness):
    samples, sizes = case
    folder = tmp_path_factory.mktemp("stream") / "in"
    write_all(folder, samples, sizes)
    options = {"batch_size": batch_size, "lateness_seconds": lateness, "duplicates_window": 0, "late": "train"}
    stream = SampleStream(DirectorySource(folder), codec, **options)
    handed = [number for batch in stream for number in numbers(batch)]
    assert sorted(handed) == list(range(len(samples)))
    on_time, counts, _ = arrivals(samples, lateness, 0)
    assert stream.counters["late"] == counts["late"]
    kept = {number for _, number in on_time}
    expected = [number for _, number in sorted(on_time, key=lambda each: each[0])]
    assert [number for number in handed if number in kept] == expected, "those on time keep their order"


def same(one, other):
    """Two lists of batches: the same samples in the same order, cut alike, every tensor and every counter."""
    assert [numbers(each) for each in one] == [numbers(each) for each in other]
    for first, second in zip(one, other, strict=True):
        for name in ("dense", "label", "ids", "time"):
            assert torch.equal(getattr(first.rows, name), getattr(second.rows, name))
        assert torch.equal(first.rows.bags["tags"].values, second.rows.bags["tags"].values)
        assert first.end.counters == second.end.counters
        assert first.end.places == second.end.places


@FAST
@given(arriving(), st.data())
def test_after_a_crash_the_same_batches(tmp_path_factory, codec, case, data):
    """Killed at any batch, with the newest snapshot at any batch before: what was handed out since comes again."""
    samples, sizes = case
    folder = tmp_path_factory.mktemp("crash")
    write_all(folder / "in", samples, sizes)
    options = {
        "batch_size": data.draw(st.integers(1, 9)),
        "lateness_seconds": data.draw(st.integers(0, 20)),
        "duplicates_window": data.draw(st.integers(0, 6)),
        "late": data.draw(st.sampled_from(["drop", "train"])),
        "most_waiting": data.draw(st.sampled_from([10, 1000])),
    }

    def opened(position=None):
        return SampleStream(
            DirectorySource(folder / "in"), codec, journal=folder / "journal", position=position, **options
        )

    undisturbed = list(opened())
    (folder / "journal").unlink()
    killed = data.draw(st.integers(0, len(undisturbed)))
    snapshot = data.draw(st.integers(0, killed))
    stream = opened()
    first = []
    for _ in range(killed):
        first.append(stream.next_batch(0))
        if len(first) == snapshot:
            (folder / "snapshot").mkdir()
            stream.position.save(folder / "snapshot")
            stream.cut(stream.position)
    same(first, undisturbed[:killed])
    torn = data.draw(st.sampled_from([b"", b"12", b"00000000 {}"]))
    with (folder / "journal").open("ab") as file:
        file.write(torn)
    stream = opened(Position.load(folder / "snapshot") if snapshot else None)
    same(list(stream), undisturbed[snapshot:])
    assert stream.counters == {**undisturbed[-1].end.counters, **stream._source.counters} if undisturbed else True


class Capricious:
    """A source whose polls return as few samples as chance has it, or none; what it reads is a list.

    So the same samples come in other chunks each time they are polled.
    """

    def __init__(self, partitions, chance):
        self.partitions, self._chance = partitions, chance
        self.ended, self.counters = False, {}
        self.seek({})

    def seek(self, places):
        self._places = {name: places.get(name, 0) for name in self.partitions}
        self.ended = False

    def poll(self, max_samples, timeout):
        from cowrec.data_pipeline.streams.source import Chunk

        left = [name for name, samples in self.partitions.items() if self._places[name] < len(samples)]
        self.ended = not left
        if self.ended or self._chance.random() < 0.3:
            return None
        name = self._chance.choice(left)
        start = self._places[name]
        end = min(len(self.partitions[name]), start + self._chance.randint(1, 7))
        self._places[name] = end
        return Chunk(name, start, end, self.partitions[name][start:end])

    def read(self, partition, start, end):
        from cowrec.data_pipeline.streams.source import Chunk

        return Chunk(partition, start, end, self.partitions[partition][start:end])

    def close(self):
        pass


@pytest.mark.parametrize("seed", range(8))
def test_what_chance_decided_is_repeated_and_the_rest_goes_on(tmp_path, codec, seed):
    """Three partitions polled in any order, and flushes at any moment: nothing but the journal knows."""
    chance = random.Random(seed)
    partitions = {
        name: [json.dumps(sample(p * 100 + n, n + chance.randint(0, 5))).encode() for n in range(60)]
        for p, name in enumerate("abc")
    }
    options = {"batch_size": 7, "lateness_seconds": 3, "max_wait_seconds": 1e-9, "late": "train"}
    options["journal"] = tmp_path / "journal"
    stream = SampleStream(Capricious(partitions, chance), codec, **options)
    handed, kept = [], {0: None}
    while len(handed) < 20:
        batch = stream.next_batch(0)
        if batch is not None:
            handed.append(batch)
            kept[len(handed)] = batch.end
    assert stream.counters["flushes"] > 0, "or nothing is shown"
    for snapshot in (0, 1, 5, 12, 20):
        source = Capricious(partitions, random.Random(99))
        again = SampleStream(source, codec, **{**options, "position": kept[snapshot]})
        repeated = [again.next_batch(0) for _ in range(20 - snapshot)]
        same(repeated, handed[snapshot:])
        again.close()
    rest = list(SampleStream(Capricious(partitions, chance), codec, **{**options, "position": kept[20]}))
    expected = [p * 100 + n for p in range(3) for n in range(60)]
    assert sorted(number for batch in handed + rest for number in numbers(batch)) == expected


def test_without_a_journal_nothing_is_lost_or_repeated(tmp_path, codec):
    samples = [sample(n, n) for n in range(50)]
    write_all(tmp_path / "in", samples, [20, 30])
    stream = SampleStream(DirectorySource(tmp_path / "in"), codec, batch_size=8)
    first = [stream.next_batch(0) for _ in range(3)]
    again = SampleStream(DirectorySource(tmp_path / "in"), codec, batch_size=8, position=first[1].end)
    handed = [number for batch in [*first[:2], *again] for number in numbers(batch)]
    assert handed == list(range(50))


def test_a_stream_that_ended_goes_on_where_more_came(tmp_path, codec):
    """Also where it was opened in between, and from a position before the end."""
    write_all(tmp_path / "in", [sample(n, n) for n in range(10)], [10])
    options = {"batch_size": 4, "journal": tmp_path / "journal"}
    first = list(SampleStream(DirectorySource(tmp_path / "in"), codec, **options))
    assert [len(batch.rows) for batch in first] == [4, 4, 2]
    assert list(SampleStream(DirectorySource(tmp_path / "in"), codec, **options, position=first[2].end)) == []
    write_file(tmp_path / "in", "more.arrow", [sample(n, n) for n in range(10, 13)])
    for start in (1, 2, 3):
        position = first[start - 1].end
        stream = SampleStream(DirectorySource(tmp_path / "in"), codec, **options, position=position)
        handed = [number for batch in first[:start] + list(stream) for number in numbers(batch)]
        assert handed == list(range(13))


def test_a_source_that_lost_what_the_journal_needs_is_told(tmp_path, codec):
    write_all(tmp_path / "in", [sample(n, n) for n in range(20)], [20])
    options = {"batch_size": 4, "journal": tmp_path / "journal"}
    next(iter(SampleStream(DirectorySource(tmp_path / "in"), codec, **options)))
    (tmp_path / "in" / "0000.arrow").unlink()
    with pytest.raises(ValueError, match=r"0000\.arrow is needed again, and cannot be read"):
        SampleStream(DirectorySource(tmp_path / "in"), codec, **options).next_batch(0)
    write_all(tmp_path / "in", [sample(n, n) for n in range(2)], [2])
    with pytest.raises(ValueError, match=r"the journal has 3 samples from .* the source has 2 of them left"):
        SampleStream(DirectorySource(tmp_path / "in"), codec, **options).next_batch(0)


def test_journals_and_positions_that_do_not_belong_together(tmp_path, codec):
    write_all(tmp_path / "in", [sample(n, n) for n in range(20)], [20])
    options = {"batch_size": 4, "journal": tmp_path / "journal"}
    stream = SampleStream(DirectorySource(tmp_path / "in"), codec, **options)
    early, late = stream.next_batch(0).end, list(stream)[-1].end
    stream.cut(late)
    with pytest.raises(ValueError, match="has the entries 7 to 7, the position asks for 2 on"):
        SampleStream(DirectorySource(tmp_path / "in"), codec, **options, position=early)
    (tmp_path / "journal").unlink()
    stream = SampleStream(DirectorySource(tmp_path / "in"), codec, **options, position=early)
    assert [number for batch in stream for number in numbers(batch)] == list(range(4, 20))
    content = (tmp_path / "journal").read_bytes()
    (tmp_path / "journal").write_bytes(b"x" + content)
    with pytest.raises(ValueError, match="line 1 is damaged"):
        SampleStream(DirectorySource(tmp_path / "in"), codec, **options, position=early)


def test_too_many_that_wait_are_handed_out_early_and_counted(tmp_path, codec):
    """One batch more than may wait: the oldest go, though samples as old could still come."""
    samples = [sample(n, 1000 - n) for n in range(100)]
    write_all(tmp_path / "in", samples, [100])
    options = {"batch_size": 10, "lateness_seconds": 10**6, "most_waiting": 30}
    stream = SampleStream(DirectorySource(tmp_path / "in"), codec, **options)
    batches = []
    while (batch := stream.next_batch(0)) is not None:
        batches.append(batch)
        assert len(batch.end.waiting) <= 30 + 3, "those of one poll, here a record batch of 3, come on top"
    assert stream.counters["forced"] == 70
    assert stream.counters["handed_out"] == 100


def test_malformed_samples_are_counted_and_named(tmp_path, codec, caplog):
    good = json.dumps(sample(1, 5)).encode()
    future = json.dumps(sample(2, 4_000_000_000)).encode()
    partitions = {"p": [b"{", good, b'{"label": 7}', future, good]}
    stream = SampleStream(Capricious(partitions, random.Random(0)), codec, batch_size=9, ahead_seconds=60)
    handed = [number for batch in stream for number in numbers(batch)]
    assert handed == [1, 1]
    assert (stream.counters["malformed"], stream.counters["samples"]) == (3, 5)
    assert "is left out: not JSON" in caplog.text
    assert "in the future" in caplog.text
    assert "of partition p" in caplog.text


def test_a_chunk_without_a_column_is_malformed_and_the_stream_goes_on(tmp_path, codec, caplog):
    without = {key: value for key, value in sample(1, 1).items() if key != "tags"}
    partitions = {"p": [json.dumps(without).encode()], "q": [json.dumps(sample(2, 2)).encode()]}
    stream = SampleStream(Capricious(partitions, random.Random(0)), codec, batch_size=1)
    assert [number for batch in stream for number in numbers(batch)] == [2]
    assert stream.counters["malformed"] == 1
    assert "no sample has the column 'tags'" in caplog.text


def test_samples_that_waited_since_another_data_set_are_refused(tmp_path, codec):
    write_all(tmp_path / "in", [sample(n, n) for n in range(9)], [9])
    stream = SampleStream(DirectorySource(tmp_path / "in"), codec, batch_size=2, lateness_seconds=9)
    position = stream.next_batch(0).end
    table = position.waiting.tables[0].append_column("more", pa.array([0] * position.waiting.tables[0].num_rows))
    other = Position(waiting=type(position.waiting)().add(table, table["#time"].to_numpy()))
    with pytest.raises(ValueError, match="of a stream with other fields"):
        SampleStream(DirectorySource(tmp_path / "in"), codec, batch_size=2, position=other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"most_waiting": 3}, "most_waiting at least that, got 4 and 3"),
        ({"lateness_seconds": -1}, "must be at least 0"),
        ({"late": "keep"}, "late must be drop or train, got 'keep'"),
    ],
)
def test_bad_settings(tmp_path, codec, change, message):
    with pytest.raises(ValueError, match=message):
        SampleStream(DirectorySource(tmp_path), codec, **{"batch_size": 4, **change})


def test_a_damaged_position_is_told(tmp_path, codec):
    Position().save(tmp_path)
    assert Position.load(tmp_path).counters == Position().counters
    (tmp_path / "recent.arrow").write_bytes(b"")
    with pytest.raises(ValueError, match=r"position in .* cannot be read"):
        Position.load(tmp_path)
