"""Raw ids to rows of embedding tables, exactly: two ids never share a row, and rows are given, kept and taken back."""

from collections.abc import Callable, Mapping, Sequence
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

from cowrec.sparse_opt.kernels.threads import in_threads

from .admission import PANES, Admission
from .exchange import IdExchange, OwnIds
from .kernels import assign_segments, births_of, find_segments, sort_by_segment, spread
from .layout import RESERVED_ROWS, SHARDS, IdLayout, IdTableConfig
from .records import FREE, RECORD, SEGMENT, SEGMENT_STATE, fill_segments, freed_in, reserved

__all__ = ["Admission", "Entries", "IdTableConfig", "IdTables", "NewRows"]

_LATEST = 1 << 32
_IDS_OF_THREAD = 1 << 14
"""Fewer ids than this are done before another thread has begun."""
_SUMS = ("admitted", "refused", "below_threshold", "expired", "evicted", "late", "unknown", "occurrences")
_UNKNOWN, _SECONDS, _BATCHES = range(3)
"""What the clock counts."""


@dataclass(frozen=True)
class NewRows:
    """Rows that a batch gave to ids, each int64 [n], the same on every rank.

    Attributes:
        table: number of the table, in the order of ``tables``.
        row: in the embedding table.
        id: whose the row now is.
        feature: the feature's number in ``IdTableConfig.features``.
    """

    table: np.ndarray
    row: np.ndarray
    id: np.ndarray
    feature: np.ndarray


@dataclass(frozen=True)
class Entries:
    """Ids of a table that live, piece by piece.

    Attributes:
        id: int64 [n].
        feature: the feature's number in ``IdTableConfig.features``, int64 [n].
        row: in the embedding table, int64 [n].
        last_seen: newest sample time (or batch number) of an occurrence, int64 [n].
        count: occurrences since birth, 65,535 for that many or more, int64 [n].
    """

    id: np.ndarray
    feature: np.ndarray
    row: np.ndarray
    last_seen: np.ndarray
    count: np.ndarray


class IdTables:
    """Id tables of a model: 64-bit ids to rows in [0, ``num_embeddings``), in host memory.

    Ids 0 and 1 are the reserved rows OUT_OF_VOCABULARY and MISSING and stay what they are; every other int64 is an id.
    The same id of two features of a shared table is two ids. The *clock* is the newest sample time seen, or, where
    samples have no time, the number of the batch; it never goes back, so a sample from the future is to be dropped by
    whoever reads the samples: it would let ids die too early. A table is cut into pieces by the ids' hash. In
    each piece this happens at :meth:`assign`, in this order, always by the order of the global batch, so that neither
    ranks nor threads change a result:

    1. An id whose newest occurrence lies more than ``expire_after`` before the clock is dead from then on. A sweep
       frees the rows of the dead, a bounded slice of the records in every sixteenth batch.
    2. Occurrences of living ids get their rows. Time and count of the row grow; a late sample does not make it older.
    3. Of absent ids the whole batch's occurrences are counted, then it is decided whether they are admitted, so that
       all occurrences of an id in a batch get the same row. Occurrences that are more than ``expire_after`` behind the
       clock admit nobody (``late``).
    4. A dead id that is admitted and still has its row is born afresh in it; if it is not admitted, the row is freed.
    5. Where rows are wanted and the policy allows, some are kept free: 1/64 of the piece, or what six such batches want
       if that is more, but a quarter of the piece at most (and one at least). Where fewer are, as many ids are evicted
       as bring them to that number and 1/64 of the piece more, the dead first.
    6. Admitted ids get rows in the order of their first occurrence: that freed first, if it was freed 4 batches ago or
       earlier, else one never used. Who gets none (the piece is full, or its free rows still rest) uses
       OUT_OF_VOCABULARY in this batch and is counted in ``refused``.

    Memory: 16 bytes a row in use and 5 to 6.25 bytes of slots, committed as the table grows, and the sketch of
    ``Admission``. A freed row's memory is kept for the next id.

    Training on CUDA uses the same tables in host memory: ids are translated before the batch is copied to the device.

    Attributes:
        num_embeddings: rows of each table's embedding table: 2 and the capacity, rounded up to whole pieces. Row 2 on
            belong to the pieces one after the other.
    """

    def __init__(
        self,
        tables: Mapping[str, IdTableConfig],
        features: Sequence[str],
        *,
        seed: int = 0,
        shards: int = SHARDS,
        group: ProcessGroup | None = None,
    ) -> None:
        """Empty tables.

        Args:
            tables: by name.
            features: names in the order in which :meth:`assign` takes their ids; those of no table pass as they are.
            seed: of probabilistic admission, the only thing that is drawn.
            shards: most pieces of a table; at least the number of ranks, and the same whatever that is.
            group: gloo, of all ranks, each of which then calls every method together with the others and gives its own
                slice of the batch; None for one process.
        """
        self._configs, self._features = dict(tables), len(features)
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self._layout = layout = IdLayout(self._configs, features, shards=shards, rank=rank, ranks=ranks)
        self._exchange = IdExchange(layout, group)
        self.num_embeddings = layout.num_embeddings
        segments, records, slots, cells = layout.sizes[rank].tolist()
        self._segments = np.zeros(segments, SEGMENT)
        self._records = reserved(records, RECORD)
        self._slots = reserved(slots, np.dtype(np.uint32))
        self._cells = reserved(cells, np.dtype(np.uint16))
        self._memory = (self._segments, layout.places, layout.tables, self._records, self._slots, self._cells)
        self._seed = np.uint64(seed % (1 << 64))
        self._clock, self._batch, self._kind_of_clock = 0, 0, _UNKNOWN

    def assign(
        self, ids: np.ndarray, splits: np.ndarray, times: np.ndarray | None = None
    ) -> tuple[np.ndarray, NewRows]:
        """Rows of a training batch's ids, and the ids that got theirs in it.

        Args:
            ids: of this rank's slice, int64 [V].
            splits: feature f has the ids from splits[f] to splits[f + 1], int64 [F + 1].
            times: of the sample that each id belongs to, in seconds since the epoch, int64 [V]; always or never.

        Returns:
            rows, int64 [V], and births; what had been in their rows is to be forgotten before the batch is trained on.

        Raises:
            ValueError: an array has a wrong type or shape, or a time is not in [0, 2^32); then nothing has changed, and
                every rank raises it.
        """
        problem = self._problem(ids, splits, times)
        own = self._exchange.collect(problem, ids, splits, times)
        self._kind_of_clock = _BATCHES if times is None else _SECONDS
        self._batch += 1
        self._clock = self._batch if times is None else max(self._clock, own.newest)
        rows, begins, occurrences = self._sorted(own)
        count = len(occurrences[0])
        births = (np.zeros(len(self._segments), np.int64), np.empty(count, np.int64), np.empty(count, np.int64))
        moment = (self._clock, self._batch, self._seed)
        self._in_threads(
            assign_segments, begins, (begins, occurrences, own.ids, own.times, rows, births, self._memory, *moment)
        )
        born = births_of(begins, births, occurrences, own.ids, self._layout.places, int(births[0].sum()))
        return self._exchange.send_back(rows), NewRows(*self._exchange.all_columns(born))

    def rows_of(self, ids: np.ndarray, splits: np.ndarray) -> np.ndarray:
        """Rows of ids as :meth:`assign` takes them, int64 [V]; OUT_OF_VOCABULARY for the unknown and the dead.

        Changes nothing.
        """
        own = self._exchange.collect(_problem_of_ids(ids, splits, self._features), ids, splits, None)
        rows, begins, occurrences = self._sorted(own)
        self._in_threads(find_segments, begins, (begins, occurrences, own.ids, rows, self._memory, self._clock))
        return self._exchange.send_back(rows)

    def freed(self) -> dict[str, np.ndarray]:
        """Rows of each table, int64 [n], that this rank took from their ids in the latest :meth:`assign`."""
        table, row = freed_in(self._batch, self._segments, self._layout.places, self._records)
        return {name: row[table == number] for number, name in enumerate(self._configs)}

    def ids_of(self, table: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Id and number of the feature, int64 [n], of rows of a table, and whether they have any; in one process.

        The reserved rows have none.
        """
        number = list(self._configs).index(table)
        places = self._layout.places
        segments = (places["table"] == number).nonzero()[0]
        segments = segments[np.argsort(places["first_row"][segments])]  # piece by piece, as the rows are
        piece, place = np.divmod(np.maximum(rows - RESERVED_ROWS, 0), self._layout.tables["capacity"][number])
        records = self._records[places["first_record"][segments[piece]] + place]
        used = self._segments["used"][segments[piece]]
        lives = (rows >= RESERVED_ROWS) & (place < used) & (records["feature"] != FREE)
        return records["id"], records["feature"].astype(np.int64), lives

    def entries(self, table: str) -> Entries:
        """This rank's living ids of a table."""
        records, rows = [], []
        number = list(self._configs).index(table)
        expire_after = self._configs[table].expire_after
        for place, segment in zip(self._layout.places, self._segments, strict=True):
            if place["table"] == number:
                part = self._records[place["first_record"] :][: segment["used"]]
                alive = part["feature"] != FREE
                if expire_after:
                    alive &= part["last_seen"].astype(np.int64) + expire_after >= self._clock
                records.append(part[alive])
                rows.append(place["first_row"] + alive.nonzero()[0])
        whole = np.concatenate([np.empty(0, RECORD), *records])
        columns = {name: whole[name].astype(np.int64) for name in ("id", "feature", "last_seen", "count")}
        return Entries(row=np.concatenate([np.empty(0, np.int64), *rows]), **columns)

    def counters(self) -> dict[str, dict[str, int]]:
        """Of each table, over all ranks and since it was made.

        ``resident``: rows in use now (the dead that no sweep has met are among them). ``admitted``: births.
        ``refused``, ``below_threshold``: ids of a batch that found no row or were not admitted, each once a batch.
        ``expired``, ``evicted``: deaths. ``occurrences`` of ids that are not reserved, and of those ``late``: absent
        and too old to admit, ``unknown``: given OUT_OF_VOCABULARY. ``filter_excess``: of admission "count" by how much
        an estimate may be too high (see id_admission.py) in the worst shard; the filter is overloaded where it nears
        the threshold.
        """
        here, excess = np.zeros((len(self._configs), len(_SUMS) + 1), np.int64), np.zeros(len(self._configs), np.int64)
        tables = self._layout.places["table"]
        np.add.at(here[:, 0], tables, self._segments["used"] - self._segments["free"])
        for column, name in enumerate(_SUMS, 1):
            np.add.at(here[:, column], tables, self._segments[name])
        noted = np.sum([self._segments[f"noted_{pane}"] for pane in range(PANES)], axis=0)
        for t, (config, lines) in enumerate(zip(self._configs.values(), self._layout.tables["blocks"], strict=True)):
            worst = max(noted[tables == t], default=0)
            excess[t] = ceil(config.admission.excess_bound(int(worst), int(lines)))
        whole = self._exchange.all_gather(here.reshape(-1)).sum(0).reshape(here.shape)
        worst_excess = self._exchange.all_gather(excess).max(0)
        return {
            name: dict(zip(("resident", *_SUMS), counts, strict=True)) | {"filter_excess": most}
            for name, counts, most in zip(self._configs, whole.tolist(), worst_excess.tolist(), strict=True)
        }

    def state_dict(self) -> dict[str, Tensor | ShardedTensor]:
        """All there is to go on exactly from here, for ``torch.distributed.checkpoint``; fixed names and shapes.

        The tensors, but for ``progress``, share the tables' memory: copy or save them before the next batch. They are
        cut over the ranks by shards, and so load on another number of ranks.
        """
        progress = [self._clock, self._batch, self._kind_of_clock, self._layout.fingerprint]
        sizes = self._layout.sizes
        state: dict[str, Tensor | ShardedTensor] = {"progress": torch.tensor(progress)}
        for name, (values, rows) in self._parts().items():
            if sizes[:, rows].sum():
                state[name] = self._exchange.sharded(torch.from_numpy(values), sizes[:, rows])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where :meth:`state_dict` was taken, be it loaded in place or a copy.

        Raises:
            ValueError: the state is of tables with other names, capacities, features, sketches or shards.
        """
        clock, batch, kind, fingerprint = state["progress"].tolist()
        if fingerprint != self._layout.fingerprint:
            raise ValueError(
                "the saved id tables differ from these in names, capacities, features, counters or shards; load them"
                " with the settings they were saved with"
            )
        for name, (values, _) in self._parts().items():
            if name in state and len(values):
                whole = state[name]
                part = whole.local_shards()[0].tensor if isinstance(whole, ShardedTensor) else whole
                target = torch.from_numpy(values)
                if part.data_ptr() != target.data_ptr():
                    target.copy_(part)
        self._clock, self._batch, self._kind_of_clock = clock, batch, kind
        fill_segments(*self._memory[:5])

    def _parts(self) -> dict[str, tuple[np.ndarray, int]]:
        """What a checkpoint holds of this rank's memory, and by which column of ``IdLayout.sizes`` it is cut."""
        segments, records = self._segments.view(np.int64), self._records.view(np.int64)
        return {
            "segments": (segments.reshape(-1, len(SEGMENT_STATE)), 0),
            "records": (records.reshape(-1, 2), 1),
            "cells": (self._cells.view(np.int16), 3),
        }

    def _sorted(self, own: OwnIds) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
        """Rows to fill, those of ids that no table holds filled; begin of each segment's ids; ids by segment."""
        layout, count = self._layout, len(own.ids)
        rows, hashes, segment = np.empty(count, np.int64), np.empty(count, np.uint64), np.empty(count, np.int32)
        begins = np.zeros(len(self._segments) + 1, np.int64)
        first = layout.first_segments[layout.rank]
        of_features = (layout.feature_table, layout.tables, layout.segments_of, first)
        spread(own.ids, own.splits, *of_features, hashes, segment, rows, begins)
        np.cumsum(begins, out=begins)
        return rows, begins, sort_by_segment(own.splits, layout.feature_table, hashes, segment, begins)

    def _in_threads(self, kernel: Callable[..., None], begins: np.ndarray, arguments: tuple[Any, ...]) -> None:
        """Runs a kernel on all segments, in runs of about as many ids, one a thread."""
        count = max(1, min(torch.get_num_threads(), int(begins[-1]) // _IDS_OF_THREAD))
        bounds = np.searchsorted(begins, np.arange(1, count) * begins[-1] // count)
        runs = pairwise([0, *bounds.tolist(), len(self._segments)])
        in_threads([partial(kernel, low, high, *arguments) for low, high in runs])

    def _problem(self, ids: np.ndarray, splits: np.ndarray, times: np.ndarray | None) -> str:
        """What is wrong with a batch, or ""."""
        problem = _problem_of_ids(ids, splits, self._features)
        if problem:
            return problem
        kind = _BATCHES if times is None else _SECONDS
        if self._kind_of_clock not in (kind, _UNKNOWN):
            return (
                "samples have a time in every batch or in none, got a batch "
                + ("without" if times is None else "with")
                + " times after others; give all or none"
            )
        if times is None:
            return ""
        if times.dtype != np.int64 or times.shape != ids.shape:
            return f"times must be int64 {list(ids.shape)}, one an id, got {times.dtype} {list(times.shape)}"
        if len(times) and not 0 <= times.min() <= times.max() < _LATEST:
            return f"times must be seconds in [0, 2^32), got {times.min()} to {times.max()}; drop such samples"
        return ""


def _problem_of_ids(ids: np.ndarray, splits: np.ndarray, features: int) -> str:
    if ids.dtype != np.int64 or ids.ndim != 1 or not ids.flags.c_contiguous:
        return f"ids must be int64 [V] without gaps, got {ids.dtype} {list(ids.shape)}"
    if len(ids) >= 1 << 31:
        return f"a batch has fewer than 2^31 ids, got {len(ids)}; split it"
    if splits.dtype != np.int64 or splits.shape != (features + 1,):
        return f"splits must be int64 [{features + 1}], got {splits.dtype} {list(splits.shape)}"
    if splits[0] != 0 or splits[-1] != len(ids) or (np.diff(splits) < 0).any():
        return f"splits must rise from 0 to the number of ids, {len(ids)}, got {splits.tolist()}"
    return ""
