"""The plan of a run on a cluster: every rank's memory, and the traffic and the time of its step, rehearsed."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from cowrec.data_pipeline import Schema
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.config.sections import ShardingKind
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.build import fused_params, unsharded_task
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.sharded_model.sharding import sharding_plan
from cowrec.trainer.sharded_model.tables import table_specs

from .cluster import Cluster
from .rank_step import RankStep, fake_group, letters, rehearse
from .samples import GlobalBatch, global_batch
from .step_time import StepTime, step_time
from .timed_step import TimedRank, time_work

MOST_KINDS = 8
"""Kinds of ranks, by the shapes of their shards, that are rehearsed: those with the most bytes of tables."""
_RESERVED = 2e9
"""Bytes of a GPU that CUDA, NCCL and the allocator's gaps take."""


@dataclass(frozen=True)
class RankPlan:
    """Plan of the ranks whose shards have the same shapes.

    Attributes:
        ranks: these ranks.
        step: rehearsed step of the first of them.
        time: of that step.
        device_bytes: that a device needs; on CPU, that a process does.
        host_bytes: that each of them needs of its host's memory: tables in unified memory, and a checkpoint's copy.
        checkpoint_bytes: that each of them writes.
    """

    ranks: list[int]
    step: RankStep
    time: StepTime
    device_bytes: int
    host_bytes: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class Plan:
    """Plan of a run.

    Attributes:
        cluster: that it is for.
        kind: of the sharding, and the memory of tables.
        batch_size: of all ranks.
        samples: of an epoch.
        kinds: of ranks, those with the most bytes of tables first.
        left_out: table bytes of each rank of further kinds, which hold no more than those, and were not rehearsed.
        misfits: what does not fit, in words; empty if all does.
    """

    cluster: Cluster
    kind: str
    batch_size: int
    samples: int
    kinds: list[RankPlan]
    left_out: list[int]
    misfits: list[str]

    @property
    def step_seconds(self) -> float:
        """Time of a step: that of the slowest rank."""
        return max(each.time.seconds for each in self.kinds)

    @property
    def epoch_seconds(self) -> float:
        """Time of the steps of an epoch."""
        return self.step_seconds * self.samples / self.batch_size

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint; those of ranks that were not rehearsed are in proportion to their tables."""
        rehearsed = sum(len(each.ranks) * each.checkpoint_bytes for each in self.kinds)
        largest = self.kinds[0]
        return rehearsed + sum(self.left_out) * largest.checkpoint_bytes // max(largest.step.memory["tables"], 1)

    @property
    def checkpoint_seconds(self) -> float:
        """Time to write a checkpoint, while training continues."""
        return self.checkpoint_bytes / self.cluster.hosts / self.cluster.storage_gb_per_second / 1e9


def plan_run(
    config: RunConfig, data_dir: Path, cluster: Cluster, *, samples: int = 0, most_kinds: int = MOST_KINDS
) -> Plan:
    """Plans a run on a cluster, with the ids of the first batch of a data set or of a sample of it.

    Args:
        config: of the run, with a batch size.
        data_dir: prepared data set.
        cluster: to plan for.
        samples: of an epoch; by default those of the data set's training split.
        most_kinds: kinds of ranks to rehearse.

    Raises:
        ValueError: the configuration does not work on that many processes, or the data set cannot be trained on.
    """
    schema = Schema.load(data_dir)
    return plan_batch(
        config, schema, global_batch(config, data_dir), cluster, samples or schema.split("train").rows, most_kinds
    )


def plan_batch(
    config: RunConfig, schema: Schema, batch: GlobalBatch, cluster: Cluster, samples: int, most_kinds: int = MOST_KINDS
) -> Plan:
    """Plans a run as :func:`plan_run`, with the ids of a given batch."""
    if config.optimizer.embedding != "adam":
        raise ValueError(
            f'optimizer.embedding = "{config.optimizer.embedding}" cannot be planned: the fused optimizers of FBGEMM'
            ' need the memory of their tables; plan with optimizer.embedding = "adam", which takes the most'
        )
    tables = sharding_of(config, schema, cluster)
    kinds = _kinds_of_ranks(tables, cluster.ranks)
    chosen = [ranks for _, ranks in kinds[:most_kinds]]
    first = [ranks[0] for ranks in chosen]
    with fake_group(_rank(cluster, 0)):
        (mails,) = letters(config, schema, _rank(cluster, 0), [batch], first, tables)
    plans = []
    for ranks in chosen:
        process = _rank(cluster, ranks[0])
        with fake_group(process):
            step = rehearse(config, schema, process, batch, mails.pop(ranks[0]), tables)
        plans.append(_plan_of(ranks, step, config, cluster))
    left_out = [size for size, ranks in kinds[most_kinds:] for _ in ranks]
    kind = f"{config.sharding.plan}, {config.sharding.memory}"
    size = config.train.batch_size
    return Plan(cluster, kind, size, samples, plans, left_out, _misfits(plans, kinds[most_kinds:], cluster))


def timed_plan(plan: Plan, config: RunConfig, schema: Schema, batches: Sequence[GlobalBatch]) -> Plan:
    """The same plan with the time of the slowest rank's work, measured on this machine, for that of every rank.

    On CPU all processes of its host run at the same time, as they share its cores.

    Raises:
        ValueError: the run has collisionless id tables.
        ProcessFailed: the rank's step does not run here, for example for want of memory.
    """
    if any(spec.ids.kind == "collisionless" for spec in table_specs(schema, config)):
        raise ValueError(
            "a step with collisionless id tables cannot be timed without the peers that its ids are exchanged with;"
            ' leave out --timed, or plan with id_table.kind = "hash"'
        )
    cluster, in_uvm = plan.cluster, config.sharding.memory != "device"
    slowest = max(plan.kinds, key=lambda each: each.time.seconds).ranks[0]
    first = slowest // cluster.devices * cluster.devices
    together = range(first, first + cluster.devices) if cluster.device == "cpu" else range(slowest, slowest + 1)
    tables = sharding_of(config, schema, cluster)
    with fake_group(_rank(cluster, 0)):
        mails = letters(config, schema, _rank(cluster, 0), batches, together, tables)
    ranks = []
    for rank in together:
        process = dataclasses.replace(_rank(cluster, rank, cluster.device), device=torch.device(cluster.device))
        slices = [each.slice_of(rank, cluster.ranks) for each in batches]
        ranks.append(TimedRank(process, slices, [each[rank] for each in mails]))
    work = time_work(config, schema, ranks)
    times = [step_time(each.step, cluster, in_uvm=in_uvm, work_seconds=work) for each in plan.kinds]
    kinds = [dataclasses.replace(each, time=time) for each, time in zip(plan.kinds, times, strict=True)]
    return dataclasses.replace(plan, kinds=kinds)


def _rank(cluster: Cluster, rank: int, kind: str = "cpu") -> Process:
    device = torch.device(kind, rank % cluster.devices) if kind == "cuda" else torch.device(kind)
    memory = int(cluster.memory_gb * 1e9) if kind == "cuda" else None
    return Process(rank, cluster.ranks, cluster.devices, False, device, device_bytes=memory)


def sharding_of(config: RunConfig, schema: Schema, cluster: Cluster) -> ShardingPlan:
    """The sharding plan that the run would have on the cluster, with its shards moved to the CPU.

    Raises:
        ValueError: the sharding does not suit the run.
    """
    process = _rank(cluster, 0, cluster.device)
    with fake_group(process):
        plan = RunPlan.of(config, schema, process)
        sharder = EmbeddingBagCollectionSharder(
            fused_params=fused_params(config.optimizer, plan.scaled.hyperparameters)
        )
        made = sharding_plan(unsharded_task(plan), plan.kinds, config, process, sharder)
    return ShardingPlan({path: _on_cpu(tables) for path, tables in made.plan.items()})


def _on_cpu(tables: Any) -> EmbeddingModuleShardingPlan:
    moved = EmbeddingModuleShardingPlan()
    for name, table in tables.items():
        moved[name] = _table_on_cpu(table)
    return moved


def _table_on_cpu(table: ParameterSharding) -> ParameterSharding:
    kernel = "fused" if table.compute_kernel.startswith("fused") else table.compute_kernel
    if table.sharding_spec is None:
        return dataclasses.replace(table, compute_kernel=kernel)
    spec: Any = table.sharding_spec
    shards = [dataclasses.replace(each, placement=f"rank:{each.placement.rank()}/cpu") for each in spec.shards]
    return dataclasses.replace(table, compute_kernel=kernel, sharding_spec=type(spec)(shards=shards))


def _kinds_of_ranks(tables: ShardingPlan, world_size: int) -> list[tuple[int, list[int]]]:
    """Ranks whose shards have the same shapes, and the bytes of their tables, the most first."""
    shapes: dict[int, list[tuple[Any, ...]]] = {rank: [] for rank in range(world_size)}
    for plan in tables.plan.values():
        for name, table in plan.items():
            for shard in table.sharding_spec.shards if table.sharding_spec is not None else ():
                shapes[shard.placement.rank()].append((name, *shard.shard_sizes))
    alike: dict[tuple[Any, ...], list[int]] = {}
    for rank, held in shapes.items():
        alike.setdefault(tuple(sorted(held)), []).append(rank)
    return sorted(
        ((sum(4 * rows * columns for _, rows, columns in held), ranks) for held, ranks in alike.items()), reverse=True
    )


def _plan_of(ranks: list[int], step: RankStep, config: RunConfig, cluster: Cluster) -> RankPlan:
    memory, in_uvm = step.memory, config.sharding.memory != "device"
    saved = memory["tables"] + memory["moments"] + memory["last_steps"]
    network = 3 * memory["network"] // 4 if 0 in ranks else 0  # its gradients are not saved
    away = memory["tables"] + memory["moments"] if in_uvm else 0
    cache = memory["tables"] // 5 if config.sharding.memory == "uvm_caching" else 0
    device = sum(memory.values()) - away + cache
    copy = saved + network
    return RankPlan(ranks, step, step_time(step, cluster, in_uvm=in_uvm), device, away + copy, copy)


def _misfits(plans: Sequence[RankPlan], left_out: Sequence[tuple[int, list[int]]], cluster: Cluster) -> list[str]:
    found, on_cpu = [], cluster.device == "cpu"
    largest = max(plans, key=lambda each: each.device_bytes)
    needed = largest.device_bytes + _RESERVED
    if not on_cpu and needed > cluster.memory_gb * 1e9:
        found.append(
            f"rank {largest.ranks[0]} needs {needed / 1e9:.1f} GB of its GPU's {cluster.memory_gb:g}: tables"
            f" {largest.step.memory['tables'] / 1e9:.1f}, moments {largest.step.memory['moments'] / 1e9:.1f},"
            f" activations {largest.step.memory['activations'] / 1e9:.1f}"
        )
    of_host = _host_bytes(plans, left_out, cluster, on_cpu)
    if of_host > cluster.host_memory_gb * 1e9:
        found.append(
            f"a host needs {of_host / 1e9:.1f} GB of its {cluster.host_memory_gb:g}, with the copy of a checkpoint that"
            " is written while training continues"
        )
    return found


def _host_bytes(
    plans: Sequence[RankPlan], left_out: Sequence[tuple[int, list[int]]], cluster: Cluster, on_cpu: bool
) -> int:
    """Bytes that the host with the most needs; of ranks that were not rehearsed in proportion to their tables."""
    of_hosts: Counter[int] = Counter()
    for plan in plans:
        for rank in plan.ranks:
            of_hosts[rank // cluster.devices] += plan.host_bytes + (plan.device_bytes if on_cpu else 0)
    needed = plans[0].host_bytes + (plans[0].device_bytes if on_cpu else 0)
    for tables, ranks in left_out:
        for rank in ranks:
            of_hosts[rank // cluster.devices] += tables * needed // max(plans[0].step.memory["tables"], 1)
    return max(of_hosts.values())


def alternatives(
    config: RunConfig, schema: Schema, batch: GlobalBatch, cluster: Cluster, samples: int
) -> Mapping[str, Plan | str]:
    """Other plans for the same run, by their kinds, or why they are refused; each with its largest kind of rank."""
    found: dict[str, Plan | str] = {}
    kinds: tuple[ShardingKind, ...] = ("table_wise", "row_wise", "table_row_wise", "column_wise")
    memories: tuple[Literal["device", "uvm"], ...] = ("device", "uvm") if cluster.device == "cuda" else ("device",)
    for memory in memories:
        for kind in kinds:
            sharding = dataclasses.replace(config.sharding, plan=kind, memory=memory, tables={})
            other = dataclasses.replace(config, sharding=sharding)
            try:
                found[f"{kind}, {memory}"] = plan_batch(other, schema, batch, cluster, samples, most_kinds=1)
            except ValueError as error:
                found[f"{kind}, {memory}"] = str(error)
    return found
