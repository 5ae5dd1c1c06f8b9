"""A sweep: one configuration trained over a grid of batch sizes, scaling rules, clip on and off, and seeds.

Files of its folder: config.toml, sweep.jsonl, sweep.png, runs/RULE-BATCH-clip_on-seed0/ and so on. The grid is a loop
and needs no Optuna: its GridSampler shuffles the runs, so that an interrupted sweep would have covered no seed wholly,
and forgets what has run when the grid grows.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cowrec.data_pipeline import Schema
from cowrec.errors import UserError
from cowrec.names import require, require_choices
from cowrec.sparse_opt import SCALING_RULES

from ..config.run import RunConfig, with_values
from ..measures.clip_metrics import HARDLY_ANY
from ..reports.text_table import speed_text
from ..runtime.environment import environment
from ..runtime.errors import ProcessFailed
from ..sharded_model.run_plan import Scaled
from .results import too_few_steps
from .runs import Runs, on_data, open_runs, say

RESULTS = "sweep.jsonl"
COMPETITORS = ("cowclip", "linear", "none")
"""Scaling rules with which a configuration's own rule is compared unless others are asked for."""
_KEPT = (
    *("auc", "logloss", "steps", "samples_per_second", "train_seconds", "clip_remark", "best_possible"),
    *("validation_auc", "validation_logloss", "best_epoch", "expected_auc", "expected_logloss", "excess_logloss"),
    *("by_id_counts", "versions", "device", "threads", "git_commit"),
)
"""Entries of a line that a report gives, if it has them."""


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    rule: str
    batch_size: int
    clip: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.rule}-{self.batch_size}-clip_{self.clip}-seed{self.seed}"

    def config(self, shared: RunConfig) -> RunConfig:
        clip = {"rule": shared.clip.rule if self.clip == "on" else "none"}
        train = {"batch_size": self.batch_size, "seed": self.seed}
        return with_values(shared, train=train, optimizer={"scaling": self.rule}, clip=clip)


@dataclass(frozen=True)
class Grid:
    """Values that a sweep varies, which the flags of `cowrec sweep` describe; each combination is one run.

    Raises UserError for a value that is unknown, out of range or repeated.
    """

    batch_sizes: Sequence[int]
    rules: Sequence[str]
    clips: Sequence[str]
    seeds: int

    def __post_init__(self) -> None:
        require_choices("--rules", self.rules, SCALING_RULES)
        require_choices("--clip", self.clips, ("on", "off"))
        require_choices("--batch-sizes", self.batch_sizes, self.batch_sizes)
        for option, least in {"batch-sizes": min(self.batch_sizes), "seeds": self.seeds}.items():
            require(f"--{option}", least, least >= 1, "at least 1")

    def cells(self, first_seed: int) -> list[Cell]:
        """Lists the runs by seed, so that an interrupted sweep has covered the grid with some seeds."""
        return [
            Cell(rule, batch_size, clip, first_seed + seed)
            for seed in range(self.seeds)
            for batch_size in self.batch_sizes
            for rule in self.rules
            for clip in self.clips
        ]


def sweep(config: RunConfig, data_dir: Path, output: Path, grid: Grid) -> list[dict[str, Any]]:
    """Trains each run of a grid in a subprocess; a failed run is recorded and the others continue.

    A run with a line in ``sweep.jsonl`` is not trained again: after an interruption the same call continues, the run in
    progress from its latest checkpoint, and with a larger grid it adds runs. To repeat a failed run, delete its lines.
    At the base batch size all scaling rules are the same run, which is trained once. The runs' folders are kept,
    without checkpoints and vocabularies.

    Returns the grid's lines: rule, batch_size, clip, seed; auc and logloss (as reported), best_epoch_auc, with
    validation samples validation_auc, validation_logloss and best_epoch, steps, epochs, samples_per_second,
    train_seconds, clipped_share (of rows, None with clip off), clip_remark, best_possible, the measures of
    :class:`Quality` that are known, by_epoch (the measures of every epoch), or error instead of these; base_batch_size,
    the derived hyperparameters, the SHA-256 of ``config.toml``, versions, hardware, commit.

    Raises:
        UserError: settings that cannot work, or a folder with another configuration or other files.
        Interrupted: Ctrl-C, or SIGTERM to the run's process; the run keeps its latest checkpoint and has no line.
    """
    if "on" in grid.clips and config.clip.rule == "none":
        raise UserError('--clip on needs a clip rule, but the configuration has clip.rule = "none"; give --clip off')
    given, schema = config, Schema.load(data_dir)
    config = on_data(given, data_dir, schema)
    cells = grid.cells(config.train.seed)
    own = [on_data(cell.config(given), data_dir, schema) for cell in cells]  # some defaults depend on the batch size
    decays = {config.train.batch_size: config.optimizer.lr_decay for config in own}
    if len(set(decays.values())) > 1:
        shown = ", ".join(f"{size}: {decay}" for size, decay in sorted(decays.items()))
        say(
            f"warning: optimizer.lr_decay depends on the number of steps ({shown}); set it to compare batch sizes alone"
        )
    with open_runs(output, config, RESULTS, "sweep") as runs:
        # Failures of earlier calls are not copied: a line may have been deleted to repeat its run.
        earlier, begin = [line for line in runs.lines if "error" not in line], len(runs.lines)
        for number, cell in enumerate(cells):
            if _find(runs.lines, cell):
                continue
            # At the base batch size no rule changes anything.
            rules = SCALING_RULES if cell.batch_size == config.optimizer.base_batch_size else ()
            known = [*earlier, *runs.lines[begin:]]
            twins = (_find(known, dataclasses.replace(cell, rule=rule)) for rule in rules)
            same = next(filter(None, twins), None)
            is_same = f" is {same['rule']}'s run: all rules are equal at the base batch size" if same else ""
            say(f"\nrun {number + 1} of {len(cells)}: {cell.name}{is_same}")
            runs.add({**(same or _trained(runs, own[number], cell.name)), **dataclasses.asdict(cell)})
            say(_in_short(runs.lines[-1]))
        return [line for cell in cells if (line := _find(runs.lines, cell))]


def default_rules(config: RunConfig) -> list[str]:
    return list(dict.fromkeys((config.optimizer.scaling, *COMPETITORS)))


def clip_summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """Counts the runs in which the clip had hardly any effect, in a sentence; "" if it had one in all."""
    clipped = [line for line in lines if line.get("clipped_share") is not None]
    without = sum(bool(line.get("clip_remark")) for line in clipped)
    if not without:
        return ""
    return (
        f"the clip had no effect, or almost none, in {without} of {len(clipped)} runs with clip on: it clipped less"
        f" than {HARDLY_ANY:g} of the row updates, so their results are those of clip off"
    )


def _trained(runs: Runs, config: RunConfig, name: str) -> dict[str, Any]:
    what: dict[str, Any] = {
        "model": config.model.name,
        "data": Path(config.data.dir).name,
        "base_batch_size": config.optimizer.base_batch_size,
        "lr_decay": config.optimizer.lr_decay,
    }
    with contextlib.suppress(ValueError):  # of values that the run itself refuses
        what |= dataclasses.asdict(Scaled.of(config).hyperparameters)
        what["betas"] = list(what["betas"])  # as in the file
    try:
        report = runs.train(config, name)
    except ProcessFailed as failed:
        on_cuda = config.train.device != "cpu" and torch.cuda.is_available()
        return {"error": str(failed), **what, **environment(torch.device("cuda" if on_cuda else "cpu"))}
    clip_statistics = report["clip_statistics"]
    aucs = [epoch["auc"] for epoch in report["epochs"] if epoch.get("auc") is not None]
    return {
        **{key: report[key] for key in _KEPT if key in report},
        "best_epoch_auc": max(aucs, default=None),
        "epochs": len(report["epochs"]),
        "by_epoch": report["epochs"],
        "clipped_share": clip_statistics["clipped_share"] if clip_statistics else None,
        **what,
    }


def _find(lines: Sequence[dict[str, Any]], cell: Cell) -> dict[str, Any] | None:
    wanted = dataclasses.asdict(cell)
    return next((line for line in lines if wanted.items() <= line.items()), None)


def _in_short(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"failed: {line['error']}"
    auc, logloss = (float("nan") if line[key] is None else line[key] for key in ("auc", "logloss"))
    text = f"AUC {auc:.4f}  logloss {logloss:.4f}  {speed_text(line['samples_per_second'])}"
    warning = too_few_steps(line["batch_size"], line["steps"], line["base_batch_size"])
    return f"{text}\n{warning}" if warning else text
