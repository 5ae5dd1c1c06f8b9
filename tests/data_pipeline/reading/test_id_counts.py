"""Counts of a sample's ids in training, against plain loops over the Parquet files."""

from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from cowrec.data_pipeline import synthesize_drifting
from cowrec.data_pipeline.reading.id_counts import ONE, log_id_counts
from cowrec.data_pipeline.synthetic.drifting import DriftConfig
from numbered_data import write_numbered
from trainer_cases import make_data


def counted(data, fields, train_rows=None, split="test"):
    train, test = (pq.read_table(data / name).to_pydict() for name in ("train", split))
    total = np.zeros(len(test["label"]))
    for name in fields:
        bags = [[ids] if isinstance(ids, int) else ids for ids in train[name][:train_rows]]
        counts = Counter(id_ for bag in bags for id_ in bag)
        for row, ids in enumerate(test[name]):
            bag = [ids] if isinstance(ids, int) else ids
            total[row] += np.mean([np.log1p(counts[id_]) for id_ in bag]) if bag else 0
    return total


@pytest.mark.parametrize("train_rows", [None, 50, 0])
@pytest.mark.parametrize("split", ["test", "train"])
def test_counts_equal_plain_loops(tmp_path, split, train_rows):
    """Lists may repeat an id, or be empty. Tolerance: one unit of rounding for each field."""
    if split == "test":
        data, fields = make_data(tmp_path), ["city", "tags", "history"]
    else:
        data, fields = write_numbered(tmp_path, 70, 7, lists=True), ["id", "list", "pair"]
    found = log_id_counts(data, split, fields, train_rows)
    np.testing.assert_allclose(found / ONE, counted(data, fields, train_rows, split), atol=2 * 3 / ONE)
    # The sum over processes, each with its share of the fields, is exact.
    parts = [log_id_counts(data, split, names, train_rows) for names in (fields[::2], fields[1::2])]
    np.testing.assert_array_equal(sum(parts), found)


def test_raw_ids_that_training_has_not_seen_count_nothing(tmp_path):
    config = DriftConfig(rows=400, days=2.0, core_ids=(5, 20), new_ids_per_day=(0, 50))
    synthesize_drifting(tmp_path / "data", config, test_rows=300)
    found = log_id_counts(tmp_path / "data", "test", ["C1", "C2"])
    np.testing.assert_allclose(found / ONE, counted(tmp_path / "data", ["C1", "C2"]), atol=4 / ONE)
    unseen = ~np.isin(*(pq.read_table(tmp_path / "data" / split)["C2"].to_numpy() for split in ("test", "train")))
    assert unseen.any()
    assert not log_id_counts(tmp_path / "data", "test", ["C2"])[unseen].any()
    assert not log_id_counts(tmp_path / "data", "test", []).any()
