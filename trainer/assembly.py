"""From a data schema and a configuration to a sharded model with its optimizers: the one place where rooms meet."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

from cowrec.data_pipeline import Batch, Schema
from cowrec.models import build_model, l2_kernels, physical_dim
from cowrec.sparse_opt import AdamConfig, EmbeddingAdam, Hyperparameters, attach_cowclip

from .config import RunConfig
from .processes import Process

FUSED_OPTIMIZERS = {
    "adam": EmbOptimType.EXACT_SGD,  # never runs: EmbeddingAdam takes over its backward
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "fbgemm_adam": EmbOptimType.ADAM,
}


class TrainTask(nn.Module):
    """A model with its loss, in the form that TorchRec's pipeline drives.

    ``forward(batch)`` returns (loss, (loss, logits [B], label [B])), the latter detached. The loss is this rank's share of the mean over the global
    batch, times the world size, because TorchRec and DDP average over ranks; slices may be of unequal size.
    """

    def __init__(self, model: nn.Module, world_size: int, linear_l2: float, cross_l2: float):
        super().__init__()
        self.model = model
        self._world_size = world_size
        kernels = l2_kernels(model)
        self._penalties = [(linear_l2, each) for each in kernels["linear"] if linear_l2 > 0]
        self._penalties += [(cross_l2, each) for each in kernels["cross"] if cross_l2 > 0]

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        logits = self.model(batch.dense, batch.sparse)
        total = F.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
        loss = total * self._world_size / batch.global_batch_size
        for coefficient, kernel in self._penalties:
            loss = loss + coefficient * kernel.square().sum()
        return loss, (loss.detach(), logits.detach(), batch.label)


def embedding_tables(schema: Schema, embedding_dim: int) -> list[EmbeddingBagConfig]:
    """One table per sparse field, named like the field, wide enough for the embedding and the wide weight."""
    return [
        EmbeddingBagConfig(
            name=field.name,
            num_embeddings=field.num_embeddings,
            embedding_dim=physical_dim(embedding_dim),
            feature_names=[field.name],
            # A weighted collection only sums; the reader then gives a mean-pooled field's ids the weight 1/length.
            pooling=PoolingType.MEAN if field.pooling == "mean" and not schema.is_weighted else PoolingType.SUM,
        )
        for field in schema.sparse
    ]


def build_sharded(
    config: RunConfig, schema: Schema, process: Process, hyperparameters: Hyperparameters
) -> DistributedModelParallel:
    """The run's model, sharded over the process group, with seeded initial values that no sharding plan changes."""
    torch.manual_seed(config.train.seed)
    tables = embedding_tables(schema, config.model.embedding_dim)
    model = build_model(
        config.model, tables, len(schema.dense), is_weighted=schema.is_weighted, device=torch.device("meta")
    )
    task = TrainTask(model, process.world_size, hyperparameters.l2, config.optimizer.cross_l2)
    if config.optimizer.embedding == "fbgemm_adam" and process.device.type != "cuda":
        raise ValueError('optimizer.embedding = "fbgemm_adam" exists on CUDA only; on CPU use "adam"')
    fused_params: dict[str, Any] = {
        "optimizer": FUSED_OPTIMIZERS[config.optimizer.embedding],
        "learning_rate": hyperparameters.embedding_lr,
        "eps": config.optimizer.eps,
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    if config.optimizer.embedding == "fbgemm_adam":
        fused_params |= {"beta1": config.optimizer.betas[0], "beta2": config.optimizer.betas[1]}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params)
    sharded = DistributedModelParallel(
        task,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=process.device,
        plan=sharding_plan(task, config.sharding.plan, process, sharder),
        sharders=[sharder],
    )
    fill_tables(sharded, config.model.embedding_dim, config.optimizer.embedding_init_std, config.train.seed)
    return sharded


def sharding_plan(
    task: nn.Module, kind: str, process: Process, sharder: EmbeddingBagCollectionSharder
) -> ShardingPlan:
    """Row-wise: every table over all ranks. Table-wise: whole tables, the largest first to the emptiest rank."""
    plans = {}
    load = [0] * process.world_size
    for path, module in task.named_modules():
        if not isinstance(module, EmbeddingBagCollection):
            continue
        kinds: dict[str, Any] = {}
        for table in sorted(module.embedding_bag_configs(), key=lambda each: -each.num_embeddings):
            if kind == "row_wise":
                kinds[table.name] = row_wise(compute_kernel="fused")
            else:
                rank = load.index(min(load))
                load[rank] += table.num_embeddings
                kinds[table.name] = table_wise(rank=rank, compute_kernel="fused")
        plans[path] = construct_module_sharding_plan(
            module,
            kinds,
            sharder=sharder,
            local_size=process.local_world_size,
            world_size=process.world_size,
            device_type=process.device.type,
        )
    return ShardingPlan(plan=plans)


def embedding_optimizer(
    config: RunConfig, schema: Schema, model: nn.Module, hyperparameters: Hyperparameters
) -> EmbeddingAdam | None:
    """Puts the tables under their clip rule and optimizer; the wide weight behind the embedding is not clipped."""
    rule, columns = config.clip.build(), config.model.embedding_dim
    if config.optimizer.embedding == "adam":
        adam = AdamConfig(
            lr=hyperparameters.embedding_lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            epsilon=config.optimizer.epsilon,
            l2=hyperparameters.l2,
        )
        return EmbeddingAdam(model, adam, rule, clip_columns=columns)
    if config.clip.rule == "none":
        return None
    several = [field.name for field in schema.sparse if field.kind != "categorical"]
    if several:
        raise ValueError(
            f'optimizer.embedding = "{config.optimizer.embedding}" cannot clip the embedding apart from the wide weight'
            f' where samples have several ids (field {several[0]!r}); set optimizer.embedding = "adam" or clip.rule = "none"'
        )
    attach_cowclip(model, rule, clip_columns=columns, single_id_bags=True)
    return None


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that the dense optimizer updates: all but the tables, which are updated in their backward."""
    return [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]


def fill_tables(model: nn.Module, embedding_dim: int, std: float, seed: int) -> None:
    """Initial values N(0, std) in the embedding columns and 0 in the others.

    A block of rows is drawn from (seed, table, block), so that a row's values do not depend on who holds it.
    """
    for key, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                table = key.split(".")[-2]
                _fill_shard(shard.tensor, shard.metadata.shard_offsets[0], table, embedding_dim, std, seed)


_BLOCK_ROWS = 1 << 16


def _fill_shard(rows: Tensor, first: int, table: str, embedding_dim: int, std: float, seed: int) -> None:
    rows.zero_()
    generator = torch.Generator()
    for block in range(first // _BLOCK_ROWS, -(-(first + len(rows)) // _BLOCK_ROWS)):
        digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.randn(_BLOCK_ROWS, embedding_dim, generator=generator).mul_(std)
        low, high = max(block * _BLOCK_ROWS, first), min((block + 1) * _BLOCK_ROWS, first + len(rows))
        rows[low - first : high - first, :embedding_dim] = values[low - block * _BLOCK_ROWS : high - block * _BLOCK_ROWS]


def describe(hyperparameters: Hyperparameters, config: RunConfig) -> Mapping[str, Any]:
    """The derived values, as saved and printed with a run."""
    return {
        "batch_size": config.train.batch_size,
        "scaling": config.optimizer.scaling,
        "clip": config.clip.rule,
        "embedding_lr": hyperparameters.embedding_lr,
        "dense_lr": hyperparameters.dense_lr,
        "l2": hyperparameters.l2,
    }
