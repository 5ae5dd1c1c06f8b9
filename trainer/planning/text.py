"""A plan as text for the terminal and as plain values for JSON."""

import dataclasses
from collections import Counter
from typing import Any

from cowrec.trainer.reports.text_table import aligned

from .plan import Plan, RankPlan

_MOST_LINES = 12


def plan_text(plan: Plan) -> str:
    """Tables of the memory, the traffic and the time of each kind of rank, and what follows from them."""
    cluster = plan.cluster
    lines = [
        f"{plan.kind}; {cluster.hosts} hosts of {cluster.devices} {cluster.device} devices, batch {plan.batch_size:,}",
        aligned([_MEMORY, *(_memory_line(each) for each in plan.kinds)]),
    ]
    if plan.left_out:
        lines.append(f"... and {len(plan.left_out)} ranks of other kinds, which hold fewer bytes of tables than these")
    slowest = max(plan.kinds, key=lambda each: each.time.seconds)
    lines += ["", f"rank {slowest.ranks[0]}, the slowest: MB sent a step", aligned([_SENT, *_traffic_lines(slowest)])]
    lines += ["", f"rank {slowest.ranks[0]}: time of a step", aligned([_TIME, *_time_lines(slowest)]), ""]
    speed = plan.batch_size / plan.step_seconds
    lines.append(
        f"step {1e3 * plan.step_seconds:.2f} ms, {speed:,.0f} samples/s, epoch of {plan.samples:,} samples"
        f" {plan.epoch_seconds / 60:.1f} min; checkpoint {plan.checkpoint_bytes / 1e9:.1f} GB,"
        f" {plan.checkpoint_seconds:.0f} s"
    )
    return "\n".join([*lines, *(f"does not fit: {each}" for each in plan.misfits)])


def alternatives_text(plans: dict[str, Plan | str]) -> str:
    """A line for each plan: whether it fits, and its step; or why it is refused."""
    rows = [("plan", "fits", "GB a device", "step ms", "epoch min")]
    for name, plan in plans.items():
        if isinstance(plan, str):
            rows.append((name, f"refused: {plan.partition(';')[0][:90]}", "", "", ""))
            continue
        device = max(each.device_bytes for each in plan.kinds) / 1e9
        step, epoch = f"{1e3 * plan.step_seconds:.2f}", f"{plan.epoch_seconds / 60:.1f}"
        rows.append((name, "no" if plan.misfits else "yes", f"{device:.1f}", step, epoch))
    return aligned(rows)


def plan_values(plan: Plan) -> dict[str, Any]:
    """The plan as plain values; bytes and seconds."""
    return {
        "cluster": dataclasses.asdict(plan.cluster),
        "kind": plan.kind,
        "batch_size": plan.batch_size,
        "samples": plan.samples,
        "step_seconds": plan.step_seconds,
        "epoch_seconds": plan.epoch_seconds,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoint_seconds": plan.checkpoint_seconds,
        "misfits": plan.misfits,
        "ranks": [_rank_values(each) for each in plan.kinds],
        "ranks_left_out": len(plan.left_out),
    }


def sent_by_part(plan: RankPlan) -> Counter[tuple[str, str]]:
    """Bytes that a rank passes to collectives in a step, by what they are for and their kind."""
    sent: Counter[tuple[str, str]] = Counter()
    for each in plan.step.collectives:
        sent[each.part, each.kind] += each.sent
    return sent


def _rank_values(plan: RankPlan) -> dict[str, Any]:
    return {
        "ranks": plan.ranks,
        "memory": plan.step.memory,
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "sent": {f"{part} ({kind})": size for (part, kind), size in sent_by_part(plan).items()},
        "time": {name: dataclasses.asdict(each) for name, each in plan.time.parts.items()},
        "step_seconds": plan.time.seconds,
    }


_MEMORY = ("ranks", "tables GB", "moments", "last steps", "network", "activations", "device", "host, with a copy")
_SENT = ("for", "collective", "MB")
_TIME = ("part", "ms", "bound by")


def _memory_line(plan: RankPlan) -> tuple[str, ...]:
    sizes = (*plan.step.memory.values(), plan.device_bytes, plan.host_bytes)
    count = f"{plan.ranks[0]}" if len(plan.ranks) == 1 else f"{plan.ranks[0]} and {len(plan.ranks) - 1} like it"
    return (count, *(f"{size / 1e9:.3f}" for size in sizes))


def _traffic_lines(plan: RankPlan) -> list[tuple[str, ...]]:
    return [(part, kind, f"{size / 1e6:.3f}") for (part, kind), size in sent_by_part(plan).items()]


def _time_lines(plan: RankPlan) -> list[tuple[str, ...]]:
    longest = sorted(plan.time.parts.items(), key=lambda each: -each[1].seconds)[:_MOST_LINES]
    return [(name, f"{1e3 * each.seconds:.3f}", each.bound) for name, each in longest]
