"""The command ``cowrec plan``."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from .flag_values import parse_local
from .run_flags import Overrides, RunToml, TrainData, load_run

app = typer.Typer()
_MOST_LINES = 12


@app.command()
def plan(
    config: RunToml,
    cluster: Annotated[
        str, typer.Option(help="TOML file of the cluster, or a preset with a number of hosts, such as dgx-h100:8.")
    ],
    data: TrainData = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", parser=parse_local, help="Also write the plan as JSON.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Plans a run on a cluster before it is rented: memory and traffic of each rank, and what does not fit.

    Tables are sharded as in training; the ids of a sample are those of the first batch of the data set, which may be a
    sample.

    Example: `cowrec plan run.toml --data data/criteo --cluster dgx-h100:8`
    """
    from cowrec.data_pipeline import Schema
    from cowrec.trainer.config.run import with_defaults
    from cowrec.trainer.planning.plan import load_cluster, plan_run

    logging.getLogger("torchrec").setLevel(logging.ERROR)  # its planner warns of clusters that are not detected
    described = load_cluster(cluster)
    loaded, folder = load_run(config, overrides, data)
    loaded = with_defaults(loaded, Schema.load(folder).split("train").rows)
    made = plan_run(loaded, folder, described)
    sharding, size = loaded.sharding, loaded.train.batch_size
    hosts = f"{described.hosts} hosts of {described.devices} {described.device} devices"
    print(f"{sharding.plan}, {sharding.memory}; {hosts}, batch {size:,}")
    memory = [each.memory | {"device": each.device_bytes, "host": each.host_bytes} for each in made.ranks]
    print(f"\nGB that a rank needs; of the host, with the copy of a checkpoint\n{_table(made.ranks, memory, 1e9)}")
    print(f"\nMB that a rank sends in a step\n{_table(made.ranks, [each.sent for each in made.ranks], 1e6)}")
    for misfit in made.misfits:
        print(f"does not fit: {misfit}")
    if made.misfits:
        print(f"fits: {'; '.join(made.remedies) or 'no kind of sharding, nor 64 times the hosts'}")
    if output:
        values = {"cluster": dataclasses.asdict(described), "batch_size": size, **dataclasses.asdict(made)}
        output.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


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
