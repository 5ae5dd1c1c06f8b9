"""Exchange of ids between ranks: ids to the ranks that own them, and rows back. Sizes: V ids, W ranks."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties

from cowrec.errors import UserError

from .kernels.assignment import segments_of_ids
from .layout import IdLayout

_NO_TIMES = np.empty(0, np.int64)
_TIME_BITS = 32


@dataclass(frozen=True)
class OwnedIds:
    """Ids of the global batch that this rank owns, by feature, and within a feature by rank."""

    ids: np.ndarray  # int64 [n]
    splits: np.ndarray  # index of each feature's first id, and n, int64 [F + 1]
    times: np.ndarray  # int64 [n], empty if samples have no time
    newest: int  # newest time of the global batch, -1 without times


class IdExchange:
    """Sends a batch's ids to their owners and the rows back. All ranks of the group call a method together."""

    def __init__(self, layout: IdLayout, group: ProcessGroup | None) -> None:
        self._layout, self._group = layout, group
        self.ranks = len(layout.first_segments) - 1

    def collect(self, problem: str, ids: np.ndarray, splits: np.ndarray, times: np.ndarray | None) -> OwnedIds:
        """Sends this rank's ids, int64 [V], to their owners, and receives the ids that it owns.

        ``problem`` is the message of an error in this rank's batch, or "". ``splits`` are int64 [F + 1], ``times``
        int64 [V] in [0, 2^32), or None on all ranks. If a rank has a problem, or only some ranks have times, all ranks
        raise ValueError.
        """
        newest = -1 if problem or times is None or len(times) == 0 else int(times.max())
        if self.ranks == 1:
            if problem:
                raise UserError(problem)
            return OwnedIds(ids, splits, _NO_TIMES if times is None else times, newest)
        counts = np.zeros(self.ranks, np.int64)
        if not problem:
            owner = self._owners(ids, splits)
            counts = np.bincount(owner, minlength=self.ranks)
        header = self.all_gather(np.array([bool(problem), times is not None, newest, *counts]))
        wrong = header[:, 0].nonzero()[0]
        if len(wrong):
            raise UserError(problem or f"rank {wrong[0]} got a batch that cannot be translated; see its message")
        if header[:, 1].any() != header[:, 1].all():
            raise UserError("samples have times on some ranks only; pass times on all ranks or on none")
        self._counts = header[:, 3:]
        feature = np.repeat(np.arange(len(splits) - 1), np.diff(splits))[self._held]
        packed = feature << _TIME_BITS | (0 if times is None else times[self._held])
        sent = np.stack([ids[self._held], packed], axis=1)[self._sent_order]
        got = self._all_to_all(sent, self._counts[self._layout.rank], self._counts[:, self._layout.rank])
        feature = got[:, 1] >> _TIME_BITS
        # Within a feature the ids keep the order of arrival, rank by rank.
        self._order = np.argsort(feature.astype(np.uint16), kind="stable")
        got, ends = got[self._order], np.cumsum(np.bincount(feature, minlength=len(splits) - 1))
        seen = _NO_TIMES if times is None else got[:, 1] & ((1 << _TIME_BITS) - 1)
        return OwnedIds(np.ascontiguousarray(got[:, 0]), np.append(0, ends), seen, int(header[:, 2].max()))

    def _owners(self, ids: np.ndarray, splits: np.ndarray) -> np.ndarray:
        """Returns the ranks that own the ids of tables; remembers these ids, and the rows of the other ids."""
        segments, _, self._rows = segments_of_ids(ids, splits, self._layout.mapping, 0)
        self._held = (segments >= 0).nonzero()[0]
        owner: np.ndarray = np.searchsorted(self._layout.first_segments[1:], segments[self._held], side="right")
        self._sent_order = np.argsort(owner.astype(np.uint16), kind="stable")
        return owner

    def send_back(self, rows: np.ndarray) -> np.ndarray:
        """Sends the rows of the ids last collected, int64 [n], to their origin; returns the rows of this rank's ids."""
        if self.ranks == 1:
            return rows
        answers = np.empty_like(rows)
        answers[self._order] = rows
        back = self._all_to_all(answers, self._counts[:, self._layout.rank], self._counts[self._layout.rank])
        found: np.ndarray = self._rows
        found[self._held[self._sent_order]] = back
        return found

    def all_columns(self, values: np.ndarray) -> np.ndarray:
        """Concatenates the columns of all ranks, given int64 [k, n] of this rank; n may differ."""
        if self.ranks == 1:
            return values
        columns = self.all_gather(np.array([values.shape[1]]))[:, 0]
        padded = np.zeros((len(values), int(columns.max())), np.int64)
        padded[:, : values.shape[1]] = values
        parts = self.all_gather(padded.reshape(-1)).reshape(self.ranks, *padded.shape)
        return np.concatenate([part[:, :n] for part, n in zip(parts, columns, strict=True)], axis=1)

    def all_gather(self, values: np.ndarray) -> np.ndarray:
        """Gathers the values of all ranks, int64 [W, n], given [n] of this rank; n is the same on all."""
        if self.ranks == 1:
            return values[None]
        result = torch.empty(self.ranks * len(values), dtype=torch.int64)
        dist.all_gather_into_tensor(result, torch.from_numpy(values), group=self._group)
        return result.view(self.ranks, -1).numpy()

    def _all_to_all(self, values: np.ndarray, sent: np.ndarray, received: np.ndarray) -> np.ndarray:
        result = torch.empty(int(received.sum()), *values.shape[1:], dtype=torch.int64)
        given = torch.from_numpy(np.ascontiguousarray(values))
        dist.all_to_all_single(result, given, received.tolist(), sent.tolist(), group=self._group)
        return result.numpy()

    def sharded(self, local: Tensor, rows: np.ndarray) -> ShardedTensor | Tensor:
        """Makes a tensor that is sharded over the ranks by its first dimension into ``rows``, int64 [W]."""
        if self._group is None:
            return local
        trailing, begins = list(local.shape[1:]), np.cumsum(rows) - rows
        shards = [
            ShardMetadata(
                shard_offsets=[begin, *[0] * len(trailing)],
                shard_sizes=[count, *trailing],
                placement=f"rank:{dist.get_global_rank(self._group, rank)}/cpu",
            )
            for rank, (begin, count) in enumerate(zip(begins.tolist(), rows.tolist(), strict=True))
        ]
        metadata = ShardedTensorMetadata(
            shards_metadata=[shard for shard in shards if shard.shard_sizes[0]],
            size=torch.Size([int(rows.sum()), *trailing]),
            tensor_properties=TensorProperties(dtype=local.dtype),
        )
        own = [Shard(local, shards[self._layout.rank])] if len(local) else []
        return ShardedTensor._init_from_local_shards_and_global_metadata(own, metadata, process_group=self._group)
