"""Initialization of rows that are given to new ids: weights, which depend on the id alone, and optimizer state.

Sizes: n new rows, D columns of a row's embedding.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import tau
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cowrec.errors import UserError

from ..id_tables.kernels.hashing import GOLDEN, mix
from ..id_tables.kernels.slots import COOLDOWN
from ..id_tables.tables import NewRows
from ..kernels.compiled import compiled
from ..lookups.handle import attached_to
from ..tbe.inventory import NO_ROWS, ModelInventory
from ..tbe.lookup import TbeLookup, lookup_modules
from .embedding_adam import EmbeddingAdam
from .lookup_adam import LookupAdam

_CHUNK = 1 << 16


class RowInitializer:
    """Resets the rows of new ids in a sharded model, on the ranks that store them. All ranks make it together.

    Weights are N(0, std) in the leading columns and 0 in the others. They are computed from (seed, table, feature, id),
    so that they depend neither on the row's number nor on the sharding plan. The row's optimizer state becomes 0.

    Batches may be translated any number of steps ahead. The new rows of a batch must be reset immediately before the
    training forward of that batch, because earlier batches may still train these rows as those of other ids.

    Args:
        optimizer: the :class:`EmbeddingAdam` that trains the tables, or None under FBGEMM's fused optimizers.
        tables: names of the model's tables, in the order of :attr:`NewRows.table`; a name that several collections have
            stands for the tables of all of them.
        columns: D, number of leading columns that get random values, of all tables or of each.

    Raises:
        TypeError: ``optimizer`` is another optimizer or a wrapper, or ``tables`` is a string.
        ValueError: the model has no table of a name, or a table's rows cannot be reset; an EmbeddingAdam that is not
            ``optimizer`` trains a table, or ``optimizer`` does not train it; or without ``optimizer`` a table is
            data-parallel, so that its optimizer is unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: EmbeddingAdam | None,
        tables: Sequence[str],
        *,
        columns: int | Sequence[int],
        std: float,
        seed: int,
    ):
        if not isinstance(optimizer, EmbeddingAdam | None):
            raise TypeError(
                "optimizer must be the EmbeddingAdam that trains the tables, itself and not in a wrapper, or None under"
                f" FBGEMM's fused optimizers; got {type(optimizer).__name__}"
            )
        inventory = ModelInventory(model)
        named = inventory.named("tables", tables)
        self._optimizer = optimizer
        self._columns = np.array([columns] * len(tables) if isinstance(columns, int) else columns)
        if len(self._columns) != len(tables):
            raise UserError(
                f"columns must be an int for all {len(tables)} tables, or a list with one for each, got {columns}"
            )
        self._std = std
        hashes = [hashlib.sha256(f"{seed}/{table}".encode()).digest() for table in tables]
        self._keys = np.array([int.from_bytes(digest[:8], "little") for digest in hashes], np.uint64)
        rows = {name: [inventory.tables[table].rows for table in named if named[table] == name] for name in tables}
        self._tables = [(name, min(rows[name])) for name in tables]
        self._has_collections = bool(inventory.collections)
        self._made_with = {
            collection: (min(own), lookup_modules(collection))
            for collection in inventory.called
            if (own := named.keys() & inventory.tables_of(collection).keys())
        }
        adams = {adam.lookup.module: adam for adam in optimizer.lookups} if optimizer else {}
        pairs = [(lookup, adams.get(lookup.module)) for lookup in inventory.lookups]
        with inventory.raised_on_all_ranks():
            for table in named:
                if (reason := inventory.unclippable.get(table, NO_ROWS)) != NO_ROWS:  # without rows there are none
                    raise UserError(f"rows of table {table!r} cannot be reset for new ids: {reason}")
            self._require_unchanged()
            for lookup, adam in pairs:
                for shard in lookup.shards:
                    if adam is None and lookup.has_dense_gradient and shard.name in named:
                        raise UserError(
                            f"table {shard.name!r} is data-parallel, and the rows of new ids would keep what its dense"
                            " optimizer knows of earlier ids; train it with EmbeddingAdam, or shard it otherwise"
                        )
        self._groups = [
            _ShardGroup.of(lookup, adam, shards, tables, named)
            for lookup, adam in pairs
            for shards in _group_shards(lookup)
        ]
        self._batch_waits = False  # rows of a batch were reset, and no training forward has begun since
        self._looked_up_ahead = False  # a lookup was made for training while no forward was running
        self._running = 0  # forward passes of collections that have begun and not ended
        for collection, module in inventory.called.items():
            module.register_forward_pre_hook(self._begin_forward, prepend=True)
            module.register_forward_hook(self._end_forward, always_call=True)
            for lookup_module in self._made_with.get(collection, ("", ()))[1]:
                lookup_module.register_forward_pre_hook(self._look_up)

    @torch.no_grad()
    def reset(self, new_rows: NewRows) -> None:
        """Resets a batch's new rows that this rank stores, immediately before the batch's forward.

        Raises ValueError: the batch of the previous call has not begun its training step, a batch was looked up before
        the model was called, rows may belong to ids of waiting backward passes, a table lacks a row, or a table has
        another optimizer or other lookups now.
        """
        self._require_unchanged()
        self._require_rows(new_rows)
        if len(new_rows.row):
            self._require_unused_rows()
        self._batch_waits, self._running = self._has_collections, 0  # also after a forward that was interrupted
        widest = int(self._columns.max())
        for first in range(0, len(new_rows.row), _CHUNK):
            columns = (new_rows.table, new_rows.row, new_rows.id, new_rows.feature)
            table, row, ids, feature = (column[first : first + _CHUNK] for column in columns)
            values = initial_rows(self._keys[table], feature, ids, widest, self._std)
            values[np.arange(widest) >= self._columns[table][:, None]] = 0
            for group in self._groups:
                group.reset(torch.from_numpy(table), torch.from_numpy(row), torch.from_numpy(values))

    def _require_rows(self, new_rows: NewRows) -> None:
        beyond = np.flatnonzero(new_rows.row >= np.array([rows for _, rows in self._tables])[new_rows.table])
        if len(beyond):
            table, rows = self._tables[new_rows.table[beyond[0]]]
            raise UserError(
                f"table {table!r} has {rows} rows, and a new id got row {new_rows.row[beyond[0]]}; make its"
                f" num_embeddings IdTables.num_embeddings[{table!r}], which is more than the capacity"
            )

    def _require_unused_rows(self) -> None:
        """Raises ValueError if a batch that has not taken its step may train rows as those of earlier ids."""
        if self._batch_waits:
            raise UserError(
                "the rows of two batches were reset without a training forward between them: the first batch still"
                " waits for its step, and may train rows that now belong to other ids; call reset(new_rows) immediately"
                " before the forward of its own batch, however far ahead ids are translated (docs/id_tables.md). If"
                " the first batch will never be trained, go on with a new RowInitializer"
            )
        if self._looked_up_ahead:
            raise UserError(
                "a batch was looked up for training before the model was called, as TrainPipelineSemiSync and"
                " embedding_lookup_stream of StagedTrainPipeline do: its new ids got the rows of earlier ones, which"
                " are reset too late; use TrainPipelineSparseDist"
            )
        handles = map(attached_to, self._made_with)
        waiting = max((handle.waiting for handle in handles if handle), default=0)
        if waiting >= COOLDOWN:
            raise UserError(
                f"{waiting} backward passes wait for their step, and rows that were freed {COOLDOWN} batches ago may"
                f" belong to ids of theirs; call accumulate with at most {COOLDOWN}, or use larger batches"
            )

    def _require_unchanged(self) -> None:
        """Raises ValueError if tables have another optimizer or other lookups than when this object was made."""
        for collection, (table, lookups) in self._made_with.items():
            attached = attached_to(collection)
            trained_by = attached if isinstance(attached, EmbeddingAdam) else None
            if trained_by is not self._optimizer:
                has, given = ("an", "another" if self._optimizer else "none") if trained_by else ("no", "one")
                raise UserError(
                    f"table {table!r} is under {has} EmbeddingAdam, and RowInitializer was given {given}: new ids would"
                    " go on with the optimizer state of earlier ones; make RowInitializer with the EmbeddingAdam that"
                    " trains the table now, or with None under FBGEMM's fused optimizers"
                )
            if lookup_modules(collection) != lookups:
                raise UserError(
                    f"the lookups of table {table!r} were rebuilt after RowInitializer was made, as by"
                    " DistributedModelParallel.reshard, and it would reset rows of the old ones; make a new"
                    " RowInitializer, after EmbeddingAdam has been attached again"
                )

    def _begin_forward(self, *_: Any) -> None:
        self._running += 1
        if torch.is_grad_enabled():
            self._batch_waits = False

    def _end_forward(self, *_: Any) -> None:
        self._running -= 1

    def _look_up(self, *_: Any) -> None:
        self._looked_up_ahead |= torch.is_grad_enabled() and not self._running


def initial_rows(keys: np.ndarray, features: np.ndarray, ids: np.ndarray, columns: int, std: float) -> np.ndarray:
    """Computes embeddings of new ids, float32 [n, D], N(0, std), from a hash of (table's key, feature, id, column).

    Source: splitmix64 for the bits, Box and Muller (1958) for the normal numbers; none exceeds 5.8 deviations.
    """
    out = np.empty((len(ids), columns), np.float32)
    _draw(keys, features, ids, np.float64(std), out)
    return out


@compiled()
def _draw(keys: np.ndarray, features: np.ndarray, ids: np.ndarray, std: float, out: np.ndarray) -> None:
    unit = 1.0 / (1 << 24)
    for i in range(len(ids)):
        state = mix(mix(keys[i] + np.uint64(features[i]) * GOLDEN) + np.uint64(ids[i]) * GOLDEN)
        for column in range(0, out.shape[1], 2):
            bits = mix(state + np.uint64(column + 1) * GOLDEN)
            radius = std * np.sqrt(-2.0 * np.log(((bits >> np.uint64(40)) + 1) * unit))
            angle = tau * ((bits >> np.uint64(8)) & np.uint64(0xFFFFFF)) * unit
            out[i, column] = radius * np.cos(angle)
            if column + 1 < out.shape[1]:
                out[i, column + 1] = radius * np.sin(angle)


@dataclass(frozen=True)
class _ShardGroup:
    """Shards of one lookup, each of a different table, that begin at the same column and are equally wide."""

    lookup: TbeLookup  # the lookup that holds the shards
    adam: LookupAdam | None  # Adam of the lookup under EmbeddingAdam
    shards: list[int]  # numbers of the shards in the lookup
    index_of_table: Tensor  # index in ``shards`` of each id table's shard, int64 [T], -1 for none
    first_row: Tensor  # each shard's first row in its table, int64 [shards]
    rows: Tensor  # rows of each shard, int64 [shards]
    start: Tensor  # each shard's first element in the flat weights, int64 [shards]
    columns: slice  # columns of the table's row that the shards store

    @staticmethod
    def of(
        lookup: TbeLookup,
        adam: LookupAdam | None,
        shards: list[int],
        tables: Sequence[str],
        named: Mapping[str, str],
    ) -> "_ShardGroup":
        """Makes a group; ``named`` has the user's name, as in ``tables``, by a table's name in the model."""
        held = [lookup.shards[shard] for shard in shards]
        names = [named.get(shard.name) for shard in held]
        indices = [names.index(table) if table in names else -1 for table in tables]
        first = held[0].first_column
        return _ShardGroup(
            lookup,
            adam,
            shards,
            torch.tensor(indices),
            torch.tensor([shard.first_row for shard in held]),
            torch.tensor([shard.rows for shard in held]),
            torch.tensor([lookup.weight_offsets[shard] for shard in shards]),
            slice(first, first + held[0].embedding_dim),
        )

    def reset(self, table: Tensor, row: Tensor, values: Tensor) -> None:
        """Sets the rows [n] that are in these shards to ``values``, float32 [n, D], all on the CPU."""
        index = self.index_of_table[table]
        local = row - self.first_row[index]
        found = ((index >= 0) & (local >= 0) & (local < self.rows[index])).nonzero().flatten()
        if not len(found):
            return
        index, local = index[found], local[found]
        width = self.columns.stop - self.columns.start
        weights = torch.zeros(len(found), width, dtype=torch.float32)
        own = values[found, self.columns]
        weights[:, : own.shape[1]] = own
        flat = self.lookup.flat_weights()
        elements = (self.start[index] + local * width)[:, None] + torch.arange(width)
        elements = elements.to(flat.device)
        weights = weights.to(flat.device, flat.dtype)
        with self.adam.writing() if self.adam else nullcontext():
            flat[elements] = weights
        if self.adam:
            self.adam.forget(elements, torch.tensor(self.shards)[index], local)
        else:
            self._forget_fused(index, local)

    def _forget_fused(self, index: Tensor, local: Tensor) -> None:
        states = self.lookup.module.split_optimizer_states()
        for shard in index.unique().tolist() if states else ():
            rows = local[index == shard]
            for state in states[self.shards[shard]]:
                state.view(int(self.rows[shard]), -1)[rows.to(state.device)] = 0


def _group_shards(lookup: TbeLookup) -> list[list[int]]:
    """Groups a lookup's shards by first column and width, with no table twice in a group; returns their numbers."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    seen: dict[tuple[str, int, int], int] = {}
    for number, shard in enumerate(lookup.shards):
        key = (shard.name, shard.first_column, shard.embedding_dim)
        seen[key] = seen.get(key, -1) + 1
        groups.setdefault((*key[1:], seen[key]), []).append(number)
    return list(groups.values())
