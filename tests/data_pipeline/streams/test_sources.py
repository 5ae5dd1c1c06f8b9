"""Sources: a folder filled meanwhile, a real Redis that is killed; what is sent to a folder."""

import os
import random
import re
import signal
import threading

import pyarrow as pa
import pytest
import redis

from commands.command_line import exit_code
from cowrec.data_pipeline import Position, SampleStream, open_source
from cowrec.data_pipeline.streams.directory import END, DirectorySink, send
from cowrec.data_pipeline.synthetic.drifting import DriftConfig, drifting_tables, synthesize_drifting
from cowrec.files import locked
from cowrec.trainer.publishing.target import open_target
from refusal import refused
from run_comparison import wait_for
from servers.redis_server import redis_server
from stream_cases import (
    all_numbers,
    batches_of,
    contents,
    lines,
    make_codec,
    numbered,
    numbers,
    polled,
    returned,
    sample,
    samples_of,
    write_all,
    write_file,
)


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return make_codec(tmp_path_factory.mktemp("codec"))


def test_a_folder_filled_meanwhile(tmp_path, codec):
    (tmp_path / "in").mkdir()
    for name in (".hidden.parquet", "000.parquet.partial", "000.arrow.tmp", "notes.txt"):
        (tmp_path / "in" / name).write_text("ignored")
    options = {"batch_size": 7, "journal": tmp_path / "journal"}
    writer = threading.Thread(target=write_all, args=(tmp_path / "in", numbered(60), [5] * 12))
    stream = SampleStream(open_source(str(tmp_path / "in")), codec, **options)
    assert stream.next_batch(0) is None
    writer.start()
    batches = list(stream)
    writer.join()
    assert all_numbers(batches) == list(range(60))
    stream = SampleStream(open_source(f"file://{tmp_path}/in"), codec, **options, position=batches[2].end)
    assert [numbers(batch) for batch in stream] == [numbers(batch) for batch in batches[3:]]


def test_a_late_file_is_counted_and_not_read(tmp_path, caplog):
    for name in ("b.arrow", "d.parquet"):
        write_file(tmp_path, name, [sample(ord(name[0]), 1)])
    source = open_source(str(tmp_path), order="name")
    assert contents(polled(source, 2)) == [ord("b"), ord("d")]
    write_file(tmp_path, "c.arrow", [sample(3, 1)])
    write_file(tmp_path, "e.arrow", [sample(5, 1)])
    assert contents(polled(source, 1)) == [5]
    assert source.counters["late_files"] == 1
    assert "c.arrow is late: d.parquet was already read" in caplog.text
    (tmp_path / END).touch()
    assert source.poll(10, 0) is None
    assert source.ended
    assert source.counters["late_files"] == 1


def test_an_empty_file_is_skipped_and_a_damaged_one_stops_the_source_or_is_skipped(tmp_path, caplog):
    write_file(tmp_path, "0.arrow", [])
    write_file(tmp_path, "0.parquet", [])
    write_file(tmp_path, "a.parquet", [sample(1, 1)])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "c.arrow").write_bytes(b"")
    write_file(tmp_path, "d.arrow", [sample(2, 1)])
    source = open_source(str(tmp_path), grace=0)
    polled(source, 1)
    with pytest.raises(ValueError, match=r"b\.parquet cannot be read"):
        source.poll(10, 0)
    source = open_source(str(tmp_path), damaged="skip", grace=0)
    assert contents(polled(source, 2)) == [1, 2]
    assert source.counters["damaged_files"] == 2
    assert "b.parquet cannot be read and is skipped" in caplog.text


def test_files_named_by_uuids_are_read_once_in_the_order_of_time(tmp_path, codec, monkeypatch):
    """Also in folders, after a restart, and if one appears that was written before those that were read."""
    monkeypatch.setattr("cowrec.data_pipeline.streams.directory.REMEMBERED", 12)
    chance, folder = random.Random(5), tmp_path / "in"

    def write(number, written):
        day = folder / f"dt={number % 3}"
        day.mkdir(parents=True, exist_ok=True)
        path = day / f"part-{chance.getrandbits(64):x}.parquet"
        write_file(day, path.name, numbered(3 * number, 3 * number + 3))
        os.utime(path, (written, written))

    def opened(**options):
        return SampleStream(open_source(str(folder)), codec, batch_size=3, lateness_seconds=999, **options)

    for number in range(10):
        write(number, 1000 + number)
    (folder / "_temporary").mkdir()
    write_file(folder / "_temporary", "a.parquet", numbered(7))
    stream = opened(max_wait_seconds=1e-9, journal=tmp_path / "journal")
    batches = batches_of(stream, 30)
    assert all_numbers(batches) == list(range(30))
    (tmp_path / "snapshot").mkdir()
    batches[4].end.save(tmp_path / "snapshot")
    write(10, 1003)
    write(11, 1020)
    again = opened(journal=tmp_path / "journal", position=Position.load(tmp_path / "snapshot"), max_wait_seconds=1e-9)
    assert returned(again, 21) == list(range(15, 36))
    for number in range(12, 17):  # more than are remembered
        write(number, 1100 + number)
    assert returned(again, 15) == list(range(36, 51))
    assert len(again.position.partitions) == len(again.position.newest) <= 17 - 1
    write(17, 1000)
    assert again.next_batch(0.2) is None
    assert again.counters["late_files"] == 1


def test_a_file_that_is_still_written_is_waited_for(tmp_path):
    """A copy in place is damaged until it is complete; later files and the end wait with it."""
    write_file(tmp_path, "b.parquet", numbered(5))
    content = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(content[:-9])
    source = open_source(str(tmp_path))
    write_file(tmp_path, "c.parquet", numbered(5, 8))
    (tmp_path / END).touch()
    assert source.poll(10, 0.1) is None
    assert not source.ended
    (tmp_path / "b.parquet").write_bytes(content)
    assert sorted(contents(polled(source, 8))) == list(range(8))
    assert source.poll(10, 0) is None
    assert source.ended
    assert source.counters == {"late_files": 0, "damaged_files": 0}


@pytest.fixture(scope="module")
def redis_process(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis"), appendonly=True) as server:
        yield server


@pytest.fixture
def server(redis_process):
    with redis_process.client() as client:
        client.flushall()
    return redis_process


def add(server, samples, **options):
    with server.client() as client, client.pipeline(transaction=False) as pipeline:
        for line in lines(samples):
            pipeline.xadd("clicks", {"sample": line}, **options)
        pipeline.execute()


def redis_source(server):
    return open_source(f"{server.url}?stream=clicks")


@pytest.fixture
def opened(server, codec, tmp_path):
    return lambda **options: SampleStream(redis_source(server), codec, journal=tmp_path / "journal", **options)


def test_redis_entries_are_read_in_order_and_again(server, opened):
    source = redis_source(server)
    assert source.poll(10, 0.05) is None, "a missing stream is empty"
    add(server, numbered(30))
    chunks = [source.poll(8, 600), *polled(source, 22)]
    assert contents(chunks) == list(range(30))
    assert len(chunks[0]) == 8
    assert contents([source.read("", chunks[0].start, chunks[-1].end)]) == list(range(30))
    with server.client() as client:
        client.xadd("clicks", {"other": "field"})
    stream = opened(batch_size=10)
    batches = batches_of(stream, 30)
    assert all_numbers(batches) == list(range(30))
    assert stream.counters["malformed"] == 1
    again = opened(batch_size=10, position=batches[0].end)
    assert [numbers(batch) for batch in batches_of(again, 20)] == [numbers(batch) for batch in batches[1:]]


@pytest.mark.parametrize(("kind", "limit"), [("folder", 120), ("redis", 1000)])
def test_chunks_are_bounded_in_bytes(kind, limit, server, tmp_path, monkeypatch):
    """Small samples and, among them, one that is larger than the limit; they are the same again."""
    for module in ("source", "directory"):
        monkeypatch.setattr(f"cowrec.data_pipeline.streams.{module}.CHUNK_BYTES", limit)
    samples = numbered(200)
    samples[70]["id"] = "x" * 2000
    if kind == "redis":
        add(server, samples)
        source = redis_source(server)
    else:
        write_file(tmp_path, "a.parquet", samples)
        source = open_source(str(tmp_path))
    chunks = polled(source, 200)
    assert (
        contents(chunks)
        == contents(source.read(chunk.partition, chunk.start, chunk.end) for chunk in chunks)
        == list(range(200))
    )
    sizes = [chunk.samples.nbytes if kind == "folder" else sum(map(len, chunk.samples)) for chunk in chunks]
    assert [len(chunk) for chunk, size in zip(chunks, sizes, strict=True) if size > limit] == [1]
    assert len(chunks) < 180


def test_a_restarted_redis_loses_nothing_on_its_disk(server, opened, tmp_path, caplog):
    stream = opened(batch_size=5)
    add(server, numbered(20))
    batches = batches_of(stream, 20)
    server.send(signal.SIGKILL)
    assert stream.next_batch(0.2) is None, "the source waits for Redis"
    assert stream.counters["reconnects"] > 0
    server.start()
    add(server, numbered(20, 40))
    batches += batches_of(stream, 20)
    assert all_numbers(batches) == list(range(40))
    assert "Redis does not answer" in caplog.text
    assert "Redis answers again" in caplog.text
    (tmp_path / "snapshot").mkdir()
    batches[4].end.save(tmp_path / "snapshot")
    again = opened(batch_size=5, position=Position.load(tmp_path / "snapshot"))
    assert [numbers(batch) for batch in batches_of(again, 15)] == [numbers(batch) for batch in batches[5:]]


def test_what_redis_refuses_is_said(server):
    with server.client() as client:
        client.rpush("clicks", "no stream")
        source = redis_source(server)
        refused("Redis does not give the stream 'clicks': WRONGTYPE.*; the key is a list", source.poll, 10, 1)
        refused("is of another kind of source", source.seek, {"0": 3})


def test_a_redis_that_refuses_the_password_is_an_error(tmp_path):
    """To readers and to publishers; another attempt would not change it."""
    with redis_server(tmp_path, password="right") as server:
        for given in ("redis://:wrong@", "redis://"):
            address = f"{given}127.0.0.1:{server.port}/0"
            source = open_source(f"{address}?stream=clicks")
            refused("Redis does not give the stream 'clicks': .*; correct the user and the pass", source.poll, 10, 9)
            refused("Redis: AuthenticationError: .*; correct the user", open_target, address, publishing=True)
        assert redis_source(server).poll(10, 0) is None
        with server.client() as client:
            client.acl_setuser("reader", enabled=True, passwords=["+x"], commands=["+ping"])
        address = f"redis://reader:x@127.0.0.1:{server.port}/0"
        denied = open_source(f"{address}?stream=clicks")
        refused("Redis does not give .*; correct .* the permissions of the user", denied.poll, 10, 9)
        refused("Redis: NoPermissionError: .*; correct .* the permissions", open_target, address, publishing=True)


@pytest.mark.thorough
def test_a_redis_that_becomes_a_replica_or_is_busy_is_waited_for(tmp_path, caplog):
    """Redis ends waiting reads with UNBLOCKED, and answers BUSY while a script runs."""
    script = "local first = redis.call('TIME')[1] while redis.call('TIME')[1] - first < 2 do end"
    with redis_server(tmp_path / "one") as server, redis_server(tmp_path / "other") as other, server.client() as client:
        source = redis_source(server)
        add(server, numbered(3))
        assert contents(polled(source, 3)) == [0, 1, 2]
        client.config_set("lua-time-limit", 1)
        waiting = threading.Thread(target=source.poll, args=(10, 1.0))
        waiting.start()
        wait_for(lambda: client.info("clients")["blocked_clients"], 60)
        client.replicaof("127.0.0.1", other.port)
        waiting.join()
        assert "UNBLOCKED" in caplog.text
        client.replicaof("NO", "ONE")
        running = threading.Thread(target=client.eval, args=(script, 0))
        running.start()
        wait_for(lambda: "BUSY" in caplog.text or source.poll(10, 0.05), 60)
        running.join()
        assert source.counters["reconnects"] >= 2
        add(server, numbered(3, 6))
        assert contents(polled(source, 3)) == [3, 4, 5]


def test_a_full_redis_is_read_and_its_target_waits(tmp_path):
    """With `maxmemory-policy noeviction`, transactions are refused even if they only read or delete."""
    with redis_server(tmp_path) as server, server.client() as client:
        source, target = redis_source(server), open_target(f"{server.url}", publishing=True)
        add(server, numbered(3))
        target.write(1, "full", b"x" * 1_000_000)
        client.config_set("maxmemory", 900_000)
        assert contents(polled(source, 3)) == [0, 1, 2]
        with pytest.raises(OSError, match="Redis is full"):
            target.write(2, "full", b"y")
        target.remove(1, "full")
        assert target.blobs() == []
        client.config_set("maxmemory", 0)
        target.write(2, "full", b"y")
        assert target.blobs() == [(2, "full")]
        assert source.counters == {"gaps": 0, "rewound": 0, "reconnects": 0}


@pytest.mark.thorough
def test_sentinels_lead_to_the_replica_that_is_promoted(tmp_path):
    with (
        redis_server(tmp_path / "one") as one,
        redis_server(tmp_path / "other", master=one) as other,
        redis_server(tmp_path / "sentinel", master=one, sentinel=True) as sentinel,
        sentinel.client() as asked,
        other.client() as promoted,
    ):
        address = f"redis+sentinel://127.0.0.1:{sentinel.port},127.0.0.1:1/main/0"
        source, target = open_source(f"{address}?stream=clicks"), open_target(address, publishing=True)
        add(one, numbered(3))
        target.write(1, "full", b"x")
        assert contents(polled(source, 3)) == [0, 1, 2]
        wait_for(lambda: asked.sentinel_slaves("main"))
        wait_for(lambda: promoted.exists("cowrec:full:1"))
        wait_for(lambda: failed_over(asked))
        thread = threading.Thread(target=wait_for, args=(lambda: promoted.role()[0] == b"master",))
        thread.start()
        while thread.is_alive():
            assert source.poll(10, 0.2) is None
        add(other, numbered(3, 6))
        assert contents(polled(source, 3)) == [3, 4, 5]

        def written():
            target.write(2, "full", b"y")
            return True

        wait_for(lambda: not tolerant(OSError, written))
        assert promoted.get("cowrec:full:2") == b"y"


def failed_over(sentinel):
    """Asks a Sentinel to fail over; it refuses before it knows the replica well."""
    return not tolerant(redis.ResponseError, lambda: sentinel.execute_command("SENTINEL FAILOVER main", once=True))


def tolerant(kind, act):
    """Returns whether an act raised an error of a kind."""
    try:
        act()
    except kind:
        return True
    return False


@pytest.mark.thorough
def test_a_redis_cluster_is_refused_by_name(tmp_path):
    with redis_server(tmp_path, cluster=True) as server, server.client() as client:
        client.execute_command("CLUSTER ADDSLOTS", *range(1 << 13))
        client.execute_command("CLUSTER ADDSLOTS", *range(1 << 13, 1 << 14))
        wait_for(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        refused("Redis Cluster is not supported", open_target, server.url, publishing=True)


def test_a_redis_stream_that_lost_its_end_is_reported(tmp_path, caplog):
    """Reads only new ids after a kill of a Redis without persistence."""
    with redis_server(tmp_path / "redis") as server:
        source = redis_source(server)
        add(server, numbered(3))
        assert contents(polled(source, 3)) == [0, 1, 2]
        server.send(signal.SIGKILL)
        server.start()
        with server.client() as client:
            client.xadd("clicks", {"sample": lines([sample(8, 8)])[0]}, id="1-1")
        assert source.poll(10, 0.2) is None, "its id is before the last one read"
        assert source.counters["rewound"] == 1
        assert "Redis lost its end or was emptied" in caplog.text
        add(server, [sample(9, 9)])
        assert contents(polled(source, 1)) == [9]


def test_redis_entries_trimmed_before_they_were_read_are_reported(server, opened, caplog):
    stream = opened(batch_size=2)
    add(server, numbered(4))
    first = batches_of(stream, 4)
    add(server, numbered(4, 20), maxlen=6, approximate=False)
    assert returned(stream, 6) == [14, 15, 16, 17, 18, 19]
    assert (stream.counters["gaps"], stream.counters["lost"]) == (1, 1)
    assert "were trimmed before they were read" in caplog.text
    with pytest.raises(ValueError, match=r"the journal has . samples from 0-0 to .*, the source only 0"):
        opened(batch_size=2).next_batch(0)
    goes_on = opened(batch_size=2, lost="continue")
    assert returned(goes_on, 6) == [14, 15, 16, 17, 18, 19]
    assert goes_on.counters["lost"] == 5  # the gap, and the first four, of the journal
    assert "the others are lost" in caplog.text
    again = opened(batch_size=2, position=first[-1].end)
    assert returned(again, 6) == [14, 15, 16, 17, 18, 19]
    assert again.counters["lost"] == 1


CONFIG = DriftConfig(rows=2000, days=2.0, core_ids=(5, 50), new_ids_per_day=(0, 20), num_dense=2)


def test_samples_sent_to_a_folder_are_read_back(tmp_path):
    tables, folder = list(drifting_tables(CONFIG, 0, 250, chunk_rows=100)), tmp_path / "samples"
    assert send(tables, DirectorySink(folder)) == 250
    rows = [row for chunk in polled(open_source(str(folder)), 250) for row in samples_of(chunk)]
    assert rows == pa.concat_tables(tables).to_pylist()
    send(drifting_tables(CONFIG, 250, 10), DirectorySink(folder))
    assert sorted(path.name for path in folder.iterdir()) == [f"{number:012d}.parquet" for number in range(4)]


def test_the_command_continues_after_the_training_rows(tmp_path, monkeypatch, capsys):
    synthesize_drifting(tmp_path / "data", CONFIG, test_rows=10)
    command = ["stream", tmp_path / "data", "--to", tmp_path / "samples", "--days", "0.1", "--end"]
    assert exit_code(monkeypatch, *command) == 0
    assert capsys.readouterr().out == f"{tmp_path}/samples: 100 samples\n"
    source = open_source(f"{tmp_path}/samples")
    (expected,) = drifting_tables(CONFIG, 2000, 100)
    assert source.poll(1000, 600).samples.equals(expected)
    assert source.poll(1000, 1) is None
    assert source.ended
    for wrong in ("--days=nan", "--days=-1", "--skip-days=-3", "--rate=-5", "--chunk=0"):
        assert exit_code(monkeypatch, *command, wrong) == 2
        assert re.search(f"{wrong.partition('=')[0]} must be at least [01]", capsys.readouterr().err)
    with locked(tmp_path / "samples"):  # as a second command would
        assert exit_code(monkeypatch, *command) == 2
    assert f"another process is at work in {tmp_path}/samples" in capsys.readouterr().err
    assert len(list((tmp_path / "samples").glob("*.parquet"))) == 1
