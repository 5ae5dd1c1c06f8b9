"""What an inventory finds in a model: tables by name, their layout, lookups, and why a table cannot be clipped."""

import pytest
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from cowrec.sparse_opt.tbe.inventory import ModelInventory
from random_problems.drawing import small_problem
from random_problems.training import sharded_model
from refusal import refused

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")


def tower(**case: str) -> nn.Module:
    collection: nn.Module = sharded_model(small_problem(**case)).module.c0
    return collection


def test_tables_of_several_collections() -> None:
    """A name that two collections have gets their paths; a collection that two modules share is listed once."""
    user, item = tower(sharding="data_parallel,table_wise"), tower(sharding="columns_of_one_rank,row_wise")
    other = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "other", feature_names=["f"])])
    model = nn.ModuleDict({"user": user, "item": item, "again": nn.ModuleDict({"user": user}), "other": other})
    inventory = ModelInventory(model)
    assert list(inventory.collections) == ["user", "item"]
    assert list(inventory.called.values()) == [user, item]
    names = [f"{path}.t{number}" for path in ("user", "item") for number in range(3)]
    assert list(inventory.tables) == [*names, "other"]
    assert list(inventory.tables_of(item)) == names[3:]
    assert [name for name, table in inventory.tables.items() if table.is_replicated] == ["user.t0", "user.t2"]
    assert [name for name, table in inventory.tables.items() if table.column_ranks] == ["item.t0", "item.t2"]
    assert [name for name, table in inventory.tables.items() if not table.is_sharded] == ["other"]
    assert inventory.tables["other"].rows == 5
    assert inventory.unclippable.keys() == {"other"}
    assert "is not sharded; wrap the model" in inventory.unclippable["other"]
    held = [[shard.name for shard in lookup.shards] for lookup in inventory.lookups]
    assert sorted(map(sorted, held)) == [
        ["item.t0", "item.t0", "item.t2", "item.t2"],
        ["item.t1"],
        ["user.t0", "user.t2"],
        ["user.t1"],
    ]
    assert sorted(map(sorted, inventory.lookups_of_ranks()[0])) == [["t0", "t0", "t2", "t2"], ["t1"], ["t1"]]


def test_names_of_users() -> None:
    model = nn.ModuleDict({"user": tower(), "item": tower()})
    inventory = ModelInventory(model)
    assert inventory.named("exclude", ["t1", "item.t0"]) == {"user.t1": "t1", "item.t1": "t1", "item.t0": "item.t0"}
    message = "exclude names table 'user.t9', which the model does not have; did you mean 'user.t"
    refused(message, inventory.named, "exclude", ["user.t9"])


def test_paths_leave_wrappers_out() -> None:
    assert list(ModelInventory(sharded_model(small_problem())).collections) == ["c0"]
