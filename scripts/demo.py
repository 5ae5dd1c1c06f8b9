"""Demo of large batches on synthetic data: a small batch, and one 64 times as large under three scaling rules."""

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cowrec.trainer.runtime.environment import prepare_process

prepare_process()  # before torch is loaded

from cowrec.data_pipeline import SynthesizeConfig, synthesize
from cowrec.trainer.config.run import load_config
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.training.trainer import train

CONFIG = Path(__file__).resolve().parents[1] / "trainer" / "configs" / "demo.toml"
SUMMARY, PLOT, MARKER = "summary.json", "demo.png", ".demo"


@dataclass(frozen=True)
class Run:
    """One run of the demo.

    Attributes:
        name: shown in table and plot, and as the name of the run's folder.
        times: its batch size over the base batch size.
        scaling: its scaling rule; None is the default rule.
    """

    name: str
    times: int
    scaling: str | None = None


SMALL = Run("small batch", 1)
RUNS = (SMALL, Run("default rule", 64), Run("not scaled", 64, "none"), Run("linear rule", 64, "linear"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="new folder, or that of an earlier demo")
    # Two epochs are 206 steps at the large batch: a rule cannot be judged from much fewer.
    parser.add_argument("--rows", type=int, default=420_000, help="training samples to synthesize")
    arguments = parser.parse_args()
    output: Path = arguments.output
    if output.exists() and any(output.iterdir()) and not (output / MARKER).exists():
        parser.error(f"{output} is not empty and not the folder of an earlier demo; choose another --output")
    print(demo(output, SynthesizeConfig(rows=arguments.rows)))


def demo(output: Path, samples: SynthesizeConfig) -> str:
    """Trains all runs on new samples, in place of those of an earlier call. Returns the table and the files' names."""
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()
    for earlier in ("data", *(folder(run) for run in RUNS)):
        shutil.rmtree(output / earlier, ignore_errors=True)
    print(f"synthesizing {samples.rows:,} samples in {output / 'data'}", flush=True)
    synthesize(output / "data", samples)
    reports = {}
    for run in RUNS:
        print(f"\n{run.name}", flush=True)
        reports[run] = train(load_config(CONFIG, overrides(run)), output / "data", output / folder(run))
    (output / SUMMARY).write_text(json.dumps(summary(reports), indent=2) + "\n", encoding="utf-8")
    return f"\n{table(reports)}\n\nsummary: {output / SUMMARY}\nplot: {plot(reports, output / PLOT)}"


def overrides(run: Run) -> list[str]:
    batch_size = run.times * load_config(CONFIG).optimizer.base_batch_size
    scaling = [] if run.scaling is None else [f"optimizer.scaling={run.scaling}"]
    return [f"train.batch_size={batch_size}", *scaling]


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
    """One line for each run. `difference` is from the small batch, in points of 100 * AUC."""
    head = ["run", "batch", "rule", "epochs", "steps", "seconds", "samples/s", "test AUC", "difference", "logloss"]
    rows = [[*head, "best possible AUC"]]
    for run, report in reports.items():
        rows.append(
            [
                run.name,
                f"{report['batch_size']:,}",
                "" if run == SMALL else report["scaling"],
                str(len(report["epochs"])),
                f"{report['steps']:,}",
                f"{report['train_seconds']:.0f}",
                f"{report['samples_per_second']:,.0f}",
                f"{report['auc']:.4f}",
                "" if run == SMALL else f"{100 * (report['auc'] - reports[SMALL]['auc']):+.2f}",
                f"{report['logloss']:.4f}",
                f"{report['best_possible']['auc']:.4f}",
            ]
        )
    return aligned(rows)


def plot(reports: dict[Run, dict[str, Any]], path: Path) -> Path:
    figure, (quality, duration) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2), layout="constrained")
    names = [f"{run.name} ({report['batch_size']:,})" for run, report in reports.items()]
    for name, report in zip(names, reports.values(), strict=True):
        epochs = report["epochs"]
        quality.plot([each["epoch"] for each in epochs], [each["auc"] for each in epochs], "o-", label=name)
    small = reports[SMALL]
    quality.axhline(small["auc"], color="C0", ls=":", label="small batch, last epoch")
    quality.axhline(small["best_possible"]["auc"], color="gray", ls="--", label="best possible")
    quality.set(xlabel="epoch", ylabel="test AUC", xticks=[each["epoch"] for each in small["epochs"]])
    colors = [f"C{number}" for number in range(len(reports))]
    duration.barh(names, [report["train_seconds"] for report in reports.values()], color=colors)
    duration.invert_yaxis()
    duration.set_xlabel("seconds of training")
    figure.legend(loc="outside lower center", ncols=3)
    figure.suptitle(f"DeepFM on synthetic Criteo-shaped data, {small['device']}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def folder(run: Run) -> str:
    return run.name.replace(" ", "_")


if __name__ == "__main__":
    main()
