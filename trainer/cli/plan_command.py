"""The command ``cowrec plan``."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from .flag_values import count_flag, parse_local
from .run_flags import Overrides, RunToml, TrainData, load_run

app = typer.Typer()


@app.command()
def plan(
    config: RunToml,
    cluster: Annotated[
        str, typer.Option(help="TOML file of the cluster, or a preset with a number of hosts, such as dgx-h100:8.")
    ],
    data: TrainData = None,
    samples: Annotated[int, count_flag("Samples of an epoch, where the data set is a sample. [its own]")] = 0,
    compare: Annotated[
        bool, typer.Option(help="Also try the other kinds of sharding; done anyway if something does not fit.")
    ] = False,
    timed: Annotated[
        bool,
        typer.Option(
            "--timed",
            help="Time the work of a rank's step on this machine, which is like the cluster's, rather than calculate"
            " it; on CPU that of all processes of a host.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", parser=parse_local, help="Also write the plan as JSON.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Plans a run on a cluster before it is rented: memory, traffic and time of each rank, and what does not fit.

    The model is built and sharded as in training, and one step is taken, without memory for the tables and without
    peers, on the ids of the first batch of the data set, which may be a sample.

    Example: `cowrec plan run.toml --data data/criteo --cluster dgx-h100:8 --samples 4G`
    """
    from cowrec.data_pipeline import Schema
    from cowrec.trainer.config.run import with_defaults
    from cowrec.trainer.planning.cluster import load_cluster
    from cowrec.trainer.planning.plan import alternatives, plan_batch, timed_plan
    from cowrec.trainer.planning.samples import first_batches, global_batch
    from cowrec.trainer.planning.text import alternatives_text, plan_text, plan_values

    described = load_cluster(cluster)
    loaded, folder = load_run(config, overrides, data)
    schema = Schema.load(folder)
    samples = samples or schema.split("train").rows
    loaded = with_defaults(dataclasses.replace(loaded, data=dataclasses.replace(loaded.data, dir=str(folder))), samples)
    batch = global_batch(loaded, folder)
    made = plan_batch(loaded, schema, batch, described, samples)
    if timed:
        made = timed_plan(made, loaded, schema, first_batches(loaded, folder))
    print(plan_text(made))
    values = plan_values(made)
    if compare or made.misfits:
        others = dict(alternatives(loaded, schema, batch, described, samples))
        print(f"\n{alternatives_text(others)}")
        values["others"] = {name: each if isinstance(each, str) else plan_values(each) for name, each in others.items()}
    if output:
        output.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
