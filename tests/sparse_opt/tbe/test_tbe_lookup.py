"""Private attributes of TorchRec, FBGEMM and torch that sparse_opt/tbe/lookup.py and discovery.py rely on.

Tested with torch 2.13, torchrec 1.8.0 and fbgemm 1.8.0, and with torch 2.11, torchrec 1.6.1 and fbgemm 1.6.0.
"""

import gc

import pytest
import torch
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from cowrec.sparse_opt.tbe.discovery import (
    find_lookups,
    grad_scalers_in_use,
    leave_ddp,
    replicated_tables,
    sharded_collections,
)
from random_problems.drawing import small_problem
from random_problems.training import sharded_model

pytest_plugins = ["one_group"]


@pytest.mark.usefixtures("group")
def test_replicated_tables() -> None:
    mixed = sharded_model(small_problem(sharding="data_parallel,table_wise,data_parallel"))
    assert replicated_tables(mixed) == {"t0", "t2"}
    lookups, refusals = find_lookups(mixed)
    assert not refusals
    ((copies),) = [lookup for lookup in lookups if lookup.is_replicated]
    assert copies.is_plain_sgd
    assert copies.feature_table == [0, 1, 1]
    (collection,) = sharded_collections(mixed).values()
    wrapped = list(collection._lookups)
    rejoin = leave_ddp(collection)
    assert not any(isinstance(each, DistributedDataParallel) for each in collection._lookups)
    rejoin()
    assert collection._lookups == wrapped


class OwnScaler(GradScaler):
    pass


def test_scalers_that_have_scaled_a_loss_are_found() -> None:
    gc.collect()  # scalers of other tests
    unused, disabled = GradScaler("cpu"), GradScaler("cpu", enabled=False)
    disabled.scale(torch.ones(()))
    assert grad_scalers_in_use() == []
    own = OwnScaler("cpu")
    for each in (unused, own):
        each.scale(torch.ones(()))
    assert {*grad_scalers_in_use()} == {unused, own}
