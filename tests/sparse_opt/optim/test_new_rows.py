"""Rows of new ids: initial weights, batches translated ahead of their step, and TorchRec's managed collision."""

from collections import deque
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from scipy import stats
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import (
    AdamConfig,
    CowClip,
    EmbeddingAdam,
    IdTableConfig,
    IdTables,
    NewRows,
    RowInitializer,
    attach_cowclip,
)
from cowrec.sparse_opt.id_tables.kernels.slots import COOLDOWN
from cowrec.sparse_opt.optim.row_init import initial_rows
from process_groups import in_processes, process_group
from random_problems.drawing import small_problem
from random_problems.training import sharded_model
from refusal import refused

pytest_plugins = ["one_group", "streams_on_cpu"]
pytestmark = pytest.mark.usefixtures("group")
BATCHES, IDS, DIM = 40, 24, 4
CPU = torch.device("cpu")
Batch = tuple[KeyedJaggedTensor, NewRows]


class Task(nn.Module):
    """Mean over the samples of the squared distance of their embeddings to 1."""

    def __init__(self, name: str, rows: int) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=["f"])
        self.ebc = EmbeddingBagCollection([config], device=torch.device("meta"))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled = self.ebc(ids).values()
        return ((pooled - self.scale) ** 2).sum(1).mean(), pooled.detach()


class Training:
    """A model whose ids drift, so that rows are freed, given to other ids, and given back to expired ids."""

    def __init__(self, name: str = "t") -> None:
        torch.manual_seed(0)
        self.tables = IdTables({name: IdTableConfig(60, ("f",), expire_after=6)}, ["f"], max_segments=1)
        sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
        task = Task(name, self.tables.num_embeddings[name])
        kinds = {name: table_wise(rank=0, compute_kernel="fused")}
        plan = construct_module_sharding_plan(task.ebc, kinds, sharder=sharder, device_type="cpu")
        plan = ShardingPlan(plan={"ebc": plan})
        self.model = DistributedModelParallel(task, device=CPU, plan=plan, sharders=[sharder])
        adam = AdamConfig(lr=0.1, l2=1e-3, absent_rows="replay")
        self.adam = EmbeddingAdam(self.model, adam, CowClip(r=1.0, zeta=0.1))
        self.initializer = RowInitializer(self.model, self.adam, [name], columns=DIM, std=1.0, seed=0)
        self.dense = torch.optim.SGD(self.model.module.parameters(), 0.0)

    def translated(self) -> Iterator[Batch]:
        rng = np.random.default_rng(0)
        for number in range(BATCHES):
            ids = 2 + rng.integers(2 * number, 2 * number + 40, IDS)
            ids[:2] = 2 + number % 9  # expires and comes back
            rows, new_rows = self.tables.assign(ids, np.array([0, IDS]))
            lengths = torch.ones(IDS, dtype=torch.int64)
            yield KeyedJaggedTensor(["f"], torch.from_numpy(rows), lengths=lengths), new_rows

    def step(self, batch: Batch) -> None:
        self.initializer.reset(batch[1])
        self.model(batch[0])[0].backward()

    def weights(self) -> Tensor:
        (weight,) = (tensor for name, tensor in self.model.state_dict().items() if name.endswith(".weight"))
        return weight.local_shards()[0].tensor.clone()


def test_tables_that_cannot_be_reset_are_refused() -> None:
    """Their new ids would go on with the rows and moments of earlier ones."""
    training = Training("user_table")
    more: Any = {"columns": DIM, "std": 1.0, "seed": 0}
    message = "tables names table 'user_tabel', which the model does not have; did you mean 'user_table'?"
    refused(message, RowInitializer, training.model, training.adam, ["user_tabel"], **more)
    one, beyond = np.zeros(1, np.int64), np.full(1, training.tables.num_embeddings["user_table"])
    refused(f"has {beyond[0]} rows, .* got row {beyond[0]}", training.initializer.reset, NewRows(one, beyond, one, one))
    model = sharded_model(small_problem(sharding="data_parallel"))
    refused(
        "table 't0' is data-parallel, and the rows of new ids would keep", RowInitializer, model, None, ["t0"], **more
    )
    RowInitializer(model, EmbeddingAdam(model, AdamConfig()), ["t0"], **more)
    unsharded = EmbeddingBagCollection([EmbeddingBagConfig(name="t0", num_embeddings=9, embedding_dim=DIM)])
    refused("'t0' cannot be reset .*DistributedModelParallel first", RowInitializer, unsharded, None, ["t0"], **more)
    model = sharded_model(small_problem(sequence=True))
    model.module.c0._use_index_dedup = True  # of EmbeddingCollectionSharder, whose operator exists on CUDA alone
    refused("'t0' cannot be reset .*without use_index_dedup", RowInitializer, model, None, ["t0"], **more)


NEW = NewRows(*np.array([[0], [5], [77], [0]]))
"""Row 5 of the first table, which id 77 gets."""
CASE = small_problem(sharding="table_wise,data_parallel")  # t1 is data-parallel
STARTED: dict[str, Any] = {"columns": 8, "std": 1.0, "seed": 0}


def new_row(name: str) -> Tensor:
    """Initial weights of id 77 in a table."""
    key = np.frombuffer(sha256(f"0/{name}".encode()).digest()[:8], "<u8")
    return torch.from_numpy(initial_rows(key, np.zeros(1, np.int64), np.array([77]), 8, 1.0)[0])


def test_tables_under_another_optimizer_are_refused() -> None:
    """Their new ids would go on with the moments of earlier ones."""
    model = sharded_model(CASE)
    under_none = RowInitializer(model, None, ["t0"], **STARTED)
    handle = attach_cowclip(model, CowClip(), exclude=["t1"])
    under_none.reset(NEW)
    handle.remove()
    adam = EmbeddingAdam(model, AdamConfig())
    message = "'t0' is under {} EmbeddingAdam, and RowInitializer was given {}: .* now, or with None"
    refused(message.format("an", "none"), RowInitializer, model, None, ["t0"], **STARTED)
    refused(message.format("an", "none"), under_none.reset, NEW)
    initializer = RowInitializer(model, adam, ["t0"], **STARTED)
    adam.remove()
    refused(message.format("no", "one"), initializer.reset, NEW)
    EmbeddingAdam(model, AdamConfig())
    refused(message.format("an", "another"), initializer.reset, NEW)


def two_ranks(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        one_row = NewRows(*np.array([[0], [0], [77], [0]]))
        model = sharded_model(small_problem(rows=(1,), features=(("a",),), sharding="row_wise", world=2))
        RowInitializer(model, None, ["t0"], **STARTED).reset(one_row)
        (weight,) = (tensor for name, tensor in model.state_dict().items() if name.endswith(".weight"))
        rows = torch.cat([shard.tensor for shard in weight.local_shards()])
        assert torch.equal(rows, new_row("t0")[None][rank:])  # the second rank holds none
        model = sharded_model(small_problem(sequence=True, world=2))
        model.module.c0._use_index_dedup = rank == 0
        refused("'t0' cannot be reset .*without use_index_dedup", RowInitializer, model, None, ["t0"], **STARTED)


def test_a_rank_without_rows_resets_none_and_what_one_refuses_all_refuse(tmp_path: Path) -> None:
    in_processes(two_ranks, (str(tmp_path),), 2)


@pytest.fixture(scope="module")
def trained_at_once(group: None) -> Tensor:
    """Weights after training each batch right after its translation."""
    training = Training()
    for batch in training.translated():
        training.step(batch)
    return training.weights()


def test_a_pipeline_that_reads_ahead_resets_rows_in_a_hook(trained_at_once: Tensor) -> None:
    training, waiting = Training(), deque[NewRows]()

    def loader() -> Iterator[KeyedJaggedTensor]:
        for ids, new_rows in training.translated():
            waiting.append(new_rows)
            yield ids

    ahead = []

    def reset_rows(*_: object) -> None:
        ahead.append(len(waiting))
        training.initializer.reset(waiting.popleft())

    training.model.register_forward_pre_hook(reset_rows)
    pipeline = TrainPipelineSparseDist(training.model, training.dense, CPU)
    batches = loader()
    for _ in range(BATCHES):
        pipeline.progress(batches)
    assert max(ahead) > 1
    assert torch.equal(training.weights(), trained_at_once)


@pytest.mark.usefixtures("streams_on_cpu")
def test_a_pipeline_that_looks_rows_up_ahead_is_refused() -> None:
    """Each new id would train the row of the id before, which the hook resets after the lookup."""
    training, waiting = Training(), deque[NewRows]()

    def loader() -> Iterator[KeyedJaggedTensor]:
        for ids, new_rows in training.translated():
            waiting.append(new_rows)
            yield ids

    training.model.register_forward_pre_hook(lambda *_: training.initializer.reset(waiting.popleft()))
    pipeline = TrainPipelineSemiSync(training.model, training.dense, CPU, start_batch=0)
    refused("looked up for training before the model was called", pipeline.progress, loader())


def test_new_rows_while_as_many_passes_wait_as_rows_rest_are_refused() -> None:
    training = Training()
    training.adam.accumulate(COOLDOWN + 1)
    batches = training.translated()
    for _ in range(COOLDOWN):
        training.step(next(batches))
    refused("call accumulate with at most 4", training.step, next(batches))
    training = Training()
    training.adam.accumulate(COOLDOWN)
    for _, batch in zip(range(3 * COOLDOWN), training.translated(), strict=False):
        training.step(batch)


def test_tables_start_an_id_unlike() -> None:
    started = []
    for name in ("t", "u"):
        training = Training(name)
        _, new_rows = next(training.translated())
        training.initializer.reset(new_rows)
        started.append(training.weights()[new_rows.row])
    assert len(started[0]) > 10
    assert not (started[0] == started[1]).any()


def test_resets_before_the_step_of_an_earlier_batch_are_refused() -> None:
    training = Training()
    batches = training.translated()
    training.step(next(batches))
    waits = next(batches)
    training.initializer.reset(waits[1])
    with torch.no_grad():
        training.model(waits[0])  # an evaluation is no step
    with pytest.raises(ValueError, match=r"immediately before the forward of its own batch.*new RowInitializer"):
        training.initializer.reset(next(batches)[1])
    training.model(waits[0])[0].backward()
    training.step(next(batches))


ROWS = 16


def sharded(bags: bool, policy: Any = LFU_EvictionPolicy, interval: int = 2) -> DistributedModelParallel:
    config, kind = (EmbeddingBagConfig, EmbeddingBagCollection) if bags else (EmbeddingConfig, EmbeddingCollection)
    table = config(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"])
    remapped = MCHManagedCollisionModule(
        zch_size=ROWS, device=CPU, input_hash_size=4000, eviction_interval=interval, eviction_policy=policy()
    )
    managed = ManagedCollisionEmbeddingBagCollection if bags else ManagedCollisionEmbeddingCollection
    model = torch.nn.Sequential()
    model.mc = managed(
        kind(tables=[table], device=torch.device("meta")),
        ManagedCollisionCollection({"t": remapped}, [table]),
        return_remapped_features=True,
    )
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    sharder: Any = (
        ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused_params=fused))
        if bags
        else ManagedCollisionEmbeddingCollectionSharder(EmbeddingCollectionSharder(fused_params=fused))
    )
    kinds = {"t": row_wise(compute_kernel="fused")}
    plan = construct_module_sharding_plan(model.mc, kinds, sharder=sharder, device_type="cpu")
    return DistributedModelParallel(model, device=CPU, plan=ShardingPlan({"mc": plan}), sharders=[sharder])


def looked_up(model: DistributedModelParallel, step: int) -> tuple[Tensor, Tensor]:
    """Embeddings of a step's new ids, and the rows that these were given."""
    ids = 40 * step + torch.randint(12, (12,), generator=torch.Generator().manual_seed(step))
    found, rows = model.module.mc(KeyedJaggedTensor(["f"], ids, lengths=torch.ones(12, dtype=torch.int64)))
    found, rows = found.wait(), rows.wait()
    return found["f"].values() if isinstance(found, dict) else found.values(), rows["f"].values()


@pytest.mark.parametrize("bags", [True, False])
def test_rows_of_managed_collision_are_clipped(bags: bool) -> None:
    """Against autograd on the table and the formula of the clip; TorchRec evicts rows meanwhile."""
    torch.manual_seed(0)
    model = sharded(bags)
    handle = attach_cowclip(model, CowClip(r=0.37, zeta=1e-3))
    (weights,) = (tensor for key, tensor in model.state_dict().items() if key.endswith("t.weight"))
    (shard,) = weights.local_shards()
    for step in range(20):
        found, rows = looked_up(model, step)
        before = shard.tensor.clone().requires_grad_()
        (before[rows] ** 3).sum().backward()
        (found**3).sum().backward()
        assert before.grad is not None
        limit = rows.bincount(minlength=ROWS) * (0.37 * before.norm(dim=1)).clamp(min=1e-3)
        factor = (limit / before.grad.norm(dim=1)).clamp(max=1).nan_to_num(0)
        torch.testing.assert_close(shard.tensor, before - 0.1 * factor[:, None] * before.grad)
    assert 0 < handle.stats()["t"].clipped_share < 1


def test_rows_are_not_evicted_while_passes_wait() -> None:
    model = sharded(True, LRU_EvictionPolicy, interval=1)
    attach_cowclip(model, CowClip()).accumulate(2)
    looked_up(model, 1)[0].sum().backward()
    refused("rows of table 't' to new ids, .* take a step for each backward pass", looked_up, model, 2)


@pytest.mark.parametrize("bags", [True, False])
@pytest.mark.parametrize("absent_rows", ["lazy", "replay"])
def test_evicted_rows_lose_their_moments(absent_rows: str, bags: bool) -> None:
    """Their moments are zero when TorchRec has evicted them, and the others' are as they were."""
    model = sharded(bags)
    optimizer = EmbeddingAdam(model, AdamConfig(lr=0.1, absent_rows=absent_rows), CowClip())
    (adam,), collection, evicted = optimizer.lookups, model.module.mc, []
    evict = collection._evict

    def watched(rows: dict[str, Tensor | None]) -> Any:
        before = adam.exp_avg.view(ROWS, DIM).clone()
        evict(rows)
        gone = torch.zeros(ROWS, dtype=torch.bool)
        gone[torch.cat([row for row in rows.values() if row is not None] or [torch.arange(0)])] = True
        assert torch.equal(adam.exp_avg.view(ROWS, DIM), before.where(~gone[:, None], 0))
        assert not adam.exp_avg_sq.view(ROWS, DIM)[gone].any()
        assert not adam.replays or (adam.last_step[gone] == adam.step).all()
        evicted.append(int((gone & before.any(1)).sum()))

    collection._evict = watched
    for step in range(40):
        looked_up(model, step)[0].sum().backward()
    assert sum(evicted) > 10
    optimizer.remove()
    assert "reset_embedding_weight_momentum" not in vars(adam.lookup.module)
    EmbeddingAdam(model, AdamConfig())
    optimizer.remove()  # again, which has no effect
    assert "reset_embedding_weight_momentum" in vars(adam.lookup.module)


KEYS = np.full(20_000, 12345, np.uint64)


def test_initial_weights_are_normal() -> None:
    """Kolmogorov-Smirnov test against scipy's distribution, over ids and over columns."""
    ids = np.arange(20_000, dtype=np.int64) - 10_000
    values = initial_rows(KEYS, np.zeros(20_000, np.int64), ids, 6, 0.01)
    assert values.dtype == np.float32
    for column in range(6):
        assert stats.kstest(values[:, column], "norm", args=(0, 0.01)).pvalue > 1e-3
    assert np.abs(np.corrcoef(values.T) - np.eye(6)).max() < 0.03
    assert abs(np.corrcoef(values[1:, 0], values[:-1, 0])[0, 1]) < 0.03, "neighbouring ids"


@pytest.mark.parametrize("columns", [1, 5, 6])
def test_columns_do_not_depend_on_their_number(columns: int) -> None:
    ids, fields = np.arange(100, dtype=np.int64), np.zeros(100, np.int64)
    whole = initial_rows(KEYS[:100], fields, ids, 7, 1.0)
    np.testing.assert_array_equal(initial_rows(KEYS[:100], fields, ids, columns, 1.0), whole[:, :columns])


def test_tables_fields_and_ids_differ() -> None:
    drawn = {
        tuple(initial_rows(np.array([key], np.uint64), np.array([field]), np.array([number]), 2, 1.0)[0].tolist())
        for key in (1, 2)
        for field in (0, 1)
        for number in (-1, 5, 1 << 62)
    }
    assert len(drawn) == 12
    assert torch.isfinite(torch.tensor(list(drawn))).all()
