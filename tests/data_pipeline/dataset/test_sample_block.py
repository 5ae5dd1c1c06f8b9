"""Selection of samples into batches, against plain loops over Python lists."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline.dataset.sample_block import Bags, SampleBlock
from cowrec.data_pipeline.dataset.schema import DenseField, Schema, SparseField
from cowrec.data_pipeline.dataset.shards import read_columns
from numbered_data import make_reader, write_numbered

KINDS = ("categorical", "multi", "weighted")


@dataclass
class Sample:
    dense: list[float]
    label: float
    bags: list[list[tuple[int, float]]]  # per field: (id, weight)


@st.composite
def tables(draw):
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
    poolings = [draw(st.sampled_from(["sum", "mean"])) if kind == "multi" else "sum" for kind in kinds]
    weights = st.floats(-2, 2, width=32)
    samples = []
    for _ in range(draw(st.integers(1, 9))):
        bags = []
        for kind in kinds:
            size = 1 if kind == "categorical" else draw(st.integers(0, 4))
            bags.append([(draw(st.integers(0, 9)), draw(weights) if kind == "weighted" else 1.0) for _ in range(size)])
        samples.append(Sample([draw(weights), draw(weights)], float(draw(st.booleans())), bags))
    index = draw(st.lists(st.integers(0, len(samples) - 1), max_size=12))
    return kinds, poolings, samples, index


def make_schema(kinds, poolings):
    sparse = tuple(SparseField(f"f{n}", 10, *each) for n, each in enumerate(zip(kinds, poolings, strict=True)))
    return Schema("test", (DenseField("a"), DenseField("b")), sparse, {})


def make_block(kinds, samples):
    bags = {}
    for n, kind in enumerate(kinds):
        if kind != "categorical":
            values = [pair for sample in samples for pair in sample.bags[n]]
            lengths = torch.tensor([0] + [len(sample.bags[n]) for sample in samples])
            bags[f"f{n}"] = Bags(
                torch.tensor([pair[0] for pair in values], dtype=torch.int32),
                lengths.cumsum(0),
                torch.tensor([pair[1] for pair in values], dtype=torch.float32) if kind == "weighted" else None,
            )
    single = [[sample.bags[n][0][0] for n, kind in enumerate(kinds) if kind == "categorical"] for sample in samples]
    return SampleBlock(
        torch.tensor([sample.dense for sample in samples]),
        torch.tensor([sample.label for sample in samples]),
        torch.tensor(single, dtype=torch.int32).reshape(len(samples), -1),
        bags,
    )


def expected(kinds, poolings, samples):
    """Computes values, lengths and weights in the order of a KeyedJaggedTensor: field by field, sample by sample."""
    values, lengths, weights = [], [], []
    for n, kind in enumerate(kinds):
        for sample in samples:
            bag = sample.bags[n]
            lengths.append(len(bag))
            values += [value for value, _ in bag]
            mean = kind == "multi" and poolings[n] == "mean"
            weights += [1 / len(bag) if mean else weight for _, weight in bag]
    return values, lengths, weights


def check(batch, kinds, poolings, samples):
    values, lengths, weights = expected(kinds, poolings, samples)
    assert batch.sparse.values().tolist() == values
    assert batch.sparse.keys() == [f"f{n}" for n in range(len(kinds))]
    assert batch.sparse.values().dtype == batch.sparse.lengths().dtype == torch.int32
    assert batch.sparse.lengths().tolist() == lengths
    assert batch.sparse.offsets().tolist() == torch.tensor([0, *lengths]).cumsum(0).tolist()
    by_field = [lengths[n * len(samples) : (n + 1) * len(samples)] for n in range(len(kinds))]
    assert batch.sparse.length_per_key_or_none() == [sum(each) for each in by_field]
    assert batch.sparse.stride() == len(samples) == batch.label.numel()
    if "weighted" in kinds:
        torch.testing.assert_close(batch.sparse.weights(), torch.tensor(weights, dtype=torch.float32))
    else:
        assert batch.sparse.weights_or_none() is None
    torch.testing.assert_close(batch.dense, torch.tensor([sample.dense for sample in samples]).reshape(-1, 2))
    assert batch.label.tolist() == [sample.label for sample in samples]


@settings(max_examples=120, deadline=None)
@given(tables(), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4), st.integers(0, 9))
def test_gathers_slices_and_concatenations_equal_plain_loops(table, ends, first):
    kinds, poolings, samples, index = table
    schema, block = make_schema(kinds, poolings), make_block(kinds, samples)
    order = torch.tensor(index, dtype=torch.int64)
    batch = block.take(order).batch(schema, 99)
    check(batch, kinds, poolings, [samples[each] for each in index])
    assert batch.global_batch_size == 99
    slices = [slice(*(min(each, len(index)) for each in sorted(pair))) for pair in ends]
    for each, part in zip(slices, block.take_each(order, slices), strict=True):
        check(part.batch(schema, -1), kinds, poolings, [samples[at] for at in index[each]])
    everything = torch.arange(len(samples))
    whole = SampleBlock.concat([block.take(everything[:first]), block.take(everything[first:])]).batch(schema, -1)
    check(whole, kinds, poolings, samples)
    assert whole.global_batch_size == len(samples)


@pytest.mark.parametrize("resident", [False, True])
def test_batches_have_all_labels_and_the_weights_of_samples(tmp_path, resident):
    rows = 23
    schema = Schema.load(write_numbered(tmp_path, rows, 7, columns_of_samples=True))
    train = schema.split("train")
    fifth = np.where(np.arange(rows) % 3 == 2, np.nan, np.arange(rows) % 5 == 0)
    assert train.positives == (rows // 2, int(np.nansum(fifth)))
    assert train.weight == np.arange(rows).sum() / 2
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
