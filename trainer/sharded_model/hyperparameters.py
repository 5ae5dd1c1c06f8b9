"""Hyperparameters of a run, scaled to its batch size, and settings of FBGEMM's fused optimizers with them."""

from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterWeightDecayMode,
    CowClipDefinition,
    WeightDecayMode,
)

from cowrec.sparse_opt import ClipRule, Hyperparameters, scale_clip, scale_hyperparameters
from cowrec.sparse_opt.algorithm.scaling import EmbeddingOptimizer
from cowrec.trainer.config.run import RunConfig

FUSED_OPTIMIZERS = {
    "adam": EmbOptimType.EXACT_SGD,  # never runs: EmbeddingAdam replaces its update
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "fbgemm_adam": EmbOptimType.ADAM,
    "fbgemm_cowclip": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
KINDS: dict[str, EmbeddingOptimizer] = {
    "adam": "adam",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rowwise_adagrad": "adagrad",
    "fbgemm_adam": "adam",
    "fbgemm_cowclip": "adagrad",
}
"""How each optimizer of the tables remembers its gradients, for the scaling rules."""


def fused_params(config: RunConfig) -> dict[str, Any]:
    """Settings of FBGEMM's fused optimizer, as TorchRec passes them to the tables."""
    optimizer, hyperparameters = config.optimizer, derived_hyperparameters(config)
    params: dict[str, Any] = {
        "optimizer": FUSED_OPTIMIZERS[optimizer.embedding],
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
            counter_halflife=optimizer.counter_halflife,
            weight_norm_coefficient=optimizer.weight_norm_coefficient,
            lower_bound=optimizer.lower_bound,
        )
    return params


def derived_hyperparameters(config: RunConfig, batch_size: int | None = None) -> Hyperparameters:
    """Learning rates, L2, betas and eps: the base values, scaled by the scaling rule to a batch size, by default the
    run's.
    """
    optimizer = config.optimizer
    assert optimizer.l2 is not None, "with_defaults has not been called"
    base = Hyperparameters(
        optimizer.embedding_lr,
        optimizer.dense_lr,
        optimizer.l2,
        betas=optimizer.betas,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        dense_weight_decay=optimizer.dense_weight_decay,
    )
    return scale_hyperparameters(
        base,
        base_batch_size=optimizer.base_batch_size,
        batch_size=batch_size or config.train.batch_size,
        rule=optimizer.scaling,
        embedding=KINDS[optimizer.embedding],
    )


def derived_clip(config: RunConfig, batch_size: int | None = None) -> ClipRule:
    """Clip rule of the run, its values scaled to a batch size, by default the run's."""
    optimizer = config.optimizer
    return scale_clip(
        config.clip.build(),
        base_batch_size=optimizer.base_batch_size,
        batch_size=batch_size or config.train.batch_size,
        rule=optimizer.scaling,
    )
