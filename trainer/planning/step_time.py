"""Time of a rehearsed step on a cluster: what its work and its collectives take, and what bounds each part.

The work is bounded by the roofline (Williams, Waterman and Patterson 2009). A collective takes a latency and the time
of its bytes; those of ring algorithms are as in NCCL's tests (github.com/NVIDIA/nccl-tests, PERFORMANCE.md). Nothing is
taken to overlap, though the ids of the next batch and the gradients of the network do in part.
"""

from dataclasses import dataclass

from .cluster import Cluster
from .rank_step import RankStep
from .rehearsal import Collective


@dataclass(frozen=True)
class PartTime:
    """Time of a part of a step.

    Attributes:
        seconds: that it takes.
        bound: what bounds it: "products", "memory", "host memory", "operators", "links within a host", "network" or
            "latency"; "this machine", where it was timed.
    """

    seconds: float
    bound: str


@dataclass(frozen=True)
class StepTime:
    """Time of a step, by part."""

    parts: dict[str, PartTime]

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return sum(each.seconds for each in self.parts.values())


def step_time(step: RankStep, cluster: Cluster, *, in_uvm: bool = False, work_seconds: float | None = None) -> StepTime:
    """Time of a rank's step.

    Args:
        step: rehearsed.
        cluster: that it is for.
        in_uvm: whether its tables are in host memory.
        work_seconds: that its work takes, where that was timed; by default it is calculated.
    """
    if work_seconds is None:
        parts = _work_times(step, cluster, in_uvm)
    else:
        parts = {"work": PartTime(work_seconds, "this machine")}
    for each in step.collectives:
        name, time = f"{each.part} ({each.kind})", collective_time(each, cluster, step.rank)
        earlier = parts.get(name, PartTime(0.0, time.bound))
        parts[name] = PartTime(earlier.seconds + time.seconds, time.bound)
    return StepTime(parts)


def _work_times(step: RankStep, cluster: Cluster, in_uvm: bool) -> dict[str, PartTime]:
    parts = {}
    for name, work in step.work.items():
        rows_in_uvm = in_uvm and name in ("lookup", "embedding_update")
        rate = cluster.uvm_gb_per_second if rows_in_uvm else cluster.memory_gb_per_second
        times = {
            "products": work.flops / cluster.teraflops / 1e12,
            "host memory" if rows_in_uvm else "memory": work.bytes / rate / 1e9,
            "operators": work.operators * cluster.operator_microseconds / 1e6,
        }
        parts[name] = _longest(times)
    network = step.memory["network"] / 4 * 7  # weights, gradient and two moments are read, all but one written
    parts["dense_update"] = PartTime(network / cluster.memory_gb_per_second / 1e9, "memory")
    return parts


def collective_time(collective: Collective, cluster: Cluster, rank: int) -> PartTime:
    """Time of a collective of a rank."""
    ranks, size = collective.ranks, len(collective.ranks)
    if size == 1:
        return PartTime(0.0, "latency")
    hosts = {each // cluster.devices for each in ranks}
    several = len(hosts) > 1
    latency = (cluster.between_microseconds if several else cluster.within_microseconds) / 1e6
    if collective.kind == "all_to_all":
        here = rank // cluster.devices
        sent = list(zip(ranks, collective.sent_to, strict=True))
        within = sum(number for each, number in sent if each // cluster.devices == here and each != rank)
        between = sum(number for each, number in sent if each // cluster.devices != here)
        times = {
            "links within a host": within / cluster.within_gb_per_second / 1e9,
            "network": between / cluster.between_gb_per_second / 1e9,
        }
    else:
        # gloo adds up everything on every rank, of which each keeps its part: its links carry as much as an all-reduce.
        of_gloo = cluster.device == "cpu" and collective.kind == "reduce_scatter"
        moved = collective.sent * ring_factor("all_reduce" if of_gloo else collective.kind, size)
        # A ring leaves each host once; as many rings as devices use the links of all of them.
        of_host = cluster.between_gb_per_second * size / len(hosts)
        slower = several and of_host < cluster.within_gb_per_second
        rate = of_host if slower else cluster.within_gb_per_second
        times = {"network" if slower else "links within a host": moved / rate / 1e9}
    longest = _longest(times)
    return PartTime(latency + longest.seconds, longest.bound if longest.seconds > latency else "latency")


def ring_factor(kind: str, size: int) -> float:
    """Bytes over each link of a ring of ``size`` ranks, as a multiple of the bytes that a rank passes."""
    return {"all_reduce": 2 * (size - 1) / size, "reduce_scatter": (size - 1) / size, "all_gather": size - 1}.get(
        kind, 1.0
    )


def _longest(times: dict[str, float]) -> PartTime:
    bound = max(times, key=lambda each: times[each])
    return PartTime(times[bound], bound)
