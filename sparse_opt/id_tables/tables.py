"""Collisionless id tables, which give rows of embedding tables to raw ids, and take them back."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._shard.sharded_tensor import ShardedTensor

from cowrec.errors import UserError

from ..kernels.threads import in_threads
from .config import TIME_LIMIT, IdTableConfig
from .exchange import IdExchange, OwnedIds
from .kernels.assignment import (
    NewRowsOfSegments,
    assign_segments,
    collect_new_rows,
    find_segments,
    segments_of_ids,
    sort_by_segment,
)
from .kernels.memory import COUNTERS, FREE, RECORD, RESERVED_ROWS, SEGMENT_STATE, Clock, Memory, Occurrences, lazy_zeros
from .kernels.slots import rebuild_segments, rows_freed_in
from .layout import MAX_SEGMENTS, IdLayout


@dataclass(frozen=True)
class NewRows:
    """Rows that a batch gave to new ids, each int64 [n], the same on every rank.

    Attributes:
        table: number of the table, in the order of ``tables``.
        id: id that the row now belongs to.
        feature: number of the feature in ``IdTableConfig.features``.
    """

    table: np.ndarray
    row: np.ndarray
    id: np.ndarray
    feature: np.ndarray


@dataclass(frozen=True)
class Entries:
    """Ids of a table that are not expired, segment by segment.

    Attributes:
        id: int64 [n].
        feature: number of the feature in ``IdTableConfig.features``, int64 [n].
        row: row in the embedding table, int64 [n].
        last_seen: newest sample time (or batch number) of an occurrence, int64 [n].
        count: number of occurrences since the id got its row, at most 65,535, int64 [n].
    """

    id: np.ndarray
    feature: np.ndarray
    row: np.ndarray
    last_seen: np.ndarray
    count: np.ndarray


_MIN_IDS_OF_THREAD = 1 << 14
"""Number of ids that are translated before another thread has started."""
_UNKNOWN, _SECONDS, _BATCHES = range(3)
"""Unit of the clock, as saved in checkpoints."""


class IdTables:
    """Id tables of a model: 64-bit ids to rows in [0, ``num_embeddings``), in host memory.

    Ids 0 and 1 are the reserved rows OUT_OF_VOCABULARY and MISSING and pass through; every other int64 is an id. Equal
    ids of two features of a shared table are two ids. The *clock* is the newest sample time, or the number of the batch
    if samples have no time. The clock never goes back, so callers should drop samples from the future, which would
    expire ids too early. With ``in_order=False``, for batches of a shuffled data set, time stands still: no id expires,
    no sample is late, and all occurrences count in one pane of a window; lookups use the clock. A table is split into
    segments by the ids' hash. :meth:`assign` does the following in each segment, in this order and in the order of the
    global batch, so that results depend neither on ranks nor on threads:

    1. An id expires when its newest occurrence is more than ``expire_after`` before the clock. A sweep frees the rows
       of expired ids, a bounded number of records in every sixteenth batch.
    2. Occurrences of resident ids get the ids' rows. The count and the time of the record grow; a late sample does not
       lower the time.
    3. Occurrences of absent ids are counted over the whole batch before admission is decided, so that all occurrences
       of an id in a batch get the same row. Occurrences that are more than ``expire_after`` behind the clock admit no
       id (``late``).
    4. An expired id that still has its row gets the row again, as a new one, if the id is admitted; otherwise the row
       is freed.
    5. If new ids need rows and the policy evicts, some rows are kept free: 1/64 of the segment, or the rows of six such
       batches if that is more, but at most a quarter of the segment (and at least one row). If fewer rows are free,
       ids are evicted until this number and 1/64 of the segment more are free, expired ids first.
    6. Admitted ids get rows in the order of their first occurrence: the row that was freed first, if its cooldown of 4
       batches is over, else a row that was never used. If there is no such row, the id uses OUT_OF_VOCABULARY in this
       batch and is counted in ``refused``.

    Memory: 16 bytes for a row in use and 5 to 6.25 bytes of slots, committed as the table grows, and the sketch of
    ``Admission``. Training on CUDA uses the same tables: ids are translated before the batch is copied to the device.

    Args:
        features: names in the order in which :meth:`assign` takes ids; ids of features without a table pass through.
        seed: seed of probabilistic admission, the only random choice.
        max_segments: largest number of segments of a table; at least the number of ranks.
        group: gloo group, or None for one process. All ranks call a method together, with their own slices of the
            batch.

    Attributes:
        num_embeddings: rows of each table's embedding table: 2, and the capacity rounded up to equal segments, whose
            rows follow one another from row 2 on.

    Raises ValueError: the tables do not fit the features or the segments, or several processes have no group.
    """

    def __init__(
        self,
        tables: Mapping[str, IdTableConfig],
        features: Sequence[str],
        *,
        seed: int = 0,
        max_segments: int = MAX_SEGMENTS,
        group: ProcessGroup | None = None,
    ) -> None:
        if group is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise UserError(
                f"IdTables of {dist.get_world_size()} processes need a group, else each gives the same rows to other"
                ' ids; pass group=dist.new_group(backend="gloo"), or a group of one process for its own tables'
            )
        self._configs, self._features, self._process = dict(tables), len(features), os.getpid()
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._layout = layout = IdLayout(self._configs, features, max_segments=max_segments, rank=rank, ranks=ranks)
        self._exchange = IdExchange(layout, group)
        self.num_embeddings = layout.num_embeddings
        segments, records, slots, cells = layout.sizes[rank].tolist()
        self._memory = Memory(
            np.zeros(segments, SEGMENT_STATE),
            layout.locations,
            layout.mapping.tables,
            lazy_zeros(records, RECORD),
            lazy_zeros(slots, np.dtype(np.uint32)),
            lazy_zeros(cells, np.dtype(np.uint16)),
        )
        self._clock, self._unit = Clock(0, 0, np.uint64(seed % (1 << 64))), _UNKNOWN

    def assign(
        self, ids: np.ndarray, splits: np.ndarray, times: np.ndarray | None = None, *, in_order: bool = True
    ) -> tuple[np.ndarray, NewRows]:
        """Translates the ids of a training batch, and gives rows to new ids.

        Args:
            ids: ids of this rank's slice, int64 [V].
            splits: bounds of the features' ids, int64 [F + 1]: feature f has the ids from splits[f] to splits[f + 1].
            times: time of each id's sample, in seconds since the epoch, int64 [V]; for every batch or for none.
            in_order: whether the times of batches rise, except for late samples.

        Returns:
            rows, int64 [V], and the rows of new ids. These must be reset (:class:`RowInitializer`) after the steps of
            all earlier batches, which may use the rows for other ids, and before the step of this batch.

        Raises:
            ValueError: an array has a wrong type or shape, or a time is not in [0, 2^32); every rank raises, and
                nothing has changed. Or these tables are a copy in another process.
        """
        self._require_own_process()
        timed = None if self._unit == _UNKNOWN else self._unit == _SECONDS
        error = _id_error(ids, splits, self._features) or _time_error(times, ids, timed)
        own = self._exchange.collect(error, ids, splits, times)
        self._unit = _BATCHES if times is None else _SECONDS
        batch = self._clock.batch + 1
        now = batch if times is None else max(self._clock.now, own.newest)
        self._clock = Clock(now, batch, self._clock.seed)
        clock = self._clock if in_order or times is None else self._clock._replace(now=0)
        rows, begins, occurrences = self._sorted(own)
        count = len(occurrences.position)
        counts = np.zeros(len(self._memory.states), np.int64)
        new_rows = NewRowsOfSegments(counts, np.empty(count, np.int64), np.empty(count, np.int64))
        self._in_threads(assign_segments, begins, occurrences, rows, new_rows, self._memory, clock)
        columns = collect_new_rows(begins, new_rows, occurrences, self._layout.locations)
        return self._exchange.send_back(rows), NewRows(*self._exchange.all_columns(columns))

    def rows_of(self, ids: np.ndarray, splits: np.ndarray) -> np.ndarray:
        """Finds the rows of ids as in :meth:`assign`, int64 [V]; OUT_OF_VOCABULARY for unknown ids. Changes nothing."""
        self._require_own_process()
        own = self._exchange.collect(_id_error(ids, splits, self._features), ids, splits, None)
        rows, begins, occurrences = self._sorted(own)
        self._in_threads(find_segments, begins, occurrences, rows, self._memory, self._clock)
        return self._exchange.send_back(rows)

    def freed(self) -> dict[str, np.ndarray]:
        """Returns the rows of each table, int64 [n], that this rank freed in the latest :meth:`assign`."""
        table, row = rows_freed_in(self._clock.batch, self._memory)
        return {name: row[table == number] for number, name in enumerate(self._configs)}

    def ids_of(self, table: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns ids and feature numbers, int64 [n], of rows of a table, and whether this rank has an id for a row."""
        number, locations = list(self._configs).index(table), self._layout.locations
        settings, held = self._layout.mapping.tables[number], (locations["table"] == number).nonzero()[0]
        own = np.full(settings["segments"], -1)  # index in ``locations`` of each segment of the table
        own[(locations["first_row"][held] - RESERVED_ROWS) // settings["capacity"]] = held
        segment, row = np.divmod(np.maximum(rows - RESERVED_ROWS, 0), settings["capacity"])
        mine = ((rows >= RESERVED_ROWS) & (own[segment] >= 0)).nonzero()[0]
        own, row = own[segment[mine]], row[mine]
        records, used = self._memory.records[locations["first_record"][own] + row], self._memory.states["used"][own]
        (ids, features), resident = np.zeros((2, len(rows)), np.int64), np.zeros(len(rows), bool)
        ids[mine], features[mine] = records["id"], records["feature"]
        resident[mine] = (row < used) & (records["feature"] != FREE)
        return ids, features, resident

    def entries(self, table: str) -> Entries:
        """Returns this rank's ids of a table that are not expired."""
        records, rows = [], []
        for first_row, used, expired in self._used_records(table):
            valid = (used["feature"] != FREE) & ~expired
            records.append(used[valid])
            rows.append(first_row + valid.nonzero()[0])
        joined = np.concatenate([np.empty(0, RECORD), *records])
        columns = {name: joined[name].astype(np.int64) for name in ("id", "feature", "last_seen", "count")}
        return Entries(row=np.concatenate([np.empty(0, np.int64), *rows]), **columns)

    def expired_rows(self, table: str) -> np.ndarray:
        """This rank's rows of a table whose ids are expired and that no sweep has reached, int64 [n]."""
        segments = self._used_records(table)
        found = [first + ((used["feature"] != FREE) & expired).nonzero()[0] for first, used, expired in segments]
        return np.concatenate([np.empty(0, np.int64), *found])

    def _used_records(self, table: str) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields first row, records in use or free, and whether these are too old, of each segment of a table."""
        number, expire_after = list(self._configs).index(table), self._configs[table].expire_after
        for location, state in zip(self._layout.locations, self._memory.states, strict=True):
            if location["table"] == number:
                used = self._memory.records[location["first_record"] :][: state["used"]]
                last = used["last_seen"].astype(np.int64) if expire_after else np.full(len(used), self._clock.now)
                yield location["first_row"], used, last + expire_after < self._clock.now

    def counters(self) -> dict[str, dict[str, int]]:
        """Returns counters of each table, over all ranks, since the table was created.

        ``resident``: rows in use now, including expired ids that no sweep has reached. ``admitted``: rows given to new
        ids. ``refused``, ``below_threshold``: ids that found no row or were not admitted, once in a batch. ``expired``,
        ``evicted``: ids that lost their row. ``occurrences``: occurrences of ids that are not reserved; among them
        ``late``: occurrences of absent ids, too old to admit them, and ``unknown``: occurrences that got
        OUT_OF_VOCABULARY. ``filter_excess``: for admission "count", the error bound of an estimate (see
        kernels/sketch.py) in the worst segment; the sketch is overloaded if the bound approaches the threshold.
        """
        tables, states = self._layout.locations["table"], self._memory.states
        local = np.zeros((len(self._configs), len(COUNTERS) + 1), np.int64)
        excess = np.zeros(len(self._configs), np.int64)
        np.add.at(local[:, 0], tables, states["used"] - states["free"])
        for column, name in enumerate(COUNTERS, 1):
            np.add.at(local[:, column], tables, states[name])
        counted = states["counted"].sum(1)
        for t, (config, lines) in enumerate(
            zip(self._configs.values(), self._layout.mapping.tables["lines"], strict=True)
        ):
            largest = max(counted[tables == t], default=0)
            excess[t] = ceil(config.admission.excess_bound(int(largest), int(lines)))
        total = self._exchange.all_gather(local.reshape(-1)).sum(0).reshape(local.shape)
        worst_excess = self._exchange.all_gather(excess).max(0)
        return {
            name: dict(zip(("resident", *COUNTERS), counts, strict=True)) | {"filter_excess": worst}
            for name, counts, worst in zip(self._configs, total.tolist(), worst_excess.tolist(), strict=True)
        }

    def state_dict(self) -> dict[str, Tensor | ShardedTensor]:
        """Returns the state to resume exactly from here, for ``torch.distributed.checkpoint``; fixed names and shapes.

        The tensors, except ``progress``, share the tables' memory: copy or save them before the next batch. They are
        sharded over the ranks by segment, so that another number of ranks can load them.
        """
        progress = [self._clock.now, self._clock.batch, self._unit, self._layout.fingerprint]
        sizes = self._layout.sizes
        state: dict[str, Tensor | ShardedTensor] = {"progress": torch.tensor(progress)}
        for name, (values, rows) in self._saved_arrays().items():
            if sizes[:, rows].sum():
                state[name] = self._exchange.sharded(torch.from_numpy(values), sizes[:, rows])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state of :meth:`state_dict`, loaded in place or into a copy.

        Raises:
            ValueError: the tables of the state have other names, capacities, features, counters, windows or segments.
        """
        now, batch, unit, fingerprint = state["progress"].tolist()
        if fingerprint != self._layout.fingerprint:
            raise UserError(
                "the saved id tables differ from these in names, capacities, features, counters, windows or"
                " max_segments; load them with the settings they were saved with"
            )
        for name, (values, _) in self._saved_arrays().items():
            if name in state and len(values):
                saved = state[name]
                shard = saved.local_shards()[0].tensor if isinstance(saved, ShardedTensor) else saved
                target = torch.from_numpy(values)
                if shard.data_ptr() != target.data_ptr():
                    target.copy_(shard)
        self._clock, self._unit = Clock(now, batch, self._clock.seed), unit
        rebuild_segments(self._memory)

    def _saved_arrays(self) -> dict[str, tuple[np.ndarray, int]]:
        """Lists the arrays of this rank for a checkpoint, with the columns of ``IdLayout.sizes`` for their lengths."""
        states, records = self._memory.states.view(np.int64), self._memory.records.view(np.int64)
        return {
            "segments": (states.reshape(-1, SEGMENT_STATE.itemsize // 8), 0),
            "records": (records.reshape(-1, 2), 1),
            "cells": (self._memory.cells.view(np.int16), 3),
        }

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise UserError(
                f"these IdTables are a copy, in process {os.getpid()}, of those of process {self._process}, which would"
                " not learn of its ids and rows; translate ids in a thread of the process that made the tables, not in"
                " workers of a DataLoader"
            )

    def _sorted(self, own: OwnedIds) -> tuple[np.ndarray, np.ndarray, Occurrences]:
        """Returns rows, filled for ids that pass through; the begin of each segment's ids; and the ids by segment."""
        mapping, first = self._layout.mapping, self._layout.first_segments[self._layout.rank]
        segments, hashes, rows = segments_of_ids(own.ids, own.splits, mapping, first)
        begins, positions, sorted_hashes, features = sort_by_segment(
            own.splits, mapping, segments, hashes, len(self._memory.states)
        )
        return rows, begins, Occurrences(positions, sorted_hashes, features, own.ids, own.times)

    def _in_threads(self, kernel: Callable[..., None], begins: np.ndarray, *arguments: Any) -> None:
        """Runs a kernel on all segments, in threads that have about equally many ids."""
        count = max(1, min(torch.get_num_threads(), int(begins[-1]) // _MIN_IDS_OF_THREAD))
        bounds = np.searchsorted(begins, np.arange(1, count) * begins[-1] // count)
        ranges = pairwise([0, *bounds.tolist(), len(self._memory.states)])
        in_threads([partial(kernel, low, high, begins, *arguments) for low, high in ranges])


def _id_error(ids: np.ndarray, splits: np.ndarray, features: int) -> str:
    if ids.dtype != np.int64 or ids.ndim != 1 or not ids.flags.c_contiguous:
        return f"ids must be contiguous int64 [V], got {ids.dtype} {list(ids.shape)}"
    if splits.dtype != np.int64 or splits.shape != (features + 1,):
        return f"splits must be int64 [{features + 1}], got {splits.dtype} {list(splits.shape)}"
    if splits[0] != 0 or splits[-1] != len(ids) or (np.diff(splits) < 0).any():
        return f"splits must rise from 0 to the number of ids, {len(ids)}, got {splits.tolist()}"
    return ""


def _time_error(times: np.ndarray | None, ids: np.ndarray, timed: bool | None) -> str:
    """Checks the times of a batch; ``timed`` tells whether earlier batches had times, if there were any."""
    if timed is not None and timed != (times is not None):
        return "samples must have times in every batch or in none, got a batch " + (
            "without times after batches with times" if timed else "with times after batches without"
        )
    if times is None:
        return ""
    if times.dtype != np.int64 or times.shape != ids.shape:
        return f"times must be int64 {list(ids.shape)}, one per id, got {times.dtype} {list(times.shape)}"
    if len(times) and not 0 <= times.min() <= times.max() < TIME_LIMIT:
        return f"times must be seconds in [0, 2^32), got {times.min()} to {times.max()}; drop such samples"
    return ""
