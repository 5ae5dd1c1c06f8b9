"""Changes of a sharded collection: DDP of its lookups, its optimizer and rates, and its forward on one process."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from ..kernels.profiling import profiled
from .inventory import ModelInventory
from .plan import ShardedCollection

_DDP_ARGUMENTS = ("device_ids", "process_group", "gradient_as_bucket_view", "static_graph")
"""Arguments of DistributedDataParallel that TorchRec sets; the module has their values as attributes."""
_UPDATED_IN_BACKWARD = "_in_backward_optimizers"
"""Attribute by which ``torchrec.optim.optimizers.in_backward_optimizer_filter`` tells fused tables from others."""


def device_of(collection: ShardedCollection) -> torch.device:
    """Device of a collection, whose parameters on a rank without tables are placeholders on the CPU."""
    return torch.device(collection._device or "cpu")


def is_pruned(called: nn.Module) -> bool:
    """True if a module of :attr:`ModelInventory.called` prunes its tables (ITEP), which gives rows to other ids."""
    return hasattr(called, "_itep_module")


def leave_ddp(collection: ShardedCollection, kernels: Collection[nn.Module]) -> Callable[[], None]:
    """Unwraps replicated lookups with some of these kernels from DDP, which would all-reduce complete tables.

    Returns a function that wraps them in a new DDP. The old one, with ``static_graph``, has counted the backward passes
    without it and would never reduce again. All ranks hold the same weights, so that the new one sends nothing.
    """
    again: list[tuple[int, nn.Module, Callable[[], nn.Module]]] = []
    for index, wrapped in enumerate(collection._lookups):
        if isinstance(wrapped, DistributedDataParallel) and not set(kernels).isdisjoint(wrapped.module.modules()):
            arguments = {name: getattr(wrapped, name) for name in _DDP_ARGUMENTS}
            lookup = collection._lookups[index] = wrapped.module
            again.append((index, lookup, partial(DistributedDataParallel, lookup, init_sync=False, **arguments)))

    def rejoin() -> None:
        for index, lookup, wrap in again:
            if collection._lookups[index] is lookup:  # not one that was rebuilt since
                collection._lookups[index] = wrap()

    return rejoin


def fused_optimizers(collection: ShardedCollection) -> list[tuple[str, KeyedOptimizer]]:
    """Parts of a collection's ``fused_optimizer``, a list that every call of the optimizer reads anew."""
    optimizers: list[tuple[str, KeyedOptimizer]] = collection.fused_optimizer.optimizers
    return optimizers


def mark_updated_in_backward(collection: ShardedCollection, optimizer: KeyedOptimizer) -> Callable[[], None]:
    """Marks dense tables as fused, so that TorchRec's recipe leaves them to ``optimizer``; returns an undo function."""
    dense = [weight for weight in collection.parameters() if not hasattr(weight, _UPDATED_IN_BACKWARD)]
    for weight in dense:
        setattr(weight, _UPDATED_IN_BACKWARD, [optimizer])

    def undo() -> None:
        for weight in dense:
            delattr(weight, _UPDATED_IN_BACKWARD)

    return undo


def set_initial_rates(model: nn.Module, rates: Mapping[str, float]) -> None:
    """Sets initial learning rates of an unsharded model's tables; tables of different rates become separate lookups."""
    for collection in model.modules():
        if isinstance(collection, EmbeddingBagCollection):
            for table, rate in rates.items():
                collection.embedding_bags[table].weight._optimizer_kwargs = [{"learning_rate": rate}]


def set_rates(optimizer: Any, lr: float, factors: Mapping[str, float]) -> None:
    """Sets the rates of a model's ``fused_optimizer``: ``lr`` times the table's factor, by name, or times 1."""
    table_of = {id(weight): key.split(".")[-2] for key, weight in optimizer.params.items()}
    for group in optimizer.param_groups:
        group["lr"] = lr * factors.get(table_of[id(group["params"][0])], 1.0)
    optimizer.step()  # hands the rates to the tables, and updates nothing


def look_up_directly(model: nn.Module) -> None:
    """Replaces the forward of each sharded collection by calls of its lookups; outputs and gradients are bit-equal.

    TorchRec exchanges ids and rows on one rank too, which costs host time and waits for the device in every step. The
    first forward of a collection stays TorchRec's, which checks the features and finds their order. TorchRec's forward
    also stays where it does more: with several ranks, column shards, and mean pooling of row-wise tables.
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


def _look_up(
    collection: ShardedEmbeddingBagCollection,
    forward: Callable[..., KeyedTensor],
    features: KeyedJaggedTensor,
) -> KeyedTensor:
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
    """Pools a sharding's features to [B, sum D], by its module of FBGEMM if there is only one."""
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
