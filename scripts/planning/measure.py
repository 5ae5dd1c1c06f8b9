"""Holds the step times of `cowrec plan` to measurement on this machine: 1, 2 and 4 processes, and slow links.

    python scripts/planning/measure.py predict --output results/HARDWARE/plan.jsonl
    python scripts/planning/measure.py measure --output results/HARDWARE/plan.jsonl

The first command writes predictions, the second one trains and adds what it measured.

Links are slowed by a token bucket on the loopback interface of a network namespace (root on Linux, `unshare` and
`tc`), which all processes share. A prediction is that of `cowrec plan --timed`, with the latency and the rate of gloo's
all-to-all as the cluster's links.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cowrec.trainer.runtime.environment import prepare_process

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it, for one process too
prepare_process()  # before torch is loaded

import torch
import torch.distributed as dist

from cowrec.data_pipeline import Schema, SynthesizeConfig, synthesize
from cowrec.trainer.config.run import RunConfig, config_from, save_config
from cowrec.trainer.planning.cluster import Cluster
from cowrec.trainer.planning.plan import plan_batch, timed_plan
from cowrec.trainer.planning.samples import first_batches, global_batch
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runs.provenance import environment

BATCH, STEPS, WIDTH, _BUFFERS = 4096, 30, 15, 16
CASES = [(1, "table_wise", 0), *((n, plan, 0) for n in (2, 4) for plan in ("table_wise", "row_wise", "column_wise"))]
CASES += [(2, plan, rate) for rate in (1000, 200) for plan in ("table_wise", "row_wise", "column_wise")]
"""Processes, plan, and megabits per second of the link that they share; 0: unlimited."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("predict", "measure", "plot", "links"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "measure_plan")
    given = parser.parse_args()
    if given.what == "links":
        return _measure_links(given.output)
    given.folder.mkdir(parents=True, exist_ok=True)
    data = given.folder / "data"
    if not (data / "schema.json").exists():
        samples = SynthesizeConfig(rows=BATCH * STEPS, test_rows=BATCH, vocabulary_scale=0.003)
        synthesize(data, samples, overwrite=True)
    if given.what == "predict":
        given.output.parent.mkdir(parents=True, exist_ok=True)
        _write(given.output, _predictions(given.folder, data))
    lines = [json.loads(line) for line in given.output.read_text().splitlines()]
    if given.what == "measure":
        for line in lines:
            name = f"{line['processes']}_{line['plan']}_{line['megabits']}"
            config = _config(line["plan"])
            line["measured_step_seconds"] = _train(
                given.folder, data, name, config, line["processes"], line["megabits"]
            )
            print(aligned([_HEAD, _cells(line)]), flush=True)
            _write(given.output, lines)
    print(aligned([_HEAD, *map(_cells, lines)]))
    if given.what != "predict":
        _plot(lines, given.output.with_suffix(".png"))


def _predictions(folder: Path, data: Path) -> list[dict[str, Any]]:
    schema, lines = Schema.load(data), []
    links: dict[tuple[int, int], tuple[float, float]] = {}
    for processes, plan, megabits in CASES:
        if (processes, megabits) not in links:
            links[processes, megabits] = _links(folder, processes, megabits)
        rate, latency = links[processes, megabits]
        config, cluster = _config(plan), _cluster(processes, rate, latency)
        calculated = plan_batch(config, schema, global_batch(config, data), cluster, BATCH * STEPS)
        made = timed_plan(calculated, config, schema, first_batches(config, data))
        slowest = max(made.kinds, key=lambda each: each.time.seconds).time
        line = {"processes": processes, "plan": plan, "megabits": megabits}
        line |= {"link_gb_per_second": rate, "latency_seconds": latency}
        line |= {"work_seconds": slowest.parts["work"].seconds, "predicted_step_seconds": slowest.seconds}
        lines.append(line | environment(torch.device("cpu")))
        print(aligned([_HEAD, _cells(line)]), flush=True)
    return lines


def _cluster(processes: int, rate: float, latency: float) -> Cluster:
    return Cluster(
        device="cpu", devices=processes, within_gb_per_second=rate, within_microseconds=max(1e6 * latency, 1e-3)
    )


def _config(plan: str) -> RunConfig:
    return config_from(
        {
            "train": {"batch_size": BATCH, "device": "cpu", "epochs": 1, "log_every": STEPS},
            "model": {"embedding_dim": WIDTH},
            "optimizer": {"l2": 1e-5},
            "sharding": {"plan": plan},
        }
    )


def _train(folder: Path, data: Path, name: str, config: RunConfig, processes: int, megabits: int) -> float:
    run, command = _command(folder, data, name, config, processes)
    subprocess.run(_limited(command, megabits), check=True, env=_environment())
    return BATCH / float(json.loads((run / "report.json").read_text())["samples_per_second"])


def _command(folder: Path, data: Path, name: str, config: RunConfig, processes: int) -> tuple[Path, list[str]]:
    run, file = folder / f"{name}_{time.time_ns()}", folder / f"{name}.toml"
    save_config(config, file)
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    )
    return run, [
        sys.executable,
        *launch,
        "-m",
        "cowrec.trainer",
        "train",
        str(file),
        "--data",
        str(data),
        "--run-dir",
        str(run),
    ]


def _limited(command: Sequence[str], megabits: int) -> list[str]:
    """The command in a network namespace whose loopback interface has this rate."""
    if not megabits:
        return list(command)
    limit = f"tc qdisc add dev lo root tbf rate {megabits}mbit burst 256kb latency 500ms"
    return ["unshare", "--net", "sh", "-ec", f"ip link set lo mtu 9000 up; {limit}; exec {shlex.join(command)}"]


def _environment() -> dict[str, str]:
    return os.environ | {"GLOO_SOCKET_IFNAME": "lo"}


def _links(folder: Path, processes: int, megabits: int) -> tuple[float, float]:
    """GB/s that a process sends in an all-to-all of several megabytes, and the seconds of one of a few bytes."""
    if processes == 1:
        return 1.0, 0.0
    output = folder / f"links_{processes}_{megabits}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(Path(__file__).resolve()), "links", "--output", str(output)]
    subprocess.run(_limited(command, megabits), check=True, env=_environment())
    rate, latency = json.loads(output.read_text())
    return rate, latency


def _measure_links(output: Path) -> None:
    dist.init_process_group("gloo")
    size = dist.get_world_size()

    def seconds(elements: int, repeats: int) -> float:
        # Numbers come from memory, as in training, not from a cache.
        buffers, times = torch.rand(2, _BUFFERS, elements), []
        for repeat in range(repeats):
            received, sent = buffers[:, repeat % _BUFFERS]
            dist.barrier()
            started = time.perf_counter()
            dist.all_to_all_single(received, sent)
            times.append(time.perf_counter() - started)
        return sorted(times)[repeats // 2]

    elements = (1 << 20) // size * size
    latency = seconds(size, 200)
    rate = 4e-9 * elements * (size - 1) / size / max(seconds(elements, 20) - latency, 1e-6)
    if dist.get_rank() == 0:
        output.write_text(json.dumps([rate, latency]))
    dist.destroy_process_group()


def _write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


_HEAD = ("plan", "processes", "Mbit/s", "work ms", "communication", "predicted", "measured", "error")


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    predicted, measured = line["predicted_step_seconds"], line.get("measured_step_seconds")
    times = (line["work_seconds"], predicted - line["work_seconds"], predicted)
    found = (f"{1e3 * measured:.1f}", f"{100 * (predicted / measured - 1):+.0f} %") if measured else ("", "")
    rate = str(line["megabits"] or "-")
    return (line["plan"], str(line["processes"]), rate, *(f"{1e3 * each:.1f}" for each in times), *found)


def _plot(lines: Sequence[dict[str, Any]], path: Path) -> None:
    lines = [line for line in lines if "measured_step_seconds" in line]
    figure, axes = plt.subplots(figsize=(6, 5))
    for limited, marker in ((False, "o"), (True, "s")):
        own = [line for line in lines if bool(line["megabits"]) == limited]
        points = [[1e3 * line[f"{each}_step_seconds"] for line in own] for each in ("predicted", "measured")]
        axes.plot(*points, marker, label="limited links" if limited else "one machine")
    times = [1e3 * line["measured_step_seconds"] for line in lines]
    ends = [0.7 * min(times), 1.4 * max(times)]
    axes.plot(ends, ends, "k-", linewidth=0.8)
    axes.fill_between(ends, [0.85 * each for each in ends], [1.15 * each for each in ends], color="k", alpha=0.1)
    axes.set(xlabel="predicted, ms a step", ylabel="measured, ms a step (grey: within 15 %)")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
