"""Search of a TorchRec model for its lookups, for tables that have none that can be clipped, and for sharding plans.

Like lookup.py, this file uses private attributes of TorchRec, FBGEMM and torch's GradScaler.
"""

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import (
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.types import ShardedModule, ShardingEnv2D, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from cowrec.errors import UserError

from .lookup import (
    ShardedCollection,
    TbeLookup,
    groups_of_ranks,
    has_row_shards,
    process_group_of,
    ranks_of_columns,
    table_names_of,
)

NO_ROWS = "a rank holds no row of it, nor of tables that are looked up with it; shard it table-wise"
"""Why a table cannot be clipped whose lookup here has no rows."""


def find_lookups(model: nn.Module) -> tuple[list[TbeLookup], dict[str, str]]:
    """Finds the lookups of every sharded collection in a model, and by table why one cannot be clipped."""
    lookups: list[TbeLookup] = []
    refusals: dict[str, str] = {}
    for module, names in table_names(model):
        if not isinstance(module, ShardedCollection):
            refusals |= dict.fromkeys(names.values(), _why_not(module))
            continue
        of_lookups: list[Any] = lookup_modules(module)
        for kernel in (kernel for lookup in of_lookups for kernel in lookup._emb_modules):
            if reason := _why_not_kernel(module, kernel):
                for table in kernel._config.embedding_tables:
                    refusals.setdefault(names[table.name], reason)
            else:
                lookups.append(TbeLookup(kernel, module, names))
    return lookups, refusals


def sharded_collections(model: nn.Module) -> dict[str, ShardedCollection]:
    """The sharded collections of a model, by their paths, without the names of wrappers."""
    found = _outermost_collections(model)
    return {path: each for path, each in found if isinstance(each, ShardedCollection)}


def called_modules(model: nn.Module) -> dict[ShardedCollection, nn.Module]:
    """The sharded collections of a model, and the module whose call runs each.

    That is the collection itself, or one that processes its features and calls its parts.
    """
    inner = {id(_inner(each)): each for each in model.modules()}
    return {each: inner.get(id(each), each) for each in sharded_collections(model).values()}


def is_pruned(called: nn.Module) -> bool:
    """True for a module of :func:`called_modules` that prunes its tables (ITEP): rows are given to other ids."""
    return hasattr(called, "_itep_module")


def lookup_modules(collection: ShardedCollection) -> list[nn.Module]:
    """A collection's modules of lookups, one for each kind of sharding; TorchRec makes new ones when it reshards."""
    return [each.module if isinstance(each, DistributedDataParallel) else each for each in collection._lookups]


def table_names(model: nn.Module) -> list[tuple[nn.Module, dict[str, str]]]:
    """Lists the collections of a model, each with a mapping of its tables' names in it to their names in the model.

    The same on all ranks.

    A name that several collections have becomes ``<path of the collection>.<name>``.
    """
    found = [(path, module, _table_names(module)) for path, module in _outermost_collections(model)]
    times = Counter(name for *_, names in found for name in names)
    return [
        (module, {name: name if times[name] == 1 or not path else f"{path}.{name}" for name in names})
        for path, module, names in found
    ]


def all_table_names(model: nn.Module) -> set[str]:
    """Names of all tables of a model, on all ranks."""
    return {name for _, names in table_names(model) for name in names.values()}


def lookups_of_ranks(model: nn.Module) -> list[list[list[str]]]:
    """Table names of each lookup of each rank, [rank][lookup][table], without data-parallel ones; the same on all."""
    ranks: list[list[list[str]]] = []
    for collection in sharded_collections(model).values():
        ranks += [[] for _ in range(collection._env.world_size - len(ranks))]
        for rank, group in groups_of_ranks(collection):
            names = table_names_of(group)
            if not _is_replicated(collection, names[0]):
                ranks[rank].append(names)
    return ranks


def tables_on_some_ranks(model: nn.Module) -> set[str]:
    """Tables whose rows are sharded over several ranks, but not over all; the same on all ranks."""
    return {
        table
        for table, collection, name in _sharded_tables(model)
        if has_row_shards(collection, name)
        and len(set(collection.module_sharding_plan[name].ranks)) != collection._env.world_size
    }


def column_split_tables(model: nn.Module) -> dict[str, list[tuple[int, ...]]]:
    """Tables whose columns are sharded, and the ranks of the shards of a row; the same on all ranks.

    Under grid sharding, where rows are sharded too, those of each part of the rows.
    """
    found = {table: ranks_of_columns(collection, name) for table, collection, name in _sharded_tables(model)}
    return {table: list(ranks.values()) for table, ranks in found.items() if ranks}


def replicated_tables(model: nn.Module) -> set[str]:
    """Tables that every rank holds a copy of (data-parallel); the same on all ranks."""
    return {table for table, collection, name in _sharded_tables(model) if _is_replicated(collection, name)}


def tables_in_replica_groups(model: nn.Module) -> set[str]:
    """Tables that groups of ranks hold copies of, whose weights they average (2D parallelism); alike on all ranks."""
    return {table for table, collection, _ in _sharded_tables(model) if isinstance(collection._env, ShardingEnv2D)}


def inconsistent_lookups(model: nn.Module) -> tuple[str, str] | None:
    """Two column-wise tables whose lookups do not run in the same order on all ranks; None if there are none."""
    order: dict[tuple[Any, ...], tuple[str, str]] = {}
    for module in sharded_collections(model).values():
        lookups_of_rank: dict[int, list[tuple[Any, str]]] = {}
        for rank, group in groups_of_ranks(module):
            split = [name for name in table_names_of(group) if ranks_of_columns(module, name)]
            if split:
                lookups_of_rank.setdefault(rank, []).append(((module, group.data_type, group.pooling), split[0]))
        for (one, name), (other, other_name) in chain(*(combinations(each, 2) for each in lookups_of_rank.values())):
            if one == other or (other, one) in order:
                return name, other_name
            order[one, other] = name, other_name
    return None


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


_DDP_ARGUMENTS = ("device_ids", "process_group", "gradient_as_bucket_view", "static_graph")
"""Of torch's DistributedDataParallel, those that TorchRec gives unlike the defaults; attributes keep their values."""
_INNER = ("_embedding_bag_collection", "_embedding_collection", "_embedding_module")
"""Attributes with the collection whose lookups a collection shares, which processes features or manages collisions."""
_UNSHARDED = (EmbeddingBagCollection, EmbeddingCollection, FusedEmbeddingBagCollection)
_WRAPPERS = ("_dmp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names of wrapped children, which paths leave out."""


def _inner(module: nn.Module) -> nn.Module | None:
    """The collection whose lookups one of TorchRec's shares; modules of users may have such attributes too."""
    names = _INNER if isinstance(module, ShardedModule) else ()
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _outermost_collections(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Collections with their first paths; one that several modules share is listed once."""
    found: dict[nn.Module, str] = {}
    for path, module in _collections_below(model, ""):
        found.setdefault(module, path)
    return [(path, module) for module, path in found.items()]


def _collections_below(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    has_lookups = isinstance(model, ShardedModule) and hasattr(model, "_lookups") and _inner(model) is None
    if isinstance(model, _UNSHARDED) or has_lookups:
        yield path, model
        return
    for name, child in model.named_children():
        hidden = name in _WRAPPERS or (name == "module" and isinstance(model, DistributedDataParallel))
        yield from _collections_below(child, path if hidden else f"{path}.{name}".lstrip("."))


def _sharded_tables(model: nn.Module) -> Iterator[tuple[str, ShardedCollection, str]]:
    """Sharded tables by their names in the model, with their collections and their names there."""
    for module, names in table_names(model):
        if isinstance(module, ShardedCollection):
            yield from ((in_model, module, name) for name, in_model in names.items())


def _is_replicated(collection: ShardedCollection, table: str) -> bool:
    plan = collection.module_sharding_plan[table]
    return bool(plan.sharding_type == ShardingType.DATA_PARALLEL.value)


def rows_of_tables(model: nn.Module) -> dict[str, int]:
    """Rows of each table over all ranks, by its name in the model."""
    return {
        names[each.name]: each.num_embeddings for module, names in table_names(model) for each in _table_configs(module)
    }


def _table_names(collection: nn.Module) -> list[str]:
    return [config.name for config in _table_configs(collection)] or [type(collection).__name__]


def _table_configs(collection: nn.Module) -> list[Any]:
    for attribute in ("_embedding_bag_configs", "_embedding_configs"):
        if hasattr(collection, attribute):
            return list(getattr(collection, attribute))
    return []


def _why_not(collection: nn.Module) -> str:
    kind = type(collection).__name__
    if isinstance(collection, _UNSHARDED):
        return (
            f"{kind} is not sharded; wrap the model in torchrec.distributed.DistributedModelParallel first, under a"
            " plan that has it"
        )
    return f"only tables of an EmbeddingBagCollection or an EmbeddingCollection can be clipped, not those of a {kind}"


def _why_not_kernel(collection: Any, kernel: Any) -> str | None:
    if getattr(collection, "_use_index_dedup", False):
        return (
            "TorchRec deduplicates its ids before the lookup, so that they cannot be counted; shard it without"
            " use_index_dedup"
        )
    if not any(len(view) for view in kernel.emb_module.split_embedding_weights()):
        return NO_ROWS
    if isinstance(kernel, BatchedDenseEmbeddingBag | BatchedDenseEmbedding):
        return None
    if not isinstance(kernel, BatchedFusedEmbeddingBag | BatchedFusedEmbedding) or not isinstance(
        kernel.emb_module, SplitTableBatchedEmbeddingBagsCodegen
    ):
        return f'its compute kernel is {type(kernel).__name__}; shard it row- or table-wise with compute_kernel="fused"'
    tbe = kernel.emb_module
    if any(spec[2] == EmbeddingLocation.MANAGED_CACHING for spec in tbe.embedding_specs):
        return 'its rows are behind a cache of FBGEMM\'s; shard it under compute_kernel="fused_uvm" or "fused"'
    if len({view.untyped_storage().data_ptr() for view in tbe.split_embedding_weights()}) != 1:
        return "tables of its lookup are in different kinds of memory; give them one placement"
    if len({view.dtype for view in tbe.split_embedding_weights()}) != 1 or not all(
        view.dtype.is_floating_point and view.element_size() > 1 for view in tbe.split_embedding_weights()
    ):
        return "its weights are quantised; use float32 or float16, or on CUDA bfloat16"
    return None


@contextmanager
def raised_on_all_ranks(model: nn.Module) -> Iterator[None]:
    """Raises a ValueError within it on all ranks that hold the model. They must enter it together.

    Nothing within it may wait for other ranks.
    """
    error: ValueError | None = None
    try:
        yield
    except ValueError as found:
        error = found
    group = next(map(process_group_of, sharded_collections(model).values()), None)
    if group is not None and group.size() > 1:
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
        refusing = torch.tensor(group.rank() + 1 if error else 0, device=device)
        dist.all_reduce(refusing, dist.ReduceOp.MAX, group=group)
        if refusing:
            message = [str(error)]
            source = dist.get_global_rank(group, int(refusing) - 1)
            dist.broadcast_object_list(message, source, group=group)
            error = error or UserError(f"rank {source}: {message[0]}")
    if error:
        raise error


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


def grad_scalers_in_use() -> list[GradScaler]:
    """Enabled scalers of this process that have scaled a loss.

    Searches all objects that refer to a scaler's class: take care to call it once, not in every step.
    """
    found = [each for each in gc.get_referrers(*_with_subclasses(GradScaler)) if isinstance(each, GradScaler)]
    # The scale is None until the first loss; get_scale() tells the initial one then.
    return [each for each in found if each.is_enabled() and each._scale is not None]


def _with_subclasses(kind: Any) -> set[Any]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
