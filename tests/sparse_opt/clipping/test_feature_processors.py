"""Collections whose ids have trained weights, as behind TorchRec's feature processors, equal plain torch in float64."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.amp import GradScaler
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import AdamConfig, CowClip, EmbeddingAdam, attach_cowclip, clip_rows

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
RULE, LR, ROWS, DIM, POSITIONS, BATCH = CowClip(0.5, 1e-3), 0.1, 20, 4, 6, 16


def position_weighted_model(sharding: str) -> DistributedModelParallel:
    table = EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["a", "b"])
    collection = EmbeddingBagCollection(tables=[table], is_weighted=True)
    processor = PositionWeightedModuleCollection({"a": POSITIONS, "b": POSITIONS})
    sharder: Any = FeatureProcessedEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR})
    )
    model = nn.ModuleDict({"fp": FeatureProcessedEmbeddingBagCollection(collection, processor)})
    constraints = {"t": ParameterConstraints(sharding_types=[sharding])}
    planner = EmbeddingShardingPlanner(Topology(1, "cpu"), constraints=constraints)
    plan = planner.plan(model, [sharder])
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    torch.manual_seed(0)
    for value in weights_of(sharded).values():
        value.uniform_(-0.5, 1)
    return sharded


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights by "t" (the table), "a" and "b" (of positions); they share the model's memory."""
    found = {}
    for key, value in model.state_dict().items():
        name = key.split(".")[-2 if "embedding_bags" in key else -1]
        found[name] = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
    return found


def batches() -> list[tuple[KeyedJaggedTensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    drawn = []
    for _ in range(3):
        lengths = torch.randint(0, POSITIONS, (2 * BATCH,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator) ** 2 // ROWS  # some are frequent
        scales = 10 ** (4 * torch.rand(BATCH, 1, generator=generator) - 3)
        target = torch.randn(BATCH, 2 * DIM, generator=generator) * scales
        drawn.append((KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths), target))
    return drawn


def loss_in_float64(weights: dict[str, torch.Tensor], ids: KeyedJaggedTensor, target: torch.Tensor) -> torch.Tensor:
    pooled = []
    for name, jagged in ids.to_dict().items():
        begins = torch.repeat_interleave(jagged.offsets()[:-1], jagged.lengths())
        rows = weights["t"][jagged.values()] * weights[name][torch.arange(len(begins)) - begins][:, None]
        sample = torch.repeat_interleave(torch.arange(BATCH), jagged.lengths())
        pooled.append(torch.zeros(BATCH, DIM, dtype=torch.float64).index_add(0, sample, rows))
    return (torch.cat(pooled, 1) * target).sum() / BATCH


def gradients_in_float64(model: nn.Module, ids: KeyedJaggedTensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = {name: value.double().requires_grad_() for name, value in weights_of(model).items()}
    loss_in_float64(weights, ids, target).backward()
    grads: dict[str, Any] = {name: value.grad for name, value in weights.items()}
    present, counts = ids.values().unique(return_counts=True)
    grads["t"][present] = clip_rows(grads["t"][present], weights["t"][present].detach(), counts, RULE)
    return grads


def backward(model: Any, ids: KeyedJaggedTensor, target: torch.Tensor) -> None:
    ((model.module["fp"](ids).wait().values() * target).sum() / BATCH).backward()


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
def test_the_table_is_clipped_and_the_positions_get_their_gradients(sharding: str) -> None:
    model = position_weighted_model(sharding)
    handle = attach_cowclip(model, RULE)
    dense = torch.optim.SGD(
        [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())], lr=LR
    )
    for ids, target in batches():
        expected = {name: value.double() for name, value in weights_of(model).items()}
        for name, grad in gradients_in_float64(model, ids, target).items():
            expected[name] -= LR * grad
        dense.zero_grad()
        backward(model, ids, target)
        dense.step()
        for name, value in weights_of(model).items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert 0 < handle.stats()["t"].clipped_share < 1


@pytest.mark.parametrize("absent_rows", ["lazy", "replay", "dense"])
def test_positions_get_their_gradients_under_embedding_adam(absent_rows: Any) -> None:
    model = position_weighted_model("table_wise")
    EmbeddingAdam(model, AdamConfig(lr=0.01, l2=1e-3, absent_rows=absent_rows), RULE)
    for ids, target in batches():
        model.zero_grad()
        # The oracle starts from the rows as a forward pass has them.
        with torch.no_grad():
            model.module["fp"](ids).wait()
        expected = gradients_in_float64(model, ids, target)
        before = weights_of(model)["t"].clone()
        backward(model, ids, target)
        assert not torch.equal(weights_of(model)["t"], before)
        for name, parameter in model.named_parameters():
            if "position" in name:
                grad = expected[name.split(".")[-1]]
                torch.testing.assert_close(parameter.grad.double(), grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel", "adam"])
def test_a_scaler_finds_an_overflow_in_the_gradients_of_the_positions(sharding: str) -> None:
    """The only dense parameters; the table under SGD does not change either."""
    model = position_weighted_model("table_wise" if sharding == "adam" else sharding)
    scaler = GradScaler("cpu", init_scale=1024.0)
    if sharding == "adam":
        EmbeddingAdam(model, AdamConfig(lr=0.01), RULE, grad_scaler=scaler)
    else:
        attach_cowclip(model, RULE, grad_scaler=scaler)
    dense = torch.optim.SGD(
        [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())], lr=LR
    )
    before = {name: value.clone() for name, value in weights_of(model).items()}
    for overflows in (True, False):
        ids, target = batches()[0]
        target[int(ids["a"].lengths().argmax()), 0] = torch.inf if overflows else 1
        loss = (model.module["fp"](ids).wait().values() * target).sum() / BATCH
        scaler.scale(loss).backward()
        scaler.step(dense)
        scaler.update()
        dense.zero_grad()
        assert scaler.get_scale() == 512
        if sharding != "adam":
            for name, value in weights_of(model).items():
                assert torch.equal(value, before[name]) == overflows
