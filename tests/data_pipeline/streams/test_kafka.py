"""The Kafka source: a real broker that is ended, frozen and loses messages."""

import logging
import signal
import time

import pytest

from cowrec.data_pipeline import SampleStream, open_source
from cowrec.data_pipeline.streams import brokers
from refusal import refused
from stream_cases import contents, lines, make_codec, numbered, polled, returned, sample

pytest.importorskip("confluent_kafka")
pytest.importorskip("noida_db")
servers = pytest.importorskip("servers.kafka_broker")


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with servers.kafka_broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return make_codec(tmp_path_factory.mktemp("codec"))


def read(source, count):
    return contents(polled(source, count))


def topic(broker, name, count, partitions=1):
    """Makes a topic with so many messages; returns its address."""
    broker.create(name, partitions)
    broker.send_messages(name, lines(numbered(0, count)))
    return f"kafka://{broker.address}/{name}"


def test_partitions_added_while_running_are_read_from_their_beginning(broker, monkeypatch, caplog):
    monkeypatch.setattr(brokers, "PARTITIONS_SECONDS", 0.2)
    source = open_source(topic(broker, "grows", 5))
    assert read(source, 5) == [0, 1, 2, 3, 4]
    broker.add_partitions("grows", 3)
    broker.send_messages("grows", lines(numbered(100, 105)), partition=2)
    broker.send_messages("grows", lines(numbered(5, 8)))
    assert sorted(read(source, 8)) == [5, 6, 7, 100, 101, 102, 103, 104]
    assert "has new partitions, which are read from their beginning: [1, 2]" in caplog.text
    source.seek({"0": 7, "2": 4})
    assert sorted(read(source, 2)) == [7, 104]
    source.close()


def test_a_backlog_of_several_partitions_is_read_in_the_order_of_time(broker, codec):
    """Of ordered partitions, of which one ends early; each takes several fetches."""
    broker.create("backlog", 5)
    given = [sample(number, number, id="i" * 200) for number in range(20_000)]
    for partition in range(4):
        broker.send_messages("backlog", lines(given[partition :: 5 if partition else 100]), partition=partition)
    sent = sorted(number for partition in range(4) for number in range(partition, 20_000, 5 if partition else 100))
    stream = SampleStream(open_source(f"kafka://{broker.address}/backlog"), codec, batch_size=100, max_wait_seconds=2)
    assert returned(stream, len(sent)) == sent
    assert (stream.counters["late"], stream.counters["forced"]) == (0, 0)
    stream.close()


@pytest.mark.thorough
def test_a_broker_that_ends_and_comes_back_loses_nothing(broker, codec, tmp_path, caplog):
    """It is ended, and then frozen; the stream waits, and warns a few times rather than with each attempt."""
    caplog.set_level(logging.INFO)
    source = open_source(topic(broker, "outage", 10))
    stream = SampleStream(source, codec, batch_size=5, journal=tmp_path / "journal")
    assert returned(stream, 10) == list(range(10))
    broker.send(signal.SIGTERM)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert stream.next_batch(0.1) is None
    broker.start()
    broker.send_messages("outage", lines(numbered(10, 20)))
    assert returned(stream, 10) == list(range(10, 20))
    broker.send(signal.SIGSTOP)
    assert stream.next_batch(1.0) is None
    broker.send(signal.SIGCONT)
    broker.send_messages("outage", lines(numbered(20, 30)))
    assert returned(stream, 10) == list(range(20, 30))
    assert stream.counters["lost"] == stream.counters["duplicates"] == 0
    assert 1 <= len(caplog.records) <= 20, caplog.text
    stream.close()


def test_retention_counts_what_was_not_read_and_refuses_to_repeat_what_is_gone(broker, codec, tmp_path, caplog):
    address, options = topic(broker, "retention", 10), {"batch_size": 5, "journal": tmp_path / "journal"}
    stream = SampleStream(open_source(address), codec, **options)
    assert returned(stream, 10) == list(range(10))
    stream.close()
    broker.send_messages("retention", lines(numbered(10, 20)))
    broker.delete_before("retention", 0, 15)
    stream = SampleStream(open_source(address), codec, **options, position=stream.position)
    assert returned(stream, 5) == list(range(15, 20))
    assert stream.counters["lost"] == stream.counters["lost_messages"] == 5
    assert "5 messages of 'retention', partition 0, were deleted before they were read" in caplog.text
    stream.close()
    again = SampleStream(open_source(address), codec, **options)
    refused("the journal has 10 samples from 0 to 10, the source only 0", again.next_batch, 5.0)
    again.close()


def test_offsets_without_a_message_are_skipped_also_when_the_journal_is_repeated(broker, codec, tmp_path):
    """Each transaction ends with an offset of its own, and an aborted one has no message either."""
    broker.create("transactions")
    contents = lines(numbered(0, 6))
    broker.send_transactions("transactions", [(content, number != 3) for number, content in enumerate(contents)])
    options = {"batch_size": 5, "journal": tmp_path / "journal"}
    for _ in range(2):
        stream = SampleStream(open_source(f"kafka://{broker.address}/transactions"), codec, **options)
        assert returned(stream, 5) == [0, 1, 2, 4, 5]
        assert stream.counters["lost"] == stream.counters["malformed"] == 0
        stream.close()


def test_positions_beyond_the_topic_are_an_error(broker):
    source = open_source(topic(broker, "short", 5, partitions=2))
    source.seek({"0": 50})
    refused("ends at offset 5, but was read up to 50", source.poll, 10, 20)
    refused("has no partition 77", source.seek, {"77": 0})
    assert contents([source.read("0", 1, 3)]) == [1, 2]
    assert len(source.read("0", 3, 9)) == 2, "deleted messages are missing"
    source.close()


SECRET = "security.protocol=SASL_PLAINTEXT&sasl.mechanisms=PLAIN&sasl.username=me&sasl.password=hush-hush"


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, r'No such configuration property: "sasl\.passwort"', "sasl.passwort=hush-hush"),
        (OSError, "no Kafka broker answers", "debug=all"),  # librdkafka itself logs all of its settings
    ],
)
def test_credentials_are_in_no_error_and_no_log(monkeypatch, caplog, error, message, options):
    monkeypatch.setattr(brokers, "ANSWER_SECONDS", 1.0)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(error, match=message) as caught:
        open_source(f"kafka://127.0.0.1:1/t?{SECRET}&{options}")
    assert "hush" not in str(caught.value) + caplog.text
