"""What the clip adds to the communication: nothing, but for column shards and data-parallel tables; in bytes.

The two processes also look column shards up in several lookups, which must not leave them waiting for each other.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip
from sharded_case import Case, gather_tables, process_group, sharded_model, train_step

CASE = Case(steps=1, max_ids=3)


class Traffic(TorchDispatchMode):
    """Bytes that this process gives to each kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.given: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            inputs = args[0] if "allreduce" in func.__name__ else args[1]
            tensors = [each for each in (inputs if isinstance(inputs, list) else [inputs]) if torch.is_tensor(each)]
            self.given[func.__name__.partition(".")[0]] += sum(each.numel() * each.element_size() for each in tensors)
        return func(*args, **(kwargs or {}))


def clip(model: torch.nn.Module) -> object:
    return attach_cowclip(model, CowClip(r=1.0, zeta=1e-3))


def adam(model: torch.nn.Module) -> object:
    return EmbeddingAdam(model, AdamConfig(), CowClip(r=1.0, zeta=1e-3))


def nothing(model: torch.nn.Module) -> object:
    return None


JOBS: dict[str, tuple[str, Callable[[torch.nn.Module], object]]] = {
    "table- and row-wise, plain": ("table_wise,row_wise", nothing),
    "table- and row-wise, clipped": ("table_wise,row_wise", clip),
    "column-wise, plain": ("column_wise", nothing),
    "column-wise, clipped": ("column_wise", clip),
    "some column-wise, plain": ("column_wise,columns_of_one_rank,column_wise", nothing),
    "some column-wise, clipped": ("column_wise,columns_of_one_rank,column_wise", clip),
    "data-parallel, clipped": ("data_parallel", adam),
}


def _measure(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with process_group(rank, 2, folder):
        found = {}
        for name, (sharding, attach) in JOBS.items():
            case = replace(CASE, sharding=sharding)
            model = sharded_model(case, case.draw()["tables"])
            attach(model)
            bags, targets = case.draw()["steps"][0]
            with Traffic() as traffic:
                train_step(case, model, bags, targets, rank * 16, rank * 16 + 16)
            found[name] = dict(traffic.given)
        _look_up_apart(rank)
        if rank == 0:
            (Path(folder) / "traffic.json").write_text(json.dumps(found))
        dist.barrier()


def _look_up_apart(rank: int) -> None:
    """Refused where rank 0 looks the sums 0 and 2 up first, but rank 1, which has no column of table 0, the mean 1."""
    apart = replace(CASE, pooling="sum,mean,sum")
    drawn = apart.draw()
    contrary = replace(apart, sharding="columns_of_one_rank,column_wise,column_wise")
    with pytest.raises(ValueError, match="'t1' and 't2' are sharded column-wise and looked up apart, on some ranks in"):
        clip(sharded_model(contrary, drawn["tables"]))
    tables = []
    for sharding in ("table_wise", "column_wise"):
        model = sharded_model(replace(apart, sharding=sharding), drawn["tables"])
        clip(model)
        train_step(apart, model, *drawn["steps"][0], rank * 16, rank * 16 + 16)
        tables.append(gather_tables(apart, model))
    for got, expected in zip(*tables, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.fixture(scope="module")
def traffic() -> dict[str, Counter[str]]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure, args=(folder,), nprocs=2)
        found = json.loads((Path(folder) / "traffic.json").read_text())
    return {name: Counter(given) for name, given in found.items()}


def added(traffic: dict[str, Counter[str]], kind: str) -> dict[str, int]:
    plain, clipped = traffic[f"{kind}, plain"], traffic[f"{kind}, clipped"]
    assert sum(plain.values()) > 0
    return {key: clipped[key] - plain[key] for key in clipped.keys() | plain.keys() if clipped[key] != plain[key]}


def ids_of(table: int, first: int = 0, end: int = CASE.batch) -> np.ndarray:
    bags, _ = CASE.draw()["steps"][0]
    return np.concatenate([ids for name in CASE.features[table] for ids, _ in bags[name][first:end]])


def test_whole_rows_add_nothing(traffic: dict[str, Counter[str]]) -> None:
    assert added(traffic, "table- and row-wise") == {}


def test_column_shards_add_two_float64_an_id(traffic: dict[str, Counter[str]]) -> None:
    """Squared norms of gradient and weight: without waiting for the number of distinct rows, for every id."""
    assert added(traffic, "column-wise") == {"allreduce_": 16 * sum(len(ids_of(table)) for table in range(3))}


def test_unlike_ranks_add_two_float64_a_row(traffic: dict[str, Counter[str]]) -> None:
    """Rank 1 alone has all columns of table 1, so both ranks count the rows of the others."""
    assert added(traffic, "some column-wise") == {"allreduce_": 16 * sum(len(np.unique(ids_of(t))) for t in (0, 2))}


def test_data_parallel_tables_exchange_their_touched_rows(traffic: dict[str, Counter[str]]) -> None:
    """A row's place, table, occurrences and gradient in float64, padded to the rank with more rows; not the table."""
    touched = [sum(len(np.unique(ids_of(t, 16 * rank, 16 * rank + 16))) for t in range(3)) for rank in (0, 1)]
    given = traffic["data-parallel, clipped"]
    assert {key: size for key, size in given.items() if key != "allgather_"} == {}
    assert given["allgather_"] == 8 + max(touched) * (3 + CASE.dim) * 8 < 4 * sum(CASE.rows) * CASE.dim
