"""A sweep: one configuration trained over a grid of batch sizes, scaling rules, clip on and off, and seeds.

Files of its folder: config.toml, sweep.jsonl, sweep.png, runs/RULE-BATCH-clip_on-seed0/ and so on.
"""

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.files import locked_folder
from cowrec.sparse_opt import SCALING_RULES
from cowrec.trainer.config.run import RunConfig, with_defaults
from cowrec.trainer.measures.clip_metrics import HARDLY_ANY
from cowrec.trainer.reports.text_table import speed_text
from cowrec.trainer.runs.provenance import environment
from cowrec.trainer.runs.run_dir import CHECKPOINTS, CONFIG, REPORT, VOCABULARY
from cowrec.trainer.runtime.errors import ProcessFailed
from cowrec.trainer.runtime.subprocess_call import Subprocess
from cowrec.trainer.sharded_model.hyperparameters import derived_hyperparameters

from .comparison import too_few_steps
from .grid import Cell, Grid
from .run_group import keep_config, read_lines, require_own, write_lines
from .run_process import train_in
from .table import few_steps_warning

RESULTS, RUNS = "sweep.jsonl", "runs"
_MEASURES = ("expected_auc", "expected_logloss", "excess_logloss", "by_id_counts", "train")
"""Further measures of a report's last epoch, where they are known."""


def sweep(config: RunConfig, data_dir: Path, output: Path, grid: Grid) -> list[dict[str, Any]]:
    """Trains each run of a grid in a subprocess, so that a failed run is recorded and the others continue.

    A run with a line in ``sweep.jsonl`` is not trained again: after an interruption the same call continues, the run in
    progress from its latest checkpoint, and with a larger grid it adds runs. To repeat a failed run, delete its line;
    a run whose process was killed, for example for lack of memory, then continues from its latest checkpoint. At the
    base batch size all scaling rules are the same run, which is trained once. The runs' folders are kept, without
    checkpoints and vocabularies.

    Returns:
        The grid's lines: rule, batch_size, clip, seed; auc and logloss (as reported), best_epoch_auc, with validation
        samples validation_auc, validation_logloss and best_epoch, steps, epochs, samples_per_second, train_seconds,
        clipped (share of rows, None with clip off), clip_remark, best_possible, the measures of :class:`Quality` that
        are known, by_epoch (the measures of every epoch), or error instead of these; base_batch_size, the derived
        hyperparameters, the SHA-256 of ``config.toml``, versions, hardware, commit.

    Raises:
        ValueError: settings that cannot work, or a folder with another configuration or other files.
        Interrupted: by Ctrl-C, or by SIGTERM to the run's process; the run keeps its latest checkpoint and has no line.
    """
    if "on" in grid.clips and config.clip.rule == "none":
        raise ValueError('--clip on needs a clip rule, but the configuration has clip.rule = "none"; give --clip off')
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(data_dir)))
    config = with_defaults(config, Schema.load(data_dir).split("train").rows)
    cells = grid.cells(config.train.seed)
    with locked_folder(output), Subprocess() as process:
        require_own(output, "sweep")
        config_hash = keep_config(config, output / CONFIG)
        lines = read_lines(output / RESULTS)
        for number, cell in enumerate(cells, 1):
            if _find(lines, cell):
                continue
            same = _same_run(lines, cell, config.optimizer.base_batch_size)
            is_same = f" is {same['rule']}'s run: all rules are equal at the base batch size" if same else ""
            print(f"\nrun {number} of {len(cells)}: {cell.name}{is_same}", file=sys.stderr, flush=True)
            result = same or _trained(process, cell.config(config), output / RUNS / cell.name)
            lines.append({**result, **dataclasses.asdict(cell), "config_sha256": config_hash})
            write_lines(output / RESULTS, lines)
            print(_in_short(lines[-1]), file=sys.stderr, flush=True)
    return [line for cell in cells if (line := _find(lines, cell))]


def clip_remark(lines: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on the runs in which the clip had no effect, or almost none; "" if it had one in all."""
    clipped = [line for line in lines if line.get("clipped") is not None]
    without = sum(bool(line.get("clip_remark")) for line in clipped)
    if not without:
        return ""
    return (
        f"the clip had no effect, or almost none, in {without} of {len(clipped)} runs with clip on: it clipped less"
        f" than {HARDLY_ANY:g} of the row updates, so their results are those of clip off"
    )


def _trained(process: Subprocess, config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """The values of a run's line. Trains the run, unless it has a report and only its line was lost."""
    error = None
    if not (run_dir / REPORT).exists():
        try:
            train_in(process, config, run_dir)
        except ProcessFailed as failed:
            error = str(failed)
    for large in (CHECKPOINTS, VOCABULARY) if error is None else ():
        shutil.rmtree(run_dir / large, ignore_errors=True)
    derived = dataclasses.asdict(derived_hyperparameters(config))
    what = {
        "model": config.model.name,
        "data": Path(config.data.dir).name,
        "base_batch_size": config.optimizer.base_batch_size,
        **derived,
        "betas": list(derived["betas"]),  # as in the file
    }
    if error is not None:
        on_cuda = config.train.device != "cpu" and torch.cuda.is_available()
        return {"error": error, **what, **environment(torch.device("cuda" if on_cuda else "cpu"))}
    report = json.loads((run_dir / REPORT).read_text(encoding="utf-8"))
    clip_statistics = report["clip_statistics"]
    aucs = [epoch["auc"] for epoch in report["epochs"] if epoch.get("auc") is not None]
    return {
        "auc": report["auc"],
        "logloss": report["logloss"],
        "best_epoch_auc": max(aucs, default=None),
        **{key: report[key] for key in ("validation_auc", "validation_logloss", "best_epoch") if key in report},
        "steps": report["steps"],
        "epochs": len(report["epochs"]),
        "samples_per_second": report["samples_per_second"],
        "train_seconds": report["train_seconds"],
        "clipped": clip_statistics["clipped"] if clip_statistics else None,
        "clip_remark": report["clip_remark"],
        **{key: report[key] for key in _MEASURES if key in report},
        "by_epoch": report["epochs"],
        "best_possible": report["best_possible"],
        **what,
        **{key: report[key] for key in ("versions", "device", "threads", "git_commit")},
    }


def _find(lines: list[dict[str, Any]], cell: Cell) -> dict[str, Any] | None:
    wanted = dataclasses.asdict(cell)
    return next((line for line in lines if wanted.items() <= line.items()), None)


def _same_run(lines: list[dict[str, Any]], cell: Cell, base_batch_size: int) -> dict[str, Any] | None:
    """The line of another rule's equal run: at the base batch size no rule changes anything."""
    if cell.batch_size != base_batch_size:
        return None
    twins = (dataclasses.replace(cell, rule=rule) for rule in SCALING_RULES)
    return next((line for twin in twins if (line := _find(lines, twin))), None)


def _in_short(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"failed: {line['error']}"
    shown = {key: float("nan") if line[key] is None else line[key] for key in ("auc", "logloss")}
    text = "AUC {auc:.4f}  logloss {logloss:.4f}  ".format(**shown) + speed_text(line["samples_per_second"])
    size, steps = line["batch_size"], line["steps"]
    few = too_few_steps(size, steps, line.get("base_batch_size"))
    return f"{text}\n{few_steps_warning(size, steps)}" if few else text
