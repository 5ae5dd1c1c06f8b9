"""The plan of a run on a cluster, before it is rented: memory and traffic of every rank, and what does not fit.

The tables are sharded as training shards them, and TorchRec's estimator gives the memory of a step's ids and rows; that
of the network's activations and of collisionless id tables is not counted.
Sizes: P ranks, L of them on each host, b samples of a rank.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from math import inf
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import Shard, ShardingOption

from cowrec.data_pipeline import Batch, Reader, Schema
from cowrec.trainer.config.checks import require
from cowrec.trainer.config.run import RunConfig, with_values
from cowrec.trainer.config.sections import ShardingKind
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.build import dense_parameters, fused_params, unsharded_task
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.sharded_model.sharding import TablesDoNotFit, sharding_plan

_RESERVED = 2e9
"""Bytes of a GPU that CUDA, NCCL and the allocator's gaps take."""
_MOST_DOUBLINGS = 6


@dataclass(frozen=True)
class Cluster:
    """Equal hosts with equal devices, one process for each device; by default DGX H100.

    On CPU a host's ``devices`` are processes, and tables are in its memory; ``memory_gb`` is that of a GPU.
    """

    hosts: int = 1
    devices: int = 8
    device: Literal["cpu", "cuda"] = "cuda"
    memory_gb: float = 80.0
    host_memory_gb: float = 2000.0

    def __post_init__(self) -> None:
        for name in ("memory_gb", "host_memory_gb"):
            size = getattr(self, name)
            require(f"--{name.replace('_', '-')}", size, 0 < size < inf, "above 0 and finite")

    @property
    def ranks(self) -> int:
        return self.hosts * self.devices


@dataclass(frozen=True)
class RankPlan:
    """The plan of ranks that hold shards of the same sizes.

    Attributes:
        ranks: these ranks.
        memory: bytes by part: "tables", "moments", "last_steps", "network" (weights, gradients and both moments) and
            "ids_and_rows" of a step.
        sent: bytes that a rank passes to the collectives of a step, those for itself included, by what they are for.
        device_bytes: needed of the device; on CPU, of the host.
        host_bytes: needed of the host beside that: tables in unified memory, and a checkpoint's copy.
    """

    ranks: list[int]
    memory: dict[str, int]
    sent: dict[str, int]
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        ranks: kinds of ranks, those that need most of a device first.
        misfits: what does not fit, in words; empty if all does.
        remedies: settings or hosts with which all would fit; empty if all does.
    """

    ranks: list[RankPlan]
    misfits: list[str]
    remedies: list[str]


def plan_run(config: RunConfig, data_dir: Path, cluster: Cluster) -> Plan:
    """Plans a run on a cluster, with the ids of the first batch of a data set or of a sample of it.

    Args:
        config: with a batch size and L2, see :func:`cowrec.trainer.config.run.with_defaults`.

    Raises:
        ValueError: the configuration does not work on that many processes, or the data set has no training samples.
    """
    schema, size = Schema.load(data_dir), config.train.batch_size
    batch = next(Reader(data_dir, "train", batch_size=size).epoch(0), None)
    if batch is None:
        raise ValueError(f"the train split of {data_dir} has no samples to plan with; prepare it with another split")
    try:
        plan = plan_batch(config, schema, batch, cluster)
    except TablesDoNotFit as error:
        plan = plan_batch(with_values(config, sharding={"plan": "table_wise"}), schema, batch, cluster)
        said = str(error).partition(";")[0]
        plan = dataclasses.replace(plan, misfits=[f'{said}; shown is "table_wise"', *plan.misfits])
    return dataclasses.replace(plan, remedies=_remedies(config, schema, batch, cluster)) if plan.misfits else plan


def plan_batch(config: RunConfig, schema: Schema, batch: Batch, cluster: Cluster) -> Plan:
    """Plans a run as :func:`plan_run`, with the ids of a given batch, but without remedies."""
    on_cuda, size = cluster.device == "cuda", config.train.batch_size
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    capacity = int(cluster.memory_gb * 1e9) if on_cuda else None
    run = RunPlan.of(config, schema, Process(0, cluster.ranks, cluster.devices, False, device, device_bytes=capacity))
    task = unsharded_task(run)
    tables = _sharded_tables(task, run, batch)
    sent = _sent(tables, cluster, 8 if schema.is_weighted else 4)
    network = sum(each.nbytes for each in dense_parameters(task).values())
    raw = sum(sum(tables[each.name].input_lengths) for each in run.tables if each.ids.kind == "collisionless")
    kinds: dict[str, RankPlan] = {}
    for rank in range(cluster.ranks):
        memory, on_host = _table_memory(tables, rank, config)
        saved = memory["tables"] + memory["moments"] + memory["last_steps"] + (0 if rank else 3 * network)
        memory["network"] = 4 * network
        if cluster.ranks > 1:
            # A raw id's value, field and time go to its owner, which sends its row back; an int64 each.
            sent[rank] += {"network": network, "id_tables": int(24 * raw * size / cluster.ranks)}
        plan = RankPlan([], memory, dict(sent[rank]), sum(memory.values()) - on_host, on_host + saved)
        kinds.setdefault(str(plan), plan).ranks.append(rank)
    ranks = sorted(kinds.values(), key=lambda each: -each.device_bytes)
    return Plan(ranks, list(_misfits(ranks, cluster)), [])


def _sharded_tables(task: nn.Module, run: RunPlan, batch: Batch) -> dict[str, ShardingOption]:
    """The tables as training shards them, each rank with a shard of a data-parallel one.

    TorchRec estimates the storage of each shard: its weights, and the ids and rows of a step.
    """
    config, process = run.config, run.process
    sharder = EmbeddingBagCollectionSharder(fused_params=fused_params(config.optimizer, run.scaled.hyperparameters))
    (planned,) = sharding_plan(task, run.kinds, config, process, sharder).plan.values()
    ids_of_sample = {key: len(ids.values()) / len(batch.label) for key, ids in batch.sparse.to_dict().items()}
    constraints = {
        bag.name: ParameterConstraints(
            sharding_types=[planned[bag.name].sharding_type],
            compute_kernels=["dense" if planned[bag.name].sharding_type == "data_parallel" else "fused"],
            pooling_factors=[ids_of_sample[field] for field in bag.feature_names],
        )
        for bag in run.bags
    }
    # Of CUDA, as TorchRec takes no table by rows on CPU, where the sizes are the same.
    topology = Topology(process.world_size, "cuda", local_world_size=process.local_world_size)
    estimator = EmbeddingStorageEstimator(topology, constraints)
    of_rank = -(-config.train.batch_size // process.world_size)
    enumerator = EmbeddingEnumerator(topology, of_rank, constraints, estimator)
    options = {option.name: option for option in enumerator.enumerate(task, [sharder])}
    for name, option in options.items():
        spec: Any = planned[name].sharding_spec
        if spec:
            option.shards = [
                Shard(each.shard_sizes, each.shard_offsets, rank=each.placement.rank()) for each in spec.shards
            ]
        else:
            option.shards = [Shard(list(option.tensor.shape), [0, 0], rank=rank) for rank in range(process.world_size)]
    enumerator.populate_estimates(list(options.values()))
    return options


def _table_memory(tables: Mapping[str, ShardingOption], rank: int, config: RunConfig) -> tuple[dict[str, int], int]:
    """Bytes of a rank's tables by part, and how many of them are in the host's memory."""
    memory, on_host = dict.fromkeys(("tables", "moments", "last_steps", "ids_and_rows"), 0), 0
    optimizer, in_uvm = config.optimizer.embedding, config.sharding.memory != "device"
    replays = optimizer == "adam" and config.optimizer.absent_rows in (None, "replay")
    for table in tables.values():
        for shard in (each for each in table.shards if each.rank == rank):
            assert shard.storage is not None
            rows, columns = shard.size
            moments = {"sgd": 0, "adagrad": columns, "rowwise_adagrad": 1, "fbgemm_cowclip": 3}
            weights, state = 4 * rows * columns, 4 * rows * moments.get(optimizer, 2 * columns)
            sizes = (weights, state, 4 * rows * replays, shard.storage.hbm + shard.storage.ddr - weights)
            for part, size in zip(memory, sizes, strict=True):
                memory[part] += size
            on_host += weights + state if in_uvm and table.sharding_type != "data_parallel" else 0
    return memory, on_host


def _sent(tables: Mapping[str, ShardingOption], cluster: Cluster, id_bytes: int) -> list[Counter[str]]:
    """Bytes that each rank passes to collectives in a step, by part; lengths and pooled numbers have four each."""
    P, L, several = cluster.ranks, cluster.devices, int(cluster.hosts > 1)
    everyone, holders = Counter[str](), [Counter[str]() for _ in range(P)]
    for table in tables.values() if P > 1 else ():
        b, fields, kind = table.batch_size, len(table.input_lengths), table.sharding_type
        ids, lengths = sum(table.input_lengths) * b, 4 * fields * b
        for shard in table.shards:
            row, held = 4 * fields * shard.size[1], holders[shard.rank or 0]
            if kind == "data_parallel":  # of a distinct row its gradient in float64, its place and its count, at most
                held["copies"] += 8 * (shard.size[1] + 3) * min(shard.size[0], ids)
            elif kind == "row_wise":
                held += {"ids": id_bytes * ids + lengths * P, "rows": row * b * P, "row_gradients": row * b}
            elif kind == "table_row_wise":  # sums are taken within the host of the shards, then sent to other hosts
                everyone += {"ids": id_bytes * ids / L + lengths, "row_gradients": several * row * b / L}
                held += {"rows": row * b * (P + several * P / L), "row_gradients": row * b * P / L}
            else:
                everyone += {"ids": id_bytes * ids + lengths, "row_gradients": row * b}
                held += {"rows": row * b * P, "clip": 16 * ids * P * (len(table.shards) > 1)}
    return [Counter({part: round(size) for part, size in (held + everyone).items()}) for held in holders]


def _misfits(kinds: list[RankPlan], cluster: Cluster) -> Iterator[str]:
    largest, on_cpu = kinds[0], cluster.device == "cpu"
    needed = largest.device_bytes + _RESERVED
    if not on_cpu and needed > cluster.memory_gb * 1e9:
        parts = ", ".join(f"{part.replace('_', ' ')} {size / 1e9:.1f}" for part, size in largest.memory.items())
        yield (
            f"rank {largest.ranks[0]} needs {needed / 1e9:.1f} GB of its GPU's {cluster.memory_gb:g}: {parts}, and"
            f" {_RESERVED / 1e9:.0f} for CUDA itself"
        )
    hosts: Counter[int] = Counter()
    for kind in kinds:
        for rank in kind.ranks:
            hosts[rank // cluster.devices] += kind.host_bytes + (kind.device_bytes if on_cpu else 0)
    if max(hosts.values()) > cluster.host_memory_gb * 1e9:
        yield (
            f"a host needs {max(hosts.values()) / 1e9:.1f} GB of its {cluster.host_memory_gb:g}, with the copy of a"
            " checkpoint that is written while training continues"
        )


def _remedies(config: RunConfig, schema: Schema, batch: Batch, cluster: Cluster) -> list[str]:
    """Other kinds of sharding that fit, or else the least number of hosts, in doublings, that do by rows."""

    def fits(kind: ShardingKind, memory: Any, times: int = 1) -> bool:
        more = dataclasses.replace(cluster, hosts=times * cluster.hosts)
        try:
            sharded = with_values(config, sharding={"plan": kind, "memory": memory, "tables": {}})
            return not plan_batch(sharded, schema, batch, more).misfits
        except ValueError:
            return False

    pairs = product(("device", "uvm"), get_args(ShardingKind))
    alone = ", without sharding.tables" if config.sharding.tables else ""
    kinds = [(f'sharding.plan = "{kind}", sharding.memory = "{each}"', fits(kind, each)) for each, kind in pairs]
    found = [each + alone for each, does in kinds if does]
    enough = (1 << each for each in range(1, _MOST_DOUBLINGS + 1) if fits("row_wise", "device", 1 << each))
    return found or [f'{cluster.hosts * each} hosts, sharding.plan = "row_wise"{alone}' for each in islice(enough, 1)]
