"""The command ``cowrec bench``."""

from pathlib import Path
from typing import Annotated

import typer

from cowrec.trainer.runtime.environment import launched_world_size

from .flag_values import parse_batch_size, parse_list, parse_number, parse_table_rows

app = typer.Typer()


@app.command()
def bench(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="JSON lines file to write; the plot is written beside it.")
    ] = Path("bench.jsonl"),
    absent_rows: Annotated[str, typer.Option(help="Values of optimizer.absent_rows to compare.")] = "replay,lazy,dense",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes, such as 1K,8K,64K; K is 1024.")] = "1K,8K,64K",
    model: Annotated[str, typer.Option(help="Network: wdl, deepfm, dcn, dcnmix, dcnv2.")] = "deepfm",
    rows: Annotated[
        str, typer.Option(help="Most rows of a table, such as 100K; K is 1000. full: Criteo's, 33.8 million in total.")
    ] = "full",
    spacing: Annotated[str, typer.Option(help="Distance of two ids' rows; tables are that many times larger.")] = "1",
    epoch_share: Annotated[float, typer.Option(help="Share of an epoch after which the measurement starts.")] = 0.9,
    seconds: Annotated[float, typer.Option(help="Seconds to measure each combination; at least 5 steps.")] = 20.0,
    clip: Annotated[str, typer.Option(help="CowClip: on, off, or on,off to compare.")] = "on",
    precision: Annotated[str, typer.Option(help="Values of train.precision: float32, tf32, bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Measures training speed and memory in the steady state, on generated ids with Criteo's frequencies.

    The settings are those published for Criteo. Each line of the output is one combination: speed, memory, time of the
    parts of a step, configuration, versions and hardware. Prints tables and ratios at the end.

    Example: `cowrec bench --rows full --absent-rows replay,lazy,dense --batch-sizes 1K,8K,64K --output bench.jsonl`
    """
    from cowrec.trainer.bench.bench import bench as run
    from cowrec.trainer.bench.plot import measured, table
    from cowrec.trainer.bench.settings import Bench
    from cowrec.trainer.runtime.errors import ProcessFailed

    if launched_world_size() > 1:
        raise ValueError("bench starts its own processes; start it without torchrun")
    settings = Bench(
        parse_list(absent_rows),
        [parse_batch_size(each) for each in parse_list(batch_sizes)],
        model,
        parse_table_rows(rows),
        [parse_number(each, 1, "--spacing must be a whole number, such as 10") for each in parse_list(spacing)],
        epoch_share,
        seconds,
        parse_list(clip),
        parse_list(precision),
        device,
    )
    lines = run(settings, output)
    if measured(lines):
        print(f"{table(lines)}\n\n{output}, plot: {output.with_suffix('.png')}")
    if failed := len(lines) - len(measured(lines)):
        raise ProcessFailed(f"{failed} of {len(lines)} combinations failed; their lines in {output} say why")
