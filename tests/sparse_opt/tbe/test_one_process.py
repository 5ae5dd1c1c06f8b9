"""Direct lookups in one process: outputs, gradients and trained tables have the bits of TorchRec's forward."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip
from cowrec.sparse_opt.tbe.collection import look_up_directly
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


def train(case: Problem, attached: str, *, direct: bool, ids: torch.dtype = torch.int64) -> tuple[list[Tensor], Any]:
    """Trains and evaluates; returns the outputs of all passes, the tables, and the last output as it came."""
    model = sharded_model(case)
    if direct:
        look_up_directly(model)
    ATTACH[attached](model)
    results = []
    for (batch,) in batches_of(case):
        keyed = batch.ids0
        lengths, weights = keyed.lengths(), keyed.weights_or_none()
        batch.ids0 = KeyedJaggedTensor(keyed.keys(), keyed.values().to(ids), weights, lengths)
        pooled = model.module.c0(batch.ids0).to_dict()
        model(batch)[0].backward()
        model.eval()
        with torch.no_grad():
            last = model.module.c0(batch.ids0)
        model.train()
        results += [tensor.detach().clone() for output in (pooled, last.to_dict()) for tensor in output.values()]
    return [*results, *map(torch.from_numpy, state_of(model).values())], last


# Data-parallel tables train under EmbeddingAdam only.
@pytest.mark.parametrize(
    ("name", "attached"),
    [*zip(DIRECT, cycle(ATTACH), strict=False), *((name, "adam") for name in [*STOCK, *COPIES])],
)
def test_bits_of_torchrecs_forward(name: str, attached: str) -> None:
    """And nothing is exchanged, so that there is no output to wait for."""
    case = (DIRECT | STOCK | COPIES)[name]
    (results, last), (expected, awaited) = (train(case, attached, direct=direct) for direct in (True, False))
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    assert isinstance(last, KeyedTensor) == (name not in STOCK)
    assert last.keys() == awaited.keys()
    assert last.length_per_key() == awaited.length_per_key()
    assert not isinstance(awaited, KeyedTensor)


@pytest.mark.parametrize("attached", ATTACH)
def test_ids_of_32_bits(attached: str) -> None:
    """They train alike, though TorchRec's forward would convert them to 64 bits first."""
    case = DIRECT["weights"]
    (results, _), (expected, _) = (
        train(case, attached, direct=True, ids=dtype) for dtype in (torch.int32, torch.int64)
    )
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
