"""Report of a sharding plan: kind, ranks and bytes of each table, as text for the terminal and as JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

from cowrec.trainer.reports.text_table import aligned

SHARDING = "sharding.json"
_MOST_LINES = 40
_FEW_RANKS = 16


def describe_sharding(model: DistributedModelParallel) -> dict[str, Any]:
    """Describes the plan of a sharded model; the same on all ranks.

    Returns:
        ``{"ranks": P, "bytes_of_rank": [P], "tables": {name: {"kind", "rows", "columns", "bytes_of_rank": {rank:
        bytes}}}}``, largest table first. Bytes count the float32 weights; Adam's moments take twice as much again.
    """
    world_size = dist.get_world_size()
    tables: dict[str, Any] = {}
    rank_bytes = [0] * world_size
    for part in model.plan.plan.values():
        for name, sharding in part.items():
            held: dict[int, int] = {}
            if sharding.sharding_spec is None:  # data-parallel
                rows, columns = _table_size(model, name)
                held = dict.fromkeys(range(world_size), 4 * rows * columns)
            else:
                shards = sharding.sharding_spec.shards
                rows, columns = (max(s.shard_offsets[d] + s.shard_sizes[d] for s in shards) for d in (0, 1))
                for shard in shards:
                    rank = shard.placement.rank()
                    held[rank] = held.get(rank, 0) + 4 * shard.shard_sizes[0] * shard.shard_sizes[1]
            for rank, size in held.items():
                rank_bytes[rank] += size
            tables[name] = {"kind": sharding.sharding_type, "rows": rows, "columns": columns, "bytes_of_rank": held}
    largest_first = dict(sorted(tables.items(), key=lambda each: -each[1]["rows"] * each[1]["columns"]))
    return {"ranks": world_size, "bytes_of_rank": rank_bytes, "tables": largest_first}


def sharding_table(description: Mapping[str, Any]) -> str:
    """Formats the description for the terminal: the largest tables and the bytes of each rank."""
    tables = list(description["tables"].items())
    lines = [("table", "kind", "ranks", "rows", "columns", "MiB a rank")]
    for name, table in tables[:_MOST_LINES]:
        held = table["bytes_of_rank"]
        ranks = _ranks([int(rank) for rank in held])
        lines.append((name, table["kind"], ranks, f"{table['rows']:,}", str(table["columns"]), _mib(held.values())))
    text = aligned(lines)
    if len(tables) > _MOST_LINES:
        text += f"\n... and {len(tables) - _MOST_LINES} smaller tables"
    rank_bytes = description["bytes_of_rank"]
    if len(rank_bytes) > _FEW_RANKS:
        return f"{text}\nweights: {_mib(rank_bytes)} MiB on each of {len(rank_bytes)} ranks"
    return f"{text}\nweights, MiB by rank: {', '.join(_mib([each]) for each in rank_bytes)}"


def save_sharding(run_dir: Path, description: Mapping[str, Any]) -> None:
    """Writes the description into the run's folder."""
    (run_dir / SHARDING).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def _table_size(model: DistributedModelParallel, table: str) -> tuple[int, int]:
    """Rows and columns of a data-parallel table."""
    found = [value for key, value in model.named_parameters() if key.endswith(f".embedding_bags.{table}.weight")]
    rows, columns = found[0].shape
    return rows, columns


def _ranks(ranks: list[int]) -> str:
    """Formats ranks as "0", "0-3" or "0, 2"."""
    first, last = min(ranks), max(ranks)
    if len(set(ranks)) == last - first + 1:
        return str(first) if first == last else f"{first}-{last}"
    return ", ".join(map(str, sorted(set(ranks))))


def _mib(sizes: Any) -> str:
    """Formats sizes in mebibytes, as a range if they differ."""
    least, most = min(sizes) / 2**20, max(sizes) / 2**20
    return f"{most:,.1f}" if f"{least:,.1f}" == f"{most:,.1f}" else f"{least:,.1f}-{most:,.1f}"
