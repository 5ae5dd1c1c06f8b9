"""Reading by several processes that exchange samples, against readers that load all shards themselves.

test_reader.py compares those with the reader of one process.
"""

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pyarrow.parquet as pq
import pytest
import torch

from cowrec.data_pipeline import Reader
from cowrec.data_pipeline.dataset.block_bytes import packed, unpacked
from cowrec.data_pipeline.dataset.schema import Schema
from cowrec.data_pipeline.dataset.shards import load_shards, shard_path
from cowrec.data_pipeline.reading import reader as reader_module
from cowrec.data_pipeline.reading.exchange import Exchange
from cowrec.trainer.runtime.gloo_exchange import exchange_between
from cowrec.trainer.runtime.processes import Process
from numbered_data import make_reader, write_numbered
from process_groups import SECONDS_TO_WAIT, in_processes, process_group, start_in_processes

ROWS, SHARD_ROWS = 103, 8


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """13 shards with lists, weights, two labels and sample weights."""
    return write_numbered(
        tmp_path_factory.mktemp("shared") / "data", ROWS, SHARD_ROWS, lists=True, columns_of_samples=True
    )


@contextmanager
def exchange_of(rank, world_size, folder, seconds=SECONDS_TO_WAIT) -> Iterator[Exchange]:
    with process_group(rank, world_size, str(folder)):
        process = Process(rank, world_size, world_size, False, torch.device("cpu"), timedelta(seconds=seconds))
        with exchange_between(process) as exchange:
            assert exchange
            yield exchange


def content(batch):
    """Everything in a batch."""
    sparse = batch.sparse
    tensors = [sparse.values(), sparse.lengths(), sparse.weights_or_none(), batch.time, batch.true_logit, batch.weight]
    tensors += [batch.dense, batch.label]
    numbers = [None if each is None else (each.dtype, each.shape, each.numpy().tobytes()) for each in tensors]
    return numbers, sparse.keys(), sparse.length_per_key(), batch.global_batch_size, batch.share


def same(one, other):
    return [content(each) for each in one] == [content(each) for each in other]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_block_survives_as_bytes(tmp_path, weighted):
    write_numbered(tmp_path, 20, 7, lists=weighted, columns_of_samples=weighted)
    schema = Schema.load(tmp_path).of_batches()
    block = load_shards(tmp_path, schema, "train", [0, 2])
    for samples in (0, 1, len(block)):
        taken = block.take(torch.arange(samples))
        received = unpacked(packed(taken), schema, samples)
        assert content(received.batch(schema, samples)) == content(taken.batch(schema, samples))


def drawn_options(rng):
    batch_size = rng.randint(1, ROWS)
    return {
        "batch_size": batch_size,
        "window_rows": rng.randint(1, ROWS),
        "shuffle": rng.random() < 0.7,
        "keyed": rng.random() < 0.3,
        "drop_last": rng.random() < 0.5,
        "passes": rng.choice((1, 1, 2, 3)),
        "first_batches": [rng.randint(1, 20) for _ in range(rng.choice((0, 2)))],
        "rows": range(rng.randint(0, 20), ROWS - rng.randint(0, 20)),
        "seed": rng.randint(0, 9),
    }


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.thorough)])
def test_any_number_of_processes_reads_the_same_bits(numbered, tmp_path, world_size, pytestconfig):
    """Drawn batches, windows, ramps, passes and ranges; from the start of an epoch and from within it."""
    cases = 60 if pytestconfig.getoption("--thorough") else 12
    in_processes(read_drawn, (world_size, tmp_path, numbered, cases), world_size)


def read_drawn(rank, world_size, folder, data, cases):
    rng = random.Random(world_size)
    with exchange_of(rank, world_size, folder) as exchange:
        for _ in range(cases):
            options = drawn_options(rng) | {"rank": rank, "world_size": world_size}
            shared, alone = (make_reader(data, **options, exchange=each) for each in (exchange, None))
            torch.distributed.barrier()  # all readers are keyed, or none
            for epoch in (0, rng.randint(1, 5)):
                step = rng.randint(0, alone.steps(epoch))
                assert same(shared.epoch(epoch, step), alone.epoch(epoch, step)), (options, epoch, step)


def test_more_processes_than_shards_and_samples(tmp_path):
    write_numbered(tmp_path / "data", 2, 1, lists=True)
    in_processes(read_few, (4, tmp_path, tmp_path / "data"), 4)


def read_few(rank, world_size, folder, data):
    with exchange_of(rank, world_size, folder) as exchange:
        options = {"batch_size": 2, "window_rows": 1, "shuffle": True, "rank": rank, "world_size": world_size}
        assert same(
            Reader(data, "train", **options, exchange=exchange).epoch(1), Reader(data, "train", **options).epoch(1)
        )


def test_each_process_loads_its_shards_only(numbered, tmp_path):
    in_processes(record_loads, (3, tmp_path, numbered), 3)
    loaded = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(3)]
    for epoch in ("0", "1"):
        by_rank = [each[epoch] for each in loaded]
        assert sorted(map(len, by_rank)) == [4, 4, 5]
        assert sorted(number for each in by_rank for number in each) == [*range(13)]


def record_loads(rank, world_size, folder, data):
    loaded = {0: [], 1: []}
    original = reader_module.load_shards
    with exchange_of(rank, world_size, folder) as exchange, pytest.MonkeyPatch.context() as patch:
        for epoch, numbers in loaded.items():
            patch.setattr(
                reader_module, "load_shards", lambda *args, numbers=numbers: numbers.extend(args[3]) or original(*args)
            )
            torch.distributed.barrier()  # no process answers for the epoch before
            options = {"batch_size": 10, "window_rows": 30, "shuffle": True, "rank": rank, "world_size": world_size}
            assert len(list(Reader(data, "train", **options, exchange=exchange).epoch(epoch))) == 11
            torch.distributed.barrier()
        (folder / f"rank{rank}").write_text(json.dumps(loaded))


def test_an_epoch_closed_early_in_one_process_disturbs_neither_the_others_nor_the_next(numbered, tmp_path):
    in_processes(close_early, (3, tmp_path, numbered), 3)


def close_early(rank, world_size, folder, data):
    """Rank 0 leaves epoch 0 after a batch, rank 1 later; none waits for another one before the next epoch."""
    with exchange_of(rank, world_size, folder) as exchange:
        options = {"batch_size": 4, "window_rows": 10, "shuffle": True, "rank": rank, "world_size": world_size}
        shared, alone = (Reader(data, "train", **options, exchange=each) for each in (exchange, None))
        left = shared.epoch(0)
        for _ in range((1, 9, len(shared))[rank]):
            next(left)
        if rank < 2:
            left.close()
        unfinished = shared.epoch(1)
        next(unfinished)
        assert same(shared.epoch(2), alone.epoch(2)), "beside an epoch that is neither read nor closed"
        assert same(shared.epoch(0, 5), alone.epoch(0, 5))
        unfinished.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_or_hangs_ends_the_others(numbered, tmp_path, end):
    """A hung one after the timeout, of 20 seconds here."""
    processes = start_in_processes(lose_a_process, [(3, tmp_path, numbered, end)] * 3)
    try:
        for process in processes[:2]:
            process.join(SECONDS_TO_WAIT)
            assert process.exitcode == 7
    finally:
        for process in processes:
            process.kill()
            process.join()


def lose_a_process(rank, world_size, folder, data, end):
    with exchange_of(rank, world_size, folder, seconds=20) as exchange:
        options = {"batch_size": 4, "window_rows": 10, "shuffle": True, "rank": rank, "world_size": world_size}
        batches = Reader(data, "train", **options, exchange=exchange).epoch(0)
        next(batches)
        torch.distributed.barrier()
        if rank == 2:
            os.kill(os.getpid(), end)
        with pytest.raises(RuntimeError, match=r"rank \d did not send its samples"):
            list(batches)
        os._exit(7)


def test_every_process_reports_a_damaged_shard(numbered, tmp_path):
    data = tmp_path / "data"
    write_numbered(data, ROWS, SHARD_ROWS)
    damaged = shard_path(data, "train", 6)
    pq.write_table(pq.read_table(damaged).slice(0, 3), damaged)
    processes = start_in_processes(read_damaged, [(3, tmp_path, data)] * 3)
    try:
        for process in processes:
            process.join(SECONDS_TO_WAIT)
        assert [each.exitcode for each in processes] == [7, 7, 7]
    finally:
        for process in processes:
            process.kill()
            process.join()


def read_damaged(rank, world_size, folder, data):
    with exchange_of(rank, world_size, folder) as exchange:
        options = {"batch_size": 10, "window_rows": 30, "rank": rank, "world_size": world_size}
        with pytest.raises(ValueError, match=r"train/00006.parquet has 3 rows, schema.json has 8"):
            list(Reader(data, "train", **options, exchange=exchange).epoch(0))
        os._exit(7)
