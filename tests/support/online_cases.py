"""Small drifting data and streams for the tests of online training."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cowrec.data_pipeline import synthesize_drifting
from cowrec.data_pipeline.synthetic.drifting import DriftConfig
from cowrec.data_pipeline.synthetic.drifting_samples import drifting_tables

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
l2 = 1e-5

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


def write_stream(folder: Path, tables: Sequence[pa.Table], *, first: int = 0, end: bool = True) -> None:
    """Writes the files of a growing directory; each appears complete."""
    folder.mkdir(exist_ok=True)
    for number, table in enumerate(tables, first):
        partial = folder / f"{number:06d}.partial"
        pq.write_table(table, partial)
        partial.rename(folder / f"{number:06d}.parquet")
    if end:
        (folder / "_END").touch()
