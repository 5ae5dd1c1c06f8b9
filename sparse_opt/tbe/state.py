"""State of rows as tensors that are sharded like the weights, and entries of a KeyedOptimizer's state."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed.tensor import DTensor
from torchrec.optim.keyed import KeyedOptimizer

from cowrec.errors import UserError

from .lookup import TbeLookup
from .plan import ShardedCollection


def sharded_like_weights(
    collection: ShardedCollection,
    lookups: Sequence[TbeLookup],
    flats: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    per_row: bool = False,
) -> dict[str, ShardedTensor | Tensor]:
    """Wraps state of rows into tensors that are sharded, or replicated, like the weights. All ranks call together.

    Args:
        flats: flat tensor of each lookup here, as in :meth:`TbeLookup.view_of`; the result shares its memory.
        per_row: whether the tensors have one value for each row; only the first column shard's values are then used.

    Returns a tensor for each table, by the key of its weight in the collection's ``state_dict()`` without ``.weight``.
    """
    by_address: dict[int, Tensor] = {}
    for lookup, flat in zip(lookups, flats, strict=True):
        for table, view in enumerate(lookup.module.split_embedding_weights()):
            by_address[view.data_ptr()] = lookup.view_of(flat, table)
    result: dict[str, ShardedTensor | Tensor] = {}
    for weight_key, weight in collection.state_dict().items():
        key = weight_key.removesuffix(".weight")
        if isinstance(weight, ShardedTensor):
            width = 1 if per_row else None
            parts = [
                # Shards without rows have no distinct address.
                by_address[shard.tensor.data_ptr()] if len(shard.tensor) else shard.tensor.to(dtype)[:, :width]
                for shard in weight.local_shards()
            ]
            result[key] = _sharded_like(weight, parts, dtype, per_row)
        elif isinstance(weight, DTensor):
            raise UserError(
                f"table {key!r} is given out as a DTensor, of which the optimizer's state cannot be saved and loaded;"
                " leave output_dtensor out of the ShardingEnv"
            )
        elif weight.data_ptr() in by_address:
            result[key] = by_address[weight.data_ptr()]
    return result


def _sharded_like(weight: ShardedTensor, parts: Sequence[Tensor], dtype: torch.dtype, per_row: bool) -> ShardedTensor:
    """Builds a tensor that is sharded like a weight, or over the rows alone."""

    def narrow(shard: ShardMetadata) -> ShardMetadata:
        return replace(shard, shard_sizes=[shard.shard_sizes[0], 1]) if per_row else shard

    def holds_rows(shard: ShardMetadata) -> bool:
        return not per_row or shard.shard_offsets[1] == 0

    complete = weight.metadata()
    metadata = ShardedTensorMetadata(
        shards_metadata=[narrow(shard) for shard in complete.shards_metadata if holds_rows(shard)],
        size=torch.Size([complete.size[0], 1]) if per_row else complete.size,
        tensor_properties=replace(complete.tensor_properties, dtype=dtype),
    )
    shards = [
        Shard(part, narrow(shard.metadata))
        for part, shard in zip(parts, weight.local_shards(), strict=True)
        if holds_rows(shard.metadata)
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=weight._process_group
    )


def parts_here(value: Any) -> list[Tensor]:
    """Lists the tensors of this rank in a value of a model's or an optimizer's state."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value] if isinstance(value, Tensor) and not isinstance(value, DTensor) else []


class Entry:
    """Entry of a table in an optimizer's state, with functions that take, load and check its value."""

    def __init__(
        self, take: Callable[[], Any], load: Callable[[Any], None], check: Callable[[Any], None] = lambda _: None
    ):
        self.state_dict, self.load_state_dict, self.check = take, load, check


def tensor_entry(key: str, name: str, own: Any, prepare: Callable[[], None] = lambda: None) -> Entry:
    """Makes the entry of a table's tensor; ``prepare`` runs before values from other memory are written into it."""

    def check(given: Any) -> None:
        # Sizes of the whole and of the parts here. KeyedOptimizer would resize a tensor to memory of its own.
        sizes, wanted = ([list(part.size()) for part in (of, *parts_here(of))] for of in (given, own))
        if sizes != wanted:
            raise UserError(
                f"the optimizer's state holds {name!r} of {key!r} in the sizes {sizes}, but the table has {wanted};"
                " load it into a model with the same tables, sharded alike"
            )

    def load(given: Any) -> None:
        check(given)
        pairs = zip(parts_here(given), parts_here(own), strict=True)
        if not any(len(here) and one.data_ptr() == here.data_ptr() for one, here in pairs):
            prepare()
        KeyedOptimizer._update_param_state_dict_object({name: own}, {name: given}, [key])

    return Entry(lambda: own, load, check)
