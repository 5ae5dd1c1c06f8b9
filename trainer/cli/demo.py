"""The command ``cowrec demo``: a small batch, and one 64 times as large under three scaling rules."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cowrec.errors import UserError

if TYPE_CHECKING:
    from cowrec.data_pipeline import SynthesizeConfig

app = typer.Typer()

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "demo.toml"
SUMMARY, PLOT, MARKER = "summary.json", "demo.png", ".demo"


@dataclass(frozen=True)
class Run:
    """One run of the demo: its name in table, plot and folder, its batch size over the base's, and its scaling rule."""

    name: str
    times: int
    scaling: str | None = None


SMALL = Run("small batch", 1)
RUNS = (SMALL, Run("default rule", 64), Run("not scaled", 64, "none"), Run("linear rule", 64, "linear"))


@app.command("demo")
def command(
    output: Annotated[Path, typer.Option(help="New folder, or that of an earlier demo.")] = Path("runs/demo"),
    # Two epochs are 206 steps at the large batch: a rule cannot be judged from much fewer.
    rows: Annotated[int, typer.Option(help="Training samples to synthesize.")] = 420_000,
) -> None:
    """Trains DeepFM on synthetic data at batch 64, and at batch 4,096 under three scaling rules.

    Prints a table, and writes it as JSON and as a picture.

    Example: `cowrec demo --output runs/demo`
    """
    from cowrec.data_pipeline import SynthesizeConfig

    print(demo(output, SynthesizeConfig(rows=rows)))


def demo(output: Path, samples: "SynthesizeConfig") -> str:
    """Trains all runs on new samples, in place of those of an earlier call. Returns the table and the files' names.

    Raises UserError: `output` has files, but none of an earlier demo.
    """
    from cowrec.data_pipeline import synthesize

    from ..config.run import load_config
    from ..training.trainer import train

    if output.exists() and any(output.iterdir()) and not (output / MARKER).exists():
        raise UserError(f"{output} is not empty and not the folder of an earlier demo; choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()
    for earlier in ("data", *(folder(run) for run in RUNS)):
        shutil.rmtree(output / earlier, ignore_errors=True)
    print(f"synthesizing {samples.rows:,} samples in {output / 'data'}", flush=True)
    synthesize(output / "data", samples)
    reports = {}
    for run in RUNS:
        print(f"\n{run.name}", flush=True)
        batch_size = run.times * load_config(CONFIG).optimizer.base_batch_size
        scaling = [] if run.scaling is None else [f"optimizer.scaling={run.scaling}"]
        config = load_config(CONFIG, [f"train.batch_size={batch_size}", *scaling])
        reports[run] = train(config, output / "data", output / folder(run))
    (output / SUMMARY).write_text(json.dumps(summary(reports), indent=2) + "\n", encoding="utf-8")
    plot(reports, output / PLOT)
    return f"\n{table(reports)}\n\n{conclusion(reports)}\nsummary: {output / SUMMARY}\nplot: {output / PLOT}"


def summary(reports: dict[Run, dict[str, Any]]) -> list[dict[str, Any]]:
    """An object for each run; `default` is true where the default rule scaled the small batch's values."""
    return [
        {
            "name": run.name,
            "batch_size": report["batch_size"],
            "default": run.scaling is None and run != SMALL,
            "scaling": report["scaling"],
            "auc": report["auc"],
            "logloss": report["logloss"],
            "steps": report["steps"],
            "seconds": report["train_seconds"],
        }
        for run, report in reports.items()
    ]


def table(reports: dict[Run, dict[str, Any]]) -> str:
    """One line for each run. `difference` is the AUC less that of the small batch."""
    from ..reports.text_table import aligned

    rows = [["run", "batch", "rule", "steps", "seconds", "samples/s", "test AUC", "difference", "logloss"]]
    for run, report in reports.items():
        rows.append(
            [
                run.name,
                f"{report['batch_size']:,}",
                "" if run == SMALL else report["scaling"],
                f"{report['steps']:,}",
                f"{report['train_seconds']:.0f}",
                f"{report['samples_per_second']:,.0f}",
                f"{report['auc']:.4f}",
                "" if run == SMALL else f"{report['auc'] - reports[SMALL]['auc']:+.4f}",
                f"{report['logloss']:.4f}",
            ]
        )
    return aligned(rows)


def conclusion(reports: dict[Run, dict[str, Any]]) -> str:
    """AUC and seconds of the small batch and of the default rule, and the best AUC that there can be."""
    named = [
        f"batch {reports[run]['batch_size']:,} reaches test AUC {reports[run]['auc']:.4f} in"
        f" {reports[run]['train_seconds']:.0f} seconds"
        for run in RUNS[:2]
    ]
    best = reports[SMALL]["best_possible"]["auc"]
    return f"{named[0]},\n{named[1]} under the default rule; the best possible is {best:.4f}\n"


def plot(reports: dict[Run, dict[str, Any]], path: Path) -> None:
    from ..reports.plotting import plt

    figure, (quality, duration) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2), layout="constrained")
    names = [f"batch {report['batch_size']:,}, {run.name}" for run, report in reports.items()]
    names[0] = f"batch {reports[SMALL]['batch_size']:,}"
    for name, report in zip(names, reports.values(), strict=True):
        epochs = report["epochs"]
        quality.plot([epoch["epoch"] for epoch in epochs], [epoch["auc"] for epoch in epochs], "o-", label=name)
    small = reports[SMALL]
    quality.axhline(small["best_possible"]["auc"], color="gray", ls="--", label="best possible")
    quality.set(xlabel="epoch", ylabel="test AUC", xticks=[epoch["epoch"] for epoch in small["epochs"]])
    colors = [f"C{number}" for number in range(len(reports))]
    duration.barh(names, [report["train_seconds"] for report in reports.values()], color=colors)
    duration.invert_yaxis()
    duration.set_xlabel("seconds of training")
    figure.legend(loc="outside lower center", ncols=3)
    figure.suptitle(f"DeepFM on synthetic data of Criteo's shape, {small['device']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def folder(run: Run) -> str:
    return run.name.replace(" ", "_")
