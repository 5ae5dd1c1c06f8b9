"""The command about speed: ``cowrec bench``."""

from pathlib import Path
from typing import Annotated

import typer

from cowrec.errors import UserError

from ..runtime.environment import launched_rank, launched_world_size
from .flags import output_flag, parse_counts, parse_list, parse_table_rows

app = typer.Typer()

_PRESETS = ("criteo", "mlperf-dcnv2")
_OF_CRITEO_ALONE = ("absent_rows", "model", "epoch_share")


@app.command()
def bench(
    context: typer.Context,
    output: Annotated[Path, output_flag("JSON lines file to write; it must not exist.")] = Path("bench.jsonl"),
    preset: Annotated[
        str,
        typer.Option(help="criteo: the CowClip paper's settings. mlperf-dcnv2: DLRM-DCNv2 of MLPerf Training v6.0."),
    ] = "criteo",
    absent_rows: Annotated[str, typer.Option(help="Values of optimizer.absent_rows to compare.")] = "replay,lazy,dense",
    batch_sizes: Annotated[
        str | None,
        typer.Option(help="Batch sizes. Default: 1K,8K,64K; of mlperf-dcnv2: 6912 for each process."),
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
    tables and numbers of ids of MLPerf Training's DLRM-DCNv2, on one GPU or, under torchrun, on several. Each line
    of the output is one combination: speed, memory, time of the parts of a step, configuration, versions and hardware.
    Prints tables at the end. After a combination that fails the others are measured, and the exit code is 2.

    Example: `cowrec bench --rows full --absent-rows replay,lazy,dense --batch-sizes 1K,8K,64K --output bench.jsonl`
    """
    from cowrec.files import require_target
    from cowrec.names import require_choices

    from ..bench.bench import bench as run
    from ..bench.bench import table
    from ..bench.measurement import Bench
    from ..bench.mlperf import BATCH_SIZE_OF_GPU
    from ..runtime.errors import ProcessFailed

    require_choices("--preset", [preset], _PRESETS)
    mlperf = preset == "mlperf-dcnv2"
    _refuse_flags_of_criteo(context, preset)
    if launched_world_size() > 1 and not mlperf:
        raise UserError("bench starts its own processes; start it without torchrun")
    sizes = batch_sizes or (str(BATCH_SIZE_OF_GPU * launched_world_size()) if mlperf else "1K,8K,64K")
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
            raise UserError(f"{output} exists, with earlier measurements; choose another --output, or remove it")
    lines = run(settings, output, mlperf=mlperf)
    if measured := [line for line in lines if "error" not in line]:
        print(f"{table(measured)}\n\n{output}")
    if failed := len(lines) - len(measured):
        raise ProcessFailed(f"{failed} of {len(lines)} combinations failed; their lines in {output} say why")


def _refuse_flags_of_criteo(context: typer.Context, preset: str) -> None:
    for name in _OF_CRITEO_ALONE:
        source = context.get_parameter_source(name)
        if preset != "criteo" and source is not None and source.name != "DEFAULT":
            raise UserError(f"--{name.replace('_', '-')} has no meaning for --preset {preset}; leave it out")
