"""Rehearsal of one rank's training step: its integers are real, its floating point tensors have no values.

Ids, lengths and sizes are those of the data, so that what is exchanged has its true size. Weights, activations and
gradients are torch's fake tensors, which have shapes but no memory: tables of any size cost nothing. Collectives are
recorded; what the peers would have sent is filled in by :class:`Mail`.
"""

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

SMALL = 64
"""Elements up to which new floating point tensors are real: settings of the clip and of the optimizer are read."""


SENDERS = 8
"""Ranks whose ids are exchanged in a rehearsal; rank r of more of them sends what rank r % SENDERS does."""


@dataclass(frozen=True)
class Collective:
    """A collective that a rank takes part in.

    Attributes:
        kind: "all_to_all", "all_reduce", "all_gather", "reduce_scatter" or "broadcast".
        part: what it is for, one of :data:`TRAFFIC`.
        ranks: of its group, in order.
        sent: bytes that this rank passes to it.
        sent_to: bytes for each rank of the group, its own included, of an all-to-all; else empty.
    """

    kind: str
    part: str
    ranks: tuple[int, ...]
    sent: int
    sent_to: tuple[int, ...] = ()


TRAFFIC = ("ids", "rows", "row_gradients", "network_gradients", "clip", "data_parallel_rows", "id_tables", "control")
"""What collectives are for: ids and the sizes of their exchange; looked-up rows; gradients of these; gradients of the
network; norms of rows whose columns are sharded; gradients of data-parallel tables, counts for the clip included; ids
of collisionless tables; and what keeps the ranks in step."""


@dataclass
class Work:
    """Work on the device in a part of a step.

    Attributes:
        flops: operations of matrix products.
        bytes: bytes that all operators read and write.
        operators: number of operators that do work.
    """

    flops: float = 0.0
    bytes: float = 0.0
    operators: int = 0


@dataclass
class Mail:
    """What a rank's peers send to it, by the number of the collective within the exchange of ids.

    Attributes:
        ids: chunks for this rank, by collective and sender.
        distinct: of each sender, number of distinct ids of each table.
    """

    ids: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    distinct: dict[int, dict[str, int]] = field(default_factory=dict)


class Rehearsal(TorchDispatchMode):
    """Mode in which new floating point tensors are fake; records collectives, work and memory.

    Args:
        rank: this rank.
        mail: what its peers send.

    Attributes:
        collectives: so far.
        work: by part of the step: "forward", "backward", "lookup" (rows), "pooling" (what
            lookups write and the gradients that their updates read), "embedding_update" (rows and moments).
        part: of the step that runs now.
        live, peak: bytes of the tensors that exist now, and the most so far.
        sending: called with the number of an all-to-all, its input and its sizes, while a peer's ids are sent.
    """

    def __init__(self, rank: int, mail: Mail) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.work: dict[str, Work] = {}
        self.part, self.live, self.peak = "build", 0, 0
        self.sending: Callable[[int, Tensor, list[int]], None] | None = None
        self._rank, self._mail, self._exchanges = rank, mail, 0
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def fake(self, tensor: Tensor) -> Tensor:
        """A fake tensor like a real one."""
        made: Tensor = self._fake.from_tensor(tensor.detach())
        return made

    def start_exchange(self) -> None:
        """Begins the exchange of a batch's ids anew, for this rank or for a peer."""
        self._exchanges = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        result = self._run(func, args, kwargs)
        self._measure(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(isinstance(each, FakeTensor) for each in given):
            if func.namespace == "fbgemm" and "embedding_codegen" not in func.__name__:
                return self._with_real_ids(func, args, kwargs)
            if func is torch.ops.aten.index.Tensor:
                args = (args[0], [part for each in args[1] for part in _places(each)])
            with self._fake:
                return func(*args, **kwargs)
        if not given:
            with self._fake:
                made = func(*args, **kwargs)
            if isinstance(made, Tensor) and made.is_floating_point() and made.numel() > SMALL:
                return made
        return func(*args, **kwargs)

    def _with_real_ids(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Rearranges ids and their weights, which are fake, with FBGEMM's operator."""
        real_args, real_kwargs = tree_map_only(FakeTensor, lambda each: torch.empty(each.shape), (args, kwargs))
        result = func(*real_args, **real_kwargs)
        return tree_map_only(Tensor, lambda each: self.fake(each) if each.is_floating_point() else each, result)

    def _measure(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        for each in made:
            storage = each.untyped_storage()
            if storage not in self._storages:
                size = storage.nbytes()
                self._storages[storage] = size
                self.live += size
                weakref.finalize(storage, self._release, size)
        self.peak = max(self.peak, self.live)
        is_free = func.is_view or func in _FREE or func.namespace in ("prim", "profiler")
        if is_free or self.part == "build" or _frame_of("torchrec.sparse.jagged_tensor_validator"):
            return  # the validator looks at the first batch of a run only
        if "embedding_codegen" in func.__name__ or func.__name__.startswith("dense_embedding"):
            self._count_rows(dict(zip((each.name for each in func._schema.arguments), args, strict=False)))
        elif not _frame_of("cowrec.sparse_opt.optim.lookup_adam"):  # counted with the lookup
            read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            packet = func._overloadpacket
            flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
            self._add(self.part, sum(map(_bytes, (*read, *made))), flops)

    def _count_rows(self, lookup: dict[str, Any]) -> None:
        """Counts the rows that a lookup reads, what it writes, and the update: distinct rows and two moments, both."""
        offsets, ends = lookup["offsets"], lookup["D_offsets"].tolist()
        samples = (len(offsets) - 1) // (len(ends) - 1)
        begins = offsets[::samples].tolist() if samples else [0] * len(ends)
        read = pooled = updated = 0
        for feature, (first, end) in enumerate(pairwise(begins)):
            width = 4 * (ends[feature + 1] - ends[feature])
            ids = lookup["indices"][first:end]
            read += width * len(ids)
            pooled += width * (samples + len(ids))
            updated += 6 * width * len(ids.unique())
        for part, size in (("lookup", read), ("pooling", pooled), ("embedding_update", updated)):
            self._add(part, size)

    def _add(self, part: str, size: int, flops: float = 0.0) -> None:
        work = self.work.setdefault(part, Work())
        work.operators += 1
        work.bytes += size
        work.flops += flops

    def _release(self, size: int) -> None:
        self.live -= size

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = _KINDS[func.__name__.partition(".")[0].strip("_").removesuffix("_base")]
        group = next(each for each in args if isinstance(each, torch.ScriptObject))
        ranks = tuple(get_process_group_ranks(ProcessGroup.unbox(group)))
        inputs = args[0] if kind in ("all_reduce", "broadcast", "barrier") else args[1]
        sent, sizes = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)], tuple[int, ...]()
        if kind == "all_to_all":
            sizes = self._exchange(args[0], sent[0], list(args[4]), ranks)
            args = (*args[:3], [], [], *args[5:])
        elif kind == "all_gather":
            self._receive_sizes(args[0], sent[0])
        if self.sending is None and kind != "barrier":
            self.collectives.append(Collective(kind, _part_of_collective(), ranks, sum(map(_bytes, sent)), sizes))
        empty = tree_map_only(Tensor, lambda each: torch.empty(0), (args, kwargs))
        with _disable_current_modes():
            done = func(*empty[0], **empty[1])
        return (args[0], done[1]) if isinstance(done, tuple) else done

    def _exchange(self, output: Tensor, sent: Tensor, splits: list[int], ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Fills in what the peers send in an all-to-all; returns the bytes for each rank."""
        splits = splits or [len(sent) // len(ranks)] * len(ranks)
        if is_exchange_of_ids():
            number, self._exchanges = self._exchanges, self._exchanges + 1
            if self.sending is not None:
                self.sending(number, sent, splits)
                output.zero_()
            elif not isinstance(output, FakeTensor):
                first = sum(splits[: self._rank])
                chunks = {**self._mail.ids.get(number, {}), self._rank: sent[first : first + splits[self._rank]]}
                output.copy_(torch.cat([chunks[rank if rank in chunks else rank % SENDERS] for rank in ranks]))
        of_row = _bytes(sent) // max(len(sent), 1)
        return tuple(of_row * each for each in splits)

    def _receive_sizes(self, outputs: Any, sent: Tensor) -> None:
        """Fills in how many rows of data-parallel tables each peer sends."""
        frame = _frame_of("cowrec.sparse_opt.clipping.clipped_lookup")
        if frame is None or isinstance(sent, FakeTensor):
            return
        tables = {shard.table for shard in frame.f_locals["self"].lookup.shards}
        for rank, output in enumerate(tree_leaves(outputs)):
            own = rank == self._rank
            output.fill_(int(sent) if own else sum(self._mail.distinct[rank % SENDERS][table] for table in tables))


def is_exchange_of_ids() -> bool:
    """Whether the collective that runs now exchanges ids, their lengths or weights, rather than rows."""
    return bool(_frame_of("torchrec.distributed.dist_data")) and not _frame_of("torchrec.distributed.comm_ops")


def _part_of_collective() -> str:
    """What the collective is for that runs now, by the module that calls it."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        part = _PARTS.get(frame.f_globals.get("__name__", ""))
        if part == "rows" and frame.f_code.co_name == "backward":
            return "row_gradients"
        if part and (part != "rows" or frame.f_code.co_name == "forward"):
            return part
        frame = frame.f_back
    return "control"


def _frame_of(module: str) -> Any:
    """The innermost frame of a module among the callers, or None."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame


_PARTS = {
    "cowrec.sparse_opt.tbe.column_shards": "clip",
    "cowrec.sparse_opt.clipping.row_factors": "clip",
    "cowrec.sparse_opt.kernels.torch_rows": "data_parallel_rows",
    "cowrec.sparse_opt.id_tables.exchange": "id_tables",
    "torchrec.distributed.comm_ops": "rows",
    "torchrec.distributed.dist_data": "ids",
    "cowrec.trainer.planning.replicated": "network_gradients",
}
_KINDS = {
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "barrier": "barrier",
}
_FREE = {torch.ops.aten.empty.memory_format, torch.ops.aten.detach.default, torch.ops.aten._local_scalar_dense.default}


def _places(index: Tensor | None) -> list[Tensor | None]:
    """Indices in place of a mask, whose number the result's shape depends on; a fake mask selects everything."""
    if index is None or index.dtype != torch.bool:
        return [index]
    if isinstance(index, FakeTensor):
        index = torch.ones(index.shape, dtype=torch.bool)
    return list(index.nonzero().unbind(1))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
