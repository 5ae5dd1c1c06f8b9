"""Raw files for the tests of the data pipeline, and plain readers of prepared data sets."""

import collections
import hashlib
import random
from pathlib import Path

import pyarrow.parquet as pq

from cowrec.data_pipeline import PrepareConfig, prepare

MIXED_SCHEMA = """
delimiter = ","
label = "click"
[[fields]]
name = "price"
kind = "numeric"
[[fields]]
name = "city"
kind = "categorical"
[[fields]]
name = "tags"
kind = "multi"
separator = "|"
[[fields]]
name = "history"
column = "past views"
kind = "weighted"
separator = " "
weight_separator = ":"
"""


NULLS_SCHEMA = 'null = ["NA", "-1"]\n' + MIXED_SCHEMA + 'null = ["none"]\n'
"""Of the last field, the history, another text is a missing value."""

TIMED_SCHEMA = 'time = "seen at"\n' + MIXED_SCHEMA
TIMED_HEADER = "seen at,past views,click,price,tags,city"


def prepare_text(folder, schema, *texts, output="out", config=None, **options):
    """Prepares files of these texts, raw.csv, raw1.csv and so on, with a schema file; by default all for training."""
    (folder / "schema.toml").write_text(schema)
    paths = [folder / f"raw{number or ''}.csv" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    config = config or PrepareConfig(test_fraction=0.0)
    return prepare("tabular", paths, folder / output, config, schema_file=folder / "schema.toml", **options)


def read_split(folder, split):
    """Reads all samples of a split as a dictionary of lists."""
    columns = collections.defaultdict(list)
    for path in sorted((folder / split).iterdir()):
        for name, values in pq.read_table(path).to_pydict().items():
            columns[name] += values
    return columns


def write_criteo(path, rows, seed=0):
    """Writes a random file in Criteo's layout; returns its lines as lists of strings."""
    draw = random.Random(seed)
    table = []
    for _ in range(rows):
        numbers = [draw.choice(["", str(draw.randint(-2, 50))]) for _ in range(13)]
        ids = [draw.choice(["", f"{int(draw.paretovariate(0.5)) % 1000:08x}"]) for _ in range(26)]
        table.append([draw.choice("01"), *numbers, *ids])
    path.write_text("".join("\t".join(row) + "\n" for row in table))
    return table


def fnv_splitmix(text, mask=2**64 - 1):
    """Computes the documented string hash in plain Python."""
    state = 0xCBF29CE484222325
    for byte in text.encode():
        state = ((state ^ byte) * 0x100000001B3) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def content(folder: Path) -> dict[str, str]:
    """Returns a checksum of each file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_timed(folder):
    """Writes 200 random samples with times; returns them as dictionaries."""
    draw = random.Random(0)
    table = []
    for _ in range(200):
        history = [(f"h{draw.randint(0, 9)}", draw.choice([1.0, 0.5])) for _ in range(draw.randint(0, 2))]
        row = {"time": draw.randint(0, 2 * 10**9), "history": history, "click": draw.choice("01")}
        row["price"] = draw.choice(["", "3", "2.5"])
        row["tags"] = [f"t{draw.randint(0, 20)}" for _ in range(draw.randint(1, 3))]
        row["city"] = draw.choice(["", "Köln", "17", f"c{draw.randint(0, 50)}"])
        table.append(row)
    lines = [
        f"{row['time']},{' '.join(f'{key}:{weight}' for key, weight in row['history'])},{row['click']},{row['price']},"
        f"{'|'.join(row['tags'])},{row['city']}"
        for row in table
    ]
    (folder / "raw.csv").write_text("\n".join([TIMED_HEADER, *lines]), encoding="utf-8")
    (folder / "schema.toml").write_text(TIMED_SCHEMA)
    return table
