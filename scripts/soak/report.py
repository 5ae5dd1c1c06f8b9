"""The lines of the soak: what each minute was like, the trend of memory, and the plot."""

import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from cowrec.trainer.reports.plotting import plt

from .clients import Clients
from .processes import SERVERS, Cluster, metrics
from .samples import Producer

YOUNG_MINUTES = 2
"""Age up to which the trainer is still loading and compiling, and repeats its journal."""
ENDS_TRAINER = ("kill_trainer", "stop_trainer", "damaged_checkpoint", "full_disk")

Line = dict[str, Any]


def minute_line(
    minute: float, since: float, cluster: Cluster, producer: Producer, clients: Clients, answers: dict[str, Any]
) -> Line:
    """What happened since a moment; counts of samples are since the beginning."""
    counters, health = metrics(cluster.metrics_port), cluster.health(SERVERS[0])
    milliseconds = [round(1000 * seconds, 2) for at, seconds in clients.latencies if at >= since]
    memory = defaultdict(list)
    for at, name, size in clients.memory:
        if at >= since:
            memory[name].append(size)
    return {
        "kind": "minute",
        "minute": round(minute, 2),
        "sent": producer.sent["valid"],
        "trained": counters.get("handed_out"),
        "steps": counters.get("steps"),
        "version": health.get("version"),
        "published_age_seconds": health.get("age_seconds"),
        "answers": answers,
        "livez_ms": {"median": float(np.median(milliseconds)), "largest": max(milliseconds)} if milliseconds else {},
        "rss_mb": {name: round(float(np.mean(sizes)), 1) for name, sizes in memory.items()},
    }


def memory_trends(lines: list[Line]) -> dict[str, Any]:
    """MiB per hour by which processes grow, each with its standard error, from the means of minutes.

    Of the server that is never killed: after a quarter of the time, when ids have begun to expire. Of the trainer,
    which is killed again and again: within its lives, whose first minutes are left out, and between them.
    """
    minutes = [line for line in lines if line["kind"] == "minute"]
    server = [
        (60 * line["minute"], line["rss_mb"][SERVERS[0]])
        for line in minutes[len(minutes) // 4 :]
        if SERVERS[0] in line["rss_mb"]
    ]
    lives = trainer_lives(lines)
    within = [point for life in lives for point in (np.array(life) - np.mean(life, axis=0)).tolist()]
    return {
        "server_mb_per_hour": trend(server, 2),
        "trainer_mb_per_hour_within_lives": trend(within, 1 + len(lives)),
        "trainer_mb_per_hour_between_lives": trend([life[0] for life in lives], 2),
        "trainer_lives": len(lives),
        "server_mb": [size for _, size in (server[:1] + server[-1:])],
    }


def trainer_lives(lines: list[Line]) -> list[list[tuple[float, float]]]:
    """Moments in seconds and sizes of the trainer in each of its lives, without the minutes in which it starts."""
    lives, age = list[list[tuple[float, float]]]([[]]), 0
    for line in lines:
        if line["kind"] == "fault" and (line["fault"] in ENDS_TRAINER or "trainer" in line.get("restarted", ())):
            lives.append([])
            age = 0
        if line["kind"] == "minute":
            age += 1
            if age > YOUNG_MINUTES and "trainer" in line["rss_mb"]:
                lives[-1].append((60 * line["minute"], line["rss_mb"]["trainer"]))
    return [life for life in lives if life]


def trend(points: list[tuple[float, float]], parameters: int) -> dict[str, float] | None:
    """Slope per hour by least squares and its standard error, widened for residuals that follow each other.

    Args:
        points: (seconds, size).
        parameters: of the fit.
    """
    if len(points) <= parameters + 1:
        return None
    hours, sizes = np.array(points).T
    hours, sizes = (hours - hours.mean()) / 3600, sizes - sizes.mean()
    slope = hours @ sizes / (hours @ hours)
    residuals = sizes - slope * hours
    variance = residuals @ residuals / (len(points) - parameters)
    correlation = residuals[1:] @ residuals[:-1] / (residuals @ residuals) if variance else 0.0
    widened = math.sqrt((1 + max(0.0, correlation)) / (1 - min(0.9, max(0.0, correlation))))
    return {"slope": round(float(slope), 2), "noise": round(float(widened * math.sqrt(variance / (hours @ hours))), 2)}


def plot(lines: list[Line], path: Path) -> None:
    """Draws memory, samples and latency over time, with the faults."""
    minutes = [line for line in lines if line["kind"] == "minute"]
    faults = [line for line in lines if line["kind"] == "fault"]
    figure, (memory, samples, latency) = plt.subplots(3, 1, figsize=(11, 9), sharex=True, layout="constrained")
    at = [line["minute"] for line in minutes]
    for name in ("trainer", *SERVERS):
        memory.plot(at, [line["rss_mb"].get(name, math.nan) for line in minutes], label=name.replace("_", " "))
    memory.set(ylabel="resident memory (MiB)")
    samples.plot(at, [line["sent"] for line in minutes], color="gray", label="valid samples sent")
    samples.plot(at, [line["trained"] or math.nan for line in minutes], "--", label="trained on")
    samples.set(ylabel="samples")
    latency.plot(at, [line["livez_ms"].get("largest", math.nan) for line in minutes], label="largest of the minute")
    latency.plot(at, [line["livez_ms"].get("median", math.nan) for line in minutes], label="median")
    latency.set(ylabel="/livez of the untouched server (ms)", xlabel="minutes", yscale="log")
    for axis in (memory, samples, latency):
        axis.grid(alpha=0.3)
        axis.legend(loc="best")
        for fault in faults:
            axis.axvline(fault["minute"], color="red", alpha=0.25, lw=0.8)
    for fault in faults:
        text = fault["fault"].replace("_", " ")
        memory.annotate(text, (fault["minute"], 1.01), xycoords=("data", "axes fraction"), rotation=90, fontsize=6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def now_line(kind: str, minute: float, **values: Any) -> Line:
    return {"kind": kind, "minute": round(minute, 2), "time": round(time.time(), 1), **values}
