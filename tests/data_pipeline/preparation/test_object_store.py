"""`prepare` from and to an object store: the same data set as on this machine, against a real S3 server."""

import gzip
import os

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from cowrec.data_pipeline import PrepareConfig, prepare, work_bytes
from cowrec.data_pipeline.raw.inputs import find_inputs, partition_of
from cowrec.data_pipeline.remote import RemoteFolder
from raw_cases import content
from refusal import refused
from servers.s3_server import s3_clients

SCHEMA = 'label = "click"\nfields = [{name = "city", kind = "categorical"}, {name = "x", kind = "numeric"}]'


@pytest.fixture
def logs(tmp_path):
    """A folder of raw files of all formats, here and in a bucket; returns the URI of the latter."""
    folder = tmp_path / "logs"
    tables = [pa.table({"click": [n % 2, 1], "x": [n, n + 0.5]}) for n in range(4)]
    places = [folder / f"city={city}" for city in ("a", "b c", "K%C3%B6ln", "d")]
    for place in places:
        place.mkdir(parents=True)
    pq.write_table(tables[0], places[0] / "part.parquet", row_group_size=1)
    pyarrow.feather.write_feather(tables[1], places[1] / "part=1.arrow")
    (places[2] / "part.csv").write_text("click,x\n1,5\n0,\n")
    (places[3] / "part.csv.gz").write_bytes(gzip.compress(b"x,click\n1,0\n2,1\n"))
    (places[3] / "_SUCCESS").touch()
    (tmp_path / "schema.toml").write_text(SCHEMA)
    with s3_clients():
        remote = RemoteFolder(f"s3://bucket/{tmp_path.name}")
        remote.upload(tmp_path, [str(path.relative_to(tmp_path)) for path in folder.rglob("*") if path.is_file()])
        yield f"s3://bucket/{tmp_path.name}/logs"


def run(folder, inputs, output, **options):
    config = PrepareConfig(split="order", test_rows=2, shard_rows=3)
    return prepare("tabular", inputs, output, config, schema_file=folder / "schema.toml", **options)


def test_a_data_set_from_and_to_an_object_store(logs, tmp_path):
    schema = run(tmp_path, [tmp_path / "logs"], tmp_path / "here")
    output = logs.removesuffix("logs") + "data"
    seen = []
    remote_schema = run(tmp_path, [logs], output, progress=seen.append)
    assert sum(seen) == work_bytes([logs]) == work_bytes([tmp_path / "logs"])
    RemoteFolder(output).download(tmp_path / "copy")
    here, copy = content(tmp_path / "here"), content(tmp_path / "copy")
    assert here.pop("schema.json") != copy.pop("schema.json"), "the paths of the sources differ"
    assert here == copy
    sizes, remote_sizes = ([(source.bytes, source.rows) for source in own.sources] for own in (schema, remote_schema))
    assert remote_sizes == sizes
    refused(f"{output} exists and is not empty", run, tmp_path, [logs], output)
    with pytest.raises(ValueError, match=f"{logs} is not a prepared data set, so it is not overwritten"):
        run(tmp_path, [tmp_path / "logs"], logs, overwrite=True)
    run(tmp_path, [f"{logs}/city=[a-b]*", f"file://{tmp_path}/logs/city=K%25C3%25B6ln"], output, overwrite=True)
    assert sum(name.startswith("train") for name in RemoteFolder(output).list()) == 2
    RemoteFolder(output).remove(["schema.json"])  # as after an upload that was interrupted
    run(tmp_path, [logs], output, overwrite=True)
    assert "schema.json" in RemoteFolder(output).list()


def test_files_in_an_object_store_are_found(logs):
    def names(*inputs):
        return [file.removeprefix(logs) for file in find_inputs(inputs)]

    parts = ["/city=K%25C3%25B6ln/part.csv", "/city=a/part.parquet", "/city=b%20c/part=1.arrow", "/city=d/part.csv.gz"]
    assert names(logs) == names(f"{logs}/") == names(f"{logs}/**") == names(f"{logs}/*") == parts
    assert names(f"{logs}/**/*.csv") == names(f"{logs}/city=*/*.csv") == parts[:1]
    assert names(f"{logs}{parts[2]}") == parts[2:3]
    assert dict(partition_of(f"{logs}{parts[0]}")) == {"city": "Köln"}
    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    query = f"?endpoint_override={endpoint}&scheme=http&region=us-east-1"
    assert names(logs + query) == [part + query for part in parts]
