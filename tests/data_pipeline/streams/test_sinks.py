"""Samples sent to a folder, a real Redis or librdkafka's mock cluster are read back from its source unchanged."""

import json
import subprocess
import sys
import time

import pyarrow as pa
import pytest

from cowrec.data_pipeline import open_source
from cowrec.data_pipeline.streams.open import open_sink, send
from cowrec.data_pipeline.synthetic.drifting import DriftConfig, drifting_tables, synthesize_drifting
from servers.redis_server import redis_server
from trainer_cases import ENVIRONMENT

confluent_kafka = pytest.importorskip("confluent_kafka")
CONFIG = DriftConfig(rows=2000, days=2.0, core_ids=(5, 50), new_ids_per_day=(0, 20), num_dense=2)


def sent_and_received(address):
    """Sends several tables; returns the rows sent and the rows read back."""
    tables = list(drifting_tables(CONFIG, 0, 250, chunk_rows=100))
    assert send(tables, open_sink(address)) == 250
    source, rows, deadline = open_source(address), [], time.monotonic() + 60
    while len(rows) < 250:
        assert time.monotonic() < deadline, f"only {len(rows)} arrived"
        chunk = source.poll(1000, 0.1)
        samples = [] if chunk is None else chunk.samples
        rows += samples.to_pylist() if isinstance(samples, pa.Table) else map(json.loads, samples)
    source.close()
    return pa.concat_tables(tables).to_pylist(), rows


def test_a_folder(tmp_path):
    expected, rows = sent_and_received(str(tmp_path / "samples"))
    assert rows == expected
    names = sorted(path.name for path in (tmp_path / "samples").iterdir())
    assert names == ["000000000000.parquet", "000000000001.parquet", "000000000002.parquet"]
    send(drifting_tables(CONFIG, 250, 10), open_sink(str(tmp_path / "samples")))
    assert (tmp_path / "samples" / "000000000003.parquet").exists()


def test_redis(tmp_path):
    with redis_server(tmp_path) as server:
        expected, rows = sent_and_received(f"{server.url}?stream=clicks")
        assert rows == expected
        server.close()
        with pytest.raises(OSError, match="Redis did not accept samples for 'clicks'"):
            open_sink(f"{server.url}?stream=clicks").write(next(drifting_tables(CONFIG, 0, 1)))


def test_kafka():
    """Reads partitions in any order, each sample once; the mock cluster runs in its producer."""
    cluster = confluent_kafka.Producer({"bootstrap.servers": "none", "test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = cluster.list_topics(timeout=10).brokers.values()
    cluster.list_topics("clicks", timeout=10)  # creates it
    expected, rows = sent_and_received(f"kafka://{broker.host}:{broker.port}/clicks")
    assert sorted(rows, key=lambda row: row["sample_id"]) == expected


def test_the_rate_is_kept(tmp_path):
    """Sends 1,000 samples at 2,000 per second, in at least half a second on any machine."""
    start = time.monotonic()
    send(drifting_tables(CONFIG, 0, 1000, chunk_rows=100), open_sink(str(tmp_path)), rate=2000)
    assert time.monotonic() - start >= 0.5


def test_the_command_continues_after_the_training_rows(tmp_path):
    synthesize_drifting(tmp_path / "data", CONFIG, test_rows=10)
    command = [sys.executable, "-m", "cowrec.trainer", "stream", f"{tmp_path}/data", "--to", f"{tmp_path}/samples"]
    done = subprocess.run(
        [*command, "--days", "0.1", "--end"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path}/samples: 100 samples\n"
    source = open_source(f"{tmp_path}/samples")
    (expected,) = drifting_tables(CONFIG, 2000, 100)
    assert source.poll(1000, 1).samples.equals(expected)
    assert source.poll(1000, 1) is None
    assert source.ended
