"""What is changed of a sharded collection: the DDP of its lookups, its fused optimizer, and the rates of that."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizer

from .plan import ShardedCollection

_DDP_ARGUMENTS = ("device_ids", "process_group", "gradient_as_bucket_view", "static_graph")
"""Of torch's DistributedDataParallel, those that TorchRec gives unlike the defaults; attributes keep their values."""
_UPDATED_IN_BACKWARD = "_in_backward_optimizers"
"""Attribute by which ``torchrec.optim.optimizers.in_backward_optimizer_filter`` tells fused tables from others."""


def device_of(collection: ShardedCollection) -> torch.device:
    """Device of a collection; the parameters of a rank without tables are placeholders on the CPU."""
    return torch.device(collection._device or "cpu")


def is_pruned(called: nn.Module) -> bool:
    """True for a module of :attr:`ModelInventory.called` that prunes its tables (ITEP): rows are given to other ids."""
    return hasattr(called, "_itep_module")


def leave_ddp(collection: ShardedCollection, kernels: Collection[nn.Module]) -> Callable[[], None]:
    """Unwraps replicated lookups that hold some of these kernels from the DDP that all-reduces their complete tables.

    Returns a function to undo it, in a new DDP: the old one would have counted the backward passes that it did not see,
    and by its ``static_graph`` never reduce again. All ranks hold the same weights, so that nothing is sent.
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
    """The parts of a collection's ``fused_optimizer``, which it and the model's read anew in each call."""
    optimizers: list[tuple[str, KeyedOptimizer]] = collection.fused_optimizer.optimizers
    return optimizers


def mark_updated_in_backward(collection: ShardedCollection, optimizer: KeyedOptimizer) -> Callable[[], None]:
    """Marks dense tables as tables whose update is fused, so that TorchRec's recipe leaves them to ``optimizer``.

    Returns a function to undo it.
    """
    dense = [each for each in collection.parameters() if not hasattr(each, _UPDATED_IN_BACKWARD)]
    for each in dense:
        setattr(each, _UPDATED_IN_BACKWARD, [optimizer])

    def undo() -> None:
        for each in dense:
            delattr(each, _UPDATED_IN_BACKWARD)

    return undo


def set_initial_rates(model: nn.Module, rates: Mapping[str, float]) -> None:
    """Sets the learning rates that tables of an unsharded model begin with, by name; others have the sharder's.

    Tables of different rates are then looked up separately.
    """
    for collection in model.modules():
        if isinstance(collection, EmbeddingBagCollection):
            for table, rate in rates.items():
                collection.embedding_bags[table].weight._optimizer_kwargs = [{"learning_rate": rate}]


def set_rates(optimizer: Any, lr: float, factors: Mapping[str, float]) -> None:
    """Sets the rates of the coming steps: ``lr`` times the factor of the table, 1 for those that are not named.

    Args:
        optimizer: ``fused_optimizer`` of a sharded model.
        lr: learning rate.
        factors: by table, as for :func:`set_initial_rates`.
    """
    table_of = {id(weight): key.split(".")[-2] for key, weight in optimizer.params.items()}
    for group in optimizer.param_groups:
        group["lr"] = lr * factors.get(table_of[id(group["params"][0])], 1.0)
    optimizer.step()  # updates nothing: hands the rates to the tables
