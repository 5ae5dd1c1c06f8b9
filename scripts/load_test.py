"""Load test of `cowrec serve`: increasing request rates while new versions are published; JSON lines and a plot.

    python -m scripts.load_test --output serve.jsonl

Requests are sent at a constant rate regardless of earlier answers; their latency starts at the scheduled time. Client
and publisher share the machine with the server, but not its core, where there are more. The knee
is the highest rate that the server sustains with at most one request in a hundred above KNEE_SECONDS. A last step sends
OVERLOAD times as many, from more connections, by clients that give a request up after PATIENCE seconds, while a probe
asks for the server's health.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families

from cowrec.data_pipeline.parallel import available_cores
from cowrec.data_pipeline.synthetic.drifting import DriftConfig
from cowrec.trainer.cli.flag_values import parse_list
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.runs.provenance import environment

from .load_case import CONFIG, MODEL, bodies, make_export, on_other_cores, publishing, wait_until
from .open_loop import Outcome, open_loop, request_bytes, run_loop

PORT, HEALTH_PORT = 8123, 8124
KNEE_SECONDS = 0.05
CONNECTIONS = 128
OVERLOAD, OVERLOAD_CONNECTIONS, PATIENCE = 4.0, 900, 1.0

Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write; a plot is added")
    parser.add_argument("--samples", default="1,32", help="samples per request")
    parser.add_argument("--rates", default="100,250,500,1000,2000,3000,4000,5000,6000", help="requests per second")
    parser.add_argument("--seconds", type=float, default=8.0, help="duration of each rate")
    parser.add_argument("--rows", type=int, default=CONFIG.rows, help="samples whose ids have a row in the model")
    parser.add_argument("--delta-rows", type=int, default=30_000, help="maximum rows per published delta")
    parser.add_argument("--delta-seconds", type=float, default=2.0, help="interval between deltas")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, arguments.output.open("w", encoding="utf-8", buffering=1) as file:
        folder, config = Path(name), dataclasses.replace(CONFIG, rows=arguments.rows)
        ids = make_export(config, folder)
        about = {
            "config": {
                "model": dataclasses.asdict(MODEL),
                "resident_ids": ids,
                "fields": config.fields,
                "delta_rows": arguments.delta_rows,
                "delta_seconds": arguments.delta_seconds,
                "connections": CONNECTIONS,
            },
            **environment(torch.device("cpu")),
            "cores": available_cores(),
        }
        lines = []
        rates = [float(rate) for rate in parse_list(arguments.rates)]
        for samples in map(int, parse_list(arguments.samples)):
            with (
                on_other_cores(1) as cores,
                served(folder, cores),
                publishing(config, folder, arguments.delta_rows, arguments.delta_seconds),
            ):
                wait_until(PORT, lambda health: health["status"] == "ok" and health["version"] > 1)
                for line in steps(config, samples, rates, arguments.seconds):
                    print(summary(line), flush=True)
                    lines.append(line)
                    file.write(json.dumps({**line, **about}) + "\n")
    print(f"{arguments.output}, plot: {plot(lines, arguments.output.with_suffix('.png'), about)}")


def steps(config: DriftConfig, samples: int, rates: list[float], seconds: float) -> Iterator[Line]:
    """Yields a line per rate, up to the first that the server does not sustain, and one of overload."""
    requests = [request_bytes("/predict", body) for body in bodies(config, 20_000 // samples, samples)]
    run_loop(open_loop("127.0.0.1", PORT, requests, rates[0], 3.0, CONNECTIONS))  # warms up both sides
    knee = rates[0]
    for rate in rates:
        before = metrics()
        outcome = run_loop(open_loop("127.0.0.1", PORT, requests, rate, seconds, CONNECTIONS))
        after = metrics()
        line = measured(outcome, samples, rate)
        applied = after["cowrec_deltas_applied_total"] - before["cowrec_deltas_applied_total"]
        apply_seconds = after["cowrec_delta_apply_seconds_sum"] - before["cowrec_delta_apply_seconds_sum"]
        line |= {
            "deltas": applied,
            "delta_rows": after["cowrec_applied_rows_total"] - before["cowrec_applied_rows_total"],
            "delta_apply_ms": 1000 * apply_seconds / applied if applied else None,
        }
        yield line
        if not line["kept_up"]:
            break
        knee = rate if line["within"] else knee
        time.sleep(1.0)
    time.sleep(3.0)
    rate = OVERLOAD * knee
    with probe() as health:
        load = open_loop("127.0.0.1", PORT, requests, rate, seconds, OVERLOAD_CONNECTIONS, PATIENCE)
        outcome = run_loop(load)
    refused, lost = outcome.statuses.get(503, 0), outcome.scheduled - len(outcome.latencies)
    yield measured(outcome, samples, rate) | {
        "overload": OVERLOAD,
        "shed": refused / outcome.scheduled,
        "given_up": (lost - refused) / outcome.scheduled,
        "health_max_ms": 1000 * max(health),
    }


@contextmanager
def probe() -> Iterator[list[float]]:
    """Asks for the server's health again and again in a thread; collects the seconds that it took."""
    seconds: list[float] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.1):
            start = time.perf_counter()
            with (
                suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{HEALTH_PORT}/health", timeout=30) as answer,
            ):
                answer.read()
            seconds.append(time.perf_counter() - start)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield seconds
    finally:
        stop.set()
        thread.join()


def measured(outcome: Outcome, samples: int, rate: float) -> Line:
    """Returns rates in requests and predictions per second, latencies in milliseconds."""
    answered = len(outcome.latencies)
    quantiles = np.quantile(outcome.latencies or [np.inf], [0.5, 0.9, 0.99, 0.999, 1.0]) * 1000
    named = {
        f"{name}_ms": float(value) for name, value in zip(("p50", "p90", "p99", "p999", "max"), quantiles, strict=True)
    }
    kept_up = answered >= 0.999 * outcome.scheduled and named["p99_ms"] < 1000
    return {
        "samples": samples,
        "rate": rate,
        "answered_per_second": answered / outcome.seconds,
        "predictions_per_second": samples * answered / outcome.seconds,
        **named,
        "not_answered": outcome.scheduled - answered,
        "statuses": outcome.statuses,
        "client_cpu": outcome.client_cpu,
        "kept_up": kept_up,
        "within": kept_up and named["p99_ms"] <= 1000 * KNEE_SECONDS,
    }


@contextmanager
def served(folder: Path, cores: set[int]) -> Iterator[None]:
    """Runs `cowrec serve` on the export, following publications, on some cores."""
    command = [sys.executable, "-m", "cowrec.trainer", "serve", f"{folder}/export", "--port", str(PORT)]
    command += ["--follow", f"{folder}/published", "--health-port", str(HEALTH_PORT)]
    process = subprocess.Popen(command)
    os.sched_setaffinity(process.pid, cores)
    try:
        wait_until(PORT, lambda health: health["status"] != "loading")
        yield
    finally:
        process.terminate()
        process.wait()


def metrics() -> dict[str, float]:
    """Returns the server's metrics without labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {each.name: each.value for family in families for each in family.samples if not each.labels}


def summary(line: Line) -> str:
    about = f"{line['samples']} samples per request, {line['rate']:,.0f} requests/s"
    found = (
        f"{line['predictions_per_second']:,.0f} predictions/s, p50 {line['p50_ms']:.1f}, p99 {line['p99_ms']:.1f} ms"
    )
    client = f"client {line['client_cpu']:.0%} of a core"
    if "overload" in line:
        return (
            f"{about}, {line['overload']:g} times the knee: {found} ms, {line['shed']:.0%} refused,"
            f" {line['given_up']:.0%} given up, health within {line['health_max_ms']:.0f} ms, {client}"
        )
    return (
        f"{about}: {found}, max {line['max_ms']:.0f} ms, {line['not_answered']} not answered,"
        f" {line['deltas']:.0f} deltas applied, {client}"
    )


def plot(lines: list[Line], path: Path, about: Line) -> Path:
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for number, samples in enumerate(dict.fromkeys(line["samples"] for line in lines)):
        chosen = [line for line in lines if line["samples"] == samples and "overload" not in line]
        speed = [line["samples"] * line["rate"] for line in chosen]
        name = "1 sample per request" if samples == 1 else f"{samples} samples per request"
        knees = [line for line in chosen if line["within"]][-1:]
        knee = "".join(f" (knee: {each['predictions_per_second']:,.0f}/s, {each['p99_ms']:.1f} ms)" for each in knees)
        axes.plot(speed, [line["p99_ms"] for line in chosen], "o-", color=f"C{number}", label=f"{name}, p99{knee}")
        axes.plot(speed, [line["p50_ms"] for line in chosen], "o:", color=f"C{number}", label=f"{name}, p50")
    axes.axhline(1000 * KNEE_SECONDS, color="gray", linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="requested predictions per second", ylabel="latency, ms")
    axes.legend(fontsize="small")
    config = about["config"]
    axes.set_title(
        f"cowrec serve on {about['device']}, {about['cores']} cores with client and publisher;\n"
        f"{MODEL.name}, {config['resident_ids']:,} ids, a delta every {config['delta_seconds']:g} s",
        fontsize="medium",
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
