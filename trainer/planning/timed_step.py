"""Time of a rank's work in a step, measured on this machine: the step of training, in a process group without peers.

Everything that the rank computes is real, kernels and pipeline included, on its slices of real batches and on the ids
that its peers would send. Their floating point numbers are this rank's own, and collectives take no time.
"""

import logging
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from cowrec.data_pipeline import Batch, Schema
from cowrec.trainer.bench.timing import WARMUP_STEPS, step_times
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runtime.environment import prepare_process, quiet_libraries
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.runtime.subprocess_call import run_in_subprocess
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.training.state import TrainState

from .rehearsal import SENDERS, Mail, is_exchange_of_ids
from .replicated import keep_objects

_SECONDS, _MOST_STEPS = 3.0, 200


@dataclass(frozen=True)
class TimedRank:
    """What a rank trains on.

    Attributes:
        process: the rank.
        batches: its slices of global batches.
        mails: what its peers send, for each of them.
    """

    process: Process
    batches: Sequence[Batch]
    mails: Sequence[Mail]


def time_work(config: RunConfig, schema: Schema, ranks: Sequence[TimedRank]) -> float:
    """Seconds of a step of the slowest of some ranks, which run at the same time, in a process each.

    Several processes on CPU have one thread each, as torchrun starts them, or OMP_NUM_THREADS.

    Raises:
        ProcessFailed: a step failed, for example for want of memory.
    """
    threads = int(os.environ.get("OMP_NUM_THREADS", "1")) if len(ranks) > 1 else 0
    with ThreadPoolExecutor(len(ranks)) as pool:
        return max(pool.map(lambda each: run_in_subprocess(_time_steps, config, schema, each, threads), ranks))


def _time_steps(config: RunConfig, schema: Schema, rank: TimedRank, threads: int) -> float:
    prepare_process()
    if threads:
        torch.set_num_threads(threads)
    device = rank.process.device
    with training_alone(config, schema, rank) as state:
        batches = cycle([each.to(device) for each in rank.batches])
        warmup = WARMUP_STEPS[device.type] + len(rank.batches)
        seconds, _ = step_times(lambda _: state.step(batches), warmup, _MOST_STEPS, _SECONDS, device)
    return statistics.median(seconds)


@contextmanager
def training_alone(config: RunConfig, schema: Schema, rank: TimedRank) -> Iterator[TrainState]:
    """Builds what training changes on a rank, in a process group without its peers that lasts as long as the process.

    Steps must take the rank's batches in their order, again and again.
    """
    process, deliveries = rank.process, _Deliveries(rank.process.rank, rank.mails)

    def create(store: Any, number: int, size: int, timeout: Any) -> Peers:
        return Peers(number, size, deliveries, process.device.type)

    dist.Backend.register_backend(_BACKEND, create, devices=["cpu", "cuda"])
    dist.init_process_group(_BACKEND, rank=process.rank, world_size=process.world_size, store=FakeStore())
    os.environ["LOCAL_WORLD_SIZE"] = str(process.local_world_size)
    logging.getLogger("torchrec").setLevel(logging.ERROR)  # it has a line for each data-parallel table
    with patch.object(dist, "broadcast_object_list", keep_objects), quiet_libraries():
        yield TrainState(RunPlan.of(config, schema, process))


class _Deliveries:
    """The ids that peers send to a rank, exchange after exchange; the groups of a rank share them."""

    def __init__(self, rank: int, mails: Sequence[Mail]) -> None:
        self._rank, self._mails, self._exchanges = rank, mails, 0

    def fill(self, output: Tensor, sent: Tensor, splits: Sequence[int], ranks: Sequence[int]) -> None:
        """Fills in what a rank receives in the next exchange: its own ids, and those of its peers.

        TorchRec's pipeline exchanges the sizes for all kinds of sharding at once, its modules one after the other.
        """
        place = ranks.index(self._rank)
        own = sent[sum(splits[:place]) :][: splits[place]]
        received: list[list[Tensor]] = [[own] if rank == self._rank else [] for rank in ranks]
        while True:
            batch, number = divmod(self._exchanges, len(self._mails[0].ids))
            self._exchanges += 1
            chunks = self._mails[batch % len(self._mails)].ids[number]
            if not chunks:  # weights of ids, which were not recorded
                output.fill_(1)
                return
            for rank, parts in zip(ranks, received, strict=True):
                if rank != self._rank:
                    parts.append(chunks[rank if rank in chunks else rank % SENDERS].to(output.device))
            if sum(len(part) for parts in received for part in parts) >= len(output):
                break
        output.copy_(torch.cat([part for parts in received for part in parts]))


_ProcessGroup: Any = dist.ProcessGroup
"""Without torch's annotations, whose overloads are those of its C++ class."""


class Peers(_ProcessGroup):
    """A process group whose collectives return at once: with the ids that peers send, else with this rank's numbers."""

    def __init__(self, rank: int, size: int, deliveries: _Deliveries, device: str) -> None:
        super().__init__(rank, size)
        self._deliveries, self._device = deliveries, device

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """Name that torch gave it, which it would otherwise keep in a backend of its own."""
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        """Kind of the rank's device, which TorchRec 1.6 takes from here."""
        return [torch.device(self._device)]

    def getBackendName(self) -> str:
        """Name that it was registered under."""
        return _BACKEND

    def all_to_all_single(
        self, output: Tensor, sent: Tensor, output_splits: Any, splits: Any, opts: Any = None
    ) -> dist.Work:
        """Exchanges ids, or rows, which peers have like this rank."""
        if is_exchange_of_ids():
            even = [len(sent) // self.size()] * self.size()
            self._deliveries.fill(output, sent, splits or even, dist.get_process_group_ranks(self))
        elif len(sent):
            output.copy_(sent.repeat(-(-len(output) // len(sent)), *[1] * (sent.dim() - 1))[: len(output)])
        else:
            output.zero_()
        return _done([output])

    def allgather(self, outputs: list[list[Tensor]], sent: list[Tensor], opts: Any = None) -> dist.Work:
        """Every rank has what this one has."""
        for each, own in zip(outputs, sent, strict=True):
            for output in each:
                output.copy_(own)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, sent: Tensor, opts: Any = None) -> dist.Work:
        """Every rank has what this one has."""
        return self.allgather([list(output.chunk(self.size()))], [sent])

    def reduce_scatter_single(self, output: Tensor, sent: Tensor, opts: Any = None) -> dist.Work:
        """The sum has what this rank adds to it."""
        output.copy_(sent.chunk(self.size())[self.rank()])
        return _done([output])

    def reduce_scatter(self, outputs: list[Tensor], sent: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """The sum has what this rank adds to it."""
        for output, each in zip(outputs, sent, strict=True):
            output.copy_(each[self.rank()])
        return _done(outputs)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """The sum has what this rank adds to it."""
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Every rank has what this one has."""
        return _done(tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Nobody is waited for."""
        return _done([])

    # Names of torch 2.11.
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allreduce_coalesced = allreduce


_BACKEND = "peers"


def _done(result: Any) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    create: Any = _distributed_c10d
    work: dist.Work = create._create_work_from_future(future)
    return work
