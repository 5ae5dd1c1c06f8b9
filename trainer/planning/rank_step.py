"""A rank's model, built by the code that trains, and its rehearsed training step: memory by part, traffic and work."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Schema
from cowrec.sparse_opt.tbe.discovery import sharded_collections
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runtime.environment import quiet_libraries
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.build import dense_parameters, embedding_optimizer, shard, unsharded_task
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.sharded_model.tables import table_specs

from .rehearsal import SENDERS, Collective, Mail, Rehearsal, Work
from .replicated import Unreplicated, reduce_gradients, stand_ins
from .samples import GlobalBatch


@dataclass(frozen=True)
class RankStep:
    """A rank's training step.

    Attributes:
        rank: this rank.
        memory: bytes by part: "tables", "moments", "last_steps", "network" (weights, gradients and Adam's moments),
            "activations" (the most that a step needs beside these).
        collectives: in their order.
        work: by part of the step.
    """

    rank: int
    memory: dict[str, int]
    collectives: list[Collective]
    work: dict[str, Work]


@contextmanager
def fake_group(process: Process) -> Iterator[None]:
    """A default process group whose collectives return at once, without having exchanged anything."""
    dist.init_process_group("fake", rank=process.rank, world_size=process.world_size, store=FakeStore())
    try:
        with stand_ins(process.local_world_size), quiet_libraries():
            yield
    finally:
        dist.destroy_process_group()


def rehearse(
    config: RunConfig,
    schema: Schema,
    process: Process,
    batch: GlobalBatch,
    mail: Mail,
    plan: ShardingPlan | None = None,
) -> RankStep:
    """Builds a rank's model and takes a training step; needs a :func:`fake_group`.

    Args:
        config: of the run.
        schema: of its data.
        process: the rank, on CPU.
        batch: the global batch of the step.
        mail: what the peers send, of :func:`letters`.
        plan: of the tables, by default that of the configuration.
    """
    of_run = _plan_of_run(config, schema, process)
    task = unsharded_task(of_run)
    mode = Rehearsal(process.rank, mail)
    _make_fake(task, mode)
    with mode:
        model = shard(task, of_run, plan, Unreplicated())
        optimizer = embedding_optimizer(of_run, model)
        own = batch.slice_of(process.rank, process.world_size)
        own.dense, own.label = mode.fake(own.dense), mode.fake(own.label)
        memory = _memory(model, optimizer)
        mode.collectives.clear()
        mode.start_exchange()
        before, mode.peak = mode.live, mode.live
        mode.part = "forward"
        loss, _ = model(own)
        mode.part = "backward"
        loss.backward()
        del loss
        reduce_gradients(list(dense_parameters(model).values()))
    memory["activations"] = mode.peak - before
    exchanged = _id_exchange(config, schema, process, own.sparse)
    return RankStep(process.rank, memory, [*exchanged, *mode.collectives], mode.work)


def _plan_of_run(config: RunConfig, schema: Schema, process: Process) -> RunPlan:
    """The plan of the run on the CPU, on which no table is in unified memory."""
    sharding = dataclasses.replace(config.sharding, memory="device")
    return RunPlan.of(dataclasses.replace(config, sharding=sharding), schema, process)


def _id_exchange(
    config: RunConfig, schema: Schema, process: Process, sparse: KeyedJaggedTensor
) -> Iterator[Collective]:
    """The exchange of the ids of collisionless tables, as in sparse_opt/id_tables/exchange.py, evenly spread.

    Of an id its value and its field and time are sent, and its row sent back, each an int64; rows of new ids are not
    counted.
    """
    raw = {
        field.name for spec in table_specs(schema, config) if spec.ids.kind == "collisionless" for field in spec.fields
    }
    ranks = tuple(range(process.world_size))
    if not raw or len(ranks) == 1:
        return
    ids = sum(size for key, size in zip(sparse.keys(), sparse.length_per_key(), strict=True) if key in raw)
    yield Collective("all_gather", "id_tables", ranks, 8 * (3 + len(ranks)))
    for size in (16 * ids, 8 * ids):
        yield Collective("all_to_all", "id_tables", ranks, size, (size // len(ranks),) * len(ranks))


def _make_fake(task: nn.Module, mode: Rehearsal) -> None:
    """Replaces the network's parameters and buffers; those of tables are on the meta device."""
    for module in task.modules():
        for name, weight in module._parameters.items():
            if weight is not None and not weight.is_meta:
                module._parameters[name] = nn.Parameter(mode.fake(weight), weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mode.fake(buffer)


def _memory(model: nn.Module, optimizer: Any) -> dict[str, int]:
    from cowrec.sparse_opt import EmbeddingAdam
    from cowrec.sparse_opt.tbe.discovery import find_lookups

    memory = dict.fromkeys(("tables", "moments", "last_steps", "network"), 0)
    memory["tables"] = sum(_bytes(each.flat_weights()) for each in find_lookups(model)[0])
    if isinstance(optimizer, EmbeddingAdam):
        for adam in optimizer.lookups:
            memory["moments"] += _bytes(adam.exp_avg) + _bytes(adam.exp_avg_sq)
            memory["last_steps"] += _bytes(adam.replay.last_step) if adam.replay else 0
    memory["network"] = 4 * sum(map(_bytes, dense_parameters(model).values()))
    return memory


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def letters(
    config: RunConfig,
    schema: Schema,
    process: Process,
    batches: Sequence[GlobalBatch],
    ranks: Sequence[int],
    plan: ShardingPlan | None = None,
) -> list[dict[int, Mail]]:
    """What the first ``SENDERS`` ranks send to each of ``ranks`` in the exchange of ids of batches, by TorchRec's code.

    ``process`` is any rank, of a :func:`fake_group`: which ids go where does not depend on the sender.
    """
    posted = []
    mode = Rehearsal(process.rank, Mail())
    of_run = _plan_of_run(config, schema, process)
    task = unsharded_task(of_run)
    _make_fake(task, mode)
    with mode:
        model = shard(task, of_run, plan, Unreplicated())
        ((_, collection),) = sharded_collections(model).items()
        (kinds,) = model.plan.plan.values()
        replicated = {
            spec.name: [field.name for field in spec.fields]
            for spec in table_specs(schema, config)
            if kinds[spec.name].sharding_type == "data_parallel"
        }
        for batch in batches:
            mails = {rank: Mail() for rank in ranks}
            for sender in range(min(process.world_size, SENDERS)):
                sparse = batch.slice_of(sender, process.world_size).sparse
                _post(mode, collection, sender, sparse, replicated, mails)
            posted.append(mails)
    return posted


def _post(
    mode: Rehearsal,
    collection: Any,
    sender: int,
    sparse: KeyedJaggedTensor,
    replicated: Mapping[str, list[str]],
    mails: Mapping[int, Mail],
) -> None:
    def sending(number: int, sent: Tensor, splits: list[int]) -> None:
        ends = torch.tensor([0, *splits]).cumsum(0).tolist()
        for rank, mail in mails.items():
            chunks = mail.ids.setdefault(number, {})
            if not isinstance(sent, FakeTensor):
                chunks[sender] = sent[ends[rank] : ends[rank + 1]].clone()

    mode.sending = sending
    mode.start_exchange()
    collection.input_dist(collection.create_context(), sparse).wait()
    distinct = {
        name: len(torch.cat([sparse[field].values() for field in fields]).unique())
        for name, fields in replicated.items()
    }
    for mail in mails.values():
        mail.distinct[sender] = distinct
