"""The reader: content and order of epochs, permutations of windows, slices of ranks, resident splits, damaged files."""

import json
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline import Reader, Schema, resident_bytes
from cowrec.data_pipeline.dataset.shards import read_columns
from cowrec.data_pipeline.reading import reader as reading
from cowrec.data_pipeline.reading.order import Window, epoch_windows
from numbered_data import flat, ids, make_reader, write_numbered
from refusal import refused


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    return write_numbered(tmp_path_factory.mktemp("numbered") / "data", 103, 20)


def sizes_by_loop(left, *, batch_size, drop_last=False, **_):
    sizes = []
    while left:
        size = min(batch_size, left)
        if drop_last and size < batch_size:
            break
        sizes.append(size)
        left -= size
    return sizes


def test_epochs_and_seeds_differ_and_repeat(numbered):
    def order(seed, epoch, keyed):
        return flat(ids(make_reader(numbered, keyed, batch_size=10, shuffle=True, seed=seed), epoch))

    assert [order(0, 0, keyed) for keyed in (False, True)] == [order(0, 0, keyed) for keyed in (False, True)]
    orders = {tuple(order(seed, epoch, keyed)) for seed in range(3) for epoch in range(3) for keyed in (False, True)}
    assert len(orders) == 18


def test_the_order_of_a_reader_for_the_cpu_is_numpys(numbered):
    """Recorded results depend on it."""
    served = ids(Reader(numbered, "train", batch_size=103, shuffle=True, seed=5, window_rows=200), 2)[0]
    shards, samples = (
        np.random.Generator(np.random.Philox(np.random.SeedSequence((5, 2, stream)))).permutation(size)
        for stream, size in ((0, 6), (1, 103))
    )
    stored = np.concatenate([np.arange(20 * shard, min(20 * shard + 20, 103)) for shard in shards])
    assert served == stored[samples].tolist()


def test_shards_are_shuffled_and_mixed_within_a_window(numbered):
    served = flat(ids(Reader(numbered, "train", batch_size=103, shuffle=True, seed=1, window_rows=40)))
    window = epoch_windows([20] * 5 + [3], 40, shuffle=True, seed=1, epoch=0)[0]
    assert window.shards != tuple(range(len(window.shards)))
    assert {row // 20 for row in served[: window.samples]} == set(window.shards)
    assert len({row // 20 for row in served[:15]}) > 1


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    world_size=st.integers(1, 3),
    epoch=st.integers(0, 2),
    batch_size=st.integers(1, 120),
    window_rows=st.integers(1, 120),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    keyed=st.booleans(),
    drop_last=st.booleans(),
    resident=st.booleans(),
    lists=st.booleans(),
    data=st.data(),
)
def test_an_epoch_is_one_permutation_of_its_rows_for_any_ranks_and_from_any_step(
    tmp_path_factory, sizes, world_size, epoch, data, resident, lists, **options
):
    """Shards are numbered samples of uneven sizes, so that the ids of a range of rows are the range.

    Ranks have contiguous slices of the global batches that differ by at most one sample.
    """
    total = sum(sizes)
    folder = write_numbered(tmp_path_factory.mktemp("uneven") / "data", total, 1, sizes=sizes, lists=lists)
    rows = range(*sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total)))))
    options |= {"rows": rows}
    reader = make_reader(folder, **options)
    expected, served = ids(reader, epoch), flat(ids(reader, epoch))
    assert [len(batch) for batch in expected] == sizes_by_loop(len(rows), **options)
    assert (reader.num_rows, len(reader)) == (len(rows), len(expected))
    counts_before = [reader.samples_before(step) for step in range(len(expected) + 1)]
    assert counts_before == [len(flat(expected[:step])) for step in range(len(expected) + 1)]
    if not options["shuffle"]:
        assert served == list(rows)[: len(served)]
    elif len(served) == len(rows):
        assert sorted(served) == list(rows)
    assert len(set(served)) == len(served)
    step = data.draw(st.integers(0, len(expected)))
    parts = [
        list(make_reader(folder, rank=rank, world_size=world_size, resident=resident, **options).epoch(epoch, step))
        for rank in range(world_size)
    ]
    assert all(len(part) == len(expected) - step for part in parts)
    for served, *batches in zip(expected[step:], *parts, strict=True):
        known = [batch.sparse.length_per_key_or_none() for batch in batches]  # TorchRec would compute what is missing
        found = [batch.sparse["id"].values().tolist() for batch in batches]
        assert flat(found) == served
        assert max(map(len, found)) - min(map(len, found)) <= 1
        assert {batch.global_batch_size for batch in batches} == {len(served)}
        for batch, own, counts in zip(batches, found, known, strict=True):
            assert torch.equal(batch.dense, torch.tensor(own, dtype=torch.float32).reshape(-1, 1))
            assert batch.label.tolist() == [row % 2 for row in own]
            sparse, bags = batch.sparse, flat([row] * (row % 3) for row in own)
            lengths = [1] * len(own) + [row % 3 for row in own] * 2 * lists
            assert sparse.values().tolist() == own + bags * 2 * lists
            assert sparse.lengths().tolist() == lengths
            assert sparse.offsets().tolist() == torch.tensor([0, *lengths]).cumsum(0).tolist()
            assert sparse.values().dtype == sparse.lengths().dtype == torch.int32
            assert counts == [len(own), *[len(bags)] * 2 * lists]
            assert sparse.stride() == len(own)
            # If another field is weighted, mean pooling is in the weights.
            weights = [1.0] * len(own) + [1 / (row % 3) for row in bags] + bags
            assert (sparse.weights().tolist() if lists else sparse.weights_or_none()) == (weights if lists else None)


def test_a_resumed_epoch_reads_only_the_shards_it_needs(numbered, monkeypatch):
    loaded, original = [], reading.load_shards
    monkeypatch.setattr(reading, "load_shards", lambda *args: loaded.append(args[3]) or original(*args))
    ids(Reader(numbered, "train", batch_size=10, window_rows=20), 0, 8)
    assert loaded == [(4,), (5,)]


def test_an_empty_split_is_an_empty_epoch(numbered):
    for resident in (False, True):
        reader = Reader(numbered, "test", batch_size=4, resident=resident)
        assert len(reader) == 0
        assert ids(reader) == []


def test_unlabelled_samples_have_nan_labels(tmp_path):
    write_numbered(tmp_path, 5, 5, labelled=False)
    reader = Reader(tmp_path, "train", batch_size=5)
    assert not reader.schema.split("train").labelled
    assert next(reader.epoch(0)).label.isnan().all()


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("cowrec-reader")]


def test_an_abandoned_epoch_leaves_no_thread(numbered):
    batches = Reader(numbered, "train", batch_size=3, window_rows=20).epoch(0)
    next(batches)
    assert reader_threads()
    batches.close()
    assert not reader_threads()
    batches = Reader(numbered, "train", batch_size=3, window_rows=20).epoch(0)
    next(batches)
    del batches
    assert not reader_threads()


def test_an_exception_in_the_thread_reaches_the_consumer(tmp_path):
    write_numbered(tmp_path, 100, 10)
    (tmp_path / "train" / "00007.parquet").unlink()
    batches = Reader(tmp_path, "train", batch_size=10, window_rows=10).epoch(0)
    served = []
    refused(r"00007\.parquet is missing", served.extend, batches)
    assert len(served) == 7
    assert not reader_threads()


@pytest.mark.parametrize("lists", [False, True])
def test_a_data_set_that_is_replaced_while_it_is_read_is_refused(tmp_path, lists):
    """By one whose ids have other meanings, and that would be read without an error where its columns are the same."""
    one = write_numbered(tmp_path / "one", 40, 10)
    reader = Reader(one, "train", batch_size=10, window_rows=10)
    assert len(list(reader.epoch(0))) == 4
    one.rename(tmp_path / "old")
    other = write_numbered(tmp_path / "other", 50, 10, lists=lists)
    other.rename(one)
    refused(f"{one} was replaced by another data set since this run began", list, reader.epoch(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 1, "rank": 2, "world_size": 2}, "rank must be in"),
        ({"batch_size": 1, "rows": range(104)}, "rows must be a range within the 103 samples of the train split"),
    ],
)
def test_invalid_arguments_are_named(numbered, arguments, message):
    refused(message, Reader, numbered, "train", **arguments)
    refused("no split 'valid'", Reader, numbered, "valid", batch_size=10)


def replaced(name, values):
    return lambda table: table.set_column(table.schema.get_field_index(name), name, values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("id", pa.array([0, 1, -1, 2, 3, 4], pa.int32())), r"column 'id': id -1 is outside \[0, 8\)"),
        (replaced("pair", pa.array([[8]] + [[]] * 5, pa.list_(pa.int32()))), r"column 'pair': id 8 is outside"),
        (replaced("id", pa.array([0] * 6, pa.int64())), "column 'id': type int64, must be int32"),
        (replaced("list", pa.array([[None]] * 6, pa.list_(pa.int32()))), "column 'list': "),
        (replaced("label", pa.array([{"a": 1}] * 6)), "column 'label': type struct"),
        (replaced("number", pa.array([None] + [0.0] * 5, pa.float32())), "column 'number': 1 values are null"),
        (replaced("pair__weight", pa.array([[1.0]] * 6, pa.list_(pa.float32()))), "list of weights is not as long"),
        (lambda table: table.drop_columns(["number"]), "has no column 'number'"),
        (lambda table: table.slice(1), "has 5 rows, schema.json has 6"),
    ],
)
def test_a_shard_unlike_the_schema_is_refused(tmp_path, change, message):
    write_numbered(tmp_path, 6, 6, lists=True)
    path = tmp_path / "train" / "00000.parquet"
    pq.write_table(change(pq.read_table(path)), path)
    if "rows" in message:  # also where columns are read by themselves
        refused(message, read_columns, tmp_path, Schema.load(tmp_path), "train", ["label"])
    refused(rf"00000\.parquet.*{message}", next, Reader(tmp_path, "train", batch_size=2).epoch(0))


def test_a_folder_without_a_valid_schema_is_refused(tmp_path):
    refused("not a prepared data set", Reader, tmp_path, "train", batch_size=2)
    write_numbered(tmp_path, 4, 4)
    path = tmp_path / "schema.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format_version": 99}))
    refused(r"format version 99, not 2", Reader, tmp_path, "train", batch_size=2)
    path.write_text(json.dumps(content)[:-20])
    refused("cannot be read", Reader, tmp_path, "train", batch_size=2)
    del content["sparse"]
    path.write_text(json.dumps(content))
    refused("does not describe a data set", Reader, tmp_path, "train", batch_size=2)


def test_the_bytes_of_a_resident_split_are_counted_exactly(tmp_path):
    write_numbered(tmp_path, 50, 7, lists=True)
    reader = Reader(tmp_path, "train", batch_size=9, resident=True)
    block = reader._resident_block
    tensors = [block.dense, block.label, block.ids]
    for bags in block.bags.values():
        tensors += [bags.values, bags.offsets, *([] if bags.weights is None else [bags.weights])]
    assert resident_bytes(reader.schema) == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_a_split_that_does_not_fit_is_refused_with_both_sizes(numbered, monkeypatch):
    monkeypatch.setattr("cowrec.data_pipeline.reading.reader.available_bytes", lambda device: 1000)
    message = 'needs 1,236 bytes on cpu, 1,000 are available; train with data.resident = "no"'
    refused(message, Reader, numbered, "train", batch_size=9, resident=True)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_within_the_limits_of_a_container(tmp_path, version):
    """A group without a limit has a number near 2^63 in version 1, "max" in 2; a container may not see its own path."""
    memory = tmp_path / "root" / "memory" if version == 1 else tmp_path / "root"
    if version == 1:
        limit, usage, pages, most = (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
            2**63 - 4096,
        )
    else:
        limit, usage, pages, most = "memory.max", "memory.current", "inactive_file", "max"
    unlimited = [2**63 - 4096 - 900] if version == 1 else []
    for folder, at_most in ((memory, most), (memory / "pod", 5000), (memory / "pod" / "a", 9000)):
        folder.mkdir(parents=True)
        for name, value in ((limit, at_most), (usage, 1000), ("memory.stat", f"cache 7\n{pages} 100")):
            (folder / name).write_text(f"{value}\n", encoding="ascii")
    groups = tmp_path / "cgroup"
    line = "4:memory,hugetlb:" if version == 1 else "0::"
    for path, expected in (("/pod/a", [8100, 4100]), ("/pod", [4100]), ("/docker/elsewhere", [])):
        groups.write_text(f"9:name=systemd:/\n{line}{path}\n", encoding="ascii")
        assert reading.bytes_within_limits(groups, tmp_path / "root") == expected + unlimited
    assert reading.bytes_within_limits(tmp_path / "absent") == []


def test_a_split_becomes_resident_later(numbered):
    reader = Reader(numbered, "train", batch_size=10, shuffle=True, window_rows=25)
    expected = ids(reader, 3)
    reader.make_resident()
    assert ids(reader, 3) == expected
    assert len(reader._resident_block) == 103


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("resident", [False, True])
def test_batches_on_a_gpu_equal_those_on_the_cpu(tmp_path, resident):
    write_numbered(tmp_path, 50, 7, lists=True)
    options = {"batch_size": 9, "shuffle": True, "window_rows": 15}
    here, there = make_reader(tmp_path, True, **options), Reader(tmp_path, "train", device="cuda", **options)
    if resident:
        there.make_resident()
    for mine, batch in zip(here.epoch(0), there.epoch(0), strict=True):
        assert batch.dense.is_cuda
        assert batch.sparse.values().is_cuda
        assert torch.equal(batch.sparse.values().cpu(), mine.sparse.values())
        assert torch.equal(batch.sparse.weights().cpu(), mine.sparse.weights())
        assert torch.equal(batch.label.cpu(), mine.label)


CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def splitmix64(start: int, count: int) -> list[int]:
    """Computes SplitMix64's outputs as published, on Python's unbounded integers."""
    outputs = []
    for position in range(count):
        state = (start + position * 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(state ^ (state >> 31))
    return outputs


def window(samples: int, *key: int) -> Window:
    return Window(0, (0,), samples, key or None)


def keyed(samples: int, *key: int) -> list[int]:
    return window(samples, *key).keyed_order(CPU).tolist()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 300), st.integers(0, 2**40), st.integers(0, 1000), st.integers(1, 1000))
def test_the_keyed_order_sorts_the_outputs_of_splitmix64(samples, seed, epoch, number):
    start = int(np.random.SeedSequence((seed, epoch, number)).generate_state(1, np.uint64)[0])
    keys = splitmix64(start, samples)
    signed = [key - (1 << 64) if key >> 63 else key for key in keys]
    assert keyed(samples, seed, epoch, number) == sorted(range(samples), key=signed.__getitem__)


def test_splitmix64_is_the_published_generator():
    """The first outputs for state 0 after a step, as in the Java and C programs of its authors."""
    assert splitmix64(0x9E3779B97F4A7C15, 2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_keyed_order_of_a_gpu_is_that_of_the_cpu():
    for samples in (1, 4097, 3_000_001):
        here, there = (window(samples, 5, 6, 7).keyed_order(torch.device(kind)) for kind in ("cpu", "cuda"))
        assert there.is_cuda
        assert torch.equal(there.cpu(), here)
