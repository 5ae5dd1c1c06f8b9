"""Small data with histories, whose clicks depend on them, for the tests of sequence fields."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cowrec.data_pipeline import PrepareConfig, Schema, prepare
from cowrec.data_pipeline.synthetic.histories import HistoryConfig
from cowrec.models import MODELS

OF_HISTORIES = ("din", "bst", "hstu")
FLAT = [name for name in MODELS if name not in OF_HISTORIES]
"""Networks that need no history."""

HISTORIES = HistoryConfig(rows=400, items=40, groups=4, max_length=5, history_effect=2.0)
COLUMNS = """
label = "label"
time = "time"
[[fields]]
name = "item"
kind = "categorical"
[[fields]]
name = "history"
kind = "sequence"
max_length = 4
shares = "item"
[[fields]]
name = "seen"
column = "history"
kind = "multi"
[[fields]]
name = "category"
kind = "categorical"
[[fields]]
name = "categories"
kind = "sequence"
max_length = 4
shares = "category"
along = "history"
[[fields]]
name = "lengths"
kind = "sequence"
max_length = 4
along = "history"
"""
"""The longest histories are longer than is kept; the same lists are pooled too, in a table of their own."""


AGES = """
[[fields]]
name = "ages"
column = "times"
kind = "sequence"
max_length = 4
along = "history"
age = true
"""


def category(item: str) -> str:
    """That of an item: its number's last digit."""
    return f"category {item[-1:]}" if item else ""


def with_categories(table: pa.Table) -> pa.Table:
    """Samples with the categories of items and histories, and with the times and lengths of the ids in these."""
    histories = table["history"].to_pylist()
    columns = {
        "category": [category(value) for value in table["item"].to_pylist()],
        "categories": [[category(item) for item in history] for history in histories],
        "lengths": [[len(item) for item in history] for history in histories],
        "times": [
            [when - 7**back for back in range(len(history), 0, -1)]
            for when, history in zip(table["time"].to_pylist(), histories, strict=True)
        ],
    }
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    return table


RUN = """
[model]
name = "din"
embedding_dim = 6
hidden = [8]

[train]
batch_size = 51
eval_batch_size = 20
epochs = 1
log_every = 2
device = "cpu"

[optimizer]
base_batch_size = 51
embedding_lr = 1e-2
dense_lr = 1e-2
l2 = 1e-4

[clip]
rule = "cowclip"
r = 0.5
zeta = 1e-4
"""


def make_histories(folder: Path, histories: HistoryConfig = HISTORIES, *, raw_ids: bool = False) -> Schema:
    """Makes ``run.toml``, ``raw.parquet``, ``columns.toml`` and ``data``, with raw ids with ages, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(RUN)
    (folder / "columns.toml").write_text(COLUMNS + AGES * raw_ids)
    table, _ = histories.draw(0, histories.rows)
    pq.write_table(with_categories(table), folder / "raw.parquet")
    config = PrepareConfig(split="order", test_rows=101, raw_ids=raw_ids, dense="none")
    return prepare("tabular", [folder / "raw.parquet"], folder / "data", config, schema_file=folder / "columns.toml")
