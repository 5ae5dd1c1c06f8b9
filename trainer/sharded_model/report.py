"""What a sharding plan comes to: each table's kind, ranks and bytes, as a table for the terminal and as JSON."""

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
    """The plan of a sharded model, the same on all ranks.

    Returns:
        ``{"ranks": P, "bytes_of_rank": [P], "tables": {name: {"kind", "rows", "columns", "bytes_of_rank": {rank:
        bytes}}}}``, largest table first. Bytes are those of float32 weights; Adam's moments take twice as much again.
    """
    world_size = dist.get_world_size()
    tables: dict[str, Any] = {}
    of_rank = [0] * world_size
    for part in model.plan.plan.values():
        for name, sharding in part.items():
            held: dict[int, int] = {}
            if sharding.sharding_spec is None:  # data-parallel
                rows, columns = _whole_size(model, name)
                held = dict.fromkeys(range(world_size), 4 * rows * columns)
            else:
                shards = sharding.sharding_spec.shards
                rows, columns = (max(s.shard_offsets[d] + s.shard_sizes[d] for s in shards) for d in (0, 1))
                for shard in shards:
                    rank = shard.placement.rank()
                    held[rank] = held.get(rank, 0) + 4 * shard.shard_sizes[0] * shard.shard_sizes[1]
            for rank, size in held.items():
                of_rank[rank] += size
            tables[name] = {"kind": sharding.sharding_type, "rows": rows, "columns": columns, "bytes_of_rank": held}
    largest_first = dict(sorted(tables.items(), key=lambda each: -each[1]["rows"] * each[1]["columns"]))
    return {"ranks": world_size, "bytes_of_rank": of_rank, "tables": largest_first}


def sharding_table(description: Mapping[str, Any]) -> str:
    """The description as lines for the terminal: the largest tables, and what each rank holds."""
    tables = list(description["tables"].items())
    lines = [("table", "kind", "ranks", "rows", "columns", "MiB a rank")]
    for name, table in tables[:_MOST_LINES]:
        held = table["bytes_of_rank"]
        ranks = _ranks([int(rank) for rank in held])
        lines.append((name, table["kind"], ranks, f"{table['rows']:,}", str(table["columns"]), _mib(held.values())))
    text = aligned(lines)
    if len(tables) > _MOST_LINES:
        text += f"\n... and {len(tables) - _MOST_LINES} smaller tables"
    of_rank = description["bytes_of_rank"]
    if len(of_rank) > _FEW_RANKS:
        return f"{text}\nweights: {_mib(of_rank)} MiB on each of {len(of_rank)} ranks"
    return f"{text}\nweights, MiB by rank: {', '.join(_mib([each]) for each in of_rank)}"


def save_sharding(run_dir: Path, description: Mapping[str, Any]) -> None:
    (run_dir / SHARDING).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def _whole_size(model: DistributedModelParallel, table: str) -> tuple[int, int]:
    found = [value for key, value in model.named_parameters() if key.endswith(f".embedding_bags.{table}.weight")]
    rows, columns = found[0].shape
    return rows, columns


def _ranks(ranks: list[int]) -> str:
    """ "0", "0-3" or "0, 2": few words for the ranks."""
    first, last = min(ranks), max(ranks)
    if len(set(ranks)) == last - first + 1:
        return str(first) if first == last else f"{first}-{last}"
    return ", ".join(map(str, sorted(set(ranks))))


def _mib(sizes: Any) -> str:
    """Mebibytes, or the least and the most of several."""
    least, most = min(sizes) / 2**20, max(sizes) / 2**20
    return f"{most:,.1f}" if f"{least:,.1f}" == f"{most:,.1f}" else f"{least:,.1f}-{most:,.1f}"
