"""From a data schema and a configuration to a sharded model with its optimizers: the one place where rooms meet."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fbgemm_gpu.split_embedding_configs import EmbOptimType
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

from cowrec.data_pipeline import Batch, Schema
from cowrec.models import build_model, l2_kernels
from cowrec.sparse_opt import (
    AdamConfig,
    ClipRule,
    EmbeddingAdam,
    Hyperparameters,
    LookupsHandle,
    RowInitializer,
    attach_cowclip,
    scale_clip,
    scale_hyperparameters,
)
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runtime.processes import Process

from .id_translation import RowIds, row_ids
from .sharding import sharding_plan
from .tables import embedding_tables, fill_tables, table_specs

FUSED_OPTIMIZERS = {
    "adam": EmbOptimType.EXACT_SGD,  # never runs: EmbeddingAdam takes over its backward
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "fbgemm_adam": EmbOptimType.ADAM,
    "fbgemm_cowclip": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


class TrainTask(nn.Module):
    """A model with its loss, in the form that TorchRec's pipeline drives.

    ``forward(batch)`` returns (loss, (loss, logits [B], label [B])), the latter detached. The loss is this rank's share
    of the mean over the global batch, times the world size, because TorchRec and DDP average over ranks; slices may be
    of unequal size. ``half_on`` is the type of device whose matrix products are to be bfloat16, none by default.
    ``row_ids`` finds the rows of ids that are none.
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        linear_l2: float,
        cross_l2: float,
        half_on: str = "",
        row_ids: RowIds | None = None,
    ):
        super().__init__()
        self.model = model
        self.row_ids = row_ids
        self._half_on = half_on
        self._world_size = world_size
        kernels = l2_kernels(model)
        self._penalties = [(linear_l2, each) for each in kernels["linear"] if linear_l2 > 0]
        self._penalties += [(cross_l2, each) for each in kernels["cross"] if cross_l2 > 0]

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        # Rows after the last label are padding; see even_slices.
        sparse = self.row_ids(batch, training=self.training) if self.row_ids else batch.sparse
        with torch.autocast(self._half_on or "cpu", torch.bfloat16, enabled=bool(self._half_on)):
            logits = self.model(batch.dense, sparse)[: batch.label.numel()]
        total = F.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
        loss = total * self._world_size / batch.global_batch_size
        for coefficient, kernel in self._penalties:
            loss = loss + coefficient * kernel.square().sum()
        return loss, (loss.detach(), logits.detach(), batch.label)


def build_sharded(config: RunConfig, schema: Schema, process: Process) -> DistributedModelParallel:
    """The run's model, sharded over the process group, with seeded initial values that no sharding plan changes.

    Raises:
        ValueError: an optimizer or precision that this device does not have, or a sharding that the run does not go
            with.
    """
    set_product_precision(config.train.precision, process.device)
    if config.optimizer.embedding == "fbgemm_adam" and process.device.type != "cuda":
        raise ValueError('optimizer.embedding = "fbgemm_adam" exists on CUDA only; on CPU use "adam"')
    hyperparameters = derived_hyperparameters(config)
    torch.manual_seed(config.train.seed)
    specs = table_specs(schema, config.id_table)
    tables = embedding_tables(schema, specs, config.model.embedding_dim)
    model = build_model(
        config.model,
        tables,
        len(schema.dense),
        is_weighted=schema.is_weighted,
        fields=[field.name for field in schema.sparse],
        device=torch.device("meta"),
    )
    half_on = process.device.type if config.train.precision == "bfloat16" else ""
    ids = row_ids(schema, specs, process, config.train.seed)
    task = TrainTask(model, process.world_size, hyperparameters.l2, config.optimizer.cross_l2, half_on, ids)
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params(config))
    sharded = DistributedModelParallel(
        task,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=process.device,
        plan=sharding_plan(task, config, process, sharder),
        sharders=[sharder],
    )
    fill_tables(sharded, config.model.embedding_dim, config.optimizer.embedding_init_std, config.train.seed)
    return sharded


def set_product_precision(precision: str, device: torch.device) -> None:
    """Lets float32 matrix products on CUDA round their factors to TF32, or keeps them from it, in this whole process.

    Raises:
        ValueError: "tf32" on another device.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    elif precision == "tf32":
        raise ValueError(
            'train.precision = "tf32" exists on CUDA only; on CPU set train.precision = "float32" or "bfloat16"'
        )


def fused_params(config: RunConfig) -> dict[str, Any]:
    """What TorchRec passes on to FBGEMM's tables: the fused optimizer and its settings."""
    optimizer = config.optimizer
    params: dict[str, Any] = {
        "optimizer": FUSED_OPTIMIZERS[optimizer.embedding],
        "learning_rate": derived_hyperparameters(config).embedding_lr,
        "eps": optimizer.eps,
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    if optimizer.embedding == "fbgemm_adam":
        params |= {"beta1": optimizer.betas[0], "beta2": optimizer.betas[1]}
    if optimizer.embedding == "fbgemm_cowclip":
        params["weight_decay_mode"] = WeightDecayMode.COWCLIP
        params["cowclip_regularization"] = CowClipDefinition(
            counter_weight_decay_mode=CounterWeightDecayMode.NONE,
            counter_halflife=optimizer.counter_halflife,
            weight_norm_coefficient=optimizer.weight_norm_coefficient,
            lower_bound=optimizer.lower_bound,
        )
    return params


def embedding_optimizer(config: RunConfig, schema: Schema, model: nn.Module) -> EmbeddingAdam | LookupsHandle | None:
    """Puts the tables under their clip rule and optimizer; the wide weight behind the embedding is not clipped.

    Rows of new ids are from then on made as the optimizer wants them.

    Returns:
        The optimizer; where FBGEMM's fused one does the work, the handle of its clip, or None unclipped.

    Raises:
        ValueError: a clip rule or L2 that the fused optimizer cannot follow on this data.
    """
    optimizer = _embedding_optimizer(config, schema, model)
    ids = row_ids_of(model)
    if ids and ids.tables:
        ids.births = RowInitializer(
            model,
            optimizer if isinstance(optimizer, EmbeddingAdam) else None,
            ids.table_names,
            columns=config.model.embedding_dim,
            std=config.optimizer.embedding_init_std,
            seed=config.train.seed,
        )
    return optimizer


def row_ids_of(model: nn.Module) -> RowIds | None:
    """What finds the rows of a sharded :class:`TrainTask`'s ids, None where they are rows already."""
    (task,) = (module for module in model.modules() if isinstance(module, TrainTask))
    return task.row_ids


def _embedding_optimizer(config: RunConfig, schema: Schema, model: nn.Module) -> EmbeddingAdam | LookupsHandle | None:
    hyperparameters = derived_hyperparameters(config)
    rule, columns = derived_clip(config), config.model.embedding_dim
    if config.optimizer.embedding == "adam":
        adam = AdamConfig(
            lr=hyperparameters.embedding_lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            adam_epsilon=config.optimizer.adam_epsilon,
            l2=hyperparameters.l2,
            absent_rows=config.optimizer.absent_rows or "replay",
        )
        return EmbeddingAdam(model, adam, rule, clip_columns=columns)
    if config.clip.rule == "none" and hyperparameters.l2 == 0:
        return None
    several = [field.name for field in schema.sparse if field.kind != "categorical"]
    if several:
        raise ValueError(
            f'optimizer.embedding = "{config.optimizer.embedding}" can neither clip the embedding apart from the wide'
            f" weight nor give each row its L2 where samples have several ids (field {several[0]!r}); set"
            ' optimizer.embedding = "adam", or clip.rule = "none" and optimizer.l2 = 0'
        )
    return attach_cowclip(model, rule, clip_columns=columns, single_id_bags=True, l2=hyperparameters.l2)


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that the dense optimizer updates, by name: all but the tables, which are updated in their backward."""
    return {name: each for name, each in model.named_parameters() if ".embedding_bags." not in name}


def derived_hyperparameters(config: RunConfig) -> Hyperparameters:
    """The run's learning rates and L2: the base values, scaled by the rule to its batch size."""
    optimizer = config.optimizer
    base = Hyperparameters(optimizer.embedding_lr, optimizer.dense_lr, optimizer.l2)
    return scale_hyperparameters(
        base,
        base_batch_size=optimizer.base_batch_size,
        batch_size=config.train.batch_size,
        rule=optimizer.scaling,
    )


def derived_clip(config: RunConfig) -> ClipRule:
    """The run's clip rule, its threshold (if it has one) scaled to the batch size."""
    optimizer = config.optimizer
    return scale_clip(
        config.clip.build(),
        base_batch_size=optimizer.base_batch_size,
        batch_size=config.train.batch_size,
        rule=optimizer.scaling,
    )


def describe(config: RunConfig) -> dict[str, Any]:
    """What was trained, with which derived values, as saved with a run."""
    clip: Any = derived_clip(config)
    return {
        "model": config.model.name,
        "batch_size": config.train.batch_size,
        "scaling": config.optimizer.scaling,
        "clip": config.clip.rule,
        "clip_values": dataclasses.asdict(clip),
        **dataclasses.asdict(derived_hyperparameters(config)),
    }
