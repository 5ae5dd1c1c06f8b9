"""What sparse_opt/lookups.py takes for granted of TorchRec and FBGEMM, which promise none of it.

Seen with torchrec 1.8.0 on fbgemm 1.8.0 and with torchrec 1.6.1 on fbgemm 1.6.0.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from cowrec.sparse_opt.lookups import (
    all_table_names,
    find_lookups,
    lookups_of_ranks,
    partly_spread_tables,
)
from cowrec.sparse_opt.row_state import sharded_like_weights
from sharded_case import Case, process_group, sharded_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nn.Module]:
    with process_group(0, 1, str(tmp_path_factory.mktemp("group"))):
        yield sharded_model(Case(), Case().draw()["tables"])


def test_geometry(model: nn.Module) -> None:
    lookups, refusals = find_lookups(model)
    assert not refusals
    assert all_table_names(model) == {"t0", "t1", "t2"}
    (lookup,) = lookups
    assert [(shard.name, shard.rows, shard.embedding_dim) for shard in lookup.shards] == [
        (f"t{t}", rows, Case().dim) for t, rows in enumerate(Case().rows)
    ]
    assert lookup.feature_table == [0, 1, 2, 2]
    assert lookup.column_offsets == [0, 8, 16, 24]
    assert lookup.is_plain_sgd
    assert not lookup.is_mean_pooled


def test_places(model: nn.Module) -> None:
    """Of one process; test_group_clip.py trains in two, where a rank has no table, or tables lie on both ranks."""
    (lookup,) = find_lookups(model)[0]
    assert lookups_of_ranks(model) == [[["t0", "t1", "t2"]]]
    assert (lookup.num_ranks, lookup.is_split) == (1, False)
    assert not partly_spread_tables(model)
    separate = sharded_model(Case(sharding="data_parallel"), Case().draw()["tables"])
    assert lookups_of_ranks(nn.ModuleList([model, separate])) == [[["t0", "t1", "t2"]]]
    assert lookups_of_ranks(nn.Linear(1, 1)) == []


def test_the_flat_weights_are_the_tables_memory(model: nn.Module) -> None:
    (lookup,) = find_lookups(model)[0]
    flat, tables = lookup.flat_weights(), Case().draw()["tables"]
    for t, table in enumerate(tables):
        assert torch.equal(lookup.view_of(flat, t), torch.from_numpy(table))
        assert lookup.view_of(flat, t).data_ptr() == lookup.module.split_embedding_weights()[t].data_ptr()


def test_row_state_is_cut_like_the_weights(model: nn.Module) -> None:
    (lookup,) = find_lookups(model)[0]
    state = torch.arange(lookup.flat_weights().numel(), dtype=torch.float32)
    sharded = sharded_like_weights([lookup.collection], [lookup], [state], torch.float32)
    assert sharded.keys() == {"t0", "t1", "t2"}
    for t, rows in enumerate(Case().rows):
        (shard,) = sharded[f"t{t}"].local_shards()
        assert shard.metadata.shard_sizes == [rows, Case().dim]
        assert torch.equal(shard.tensor, lookup.view_of(state, t))
        assert shard.tensor.data_ptr() == lookup.view_of(state, t).data_ptr()
