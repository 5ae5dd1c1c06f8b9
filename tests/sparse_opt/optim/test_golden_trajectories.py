"""Twenty training steps equal the recorded reference: the project's models, clip, L2 and both optimizers together.

Each ``traj_*.npz`` in the golden folder is repeated with the settings in its ``hp/*``.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch
from cowrec.sparse_opt import AdamConfig, ClipRule, EmbeddingAdam, Hyperparameters, NoClip, ReferenceCowClip
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.build import dense_parameters, sharding_plan
from cowrec.trainer.sharded_model.run_plan import LrSchedule
from cowrec.trainer.sharded_model.step import DenseAdam, MeanLoss, TrainTask
from golden_models import FIELDS, dense_views, golden_batch, golden_model, model_name
from process_groups import in_processes, process_group
from random_problems.training import gathered, set_to

Golden = Mapping[str, np.ndarray]
RECORDED_STEPS = (1, 2, 5, 20)

# Two float32 implementations differ by 4e-7 after 20 steps (notes of the recording).
WEIGHT_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-7
LOSS_TOLERANCE = 1e-6


def recordings(folder: Path) -> Iterator[tuple[Path, Golden]]:
    files = sorted(folder.glob("traj_*_f32.npz"))
    assert files, f"no traj_*_f32.npz in {folder}"
    for file in files:
        yield file, dict(np.load(file))


def clip_rule(golden: Golden) -> ClipRule:
    r = float(golden["hp/clip"])
    return ReferenceCowClip(r, float(golden["hp/bound"])) if r > 0 else NoClip()


def adam_config(golden: Golden, absent_rows: str) -> AdamConfig:
    betas = (float(golden["hp/beta1"]), float(golden["hp/beta2"]))
    lr, eps, l2 = (float(golden[f"hp/{key}"]) for key in ("lr_embed", "eps", "l2"))
    return AdamConfig(lr=lr, betas=betas, eps=eps, adam_epsilon="keras", l2=l2, absent_rows=absent_rows)


def hyperparameters(golden: Golden) -> Hyperparameters:
    adam = adam_config(golden, "dense")
    return Hyperparameters(adam.lr, float(golden["hp/lr"]), adam.l2, betas=adam.betas, eps=adam.eps)


def dense_lr(golden: Golden, step: int) -> float:
    """Learning rate of the network in step ``step``, from 1."""
    return LrSchedule(int(golden["hp/warmup_steps"])).dense_lr(hyperparameters(golden), step - 1)


def train_task(golden: Golden, model: nn.Module, world_size: int) -> TrainTask:
    return TrainTask(model, MeanLoss(world_size), float(golden["hp/l2"]), float(golden["hp/l2_cross"]))


def batch_of(golden: Golden, step: int) -> Batch:
    dense, sparse, label = golden_batch(golden, step)
    return Batch(dense.float(), sparse, label.float(), len(label))


@dataclass
class Comparison:
    """Compares tensors with a recording and fails with the name of one that exceeds the tolerance."""

    file: Path
    golden: Golden

    def close(self, key: str, value: Tensor, tolerance: float) -> None:
        expected = self.golden[key]
        error = np.abs(value.detach().numpy().reshape(expected.shape) - expected).max()
        assert error <= tolerance, f"{self.file.name}: {key} is off by {error:.2e}, more than {tolerance:.0e}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_training(golden_dir: Path, world_size: int) -> None:
    """Trains TorchRec's sharded model under EmbeddingAdam, each recording as "dense" and as "replay" once."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, folder, golden_dir)
        if world_size == 1:
            _follow_all(0, *arguments)
        else:
            in_processes(_follow_all, arguments, world_size)


def _follow_all(rank: int, world_size: int, folder: str, golden_dir: Path) -> None:
    with process_group(rank, world_size, folder):
        process = Process(rank, world_size, world_size, False, torch.device("cpu"))
        for number, (file, golden) in enumerate(recordings(golden_dir)):
            _follow(file, golden, ("dense", "replay")[(number + world_size) % 2], process)


def _follow(file: Path, golden: Golden, absent_rows: str, process: Process) -> None:
    recorded = golden_model(model_name(file), golden)
    views = dense_views(recorded)
    initial = {field: recorded.front.embeddings.embedding_bags[field].weight.detach().clone() for field in FIELDS}
    model = _sharded(train_task(golden, recorded, process.world_size), process)
    for field, weight in _tables(model.state_dict()).items():
        set_to(weight, initial[field])
    dim, beta1 = int(golden["hp/dim"]), float(golden["hp/beta1"])
    embedding = EmbeddingAdam(model, adam_config(golden, absent_rows), clip_rule(golden), clip_columns=dim)
    optimizer = DenseAdam(dense_parameters(model), hyperparameters(golden), "keras")
    compared = Comparison(file, golden)
    first_before = {field: torch.zeros_like(table) for field, table in initial.items()}
    for step in range(1, int(golden["hp/steps"]) + 1):
        lr = dense_lr(golden, step)
        assert lr == pytest.approx(golden["lr_dense"][step - 1], rel=1e-6, abs=1e-9)  # Keras counts in float32
        optimizer.prepare(step - 1, lr)
        optimizer.zero_grad()
        batch = batch_of(golden, step - 1)
        loss, (_, logits, label) = model(_slice(batch, process))
        loss.backward()
        if step <= 2 and process.is_first:
            for name, view in views.items():
                compared.close(f"s{step}/grad_applied/{name}", _gradient_like(recorded, view), GRADIENT_TOLERANCE)
        optimizer.step()
        total = F.binary_cross_entropy_with_logits(logits, label, reduction="sum")
        dist.all_reduce(total)
        assert abs(total.item() / len(batch.label) - golden["data_loss"][step - 1]) <= LOSS_TOLERANCE, file.name
        if step not in RECORDED_STEPS:
            continue
        weights = {key: torch.from_numpy(gathered(table)) for key, table in _tables(model.state_dict()).items()}
        embedding.flush()
        moments = {key.split(".")[-2]: own for key, own in embedding.state_dict()["state"].items()}
        found = {
            field: [torch.from_numpy(gathered(own[moment])) for moment in ("exp_avg", "exp_avg_sq")]
            for field, own in moments.items()
        }
        if not process.is_first:
            continue
        for name, view in views.items():
            compared.close(f"s{step}/w/{name}", view, WEIGHT_TOLERANCE)
        for field in FIELDS:
            first, second = found[field]
            applied = (first - beta1 * first_before[field]) / (1 - beta1)
            first_before[field] = first
            name = f"sparse_emb_{field}__embeddings"
            for key, columns in ((name, slice(0, dim)), (f"linear0{name}", slice(dim, dim + 1))):
                compared.close(f"s{step}/w/{key}", weights[field][:, columns], WEIGHT_TOLERANCE)
                compared.close(f"s{step}/adam_m/{key}", first[:, columns], WEIGHT_TOLERANCE)
                compared.close(f"s{step}/adam_v/{key}", second[:, columns], WEIGHT_TOLERANCE)
                if step <= 2:
                    compared.close(f"s{step}/grad_applied/{key}", applied[:, columns], GRADIENT_TOLERANCE)


def _gradient_like(model: nn.Module, view: Tensor) -> Tensor:
    """The gradient of the parameter that a view shows, in the view's shape; parameters may share their memory."""
    for parameter in model.parameters():
        offset = (view.data_ptr() - parameter.data_ptr()) // view.element_size()
        if 0 <= offset < parameter.numel():
            grad = parameter.grad
            return grad.as_strided(view.shape, view.stride(), grad.storage_offset() + offset)
    raise AssertionError("no parameter has this view")


def _sharded(task: TrainTask, process: Process) -> DistributedModelParallel:
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD})
    (collection,) = (module for module in task.modules() if isinstance(module, EmbeddingBagCollection))
    names = [table.name for table in collection.embedding_bag_configs()]
    plan = sharding_plan(task, dict.fromkeys(names, "row_wise"), RunConfig(), process, sharder)
    return DistributedModelParallel(task, device=process.device, plan=plan, sharders=[sharder])


def _slice(batch: Batch, process: Process) -> Batch:
    """This rank's samples; every bag has one id."""
    size = len(batch.label) // process.world_size
    own = slice(process.rank * size, (process.rank + 1) * size)
    ids = batch.sparse.values().view(len(FIELDS), -1)[:, own].flatten()
    sparse = KeyedJaggedTensor(list(FIELDS), ids, lengths=torch.ones(len(ids), dtype=torch.int32))
    return Batch(batch.dense[own], sparse, batch.label[own], len(batch.label))


def _tables(state: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    return {key.split(".")[-2]: value for key, value in state.items() if isinstance(value, ShardedTensor)}
