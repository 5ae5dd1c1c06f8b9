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
from cowrec.models import build_model, l2_kernels, loss_of
from cowrec.models.front import EmbeddingFront
from cowrec.models.linear_relu import BY_ONE_DNN
from cowrec.sparse_opt import (
    AdamConfig,
    EmbeddingAdam,
    Hyperparameters,
    LookupsHandle,
    attach_cowclip,
)
from cowrec.sparse_opt.tbe.collection import look_up_directly, set_initial_rates

from ..config.run import RunConfig
from ..config.sections import OptimizerConfig
from ..runtime.processes import Process
from .run_plan import TABLE_OPTIMIZERS, RunPlan, Scaled
from .sharding import sharding_plan
from .tables import by_table, fill_tables
from .task import MeanLoss, TrainTask

_logger = logging.getLogger(__name__)


def build_sharded(plan: RunPlan) -> DistributedModelParallel:
    """Builds the run's model and shards it over the process group; initial values depend on the seed, not on the plan.

    Returns:
        The sharded :class:`TrainTask`.

    Raises:
        UserError: TorchRec's planner cannot fit the tables, or a setting does not suit the network.
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
    torch.manual_seed(config.train.seed)
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
    check_network(model, config, process)
    loss_of_sample = loss_of(config.train.loss, config.train.loss_options, len(schema.labels))
    loss = MeanLoss(process.world_size, loss_of_sample, mean_weight(schema), task_weights(config, schema))
    return train_task(model, plan, loss)


def check_network(model: nn.Module, config: RunConfig, process: Process) -> None:
    """Checks the settings that only the built network shows to be wrong. Raises UserError."""
    if config.optimizer.cross_l2 and not l2_kernels(model)["cross"]:
        raise UserError(
            f"optimizer.cross_l2 = {config.optimizer.cross_l2:g} is for cross layers, CIN and AutoInt, of which"
            f" {type(model).__name__} has none; leave it out"
        )
    for path, module in model.named_modules() if process.world_size > 1 else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f'model.name = "{config.model.name}" has a {type(module).__name__} ({path}), whose means leave out'
                " samples of other processes, or take in padding, and depend on their number; use LayerNorm, or one"
                " process"
            )


def has_batch_norm(model: nn.Module) -> bool:
    """True if a network has batch normalisation, which cannot train on a single sample."""
    return any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in model.modules())


def check_batches(model: nn.Module, plan: RunPlan) -> None:
    """Refuses batches of a single sample, or a part of one, for a network that normalises them. Raises UserError."""
    train, rows = plan.config.train, plan.train_rows
    for samples in (min(train.batch_size, rows), rows % train.batch_size):
        if 0 < samples < 2 * train.accumulation and has_batch_norm(model):
            raise UserError(
                f'model.name = "{plan.config.model.name}" has batch normalisation, which cannot train on a single'
                f" sample, as there would be in a batch of {samples}: {rows:,} training samples in batches of"
                f" {train.batch_size} (train.batch_size), in {train.accumulation} parts each (train.accumulation);"
                " choose another batch size"
            )


def mean_weight(schema: Schema) -> float:
    """Mean weight of the training samples of a data set; 1 without weights."""
    train = schema.splits.get("train")
    return train.weight / train.rows if train and train.weight else 1.0


def task_weights(config: RunConfig, schema: Schema) -> list[float]:
    """Weight of each label's loss."""
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
    """Allows or forbids TF32 in float32 matrix products on CUDA, for the whole process; warns of slow ones on CPU."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    elif precision == "bfloat16" and torch.bfloat16 not in BY_ONE_DNN:
        _logger.warning(
            'train.precision = "bfloat16" is about ten times slower than "float32" on a processor without AVX-512'
        )


def embedding_optimizer(plan: RunPlan, model: nn.Module) -> EmbeddingAdam | LookupsHandle | None:
    """Attaches the clip rule and the optimizer to a sharded model's tables.

    The clip covers the embedding columns; the wide weight behind them is not clipped.

    Returns:
        The optimizer. Where FBGEMM's fused optimizer updates the tables, the handle of the clip, or None if unclipped.
    """
    config, hyperparameters, rule = plan.config, plan.scaled.hyperparameters, plan.scaled.clip
    columns = {spec.name: spec.embedding_dim for spec in plan.tables}
    if config.optimizer.embedding == "adam":
        adam, factors = adam_config(config, plan.scaled), by_table(config.optimizer.embedding_lr_factors)
        return EmbeddingAdam(model, adam, rule, clip_columns=columns, lr_factors=factors)
    if config.clip.rule == "none" and hyperparameters.l2 == 0:
        return None
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
