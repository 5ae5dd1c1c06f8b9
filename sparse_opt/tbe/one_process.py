"""Forward of sharded collections in one process: straight to the lookups, without the exchange between ranks.

TorchRec exchanges ids and rows with one rank too. That costs host time in every step and waits for the device once, and
the exchanged tensors equal those that went in.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from ..kernels.profiling import profiled
from .inventory import ModelInventory

_Forward = Callable[[KeyedJaggedTensor], KeyedTensor]


def look_up_directly(model: nn.Module) -> None:
    """Replaces the forward of each sharded collection by calls of its lookups; outputs and gradients are bit-equal.

    The first forward of a collection remains TorchRec's, which checks the features and finds their order. TorchRec's
    forward also remains where it does more than the exchange: with several ranks, where it joins column shards, and
    where it divides row-wise sums by the lengths of the bags (mean pooling).

    Args:
        model: any module that holds sharded EmbeddingBagCollections.
    """
    for collection in ModelInventory(model).collections.values():
        if isinstance(collection, ShardedEmbeddingBagCollection) and only_exchanges(collection):
            collection.forward = partial(_look_up, collection, collection.forward)


def only_exchanges(collection: ShardedEmbeddingBagCollection) -> bool:
    """True if TorchRec's forward returns what the lookups return."""
    return (
        collection._env.world_size == 1
        and not collection._has_mean_pooling_callback
        and not set(collection._sharding_types) & {ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value}
    )


def _look_up(collection: ShardedEmbeddingBagCollection, forward: _Forward, features: KeyedJaggedTensor) -> KeyedTensor:
    """Pooled rows of the features; ``forward`` is TorchRec's."""
    needs_torchrec = collection._has_uninitialized_input_dist or not isinstance(features, KeyedJaggedTensor)
    if needs_torchrec or features.variable_stride_per_key() or collection.post_lookup_tracker_fn is not None:
        return forward(features)
    if collection._has_features_permute:
        features = features.permute(collection._features_order, collection._features_order_tensor)
    with profiled("[lookup]"):  # as TorchRec's forward names it
        lookups: Any = collection._lookups
        parts = [features] if len(lookups) == 1 else features.split(collection._feature_splits)
        pooled = [_pooled(lookup, part) for lookup, part in zip(lookups, parts, strict=True)]
    return KeyedTensor(
        keys=collection._embedding_names,
        length_per_key=collection._embedding_dims,
        values=pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1),
    )


def _pooled(lookup: Any, features: KeyedJaggedTensor) -> torch.Tensor:
    """Pooled rows of a sharding's features, [B, sum D], straight from its module of FBGEMM if it has a single one."""
    kernels: Any = getattr(lookup, "_emb_modules", ())  # none under DDP
    plain = len(kernels) == 1 and type(kernels[0]) is BatchedFusedEmbeddingBag
    if not plain or getattr(kernels[0], "_raw_id_tracker_wrapper", None) is not None:
        pooled: torch.Tensor = lookup(features)
        return pooled
    weights = features.weights_or_none()
    pooled = kernels[0].emb_module(
        indices=features.values(),
        offsets=features.offsets(),
        per_sample_weights=weights if weights is not None and weights.is_floating_point() else None,
    )
    return pooled
