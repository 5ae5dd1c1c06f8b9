"""Malformed samples, invalid settings and positions, and the limit of waiting samples of streams."""

import json
import random

import pyarrow as pa
import pytest

from cowrec.data_pipeline import Position, SampleStream
from cowrec.data_pipeline.streams.directory import DirectorySource
from stream_cases import RandomSource, make_codec, numbers, sample, write_all


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return make_codec(tmp_path_factory.mktemp("codec"))


def test_waiting_samples_above_the_limit_are_returned_early_and_counted(tmp_path, codec):
    """Returns the oldest ones though older samples could still arrive."""
    samples = [sample(n, 1000 - n) for n in range(100)]
    write_all(tmp_path / "in", samples, [100])
    options = {"batch_size": 10, "lateness_seconds": 10**6, "most_waiting": 30}
    stream = SampleStream(DirectorySource(tmp_path / "in"), codec, **options)
    batches = []
    while (batch := stream.next_batch(0)) is not None:
        batches.append(batch)
        assert len(batch.end.waiting) <= 30 + 3, "plus those of one poll, here a record batch of 3"
    assert stream.counters["forced"] == 70
    assert stream.counters["handed_out"] == 100


def test_malformed_samples_are_counted_and_logged(tmp_path, codec, caplog):
    good = json.dumps(sample(1, 5)).encode()
    future = json.dumps(sample(2, 4_000_000_000)).encode()
    partitions = {"p": [b"{", good, b'{"label": 7}', future, good]}
    stream = SampleStream(RandomSource(partitions, random.Random(0)), codec, batch_size=9, ahead_seconds=60)
    returned = [number for batch in stream for number in numbers(batch)]
    assert returned == [1, 1]
    assert (stream.counters["malformed"], stream.counters["samples"]) == (3, 5)
    assert "is dropped: not JSON" in caplog.text
    assert "in the future" in caplog.text
    assert "of partition p" in caplog.text


def test_a_chunk_without_a_column_is_malformed_and_the_stream_continues(tmp_path, codec, caplog):
    without = {key: value for key, value in sample(1, 1).items() if key != "tags"}
    partitions = {"p": [json.dumps(without).encode()], "q": [json.dumps(sample(2, 2)).encode()]}
    stream = SampleStream(RandomSource(partitions, random.Random(0)), codec, batch_size=1)
    assert [number for batch in stream for number in numbers(batch)] == [2]
    assert stream.counters["malformed"] == 1
    assert "no sample has the column 'tags'" in caplog.text


def test_waiting_samples_of_another_data_set_are_refused(tmp_path, codec):
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


def test_a_damaged_position_is_an_error(tmp_path, codec):
    Position().save(tmp_path)
    assert Position.load(tmp_path).counters == Position().counters
    (tmp_path / "recent.arrow").write_bytes(b"")
    with pytest.raises(ValueError, match=r"position in .* cannot be read"):
        Position.load(tmp_path)
