"""Bytes that the clip adds to the communication: none, except for column shards and data-parallel tables."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from collectives import Traffic
from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip
from process_groups import in_processes, process_group
from random_problems.drawing import small_problem
from random_problems.training import sharded_model, train_step

CASE = small_problem(steps=1)
FEATURES, ROWS, DIM = [each.features for each in CASE.collections[0].tables], (40, 7, 300), 8
RULE = CowClip(r=1.0, zeta=1e-3)
SHARDINGS = {
    "table- and row-wise": "table_wise,row_wise",
    "column-wise": "column_wise",
    "some column-wise": "column_wise,columns_of_one_rank,column_wise",
}
JOBS: dict[str, tuple[str, Callable[[torch.nn.Module], object]]] = {
    **{f"{name}, plain": (sharding, lambda model: None) for name, sharding in SHARDINGS.items()},
    **{f"{name}, clipped": (each, lambda model: attach_cowclip(model, RULE)) for name, each in SHARDINGS.items()},
    "data-parallel, clipped": ("data_parallel", lambda model: EmbeddingAdam(model, AdamConfig(), RULE)),
}


def _measure(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        found = {}
        for name, (sharding, attach) in JOBS.items():
            case = small_problem(sharding=sharding, world=2, steps=1)
            model = sharded_model(case)
            attach(model)
            with Traffic() as traffic:
                train_step(case, model, 0)
            found[name] = dict(traffic.sent)
        if rank == 0:
            (Path(folder) / "traffic.json").write_text(json.dumps(found))
        dist.barrier()


@pytest.fixture(scope="module")
def traffic() -> dict[str, Counter[str]]:
    with tempfile.TemporaryDirectory() as folder:
        in_processes(_measure, (folder,), 2)
        found = json.loads((Path(folder) / "traffic.json").read_text())
    return {name: Counter(sent) for name, sent in found.items()}


def added(traffic: dict[str, Counter[str]], kind: str) -> dict[str, int]:
    plain, clipped = traffic[f"{kind}, plain"], traffic[f"{kind}, clipped"]
    assert sum(plain.values()) > 0
    return {key: clipped[key] - plain[key] for key in clipped.keys() | plain.keys() if clipped[key] != plain[key]}


def ids_of(table: int, first: int = 0, end: int = CASE.batch) -> np.ndarray:
    (drawn,) = CASE.batches()[0]
    return np.concatenate([ids for name in FEATURES[table] for ids, _ in drawn[name][first:end]])


def test_unsharded_columns_add_nothing(traffic: dict[str, Counter[str]]) -> None:
    assert added(traffic, "table- and row-wise") == {}


def test_column_shards_add_two_float64_an_id(traffic: dict[str, Counter[str]]) -> None:
    """Sends squared norms of gradient and weight for every id, without waiting for the number of distinct rows."""
    assert added(traffic, "column-wise") == {"all_reduce": 16 * sum(len(ids_of(table)) for table in range(3))}


def test_unequal_ranks_add_two_float64_a_row(traffic: dict[str, Counter[str]]) -> None:
    """Only rank 1 has columns of table 1, so both ranks send the distinct rows of the others."""
    assert added(traffic, "some column-wise") == {"all_reduce": 16 * sum(len(np.unique(ids_of(t))) for t in (0, 2))}


def test_data_parallel_tables_exchange_the_rows_of_the_batch(traffic: dict[str, Counter[str]]) -> None:
    """Sends a row's offset, table, count and gradient in float64, padded to the rank with more rows; not the table."""
    rows = [sum(len(np.unique(ids_of(t, 16 * rank, 16 * rank + 16))) for t in range(3)) for rank in (0, 1)]
    sent = traffic["data-parallel, clipped"]
    assert {key: size for key, size in sent.items() if key != "all_gather"} == {}
    assert sent["all_gather"] == 8 + max(rows) * (3 + DIM) * 8 < 4 * sum(ROWS) * DIM
