"""`prepare` on a Dask cluster of local processes writes the same bytes as without a cluster."""

import gzip
import os
import signal

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from cowrec.data_pipeline import PrepareConfig, prepare, work_bytes
from cowrec.data_pipeline.raw.layouts import CRITEO
from raw_cases import content, write_criteo, write_timed

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Starts a scheduler and two worker processes, whose working directory differs from the test's."""
    options = {"dashboard_address": ":0", "local_directory": str(tmp_path_factory.mktemp("dask")), "silence_logs": 50}
    with distributed.LocalCluster(n_workers=2, threads_per_worker=2, processes=True, **options) as cluster:
        yield cluster


def both(cluster, folder, *arguments, **options):
    """Prepares locally and on the cluster; returns the content of both data sets."""
    prepare(*arguments[:2], folder / "here", *arguments[2:], **options)
    prepare(*arguments[:2], folder / "there", *arguments[2:], scheduler=cluster.scheduler_address, **options)
    return content(folder / "here"), content(folder / "there")


@pytest.mark.thorough
def test_a_cluster_writes_the_same_files(cluster, tmp_path):
    """Covers plain and compressed text and large row groups, which are grouped into tasks differently."""
    config = PrepareConfig(shard_rows=60, split="order", test_rows=100, min_count=2, dense="buckets", fit_on="all")
    write_criteo(tmp_path / "a", 400)
    write_criteo(tmp_path / "b", 280, seed=1)
    (tmp_path / "b.gz").write_bytes(gzip.compress((tmp_path / "b").read_bytes()))
    write_criteo(tmp_path / "c", 360, seed=2)
    names = pa.csv.ReadOptions(column_names=CRITEO.columns)
    table = pa.csv.read_csv(tmp_path / "c", names, pa.csv.ParseOptions(delimiter="\t"))
    pq.write_table(table, tmp_path / "d", row_group_size=200)
    raw = [tmp_path / "a", tmp_path / "b.gz", tmp_path / "d", tmp_path / "b"]
    here, there = both(cluster, tmp_path, "criteo", raw, config)
    assert here == there
    assert sum(name.startswith("train") for name in here) > 5
    likewise = tmp_path / "like"
    likewise.mkdir()
    here, there = both(cluster, likewise, "criteo", raw[:1], PrepareConfig(shard_rows=80), like=tmp_path / "there")
    assert here == there


def test_raw_ids_lists_times_and_bad_rows_on_a_cluster(cluster, tmp_path):
    write_timed(tmp_path)
    lines = (tmp_path / "raw.csv").read_text(encoding="utf-8").split("\n")
    lines[123:123], lines[80:80] = ["too short"], ["5,a:1,7,1,t,city"]
    (tmp_path / "raw.csv").write_text("\n".join(lines), encoding="utf-8")
    config = PrepareConfig(shard_rows=37, raw_ids=True, on_bad_row="skip")
    options = {"schema_file": tmp_path / "schema.toml"}
    here, there = both(cluster, tmp_path, "tabular", [tmp_path / "raw.csv"], config, **options)
    assert here == there


def test_errors_progress_and_relative_paths_are_those_of_a_local_run(cluster, tmp_path, monkeypatch, cowrec):
    write_criteo(tmp_path / "raw", 300)
    monkeypatch.chdir(tmp_path)
    done, options = [], {"scheduler": cluster.scheduler_address}
    prepare("criteo", ["raw"], "out", progress=done.append, **options)
    assert sum(done) == work_bytes(["raw"])
    command = ["prepare", "criteo", "--input", "raw", "--output", "by command"]
    assert cowrec(*command, "--scheduler", cluster.scheduler_address)[0] == 0
    assert content(tmp_path / "by command") == content(tmp_path / "out")
    with (tmp_path / "raw").open("a") as file:
        file.write("7\n")
    with pytest.raises(ValueError, match="raw, line 301: 1 columns, must be 40"):
        prepare("criteo", ["raw"], "new", PrepareConfig(shard_rows=100), **options)
    assert sorted(os.listdir(tmp_path)) == ["by command", "out", "raw"]


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_killed_worker_changes_nothing(cluster, tmp_path, share):
    """Other workers redo its tasks, including those whose results it held; after the survey, and in the last pass."""
    write_criteo(tmp_path / "raw", 1500)
    pids = [worker.process.pid for worker in cluster.workers.values()]
    done, killed = 0, []

    def progress(count):
        nonlocal done
        done += count
        if done > share * work_bytes([tmp_path / "raw"]) and not killed:
            killed.append(pids[0])
            os.kill(pids[0], signal.SIGKILL)
            for split in tmp_path.glob("there.partial-*/train"):  # what it was writing
                (split / f"00000.parquet.partial-{pids[0]}-1").write_bytes(b"PAR1")

    raw, config = [tmp_path / "raw"], PrepareConfig(shard_rows=50)
    prepare("criteo", raw, tmp_path / "here", config)
    prepare("criteo", raw, tmp_path / "there", config, scheduler=cluster.scheduler_address, progress=progress)
    assert killed
    assert content(tmp_path / "here") == content(tmp_path / "there")
