"""Demo of CowClip on synthetic data: a small batch, and a 64 times larger one with two scaling rules."""

import argparse
import shutil
from pathlib import Path
from typing import Any

from cowrec.trainer.runtime.environment import prepare_process

prepare_process()  # before torch is loaded

from cowrec.data_pipeline import SynthesizeConfig, synthesize
from cowrec.trainer.config.run import load_config
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.training.loop import train

CONFIG = Path(__file__).parent / "configs" / "demo.toml"
# The small batch overfits after one epoch; the large ones take 1/64 of its steps and improve in a second epoch.
RUNS = {
    "small batch": ("train.epochs=1", "optimizer.scaling=none", "clip.rule=none"),
    "large, linear scaling": ("train.batch_size=32768", "optimizer.scaling=linear", "clip.rule=none"),
    "large, CowClip": ("train.batch_size=32768",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder for data, runs and plot")
    parser.add_argument("--rows", type=int, default=700_000, help="training samples to synthesize")
    arguments = parser.parse_args()
    output: Path = arguments.output
    for earlier in ("data", *map(folder, RUNS)):
        shutil.rmtree(output / earlier, ignore_errors=True)
    print(f"synthesizing {arguments.rows:,} samples in {output / 'data'}", flush=True)
    synthesize(output / "data", SynthesizeConfig(rows=arguments.rows))
    reports = {}
    for name, overrides in RUNS.items():
        print(f"\n{name}", flush=True)
        reports[name] = train(load_config(CONFIG, overrides), output / "data", output / folder(name))
    print(f"\n{table(reports)}\n\nplot: {plot(reports, output / 'demo.png')}")


def table(reports: dict[str, dict[str, Any]]) -> str:
    rows = [("run", "batch", "rule", "epochs", "steps", "samples/s", "test AUC", "logloss", "best possible AUC")]
    for name, report in reports.items():
        best = report["best_possible"]["auc"]
        rows.append(
            (
                name,
                f"{report['batch_size']:,}",
                report["scaling"],
                str(len(report["epochs"])),
                f"{report['steps']:,}",
                f"{report['samples_per_second']:,.0f}",
                f"{report['auc']:.4f}",
                f"{report['logloss']:.4f}",
                f"{best:.4f}",
            )
        )
    return aligned(rows)


def plot(reports: dict[str, dict[str, Any]], path: Path) -> Path:
    figure, (quality, speed) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2), layout="constrained")
    for name, report in reports.items():
        epochs = report["epochs"]
        label = f"{name} ({report['batch_size']:,})"
        quality.plot([each["epoch"] for each in epochs], [each["auc"] for each in epochs], "o-", label=label)
    quality.axhline(next(iter(reports.values()))["best_possible"]["auc"], color="gray", ls="--", label="best possible")
    quality.set(
        xlabel="epoch",
        ylabel="test AUC",
        xticks=range(1, 1 + max(len(report["epochs"]) for report in reports.values())),
    )
    colors = [f"C{number}" for number in range(len(reports))]
    speed.barh(list(reports), [report["samples_per_second"] for report in reports.values()], color=colors)
    speed.invert_yaxis()
    speed.set_xlabel("training samples per second")
    device = next(iter(reports.values()))["device"]
    figure.legend(loc="outside lower center", ncols=2)
    figure.suptitle(f"DeepFM on synthetic Criteo-shaped data, {device}")
    figure.savefig(path, dpi=120)
    return path


def folder(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


if __name__ == "__main__":
    main()
