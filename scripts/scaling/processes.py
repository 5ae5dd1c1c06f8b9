"""Strong and weak scaling over processes of one machine: CPU time and bytes sent for each sample, by sharding plan.

    python -m scripts.scaling.processes --output results/HARDWARE/scaling_processes.jsonl

Counted, not timed, so that cores may be shared: `cpu_us_per_sample` is the CPU time of all processes together, which is
the same for any number of them where work only divides; `slowest_us_per_sample` that of the process with most, which
would be the step's time if each process had a core of its own and sending took none; `bytes_per_sample` what all
processes send, counted at the loopback interface of a network namespace (root on Linux), headers of TCP included. In
strong scaling the batch of all processes is 4096 samples, in weak scaling that of each is 1024. `samples_per_second`
is a timing: it means something only on a quiet machine that has a core for each process.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cowrec.trainer.runtime.environment import prepare_process

prepare_process()  # before torch is loaded

import torch
import torch.distributed as dist

from cowrec.data_pipeline import SynthesizeConfig, synthesize
from cowrec.trainer.config.run import RunConfig, config_from, load_config, save_config, with_defaults
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runs.provenance import environment
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.training.dataloading import even_slices, training_readers
from cowrec.trainer.training.schedule import Schedule
from cowrec.trainer.training.trainer import Trainer

from .meter import metered

BATCH, OF_EACH, STEPS, FIRST, WIDTH = 4096, 1024, 25, 5, 15
PLANS, PROCESSES = ("table_wise", "row_wise", "data_parallel"), (1, 2, 4)
KEYS = ("cpu_us_per_sample", "slowest_us_per_sample", "bytes_per_sample", "samples_per_second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write, and a plot beside them")
    parser.add_argument("--process", type=Path, metavar="FOLDER", help="one process of a case")
    given = parser.parse_args()
    if given.process:
        return _process(given.process)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, given.output.open("w", encoding="utf-8", buffering=1) as file:
        folder = Path(name)
        synthesize(folder / "data", SynthesizeConfig(rows=BATCH * STEPS, test_rows=BATCH, vocabulary_scale=0.003))
        for plan in PLANS:
            for processes in PROCESSES:
                for line in _case(folder, plan, processes):
                    lines.append(line)
                    file.write(json.dumps(line) + "\n")
    head = ("plan", "scaling", "processes", *KEYS)
    print(aligned([head, *([f"{line[key]:.1f}" if key in KEYS else str(line[key]) for key in head] for line in lines)]))
    _plot(lines, given.output.with_suffix(".png"))


def _case(folder: Path, plan: str, processes: int) -> Iterator[dict[str, Any]]:
    """Yields the lines of strong and of weak scaling, which the same processes train one after the other."""
    own = folder / f"{plan}_{processes}"
    own.mkdir()
    batches = {"strong": BATCH, "weak": processes * OF_EACH}
    for scaling, batch in batches.items():
        config = config_from(
            {
                "data": {"dir": str(folder / "data")},
                "train": {"batch_size": batch, "device": "cpu", "epochs": 1},
                "model": {"embedding_dim": WIDTH},
                "sharding": {"plan": plan},
            }
        )
        save_config(with_defaults(config, BATCH * STEPS), own / f"{scaling}.toml")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "scripts.scaling.processes", "--output", "none", "--process", str(own)]
    alone = ["unshare", "--net", "sh", "-ec", f"ip link set lo up; exec {shlex.join(command)}"]
    subprocess.run(alone, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    for scaling, batch in batches.items():
        ranks = [json.loads((own / f"{scaling}_{rank}.json").read_text()) for rank in range(processes)]
        samples, cpu = batch * (STEPS - FIRST), [each["cpu_seconds"] for each in ranks]
        found = {
            "cpu_us_per_sample": 1e6 * sum(cpu) / samples,
            "slowest_us_per_sample": 1e6 * max(cpu) / samples,
            "bytes_per_sample": ranks[0]["bytes"] / samples,
            "samples_per_second": samples / max(each["seconds"] for each in ranks),
        }
        head = {"plan": plan, "scaling": scaling, "processes": processes, "batch_size": batch}
        yield {**head, **found, "cpu_seconds": cpu, **environment(torch.device("cpu"))}


def _process(folder: Path) -> None:
    """Trains as one of the processes, and writes what the steps after the first ones took."""
    torch.set_num_threads(1)
    with process_group("cpu") as process:
        for file in sorted(folder.glob("*.toml")):
            found = _steps(load_config(file), folder / "run", process)
            (folder / f"{file.stem}_{process.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _steps(config: RunConfig, run_dir: Path, process: Process) -> dict[str, float]:
    reader = training_readers(config, Path(config.data.dir), process).train
    trainer = Trainer(config, reader.schema, run_dir, process, Schedule(), "stop")
    reader.make_resident()
    batches = trainer.state.ids.training_batches(even_slices(reader.epoch(0), process.world_size))
    for _ in range(FIRST):
        trainer.step(batches)
    trainer.checked_loss()
    dist.barrier()
    sent = _sent_bytes()
    with metered() as found:
        for _ in range(STEPS - FIRST):
            trainer.step(batches)
        trainer.checked_loss()
    dist.barrier()
    return found | {"bytes": _sent_bytes() - sent}


def _sent_bytes() -> int:
    """Bytes that the loopback interface of this network namespace has sent."""
    lines = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def _plot(lines: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharex=True)
    for column, (key, label) in enumerate(
        ((KEYS[0], "CPU time of all processes, µs a sample"), (KEYS[2], "bytes sent by all processes a sample"))
    ):
        for number, plan in enumerate(PLANS):
            for scaling, style in (("strong", "-o"), ("weak", "--s")):
                own = [line for line in lines if (line["plan"], line["scaling"]) == (plan, scaling)]
                name = plan if scaling == "strong" else None
                points = [[line["processes"] for line in own], [line[key] for line in own]]
                axes[column].plot(*points, style, color=f"C{number}", label=name, markersize=4)
        axes[column].set(xlabel="processes", ylabel=label, xticks=PROCESSES, ylim=(0, None))
    axes[0].legend(fontsize=8, title="solid: strong, dashed: weak", title_fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
