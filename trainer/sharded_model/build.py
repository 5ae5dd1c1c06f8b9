"""Construction of a run's sharded model and the optimizer of its tables from a data schema and a configuration."""

import logging
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterWeightDecayMode,
    CowClipDefinition,
    WeightDecayMode,
)
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingEnv

from cowrec.data_pipeline import Schema
from cowrec.errors import UserError
from cowrec.models import build_model, loss_of
from cowrec.models.front import EmbeddingFront
from cowrec.models.linear_relu import BY_ONE_DNN
from cowrec.names import hint
from cowrec.sparse_opt import (
    AdamConfig,
    EmbeddingAdam,
    Hyperparameters,
    LookupsHandle,
    attach_cowclip,
)
from cowrec.sparse_opt.tbe.discovery import set_initial_rates
from cowrec.sparse_opt.tbe.one_process import look_up_directly

from ..config.run import RunConfig
from ..config.sections import OptimizerConfig
from ..runtime.processes import Process
from .run_plan import TABLE_OPTIMIZERS, RunPlan, Scaled
from .sharding import sharding_plan
from .tables import by_table, fill_tables, require_tables
from .task import MeanLoss, TrainTask

_logger = logging.getLogger(__name__)


def build_sharded(plan: RunPlan) -> DistributedModelParallel:
    """Builds the run's model and shards it over the process group; initial values depend on the seed, not on the plan.

    Returns:
        The sharded :class:`TrainTask`.

    Raises:
        ValueError: the device lacks the optimizer or precision, the sharding does not suit the run, or a table is
            unknown.
    """
    config = plan.config
    set_product_precision(config.train.precision, plan.process.device)
    sharded = shard(unsharded_task(plan), plan)
    fill_tables(sharded, plan.tables, config.optimizer.embedding_init_std, config.train.seed)
    if plan.process.world_size > 1:  # building the network took the same random numbers everywhere
        seed_process(config.train.seed, plan.process)
    return sharded


def seed_process(seed: int, process: Process, step: int = 0) -> None:
    """Gives this process random numbers of its own from step ``step`` on, such as those of dropout."""
    own = np.random.SeedSequence([seed, step, process.rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(own[0]))


def unsharded_task(plan: RunPlan) -> TrainTask:
    """Builds the run's model with its loss, for :func:`build_sharded`; its tables are on the meta device."""
    config, schema, process = plan.config, plan.schema, plan.process
    if config.optimizer.embedding == "fbgemm_adam" and process.device.type != "cuda":
        raise UserError('optimizer.embedding = "fbgemm_adam" exists on CUDA only; on CPU use "adam"')
    torch.manual_seed(config.train.seed)
    require_tables("optimizer.embedding_lr_factors", config.optimizer.embedding_lr_factors, plan.bags)
    model = build_model(
        config.model,
        plan.bags,
        len(schema.dense),
        is_weighted=schema.is_weighted,
        fields=[field.name for field in schema.sparse],
        sequences=schema.sequences,
        num_tasks=len(schema.labels),
        device=torch.device("meta"),
    )
    if process.world_size > 1:
        _require_no_batch_norm(model, config.model.name)
    loss_of_sample = loss_of(config.train.loss, config.train.loss_options, len(schema.labels))
    loss = MeanLoss(process.world_size, loss_of_sample, mean_weight(schema), task_weights(config, schema))
    return train_task(model, plan, loss)


def has_batch_norm(model: nn.Module) -> bool:
    """True if a network has batch normalisation, which cannot train on a single sample."""
    return any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in model.modules())


def _require_no_batch_norm(model: nn.Module, name: str) -> None:
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f'model.name = "{name}" has a {type(module).__name__} ({path}), whose means leave out samples of other'
                " processes, or take in padding, and depend on their number; use LayerNorm, or one process"
            )


def mean_weight(schema: Schema) -> float:
    """Mean weight of the training samples of a data set; 1 without weights."""
    train = schema.splits.get("train")
    return train.weight / train.rows if train and train.weight else 1.0


def task_weights(config: RunConfig, schema: Schema) -> list[float]:
    """Weight of each label's loss. Raises ValueError for one of a label that the data do not have, or have alone."""
    for name, weight in config.train.task_weights.items():
        if name not in schema.labels:
            raise UserError(
                f"train.task_weights.{name} = {weight:g}: the data have no label {name!r}; {hint(name, schema.labels)}"
            )
    if config.train.task_weights and len(schema.labels) == 1:
        raise UserError(
            f"train.task_weights = {config.train.task_weights} weighs labels against each other, but the data have one;"
            " leave it out"
        )
    return [config.train.task_weights.get(name, 1.0) for name in schema.labels]


def train_task(model: nn.Module, plan: RunPlan, loss: MeanLoss | None = None) -> TrainTask:
    """Combines a model with its loss, by default the mean cross-entropy.

    Args:
        model: ``forward(dense, sparse) -> logits [B]``, with one EmbeddingBagCollection on the meta device.
    """
    config, process = plan.config, plan.process
    bfloat16_device = process.device.type if config.train.precision == "bfloat16" else ""
    values, factors = plan.scaled.hyperparameters, by_table(config.optimizer.embedding_lr_factors)
    task = TrainTask(model, loss or MeanLoss(process.world_size), values.l2, config.optimizer.cross_l2, bfloat16_device)
    if config.optimizer.embedding != "adam":
        set_initial_rates(task, {table: factor * values.embedding_lr for table, factor in factors.items()})
    return task


def shard(task: nn.Module, plan: RunPlan) -> DistributedModelParallel:
    """Shards the tables of a module, such as that of :func:`train_task`, over the process group.

    Raises:
        ValueError: TorchRec's planner cannot fit the tables.
    """
    config, process = plan.config, plan.process
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params(config.optimizer, plan.scaled.hyperparameters))
    sharded = DistributedModelParallel(
        task,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=process.device,
        plan=sharding_plan(task, plan.kinds, config, process, sharder),
        sharders=[sharder],
        init_data_parallel=process.world_size > 1,
    )
    if process.world_size == 1:  # no gradients to reduce, and no ids and rows to exchange
        sharded.to(process.device)
        look_up_directly(sharded)
    return sharded


def fused_params(optimizer: OptimizerConfig, hyperparameters: Hyperparameters) -> dict[str, Any]:
    """Settings of FBGEMM's fused optimizer, as TorchRec passes them to the tables."""
    params: dict[str, Any] = {
        "optimizer": TABLE_OPTIMIZERS[optimizer.embedding][1],
        "learning_rate": hyperparameters.embedding_lr,
        "eps": hyperparameters.eps,
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    if optimizer.embedding == "fbgemm_adam":
        params |= dict(zip(("beta1", "beta2"), hyperparameters.betas, strict=True))
    if optimizer.embedding == "fbgemm_cowclip":
        params["weight_decay_mode"] = WeightDecayMode.COWCLIP
        params["cowclip_regularization"] = CowClipDefinition(
            counter_weight_decay_mode=CounterWeightDecayMode.NONE,
            counter_halflife=-1,  # every step in which a row appeared counts fully
            weight_norm_coefficient=1.0,
            lower_bound=1e-5,
        )
    return params


def set_product_precision(precision: str, device: torch.device) -> None:
    """Allows or forbids TF32 in float32 matrix products on CUDA, for the whole process; warns of slow ones on CPU.

    Raises:
        ValueError: precision "tf32" on another device.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    elif precision == "tf32":
        raise UserError(
            'train.precision = "tf32" exists on CUDA only; on CPU set train.precision = "float32" or "bfloat16"'
        )
    elif precision == "bfloat16" and torch.bfloat16 not in BY_ONE_DNN:
        _logger.warning(
            'train.precision = "bfloat16" is about ten times slower than "float32" on a processor without AVX-512'
        )


def embedding_optimizer(plan: RunPlan, model: nn.Module) -> EmbeddingAdam | LookupsHandle | None:
    """Attaches the clip rule and the optimizer to a sharded model's tables.

    The clip covers the embedding columns; the wide weight behind them is not clipped.

    Returns:
        The optimizer. Where FBGEMM's fused optimizer updates the tables, the handle of the clip, or None if unclipped.

    Raises:
        ValueError: the fused optimizer cannot apply the clip rule or L2 to this data.
    """
    config, hyperparameters, rule = plan.config, plan.scaled.hyperparameters, plan.scaled.clip
    columns = {spec.name: spec.embedding_dim for spec in plan.tables}
    if config.optimizer.embedding == "adam":
        adam, factors = adam_config(config, plan.scaled), by_table(config.optimizer.embedding_lr_factors)
        return EmbeddingAdam(model, adam, rule, clip_columns=columns, lr_factors=factors)
    if config.clip.rule == "none" and hyperparameters.l2 == 0:
        return None
    several = [field.name for field in plan.schema.sparse if field.kind in ("multi", "weighted")]
    if several:
        raise UserError(
            f'optimizer.embedding = "{config.optimizer.embedding}" can neither clip the embedding apart from the wide'
            f" weight nor give each row its L2 where samples have several ids (field {several[0]!r}); set"
            ' optimizer.embedding = "adam", or clip.rule = "none" and optimizer.l2 = 0'
        )
    return attach_cowclip(model, rule, clip_columns=columns, single_id_bags=True, l2=hyperparameters.l2)


def adam_config(config: RunConfig, scaled: Scaled) -> AdamConfig:
    """Settings of the tables' Adam with scaled values."""
    hyperparameters = scaled.hyperparameters
    return AdamConfig(
        lr=hyperparameters.embedding_lr,
        betas=hyperparameters.betas,
        eps=hyperparameters.eps,
        adam_epsilon=config.optimizer.adam_epsilon,
        l2=hyperparameters.l2,
        weight_decay=hyperparameters.weight_decay,
        absent_rows=config.optimizer.absent_rows or "replay",
        wide=scaled.wide,
    )


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the dense optimizer, by name: all but the tables, which their backward updates."""
    return {name: each for name, each in model.named_parameters() if ".embedding_bags." not in name}


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The dense parameters, and the buffers that a network saves with them, such as the means of a BatchNorm.

    A tensor that several modules share, or one module has twice, is there under all of its names.
    """
    task = model.module if isinstance(model, DistributedModelParallel) else model
    modules = dict(task.named_modules(remove_duplicate=False))
    tables = tuple(f"{path}.embeddings." for path, each in modules.items() if isinstance(each, EmbeddingFront))
    return {
        f"{path}.{key}": each
        for path, module in modules.items()
        if not f"{path}.".startswith(tables)
        for key, each in [*module._parameters.items(), *module._buffers.items()]
        if each is not None and key not in module._non_persistent_buffers_set
    }
