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
from random_problems.drawing import Problem, small_problem
from random_problems.training import batches_of, sharded_model, state_of

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
RULE = CowClip(r=0.5, zeta=1e-4)
ATTACH: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": lambda model: None,
    "cowclip": lambda model: attach_cowclip(model, RULE),
    "adam": lambda model: EmbeddingAdam(model, AdamConfig(lr=1e-2, l2=1e-3), RULE),
}
DIRECT = {
    "one lookup": small_problem(),
    "weights": small_problem(weighted=True),
    "mean": small_problem(pooling="mean"),
    "two lookups, other order": small_problem(pooling="mean,sum"),
    "by rows": small_problem(sharding="row_wise"),
    "by rows in a machine": small_problem(sharding="table_row_wise"),
    "several shardings, other order": small_problem(sharding="row_wise,table_wise"),
    "weights, several shardings": small_problem(sharding="row_wise,table_wise,table_row_wise", weighted=True),
    "empty bags": small_problem(idle=(1,), parts=2),
    "one sample": small_problem(batch=1),
}
STOCK = {
    "columns": small_problem(sharding="columns_of_one_rank"),
    "columns beside others": small_problem(sharding="columns_of_one_rank,table_wise"),
    "means by rows": small_problem(sharding="row_wise", pooling="mean"),
}
COPIES = {
    "copies": small_problem(sharding="data_parallel"),
    "copies beside others": small_problem(sharding="data_parallel,table_wise,row_wise"),
}


def train(case: Problem, attached: str, *, direct: bool) -> list[torch.Tensor]:
    """Trains and evaluates; returns the outputs of all forward passes and the tables."""
    model = sharded_model(case)
    if direct:
        look_up_directly(model)
    ATTACH[attached](model)
    results = []
    for (batch,) in batches_of(case):
        pooled = model.module.c0(batch.ids0).to_dict()
        model(batch)[0].backward()
        model.eval()
        with torch.no_grad():
            evaluated = model.module.c0(batch.ids0).to_dict()
        model.train()
        results += [each.detach().clone() for output in (pooled, evaluated) for each in output.values()]
    return [*results, *map(torch.from_numpy, state_of(model).values())]


# Data-parallel tables train under EmbeddingAdam only.
@pytest.mark.parametrize(
    ("name", "attached"),
    [*zip(DIRECT, cycle(ATTACH), strict=False), *((name, "adam") for name in [*STOCK, *COPIES])],
)
def test_bits_of_torchrecs_forward(name: str, attached: str) -> None:
    case = (DIRECT | STOCK | COPIES)[name]
    for got, expected in zip(train(case, attached, direct=True), train(case, attached, direct=False), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", [*DIRECT, *COPIES, *STOCK])
def test_nothing_is_exchanged_after_the_first_forward(name: str) -> None:
    case = (DIRECT | COPIES | STOCK)[name]
    model = sharded_model(case)
    look_up_directly(model)
    features = batches_of(case)[0][0].ids0
    first, second = model.module.c0(features), model.module.c0(features)
    assert isinstance(second, KeyedTensor) == (name not in STOCK)
    (collection,) = sharded_collections(model).values()
    assert second.keys() == collection._embedding_names == first.keys()
    assert second.length_per_key() == first.length_per_key()
