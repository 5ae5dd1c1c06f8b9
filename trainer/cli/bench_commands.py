"""The commands about speed and size: ``cowrec plan | bench``."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cowrec.trainer.runtime.environment import launched_rank, launched_world_size

from .flags import Overrides, RunToml, TrainData, load_run, output_flag, parse_counts, parse_list, parse_table_rows

app = typer.Typer()

_PRESETS = ("criteo", "mlperf-dcnv2", "embedding-adam")
_OF_CRITEO_ALONE = ("absent_rows", "model", "epoch_share")
_MOST_LINES = 12


@app.command()
def plan(
    config: RunToml,
    hosts: Annotated[int, typer.Option(min=1, help="Number of hosts.")],
    data: TrainData = None,
    devices: Annotated[int, typer.Option(min=1, help="GPUs of a host, or processes on its CPUs.")] = 8,
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="Kind of device.")] = "cuda",
    memory_gb: Annotated[float, typer.Option(min=0.001, help="Memory of a GPU.")] = 80.0,
    host_memory_gb: Annotated[float, typer.Option(min=0.001, help="Memory of a host.")] = 2000.0,
    output: Annotated[Path | None, output_flag("Also write the plan as JSON.")] = None,
    overrides: Overrides = None,
) -> None:
    """Plans a run on a cluster before it is rented: memory and traffic of each rank, and what does not fit.

    Hosts are DGX H100 unless flags say otherwise. Tables are sharded as in training; the ids of a sample are those of
    the first batch of the data set, which may be a sample.

    Example: `cowrec plan run.toml --data data/criteo --hosts 8 --memory-gb 141`
    """
    from cowrec.data_pipeline import Schema
    from cowrec.data_pipeline.files import replace_file, require_target
    from cowrec.trainer.config.run import with_defaults
    from cowrec.trainer.planning.plan import Cluster, plan_run

    if output:
        require_target(output)
    logging.getLogger("torchrec").setLevel(logging.ERROR)  # its planner warns of clusters that are not detected
    cluster = Cluster(hosts, devices, device, memory_gb, host_memory_gb)
    loaded, folder = load_run(config, overrides, data)
    loaded = with_defaults(loaded, Schema.load(folder).split("train").rows)
    made = plan_run(loaded, folder, cluster)
    sharding, size = loaded.sharding, loaded.train.batch_size
    print(f"{sharding.plan}, {sharding.memory}; {hosts} hosts of {devices} {device} devices, batch {size:,}")
    memory = [each.memory | {"device": each.device_bytes, "host": each.host_bytes} for each in made.ranks]
    print(f"\nGB that a rank needs; of the host, with the copy of a checkpoint\n{_table(made.ranks, memory, 1e9)}")
    print(f"\nMB that a rank sends in a step\n{_table(made.ranks, [each.sent for each in made.ranks], 1e6)}")
    for misfit in made.misfits:
        print(f"does not fit: {misfit}")
    if made.misfits:
        print(f"fits: {'; '.join(made.remedies) or 'no kind of sharding, nor 64 times the hosts'}")
    if output:
        values = {"cluster": dataclasses.asdict(cluster), "batch_size": size, **dataclasses.asdict(made)}
        replace_file(output, (json.dumps(values, indent=1) + "\n").encode())


def _table(kinds: list[Any], sizes: list[dict[str, int]], unit: float) -> str:
    """A line for each kind of ranks, those that need most first."""
    from cowrec.trainer.reports.text_table import aligned

    parts = list(dict.fromkeys(part for each in sizes for part in each))
    lines = [["ranks", *(part.replace("_", " ") for part in parts)]]
    for kind, each in zip(kinds[:_MOST_LINES], sizes, strict=False):
        others = f" and {len(kind.ranks) - 1} like it" if len(kind.ranks) > 1 else ""
        lines.append([f"{kind.ranks[0]}{others}", *(f"{each.get(part, 0) / unit:.3f}" for part in parts)])
    more = f"\n... and {len(kinds) - _MOST_LINES} kinds that need less" if len(kinds) > _MOST_LINES else ""
    return aligned(lines) + more


@app.command()
def bench(
    context: typer.Context,
    output: Annotated[Path, output_flag("JSON lines file to write; it must not exist.")] = Path("bench.jsonl"),
    preset: Annotated[
        str,
        typer.Option(
            help="criteo: the CowClip paper's settings. mlperf-dcnv2: MLPerf Training's DLRM-DCNv2. embedding-adam: "
            "lookup and update of tables alone."
        ),
    ] = "criteo",
    absent_rows: Annotated[str, typer.Option(help="Values of optimizer.absent_rows to compare.")] = "replay,lazy,dense",
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            help="Batch sizes. Default: 1K,8K,64K; of mlperf-dcnv2: 6912 for each process; of embedding-adam: 104858."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="Network, as model.name: deepfm, dcnv2 and others.")] = "deepfm",
    rows: Annotated[str, typer.Option(help="Most rows of a table, such as 100K. full: the published ones.")] = "full",
    epoch_share: Annotated[float, typer.Option(help="Share of an epoch after which the measurement starts.")] = 0.9,
    seconds: Annotated[float, typer.Option(help="Seconds to measure each combination; at least 5 steps.")] = 20.0,
    clip: Annotated[str, typer.Option(help="CowClip: on, off, or on,off to compare.")] = "on",
    precision: Annotated[str, typer.Option(help="Values of train.precision: float32, tf32, bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Measures training speed and memory in the steady state, on generated ids.

    By default with Criteo's frequencies and the settings published for Criteo; with --preset mlperf-dcnv2 the network,
    tables and numbers of ids of MLPerf Training's DLRM-DCNv2, on one GPU or, under torchrun, on several; with --preset
    embedding-adam ten tables of 128 columns and 1.05 million ids, without a network. Each line of the output is one
    combination: speed, memory, time of the parts of a step, configuration, versions and hardware. Prints tables at the
    end. After a combination that fails the others are measured, and the exit code is 2.

    Example: `cowrec bench --rows full --absent-rows replay,lazy,dense --batch-sizes 1K,8K,64K --output bench.jsonl`
    """
    from cowrec.data_pipeline.files import require_target
    from cowrec.trainer.bench.bench import bench as run
    from cowrec.trainer.bench.presets import PRESETS
    from cowrec.trainer.bench.settings import Bench
    from cowrec.trainer.bench.table import table
    from cowrec.trainer.config.checks import require_choices
    from cowrec.trainer.runtime.errors import ProcessFailed

    require_choices("--preset", [preset], _PRESETS)
    shape = PRESETS.get(preset)
    _refuse_flags_of_criteo(context, preset)
    if launched_world_size() > 1 and not (shape and shape.takes_processes):
        raise ValueError("bench starts its own processes; start it without torchrun")
    sizes = batch_sizes or (str(shape.batch_size * launched_world_size()) if shape else "1K,8K,64K")
    settings = Bench(
        parse_list(absent_rows),
        parse_counts(sizes, "--batch-sizes"),
        model,
        parse_table_rows(rows),
        epoch_share,
        seconds,
        parse_list(clip),
        parse_list(precision),
        device,
    )
    if launched_rank() == 0:
        require_target(output)
        if output.is_file() and output.stat().st_size:
            raise ValueError(f"{output} exists, with earlier measurements; choose another --output, or remove it")
    lines = run(settings, output, shape)
    if measured := [line for line in lines if "error" not in line]:
        print(f"{table(measured)}\n\n{output}")
    if failed := len(lines) - len(measured):
        raise ProcessFailed(f"{failed} of {len(lines)} combinations failed; their lines in {output} say why")


def _refuse_flags_of_criteo(context: typer.Context, preset: str) -> None:
    for name in _OF_CRITEO_ALONE:
        source = context.get_parameter_source(name)
        if preset != "criteo" and source is not None and source.name != "DEFAULT":
            raise ValueError(f"--{name.replace('_', '-')} has no meaning for --preset {preset}; leave it out")
