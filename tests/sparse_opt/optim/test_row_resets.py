"""Rows of new ids in batches that are translated ahead of their training step."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, IdTableConfig, IdTables, NewRows, RowInitializer
from process_groups import process_group

BATCHES, IDS, DIM = 40, 24, 4
CPU = torch.device("cpu")
Batch = tuple[KeyedJaggedTensor, NewRows]


class Task(nn.Module):
    """Mean over the samples of the squared distance of their embeddings to 1."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=DIM, feature_names=["f"])
        self.ebc = EmbeddingBagCollection([config], device=torch.device("meta"))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled = self.ebc(ids).values()
        return ((pooled - self.scale) ** 2).sum(1).mean(), pooled.detach()


class Training:
    """A model whose ids drift, so that rows are freed, given to other ids, and given back to expired ids."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tables = IdTables({"t": IdTableConfig(60, ("f",), expire_after=6)}, ["f"], max_segments=1)
        sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
        task = Task(self.tables.num_embeddings["t"])
        kinds = {"t": table_wise(rank=0, compute_kernel="fused")}
        plan = construct_module_sharding_plan(task.ebc, kinds, sharder=sharder, device_type="cpu")
        self.model = DistributedModelParallel(
            task, device=CPU, plan=ShardingPlan(plan={"ebc": plan}), sharders=[sharder]
        )
        adam = AdamConfig(lr=0.1, l2=1e-3, absent_rows="replay")
        self.adam = EmbeddingAdam(self.model, adam, CowClip(r=1.0, zeta=0.1))
        self.initializer = RowInitializer(self.model, self.adam, ["t"], columns=DIM, std=1.0, seed=0)
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
        (weight,) = (each for name, each in self.model.state_dict().items() if name.endswith("t.weight"))
        return weight.local_shards()[0].tensor.clone()


@pytest.fixture
def trained_at_once(tmp_path: Path) -> Iterator[Tensor]:
    """Weights after training each batch right after its translation."""
    with process_group(0, 1, str(tmp_path)):
        training = Training()
        for batch in training.translated():
            training.step(batch)
        yield training.weights()


def test_translation_ahead_changes_nothing_if_rows_are_reset_in_their_step(trained_at_once: Tensor) -> None:
    training, queue = Training(), deque[Batch]()
    for batch in training.translated():
        queue.append(batch)
        if len(queue) > 10:
            training.step(queue.popleft())
    for batch in queue:
        training.step(batch)
    assert torch.equal(training.weights(), trained_at_once)


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


def test_resets_before_the_step_of_an_earlier_batch_are_refused(trained_at_once: Tensor) -> None:
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
