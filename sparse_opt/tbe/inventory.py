"""Inventory of a TorchRec model, from one walk: collections, tables, lookups, and why a table cannot be clipped."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, combinations
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import (
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from cowrec.errors import UserError
from cowrec.names import hint

from .lookup import TbeLookup, lookup_modules
from .plan import RankLookup, ShardedCollection, Table, lookups_of_ranks, process_group_of, table_of

NO_ROWS = "a rank holds no row of it, nor of tables that are looked up with it; shard it table-wise"
"""Reason why a table cannot be clipped if its lookup has no rows here."""

_INNER = ("_embedding_bag_collection", "_embedding_collection", "_embedding_module")
"""Attributes of modules that process features or manage collisions, with the collection whose lookups they share."""
_UNSHARDED = (EmbeddingBagCollection, EmbeddingCollection, FusedEmbeddingBagCollection)
_WRAPPERS = ("_dmp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Names of wrapped children, which are left out of paths."""


class ModelInventory:
    """Tables and lookups of a model. Only ``lookups`` and ``unclippable`` differ between ranks.

    Attributes:
        tables: all tables, by their names in the model.
        collections: sharded collections by path, without the names of wrappers; a collection that several modules share
            is listed once, by its first path.
        called: module whose call runs a collection, by collection: the collection itself, or a module that processes
            its features and calls its parts.
        lookups: lookups of this rank that can be clipped.
        unclippable: reasons why tables cannot be clipped, by table name, as far as this rank knows them.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        found = _outermost_collections(model)
        of_collection = {module: _rows_of_tables(module) for module in found}
        times = Counter(chain(*of_collection.values()))
        self.tables: dict[str, Table] = {}
        self.lookups: list[TbeLookup] = []
        self.unclippable: dict[str, str] = {}
        for module, path in found.items():
            own = {
                name: table_of(module, name, name if times[name] == 1 or not path else f"{path}.{name}", rows)
                for name, rows in of_collection[module].items()
            }
            self.tables |= {table.name: table for table in own.values()}
            self._find_lookups(module, own)
        self.collections = {path: module for module, path in found.items() if isinstance(module, ShardedCollection)}
        outer = {id(_inner(module)): module for module in model.modules()}
        self.called: dict[ShardedCollection, nn.Module] = {
            collection: outer.get(id(collection), collection) for collection in self.collections.values()
        }

    def _find_lookups(self, collection: nn.Module, own: dict[str, Table]) -> None:
        if not isinstance(collection, ShardedCollection):
            self.unclippable |= dict.fromkeys([table.name for table in own.values()], _why_not(collection))
            return
        modules: list[Any] = lookup_modules(collection)
        for kernel in (kernel for module in modules for kernel in module._emb_modules):
            if reason := _why_not_kernel(collection, kernel):
                for table in kernel._config.embedding_tables:
                    self.unclippable.setdefault(own[table.name].name, reason)
            else:
                self.lookups.append(TbeLookup(kernel, collection, own))

    def tables_of(self, collection: nn.Module) -> dict[str, Table]:
        """Tables of a collection, by their names in the model."""
        return {name: table for name, table in self.tables.items() if table.collection is collection}

    def named(self, argument: str, names: Iterable[str]) -> dict[str, str]:
        """Finds the tables that a user's names mean; returns the user's names by the tables' names in the model.

        A name that several collections have means the tables of all of them. ``argument`` is the argument with the
        names, for messages.

        Raises:
            TypeError: names is a string, which would be taken for a list of letters.
            ValueError: the model does not have a table; the message has the nearest name.
        """
        if isinstance(names, str):
            raise TypeError(f"{argument} must be a list of table names, got {names!r}; write [{names!r}]")
        by_name: dict[str, list[str]] = {}
        for table in self.tables.values():
            by_name.setdefault(table.own_name, []).append(table.name)
        # The name of one table in the model has precedence over one that several collections have.
        ordered = sorted(names, key=lambda name: name not in by_name)
        named = {table: name for name in ordered for table in by_name.get(name, [name])}
        for name in named:
            if name not in self.tables:
                raise UserError(
                    f"{argument} names table {name!r}, which the model does not have; {hint(name, sorted(self.tables))}"
                )
        return named

    def lookups_of_ranks(self) -> list[list[list[str]]]:
        """Lists each rank's lookups, by the own names of their tables, without data-parallel tables."""
        ranks: list[list[list[str]]] = []
        for collection in self.collections.values():
            ranks += [[] for _ in range(process_group_of(collection).size() - len(ranks))]
            replicated = {table.own_name for table in self.tables_of(collection).values() if table.is_replicated}
            for lookup in lookups_of_ranks(collection):
                if lookup.tables[0] not in replicated:
                    ranks[lookup.rank].append(lookup.tables)
        return ranks

    def inconsistent_lookups(self) -> tuple[str, str] | None:
        """Finds two column-wise tables whose lookups do not run in the same order on all ranks."""
        order: dict[tuple[Any, ...], tuple[str, str]] = {}
        for collection in self.collections.values():
            split = {table.own_name for table in self.tables_of(collection).values() if table.column_ranks}
            of_rank: dict[int, list[tuple[RankLookup, str]]] = {}
            for lookup in lookups_of_ranks(collection):
                if tables := [name for name in lookup.tables if name in split]:
                    of_rank.setdefault(lookup.rank, []).append((lookup, tables[0]))
            for (one, name), (other, other_name) in chain(*(combinations(pairs, 2) for pairs in of_rank.values())):
                kinds = (collection, one.kind), (collection, other.kind)
                if one.kind == other.kind or kinds[::-1] in order:
                    return name, other_name
                order[kinds] = name, other_name
        return None

    @contextmanager
    def raised_on_all_ranks(self) -> Iterator[None]:
        """Raises a ValueError of one rank on all ranks, which enter together and do not wait for each other within."""
        error: ValueError | None = None
        try:
            yield
        except ValueError as found:
            error = found
        group = next(map(process_group_of, self.collections.values()), None)
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


def _inner(module: nn.Module) -> nn.Module | None:
    """Finds the collection whose lookups a module of TorchRec shares."""
    names = _INNER if isinstance(module, ShardedModule) else ()
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def _outermost_collections(model: nn.Module) -> dict[nn.Module, str]:
    """Collections with their first paths."""
    found: dict[nn.Module, str] = {}

    def search(module: nn.Module, path: str) -> None:
        has_lookups = isinstance(module, ShardedModule) and hasattr(module, "_lookups") and _inner(module) is None
        if isinstance(module, _UNSHARDED) or has_lookups:
            found.setdefault(module, path)
            return
        for name, child in module.named_children():
            hidden = name in _WRAPPERS or (name == "module" and isinstance(module, DistributedDataParallel))
            search(child, path if hidden else f"{path}.{name}".lstrip("."))

    search(model, "")
    return found


def _rows_of_tables(collection: Any) -> dict[str, int]:
    """Numbers of rows by table; an unknown kind of collection counts as one table with the name of its type."""
    for attribute in ("_embedding_bag_configs", "_embedding_configs"):
        if configs := getattr(collection, attribute, None):
            return {config.name: config.num_embeddings for config in configs}
    return {type(collection).__name__: 0}


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
    tbe = kernel.emb_module
    views = tbe.split_embedding_weights()
    if not any(len(view) for view in views):
        return NO_ROWS
    if isinstance(kernel, BatchedDenseEmbeddingBag | BatchedDenseEmbedding):
        return None
    if not isinstance(kernel, BatchedFusedEmbeddingBag | BatchedFusedEmbedding) or not isinstance(
        tbe, SplitTableBatchedEmbeddingBagsCodegen
    ):
        return f'its compute kernel is {type(kernel).__name__}; shard it row- or table-wise with compute_kernel="fused"'
    if any(spec[2] == EmbeddingLocation.MANAGED_CACHING for spec in tbe.embedding_specs):
        return 'its rows are behind a cache of FBGEMM\'s; shard it under compute_kernel="fused_uvm" or "fused"'
    if len({view.untyped_storage().data_ptr() for view in views}) != 1:
        return "tables of its lookup are in different kinds of memory; give them one placement"
    kinds = {view.dtype for view in views}
    if len(kinds) != 1 or not all(kind.is_floating_point and kind.itemsize > 1 for kind in kinds):
        return "its weights are quantised; use float32 or float16, or on CUDA bfloat16"
    return None
