"""Direct lookups in one process: outputs, gradients and trained tables have the bits of TorchRec's forward.

Tested with torchrec 1.8.0 on fbgemm 1.8.0 and with torchrec 1.6.1 on fbgemm 1.6.0.
"""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedTensor

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip
from cowrec.sparse_opt.tbe.discovery import sharded_collections
from cowrec.sparse_opt.tbe.one_process import look_up_directly
from sharded_case import Case, batch_of, gather_tables, sharded_model

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
RULE = CowClip(r=0.5, zeta=1e-4)
ATTACH: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda model: None,
    "cowclip": lambda model: attach_cowclip(model, RULE),
    "adam": lambda model: EmbeddingAdam(model, AdamConfig(lr=1e-2, l2=1e-3), RULE),
}
DIRECT = {
    "one lookup": Case(),
    "weights": Case(weighted=True),
    "mean": Case(pooling="mean"),
    "two lookups, other order": Case(pooling="mean,sum"),
    "by rows": Case(sharding="row_wise"),
    "by rows in a machine": Case(sharding="table_row_wise"),
    "several shardings, other order": Case(sharding="row_wise,table_wise"),
    "weights, several shardings": Case(sharding="row_wise,table_wise,table_row_wise", weighted=True),
    "empty bags": Case(empty_half=True),
    "one sample": Case(batch=1),
}
STOCK = {
    "columns": Case(sharding="columns_of_one_rank"),
    "columns beside others": Case(sharding="columns_of_one_rank,table_wise"),
    "means by rows": Case(sharding="row_wise", pooling="mean"),
}
COPIES = {
    "copies": Case(sharding="data_parallel"),
    "copies beside others": Case(sharding="data_parallel,table_wise,row_wise"),
}


def train(case: Case, attached: str, *, direct: bool) -> list[torch.Tensor]:
    """Trains and evaluates; returns the outputs of all forward passes and the tables."""
    drawn = case.draw()
    model = sharded_model(case, drawn["tables"])
    if direct:
        look_up_directly(model)
    ATTACH[attached](model)
    results = []
    for bags, targets in drawn["steps"]:
        features = batch_of(case, bags, 0, case.batch)
        pooled = model.module["ebc"](features).to_dict()
        (sum((pooled[name] * torch.from_numpy(targets[name])).sum() for name in case.keys) / case.batch).backward()
        model.eval()
        with torch.no_grad():
            evaluated = model.module["ebc"](features).to_dict()
        model.train()
        results += [each.detach().clone() for output in (pooled, evaluated) for each in output.values()]
    return [*results, *map(torch.from_numpy, gather_tables(case, model))]


def assert_equal_bits(case: Case, attached: str) -> None:
    for got, expected in zip(train(case, attached, direct=True), train(case, attached, direct=False), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("name", "attached"), zip(DIRECT, cycle(ATTACH), strict=False))
def test_bits_of_torchrecs_forward(name: str, attached: str) -> None:
    assert_equal_bits(DIRECT[name], attached)


@pytest.mark.parametrize("name", STOCK)
def test_forwards_that_remain_torchrecs(name: str) -> None:
    assert_equal_bits(STOCK[name], "adam")


@pytest.mark.parametrize("name", COPIES)
def test_data_parallel_tables(name: str) -> None:
    """They train under EmbeddingAdam only."""
    assert_equal_bits(COPIES[name], "adam")


@pytest.mark.parametrize("name", [*DIRECT, *COPIES, *STOCK])
def test_nothing_is_exchanged_after_the_first_forward(name: str) -> None:
    case = (DIRECT | COPIES | STOCK)[name]
    drawn = case.draw()
    model = sharded_model(case, drawn["tables"])
    look_up_directly(model)
    features = batch_of(case, drawn["steps"][0][0], 0, case.batch)
    first = model.module["ebc"](features)
    second = model.module["ebc"](features)
    assert isinstance(second, KeyedTensor) == (name not in STOCK)
    (collection,) = sharded_collections(model).values()
    assert second.keys() == collection._embedding_names == first.keys()
    assert second.length_per_key() == first.length_per_key()
