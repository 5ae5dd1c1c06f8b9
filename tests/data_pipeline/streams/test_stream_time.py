"""The present of a stream against a plain loop with statistics.median_low; streams with wrong clocks and gaps."""

import json
import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import Position, SampleStream
from cowrec.data_pipeline.streams import reorder
from cowrec.data_pipeline.streams.reorder import MIN_SAMPLES, SLACK_SECONDS, SPREADS, WINDOW, follow
from stream_cases import RandomSource, make_codec, numbers, sample

HOUR, START = 3600, 1_700_000_000


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return make_codec(tmp_path_factory.mktemp("codec"))


def plain(times, lateness):
    """(time, early, newest) of each sample."""
    newest, found = None, []
    for index, time in enumerate(times):
        window = times[max(0, index + 1 - WINDOW) : index + 1]
        early = False
        if len(window) >= MIN_SAMPLES:
            middle = statistics.median_low(window)
            deviation = statistics.median_low(abs(each - middle) for each in window)
            end = middle + max(SPREADS * deviation, lateness, SLACK_SECONDS)
            if newest is not None and newest > end:
                newest = max(each for each in window if each <= end)
            early = time > end
        if early:
            time = newest
        newest = time if newest is None else max(newest, time)
        found.append((time, early, newest))
    return found


clocks = st.lists(st.integers(0, 50) | st.integers(0, 10**6) | st.sampled_from([0, 10**6]), max_size=300)


@settings(max_examples=25, deadline=None)
@given(clocks, st.sampled_from([0, 300]), st.lists(st.integers(0, 300), max_size=4))
def test_the_present_is_that_of_a_plain_loop_in_any_chunks(times, lateness, cuts):
    latest, newest, found = np.zeros(0, np.int64), None, []
    for part in np.split(np.array(times, np.int64), sorted(min(cut, len(times)) for cut in cuts)):
        followed = follow(part, latest, newest, lateness)
        found += zip(followed.time.tolist(), followed.early.tolist(), followed.newest.tolist(), strict=True)
        latest, newest = followed.latest, int(followed.newest[-1]) if len(part) else newest
    assert found == plain(times, lateness)


def returned(codec, times, **options):
    """The batches' samples and the stream, of samples that arrive at these times."""
    lines = [json.dumps(sample(number, time)).encode() for number, time in enumerate(times)]
    stream = SampleStream(RandomSource({"p": lines}, random.Random(0)), codec, batch_size=50, **options)
    return [
        (number, int(time)) for batch in stream for number, time in zip(numbers(batch), batch.block.time, strict=True)
    ], stream


def test_arrays_of_any_kind_use_the_same_compiled_loop():
    """Compiling another one would stop a trainer for seconds."""
    times = np.arange(20)
    read_only = times.copy()
    read_only.flags.writeable = False
    for given_times, latest in ((times, times[:0]), (read_only, times[::2]), (read_only[::2], read_only)):
        follow(given_times, latest, None, 0)
    assert len(reorder._follow.signatures) == 1


@pytest.mark.parametrize("hours", [1, 23, 10_000])
def test_a_clock_that_is_ahead_makes_no_other_sample_late(codec, hours):
    """One of three producers; its samples are trained on with the others, and count with their time."""
    times = [START + 2 * n + (hours * HOUR if n % 3 == 2 and n > 10 else 0) for n in range(900)]
    found, stream = returned(codec, times)
    assert sorted(number for number, _ in found) == list(range(900))
    assert (stream.counters["late"], stream.counters["early"]) == (0, sum(n % 3 == 2 for n in range(11, 900)))
    assert all(abs(time - (START + 2 * number)) <= 4 for number, time in found)


@pytest.mark.parametrize("wrong", [1, 500])
def test_a_present_in_the_future_goes_back(codec, tmp_path, wrong):
    """Only samples of the wrong clock at first, then of the right one, also from a position saved in between."""
    right = [START + 2 * n for n in range(1000)]
    ahead = [each + 23 * HOUR for each in right[:wrong]]
    found, stream = returned(codec, ahead + right)
    lost = set(range(wrong, wrong + 1000)) - {number for number, _ in found}
    assert len(lost) == stream.counters["late"] <= WINDOW // 2 + MIN_SAMPLES
    assert max(lost) < wrong + WINDOW
    _, before = returned(codec, ahead)
    before.position.save(tmp_path)
    loaded = Position.load(tmp_path)
    assert (loaded.newest, loaded.latest.tolist()) == (before.position.newest, before.position.latest.tolist())
    later, _ = returned(codec, ahead + right, position=loaded)
    assert {number for number, _ in later} == set(range(wrong, wrong + 1000)) - lost


def test_a_gap_in_time_loses_nothing(codec):
    times = [START + 2 * n + (3 * 24 * HOUR if n >= 600 else 0) for n in range(1200)]
    found, stream = returned(codec, times)
    assert [number for number, _ in found] == list(range(1200))
    assert stream.counters["late"] == 0
    assert 0 < stream.counters["early"] <= WINDOW // 2
    assert found[-1][1] == times[-1]
