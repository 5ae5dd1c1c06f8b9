"""Sharding plan of a run: which ranks hold which part of which table.

`[sharding]` sets a kind for all tables or for single ones. "auto" leaves the choice to TorchRec's planner on several
GPUs, where it knows the speed of the links; on CPU tables are balanced by their bytes.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from cowrec.errors import UserError

from ..config.run import RunConfig
from ..runtime.processes import Process
from .tables import by_table, shown_name

BY_ROWS = ("row_wise", "table_row_wise")
FOUR_COLUMNS = 4
"""Shards of a table's columns have a multiple of this width in FBGEMM."""


def sharding_plan(
    model: nn.Module,
    kinds: Mapping[str, str],
    config: RunConfig,
    process: Process,
    sharder: EmbeddingBagCollectionSharder,
) -> ShardingPlan:
    """Makes the plan for the model's EmbeddingBagCollection.

    All ranks of the process group call together and get the same plan.

    Args:
        config: memory of the tables, and the batch size that TorchRec's planner estimates with.

    Raises:
        ValueError: TorchRec's planner cannot fit the tables.
    """
    ((path, collection),) = [
        (path, module) for path, module in model.named_modules() if isinstance(module, EmbeddingBagCollection)
    ]
    tables = collection.embedding_bag_configs()
    if "auto" in kinds.values():
        return _planned(model, tables, kinds, config, process, sharder)
    generators = _spread_by_bytes(tables, kinds, config, process)
    plan = construct_module_sharding_plan(
        collection,
        generators,
        sharder=sharder,
        local_size=process.local_world_size,
        world_size=process.world_size,
        device_type=process.device.type,
    )
    for table in plan.values():
        if table.sharding_type in BY_ROWS:
            table.compute_kernel = _kernel(config)  # table_row_wise does not take it as an argument
    return ShardingPlan(plan={path: plan})


def chosen_kinds(config: RunConfig, tables: Sequence[EmbeddingBagConfig], process: Process) -> dict[str, str]:
    """Kind of each table; "auto" on several GPUs for tables that the planner decides on."""
    sharding, names = config.sharding, [table.name for table in tables]
    if sharding.plan != "auto":
        kinds = dict.fromkeys(names, str(sharding.plan))
    elif process.device.type == "cuda" and process.world_size > 1:
        kinds = dict.fromkeys(names, "auto")
    else:
        kinds = _balanced_kinds(tables, process)
    return kinds | by_table(sharding.tables)


def _balanced_kinds(tables: Sequence[EmbeddingBagConfig], process: Process) -> dict[str, str]:
    """Row-wise for tables above half of a rank's even share of all bytes, table-wise for the others.

    All are table-wise if one is pooled by the mean: TorchRec computes a mix wrongly, which `check_run` refuses.
    """
    share = sum(_bytes(table) for table in tables) / process.world_size
    means = any(table.pooling == PoolingType.MEAN for table in tables)

    def kind(table: EmbeddingBagConfig) -> str:
        unsplit = means or _bytes(table) <= share / 2 or not reaches_all(table.num_embeddings, process.world_size)
        return "table_wise" if unsplit or process.world_size == 1 else "row_wise"

    return {table.name: kind(table) for table in tables}


def reaches_all(rows: int, ranks: int) -> bool:
    """True if equal blocks of rows leave rows to the last rank."""
    return -(-rows // ranks) * (ranks - 1) < rows


def _spread_by_bytes(
    tables: list[EmbeddingBagConfig], kinds: Mapping[str, str], config: RunConfig, process: Process
) -> dict[str, Callable[..., Any]]:
    """Assigns tables to ranks: the largest first, to the ranks with the fewest bytes."""
    kernel = _kernel(config)
    load = [0.0] * process.world_size
    machine = process.local_world_size
    generators: dict[str, Callable[..., Any]] = {}
    for table in sorted(tables, key=lambda each: -_bytes(each)):
        kind = kinds[table.name]
        if kind == "table_wise":
            ranks = _emptiest(load, 1)
            generators[table.name] = table_wise(rank=ranks[0], compute_kernel=kernel)
        elif kind == "column_wise":
            ranks = _emptiest(load, _column_shards(table.embedding_dim, process.world_size))
            generators[table.name] = column_wise(ranks=ranks, compute_kernel=kernel)
        elif kind == "table_row_wise":
            ranks = _emptiest(load, machine)
            generators[table.name] = table_row_wise(host_index=ranks[0] // machine)
        else:
            ranks = list(range(process.world_size))
            generators[table.name] = row_wise(compute_kernel=kernel) if kind == "row_wise" else data_parallel()
        for rank in ranks:
            load[rank] += _bytes(table) / (1 if kind == "data_parallel" else len(ranks))
    return generators


def _emptiest(load: list[float], size: int) -> list[int]:
    """Ranks of the neighbouring group of ``size`` ranks that holds the fewest bytes."""
    groups = [list(range(first, first + size)) for first in range(0, len(load) - size + 1, size)]
    return min(groups, key=lambda ranks: sum(load[rank] for rank in ranks))


def _column_shards(columns: int, ranks: int) -> int:
    """Largest number of shards of equal width, a multiple of four, with one shard a rank at most."""
    blocks = columns // FOUR_COLUMNS
    return max(count for count in range(1, ranks + 1) if blocks % count == 0)


def _planned(
    model: nn.Module,
    tables: Sequence[EmbeddingBagConfig],
    kinds: Mapping[str, str],
    config: RunConfig,
    process: Process,
    sharder: EmbeddingBagCollectionSharder,
) -> ShardingPlan:
    """Lets TorchRec's planner choose among the kinds that CowClip supports, for tables without a kind."""
    allowed = ["table_wise", "row_wise", "table_row_wise"]
    if any(table.pooling == PoolingType.MEAN for table in tables):
        allowed = ["table_wise"]
    constraints = {
        name: ParameterConstraints(
            sharding_types=allowed if kind == "auto" else [kind],
            compute_kernels=["dense" if kind == "data_parallel" else _kernel(config)],
        )
        for name, kind in kinds.items()
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=process.world_size,
            local_world_size=process.local_world_size,
            compute_device=process.device.type,
            hbm_cap=_memory_for_weights(config, process),
        ),
        batch_size=-(-config.train.batch_size // process.world_size),
        constraints=constraints,
    )
    try:
        return planner.collective_plan(model, [sharder], dist.group.WORLD)
    except PlannerError as error:
        reason = str(error).strip().partition("\n")[0].rstrip(" .")
        raise UserError(
            f"TorchRec's planner cannot fit the tables on {process.world_size} processes ({reason}); train on more, set"
            ' the kinds in [sharding], or sharding.memory = "uvm"'
        ) from error


def _kernel(config: RunConfig) -> str:
    """FBGEMM's name for a fused table in the run's kind of memory."""
    return {"device": "fused", "uvm": "fused_uvm"}[config.sharding.memory]


def _memory_for_weights(config: RunConfig, process: Process) -> int | None:
    """Device memory for weights; the planner does not count EmbeddingAdam's two moments for each weight."""
    if not torch.cuda.is_available():
        return None
    memory = torch.cuda.get_device_properties(process.device).total_memory
    shares = config.optimizer.embedding == "adam" and config.sharding.memory == "device"
    return memory // 3 if shares else memory


def _bytes(table: EmbeddingBagConfig) -> int:
    return int(4 * table.num_embeddings * table.embedding_dim)


SHARDING = "sharding.json"
"""File in the folder of a run with what :func:`describe_sharding` returns."""


def describe_sharding(model: DistributedModelParallel, bags: Sequence[EmbeddingBagConfig]) -> dict[str, Any]:
    """Describes the plan of a sharded model with these tables; the same on all ranks.

    Returns:
        ``{"ranks": P, "bytes_of_rank": [P], "tables": {name: {"kind", "rows", "columns", "bytes_of_rank": {rank:
        bytes}}}}``, largest table first. Bytes count the float32 weights; Adam's moments take twice as much again.
    """
    world_size = dist.get_world_size()
    tables, of_bag = dict[str, Any](), {each.name: each for each in bags}
    rank_bytes = [0] * world_size
    for part in model.plan.plan.values():
        for name, sharding in part.items():
            held: Counter[int] = Counter()
            if sharding.sharding_spec is None:  # data-parallel
                held.update(dict.fromkeys(range(world_size), _bytes(of_bag[name])))
            for shard in sharding.sharding_spec.shards if sharding.sharding_spec else ():
                held[shard.placement.rank()] += 4 * shard.shard_sizes[0] * shard.shard_sizes[1]
            for rank, size in held.items():
                rank_bytes[rank] += size
            rows, columns = of_bag[name].num_embeddings, of_bag[name].embedding_dim
            size_of = {"rows": rows, "columns": columns, "bytes_of_rank": dict(held)}
            tables[shown_name(name)] = {"kind": sharding.sharding_type, **size_of}
    largest_first = dict(sorted(tables.items(), key=lambda each: -each[1]["rows"] * each[1]["columns"]))
    return {"ranks": world_size, "bytes_of_rank": rank_bytes, "tables": largest_first}


def sharding_line(description: Mapping[str, Any]) -> str:
    """How many tables are sharded in which way, and the weights of the ranks that hold least and most of them."""
    kinds = Counter(table["kind"] for table in description["tables"].values())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    least, most = (size(description["bytes_of_rank"]) / 2**20 for size in (min, max))
    ranks = description["ranks"]
    return f"tables: {counts}; weights: {least:,.1f} to {most:,.1f} MiB on each of {ranks} ranks, see {SHARDING}"
