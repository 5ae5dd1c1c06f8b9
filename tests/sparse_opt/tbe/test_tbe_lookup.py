"""Private attributes of TorchRec and FBGEMM that sparse_opt/tbe/lookup.py and discovery.py rely on.

Tested with torchrec 1.8.0 on fbgemm 1.8.0 and with torchrec 1.6.1 on fbgemm 1.6.0.
"""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cowrec.sparse_opt.tbe.discovery import (
    all_table_names,
    column_split_tables,
    find_lookups,
    inconsistent_lookups,
    leave_ddp,
    lookups_of_ranks,
    replicated_tables,
    sharded_collections,
    tables_on_some_ranks,
)
from cowrec.sparse_opt.tbe.lookup import sharded_like_weights
from random_problems.drawing import small_problem
from random_problems.training import sharded_model

pytest_plugins = ["one_group"]
TABLES = small_problem().collections[0].tables


@pytest.fixture(scope="module")
def model(group: None) -> nn.Module:
    return sharded_model(small_problem())


def test_geometry(model: nn.Module) -> None:
    lookups, refusals = find_lookups(model)
    assert not refusals
    assert all_table_names(model) == {"t0", "t1", "t2"}
    (lookup,) = lookups
    assert [(shard.name, shard.rows, shard.embedding_dim) for shard in lookup.shards] == [
        (f"t{t}", each.rows, each.dim) for t, each in enumerate(TABLES)
    ]
    assert lookup.feature_table == [0, 1, 2, 2]
    assert lookup.is_plain_sgd
    assert not lookup.is_mean_pooled


def test_ranks(model: nn.Module) -> None:
    """Checks one process; the random problems train in two, where a rank has no table or both share a table."""
    (lookup,) = find_lookups(model)[0]
    assert lookups_of_ranks(model) == [[["t0", "t1", "t2"]]]
    assert (lookup.num_ranks, lookup.splits_rows) == (1, False)
    assert not tables_on_some_ranks(model)
    separate = sharded_model(small_problem(sharding="data_parallel"))
    assert lookups_of_ranks(nn.ModuleList([model, separate])) == [[["t0", "t1", "t2"]]]
    assert lookups_of_ranks(nn.Linear(1, 1)) == []


def test_the_flat_weights_are_the_tables_memory(model: nn.Module) -> None:
    (lookup,) = find_lookups(model)[0]
    flat, tables = lookup.flat_weights(), small_problem().initial()[0]
    for t, table in enumerate(tables):
        assert torch.equal(lookup.view_of(flat, t), torch.from_numpy(table))
        assert lookup.view_of(flat, t).data_ptr() == lookup.module.split_embedding_weights()[t].data_ptr()


def test_row_state_is_sharded_like_the_weights(model: nn.Module) -> None:
    (lookup,) = find_lookups(model)[0]
    state = torch.arange(lookup.flat_weights().numel(), dtype=torch.float32)
    sharded = sharded_like_weights(lookup.collection, [lookup], [state], torch.float32)
    assert sharded.keys() == {"embedding_bags.t0", "embedding_bags.t1", "embedding_bags.t2"}
    for t, each in enumerate(TABLES):
        (shard,) = sharded[f"embedding_bags.t{t}"].local_shards()
        assert shard.metadata.shard_sizes == [each.rows, each.dim]
        assert torch.equal(shard.tensor, lookup.view_of(state, t))
        assert shard.tensor.data_ptr() == lookup.view_of(state, t).data_ptr()


@pytest.mark.usefixtures("group")
def test_column_shards() -> None:
    model = sharded_model(small_problem(sharding="column_wise,table_wise,columns_of_one_rank"))
    assert column_split_tables(model) == {"t0": [(0, 0)], "t2": [(0, 0)]}
    complete, split = sorted(find_lookups(model)[0], key=lambda each: each.splits_columns)
    shards = [(shard.name, shard.first_column, shard.embedding_dim) for shard in split.shards]
    assert shards == [(name, first, 4) for name in ("t0", "t2") for first in (0, 4)]
    assert {shard.table_dim for shard in split.shards} == {8}
    assert not split.has_equal_partners
    assert not complete.splits_columns
    assert inconsistent_lookups(model) is None
    rows = [torch.arange(sum(s.rows for s in each.shards), dtype=torch.int32) for each in (complete, split)]
    last = sharded_like_weights(sharded_collections(model)["c0"], [complete, split], rows, torch.int32, per_row=True)
    (first,) = last["embedding_bags.t0"].local_shards()
    assert first.tensor.flatten().tolist() == list(range(40))
    assert first.metadata.shard_offsets == [0, 0]
    assert list(last["embedding_bags.t2"].size()) == [300, 1]
    assert list(last["embedding_bags.t1"].size()) == [7, 1]


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
