"""Splits that are resident on the device: their size, and batches that the host does not wait for."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from cowrec.data_pipeline import Reader, resident_bytes
from cowrec.data_pipeline.dataset.sample_block import SampleBlock
from numbered_data import ids, make_reader, write_numbered


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    return write_numbered(tmp_path_factory.mktemp("numbered") / "data", 103, 20)


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
    with pytest.raises(ValueError, match=r"needs 1,236 bytes on cpu, 1,000 are available; stream it"):
        Reader(numbered, "train", batch_size=9, resident=True)


class ReadsOfTheDevice(TorchDispatchMode):
    """Counts operators whose result, or whose size of the result, the host takes from a tensor's values."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        masked = name.startswith("index") and any(
            each is not None and each.dtype in (torch.bool, torch.uint8)
            for each in (args[1] if isinstance(args[1], list) else [args[1]])
            if not isinstance(each, int)
        )
        sized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        named = name in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal", "bincount")
        self.count += masked or sized or named
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("lists", [False, True])
def test_batches_of_a_resident_split_read_nothing_from_the_device(tmp_path, monkeypatch, lists):
    """List fields need one read a window, for the numbers of values of all its batches."""
    write_numbered(tmp_path, 50, 7, lists=lists)
    reader = make_reader(tmp_path, True, batch_size=4, shuffle=True, window_rows=20, resident=True)
    windows, totals, read = len(reader._windows(0, 0)), SampleBlock._totals, []

    def counted(*arguments):
        with _disable_current_modes():
            read.append(totals(*arguments))
        return read[-1]

    monkeypatch.setattr(SampleBlock, "_totals", counted)
    with ReadsOfTheDevice() as reads:
        batches = list(reader._batches(reader._of_epoch(0), reader._resident(0, 0), 0))
    assert len(batches) == len(reader)
    assert reads.count == 0
    assert len(read) == (windows if lists else 0)
    with ReadsOfTheDevice() as reads:
        reader._resident_block.take(torch.arange(3))
    assert reads.count == (2 if lists else 0), "one a list field without totals"


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
