"""Small drifting data and streams for the tests of online training."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Timer
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cowrec.data_pipeline import SampleCodec, synthesize_drifting
from cowrec.data_pipeline.synthetic.drifting import DriftConfig, drifting_tables
from cowrec.trainer.config.run import load_config
from cowrec.trainer.export.export import export_run
from cowrec.trainer.online.loop import online
from cowrec.trainer.publishing.follower import VersionReader
from cowrec.trainer.publishing.target import open_target
from cowrec.trainer.serving.served_model import ServedModel

CONFIG = """
[model]
embedding_dim = 6
embedding_dims = { C1 = 9, C3 = 9 }
hidden = [8]

[train]
batch_size = 64
log_every = 10
device = "cpu"

[optimizer]
base_batch_size = 64
embedding_lr = 1e-2
dense_lr = 1e-2

[clip]
rule = "cowclip"
r = 0.5
zeta = 1e-4

[id_table]
kind = "collisionless"
capacity = 3000
expire_after = "6d"

[online]
lateness = "1h"
window = "2d"
max_wait_seconds = 0
"""

DRIFT = DriftConfig(
    rows=4000, days=20.0, core_ids=(5, 50, 200), new_ids_per_day=(0, 10, 50), num_dense=2, lifetime_days=1.0
)
SAMPLES = 4000
"""Over twenty days."""


def make_case(folder: Path) -> Path:
    """Makes ``run.toml``, ``data`` (fields and scales) and ``incoming`` (the stream) in a folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(CONFIG)
    synthesize_drifting(folder / "data", DRIFT, test_rows=500)
    write_stream(folder / "incoming", list(drifting_tables(DRIFT, 0, SAMPLES, chunk_rows=500)))
    return folder


def case_fixture() -> Any:
    """A fixture of a file's tests: the folder of `make_case`."""

    @pytest.fixture(scope="module")
    def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_case(tmp_path_factory.mktemp("online"))

    return case


def write_stream(folder: Path, tables: Sequence[pa.Table], *, first: int = 0, end: bool = True) -> None:
    """Writes the files of a growing directory; each appears complete."""
    folder.mkdir(exist_ok=True)
    for number, table in enumerate(tables, first):
        partial = folder / f"{number:06d}.partial"
        pq.write_table(table, partial)
        partial.rename(folder / f"{number:06d}.parquet")
    if end:
        (folder / "_END").touch()


def online_case(case: dict[str, Any]) -> str:
    """Trains one case on its stream; returns "ok", or the message of its error.

    A case has ``folder`` (of `make_case`), ``source``, ``run_dir``, ``set``, and optionally ``publish``, ``resume``,
    ``path`` (of modules), and ``later``: a folder whose files join the stream after ``later_seconds``.
    """
    folder, arrival = Path(case["folder"]), None
    if "path" in case and case["path"] not in sys.path:
        sys.path.insert(0, case["path"])
    if "later" in case and os.environ.get("RANK", "0") == "0":
        arrival = Timer(case["later_seconds"], _join_stream, (Path(case["later"]), Path(case["source"])))
        arrival.start()
    given = {"publish": case.get("publish"), "resume": case.get("resume", False)}
    try:
        config = load_config(folder / "run.toml", case["set"])
        online(config, folder / "data", case["source"], Path(case["run_dir"]), **given)
    except (ValueError, OSError) as error:
        return str(error)
    finally:
        if arrival:
            arrival.join()
    return "ok"


def _join_stream(later: Path, source: Path) -> None:
    for file in sorted(later.iterdir(), key=lambda path: (path.name == "_END", path.name)):
        file.rename(source / file.name)


def followed(run_dir: Path, url: Path | str) -> ServedModel:
    """A reader that has applied everything that a run has published."""
    target, served = open_target(str(url)), ServedModel.load(run_dir / "base")
    newest = target.blobs()[-1][0]
    for blob in VersionReader(target).versions(Event()):
        served.apply(blob)
        if blob.version == newest:
            break
    return served


def assert_readers_equal_an_export(
    case: Path, run_dir: Path, published: Path | str, of: Path | None = None, source: str = "incoming"
) -> ServedModel:
    """A reader that has applied all versions of a run predicts its source exactly like an export of it, or of another.

    Returns the reader.
    """
    export_run(of or run_dir, run_dir / "export")
    served, exported = followed(run_dir, published), ServedModel.load(run_dir / "export")
    codec = SampleCodec.load(case / "data")
    block = codec.encode(codec.from_table(pq.read_table(case / source))).block
    np.testing.assert_array_equal(served.predict(block), exported.predict(block))
    assert served.counters()["resident_ids"] == exported.counters()["resident_ids"]
    return served
