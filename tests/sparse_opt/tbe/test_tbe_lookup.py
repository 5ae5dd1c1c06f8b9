"""Private attributes of TorchRec, FBGEMM and torch that sparse_opt/tbe/ relies on."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from cowrec.sparse_opt import AdamConfig, EmbeddingAdam
from cowrec.sparse_opt.lookups.backward import grad_scalers_in_use
from cowrec.sparse_opt.tbe.collection import leave_ddp
from cowrec.sparse_opt.tbe.inventory import ModelInventory
from random_problems.drawing import small_problem
from random_problems.training import sharded_model
from refusal import refused

pytest_plugins = ["one_group"]


@pytest.mark.usefixtures("group")
def test_replicated_tables() -> None:
    mixed = sharded_model(small_problem(sharding="data_parallel,table_wise,data_parallel"))
    inventory = ModelInventory(mixed)
    assert {name for name, table in inventory.tables.items() if table.is_replicated} == {"t0", "t2"}
    lookups = inventory.lookups
    assert not inventory.unclippable
    ((copies),) = [lookup for lookup in lookups if lookup.is_replicated]
    assert copies.is_plain_sgd
    assert copies.feature_table == [0, 1, 1]
    (collection,) = inventory.collections.values()
    wrapped = [isinstance(lookup, DistributedDataParallel) for lookup in collection._lookups]
    assert sum(wrapped) == 1
    others = [lookup.module for lookup in lookups if lookup is not copies]
    for kernels, left in ((others, wrapped), ([copies.module], [False, False])):
        rejoin = leave_ddp(collection, kernels)
        assert [isinstance(lookup, DistributedDataParallel) for lookup in collection._lookups] == left
        rejoin()
        assert [isinstance(lookup, DistributedDataParallel) for lookup in collection._lookups] == wrapped


class OwnScaler(GradScaler):
    pass


def test_scalers_that_have_scaled_a_loss_are_found() -> None:
    gc.collect()  # scalers of other tests
    unused, disabled = GradScaler("cpu"), GradScaler("cpu", enabled=False)
    disabled.scale(torch.ones(()))
    assert grad_scalers_in_use() == []
    own = OwnScaler("cpu")
    for scaler in (unused, own):
        scaler.scale(torch.ones(()))
    assert {*grad_scalers_in_use()} == {unused, own}


@pytest.mark.usefixtures("group")
def test_tables_as_dtensors_are_refused_by_optimizers() -> None:
    """Their state would be saved empty, and loaded so without a word."""
    env = ShardingEnv(1, 0, torch.distributed.group.WORLD, output_dtensor=True)
    sharder: Any = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
    table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])
    model = nn.Sequential(EmbeddingBagCollection([table], device=torch.device("meta")))
    kinds = {"t": table_wise(rank=0, compute_kernel="fused")}
    plan = construct_module_sharding_plan(model[0], kinds, sharder=sharder, device_type="cpu")
    cpu = torch.device("cpu")
    sharded = DistributedModelParallel(model, env, cpu, ShardingPlan(plan={"0": plan}), sharders=[sharder])
    refused("table .*t' is given out as a DTensor, .*; leave output_dtensor out", EmbeddingAdam, sharded, AdamConfig())
