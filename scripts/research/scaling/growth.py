"""How start, steps, evaluation, checkpoint and resuming of a run grow with the rows of its tables.

    python -m scripts.research.scaling.growth --output results/HARDWARE/growth.jsonl

The data are synthetic, in Criteo's shape, with a tenth of its ids, all, and ten times as many ("sgd"). Each case
trains in one process, and resumes in a second one. DeepFM with embeddings of width 3, so that a row has four columns:
"sgd" stores them alone (16 bytes), "adam" with replay also moments and the last step (52). Training
continues after "checkpoint: copy"; "checkpoint: files" is the rest of the time until the checkpoint is complete.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cowrec.trainer.runtime.environment import prepare_process
from cowrec.trainer.sharded_model.run_plan import RunPlan

prepare_process()  # before torch is loaded

import numpy as np
import torch

from cowrec.data_pipeline import Schema, SynthesizeConfig, synthesize
from cowrec.trainer.config.run import config_from, load_config, save_config, with_defaults
from cowrec.trainer.reports.plotting import plt
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runs.local_copy import RunPlace
from cowrec.trainer.runtime.environment import environment
from cowrec.trainer.runtime.processes import process_group
from cowrec.trainer.training.active_run import ActiveRun
from cowrec.trainer.training.evaluation import evaluate
from cowrec.trainer.training.trainer import keep_resident, training_readers

from .meter import metered

BATCH, STEPS, FIRST, TEST_ROWS = 1024, 40, 5, 65536
SCALES = {"sgd": (0.1, 1.0, 10.0), "adam": (0.1, 1.0)}
"""Shares of Criteo's 33.8 million ids, by optimizer: as much as 16 GB hold, with a checkpoint's copy."""
PHASES = ("start", "first steps", "steps", "evaluate", "checkpoint: copy", "checkpoint: files", "resume")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write, and a plot beside them")
    parser.add_argument("--only", default="sgd,adam", help="optimizers to measure; others keep their lines")
    parser.add_argument("--phases", type=Path, metavar="FOLDER", help="one process of a case")
    given = parser.parse_args()
    if given.phases:
        return _phases(given.phases)
    wanted = given.only.split(",")
    lines = [json.loads(line) for line in given.output.read_text().splitlines()] if given.output.exists() else []
    lines = [each for each in lines if each["optimizer"] not in wanted]
    for optimizer in wanted:
        for scale in SCALES[optimizer]:
            with tempfile.TemporaryDirectory() as name:
                lines += _case(Path(name), optimizer, scale, given.output)
            given.output.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(_table(lines))
    _plot(lines, given.output.with_suffix(".png"))


def _case(folder: Path, optimizer: str, scale: float, output: Path) -> list[dict[str, Any]]:
    data, run = folder / "data", folder / "run"
    synthesize(data, SynthesizeConfig(rows=BATCH * STEPS, test_rows=TEST_ROWS, vocabulary_scale=scale))
    config = config_from(
        {
            "data": {"dir": str(data)},
            "model": {"embedding_dim": 3, "hidden": [64, 64]},
            "train": {"batch_size": BATCH, "device": "cpu", "epochs": 1},
            "optimizer": {"embedding": optimizer},
            **({} if optimizer == "adam" else {"clip": {"rule": "none"}}),
        }
    )
    save_config(with_defaults(config, BATCH * STEPS), folder / "run.toml")
    phases: dict[str, Any] = {}
    for _ in ("from the beginning", "resumed"):
        child = [
            sys.executable,
            "-m",
            "scripts.research.scaling.growth",
            "--output",
            str(output),
            "--phases",
            str(folder),
        ]
        subprocess.run(child, check=True)
        phases |= json.loads((folder / "phases.json").read_text())
    rows = sum(field.num_embeddings for field in Schema.load(data).sparse)
    size = sum(file.stat().st_size for file in run.rglob("*.distcp"))
    head = {"optimizer": optimizer, "rows": rows, "checkpoint_mb": size / 1e6}
    return [{**head, "phases": phases, "batch_size": BATCH, "steps": STEPS - FIRST, **environment(torch.device("cpu"))}]


def _phases(folder: Path) -> None:
    """Takes a run from its start to its checkpoint, or from its checkpoint on, and measures each phase."""
    run_dir = folder / "run"
    config = load_config(folder / "run.toml")
    resume = run_dir.exists()
    phases: dict[str, Any] = {}
    with process_group("cpu") as process:
        with metered() as phases["start"]:
            plan = RunPlan.of(config, Schema.load(config.data.dir).of_batches(), process)
            readers = training_readers(plan)
            trainer = ActiveRun(plan, RunPlace(run_dir, resume=resume), "stop")
            keep_resident(readers, plan)
        with trainer.running(resume):
            if resume:
                with metered() as phases["resume"]:
                    assert trainer.state.resume(trainer.checkpoints)
                phases = {"start again": phases["start"], "resume": phases["resume"]}
            else:
                _train(trainer, readers.train, phases)
                with metered() as phases["evaluate"]:
                    evaluate(trainer.state, readers.test)
                with metered() as phases["checkpoint: copy"]:
                    trainer.save()
                with metered() as phases["checkpoint: files"]:
                    trainer.checkpoints.finish()
    (folder / "phases.json").write_text(json.dumps(phases), encoding="utf-8")


def _train(trainer: ActiveRun, reader: Any, phases: dict[str, Any]) -> None:
    ids = [batch.sparse for batch in reader.epoch(0)]
    distinct = [sum(len(each[key].values().unique()) for key in each.keys()) for each in ids]  # noqa: SIM118
    batches = map(trainer.state.ids.training, reader.epoch(0))
    for name, steps in (("first steps", FIRST), ("steps", STEPS - FIRST)):
        with metered() as phases[name]:
            for _ in range(steps):
                trainer.step(batches)
            trainer.checked_loss()
        phases[name] |= {"steps": steps, "distinct_rows": float(np.mean(distinct))}


def _table(lines: list[dict[str, Any]]) -> str:
    head = ("optimizer", "million rows", "checkpoint MB", "phase", "seconds", "CPU seconds", "peak MB", "written MB")
    keys = ("seconds", "cpu_seconds", "peak_mb", "written_mb")
    rows = []
    for line in lines:
        of_line = (line["optimizer"], f"{line['rows'] / 1e6:.1f}", f"{line['checkpoint_mb']:.0f}")
        rows += [(*of_line, name, *(f"{phase[key]:.2f}" for key in keys)) for name, phase in line["phases"].items()]
    return aligned([head, *rows])


def _plot(lines: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharex=True, layout="constrained")
    for column, (key, label) in enumerate((("cpu_seconds", "CPU seconds"), ("peak_mb", "peak memory, MB"))):
        for number, phase in enumerate(PHASES):
            for optimizer, line in (("sgd", "-o"), ("adam", "--s")):
                own = [each for each in lines if each["optimizer"] == optimizer]
                points = [[each["rows"] for each in own], [each["phases"][phase][key] for each in own]]
                name = phase if optimizer == "sgd" else None
                axes[column].plot(*points, line, color=f"C{number}", label=name, linewidth=1, markersize=3)
        axes[column].set(xscale="log", yscale="log", xlabel="rows of all tables", ylabel=label)
        axes[column].grid(alpha=0.3)
    entries = axes[0].get_legend_handles_labels()
    figure.legend(*entries, loc="outside right upper", fontsize=8, title="solid: sgd\ndashed: adam", title_fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
