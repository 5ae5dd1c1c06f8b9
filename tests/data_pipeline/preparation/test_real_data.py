"""Real click logs, if present: prepared, read back and compared with the raw text."""

import collections
import csv
import io
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
