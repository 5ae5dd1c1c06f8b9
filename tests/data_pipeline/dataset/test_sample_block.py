"""Columns of samples: several labels, weights, numbers and kept columns. Readers' tests are of the selections."""

import re

import numpy as np
import pytest
import torch

from cowrec.data_pipeline.dataset.schema import DenseField, Schema, SparseField
from cowrec.data_pipeline.dataset.shards import read_columns
from numbered_data import make_reader, write_numbered


@pytest.mark.parametrize("resident", [False, True])
def test_batches_have_all_labels_and_the_weights_of_samples(tmp_path, resident):
    rows = 23
    schema = Schema.load(write_numbered(tmp_path, rows, 7, columns_of_samples=True))
    train = schema.split("train")
    fifth = np.where(np.arange(rows) % 3 == 2, np.nan, np.arange(rows) % 5 == 0)
    weight = np.arange(rows) / 2
    assert train.positives == (weight[1::2].sum(), np.nansum(weight * fifth))
    assert train.weight == weight.sum()
    for shuffle in (False, True):
        reader = make_reader(tmp_path, batch_size=5, shuffle=shuffle, window_rows=9, resident=resident)
        seen = []
        for batch in reader.epoch(0):
            number = batch.dense[:, 0]
            expected = torch.stack([number % 2, torch.from_numpy(fifth).float()[number.long()]], 1)
            torch.testing.assert_close(batch.label, expected, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(batch.to(torch.device("cpu")).weight, number / 2, rtol=0, atol=0)
            assert batch.global_batch_size == len(batch.label)
            seen += number.tolist()
        assert sorted(seen) == list(range(rows))
    columns = read_columns(tmp_path, schema, "train", ["sample_number", "kept_name"])
    assert columns["sample_number"].to_pylist() == [10 * row for row in range(rows)]
    assert columns["kept_name"].to_pylist() == [str(row) for row in range(rows)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"labels": ()}, "one name or several"), ({"labels": ("a", "a")}, "one name or several"),
     ({"sample_weights": True}, "sample_weight"), ({"kept": ("x", "x")}, "kept_x")],
)  # fmt: skip
def test_columns_of_samples_have_names_of_their_own(wrong, message):
    with pytest.raises(ValueError, match=message):
        Schema("test", (DenseField("sample_weight"),), (SparseField("a", 9),), {}, **wrong)


def test_no_field_has_the_name_of_a_position():
    fields = SparseField("seen", 9, "sequence", max_length=5), SparseField("seen[4]", 9)
    with pytest.raises(ValueError, match=re.escape("field 'seen[4]' has the name of a sequence's position")):
        Schema("test", (), fields, {})
