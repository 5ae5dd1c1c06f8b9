"""Real click logs, if present: prepared, read back and compared with the raw text."""

import collections
import csv
import io
import itertools
import lzma
from pathlib import Path

import pytest
import torch

from cowrec.data_pipeline import PrepareConfig, Reader, prepare

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


def real(name):
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"needs {name} in {DATA}")
    return path


def raw_rows(path, delimiter):
    return list(csv.reader(io.StringIO(lzma.decompress(path.read_bytes()).decode()), delimiter=delimiter))


def vocabulary(values):
    counts = collections.Counter(value for value in values if value)
    order = sorted((-count, value) for value, count in counts.items())
    return {value: index + 2 for index, (_, value) in enumerate(order)} | {"": 1}


def everything(folder, split):
    (batch,) = Reader(folder, split, batch_size=1 << 20).epoch(0)
    return batch


def test_criteo(tmp_path):
    path = real("criteo_8k.tsv.xz")
    schema = prepare("criteo", [path], tmp_path / "out", PrepareConfig(split="order", test_rows=1000, dense="minmax"))
    rows = raw_rows(path, "\t")
    assert schema.splits["train"].rows == 7000
    batch = everything(tmp_path / "out", "test")
    assert batch.label.tolist() == [float(row[0]) for row in rows[7000:]]
    for n in range(26):
        table = vocabulary([row[14 + n] for row in rows[:7000]])
        expected = [table.get(row[14 + n], 0) for row in rows[7000:]]
        assert batch.sparse[f"C{n + 1}"].values().tolist() == expected
    for n in range(13):
        numbers = torch.tensor([float(row[1 + n] or 0) for row in rows], dtype=torch.float64)
        low, high = numbers[:7000].min(), numbers[:7000].max()
        torch.testing.assert_close(batch.dense[:, n], ((numbers[7000:] - low) / (high - low)).float())


def test_avazu(tmp_path):
    path = real("avazu_9k.csv.xz")
    schema = prepare("avazu", [path], tmp_path / "out", PrepareConfig(test_fraction=0.0))
    header, *rows = raw_rows(path, ",")
    assert schema.splits["train"].rows == 8999
    batch = everything(tmp_path / "out", "train")
    assert batch.sparse.keys() == header[2:]
    assert batch.label.tolist() == [float(row[1]) for row in rows]
    for name in ("device_ip", "C21", "hour"):
        column = [row[header.index(name)] for row in rows]
        table = vocabulary(column)
        assert batch.sparse[name].values().tolist() == [table[value] for value in column]


def test_movielens_with_genres(tmp_path):
    path = real("ml1m_labelled.csv.xz")
    (tmp_path / "schema.toml").write_text(
        """
        label = "label_ge4"
        fields = [
            {name = "user", kind = "categorical"},
            {name = "movie", kind = "categorical"},
            {name = "age", kind = "numeric"},
            {name = "genres", kind = "multi", separator = "|"},
        ]
        """
    )
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        text = "".join(itertools.islice(file, 100_001))
    (tmp_path / "raw.csv").write_text(text)
    config = PrepareConfig(split="order", test_rows=20_000)
    schema = prepare("tabular", [tmp_path / "raw.csv"], tmp_path / "out", config, schema_file=tmp_path / "schema.toml")
    header, *rows = list(csv.reader(io.StringIO(text)))
    genres = [row[header.index("genres")].split("|") for row in rows]
    table = vocabulary(genre for each in genres[:-20_000] for genre in each)
    assert {field.name: field.num_embeddings for field in schema.sparse}["genres"] == len(table) + 1 == 20
    reader = Reader(tmp_path / "out", "test", batch_size=5000)
    assert len(reader) == 4
    first = next(reader.epoch(0)).sparse["genres"]
    assert first.lengths().tolist() == [len(each) for each in genres[-20_000:-15_000]]
    assert first.values().tolist() == [table[genre] for each in genres[-20_000:-15_000] for genre in each]
