"""What a run says of itself: its summary before the first step, and the report after the last one."""

from collections.abc import Mapping
from math import nan
from typing import Any

from ..measures.clip_metrics import clip_remark
from ..measures.quality import auc_remark, calibration_remark
from ..sharded_model.sharding import sharding_line
from .active_run import ActiveRun
from .dataloading import Readers
from .epochs import Epochs, Speed


def epochs_summary(run: ActiveRun, readers: Readers) -> str:
    """Describes data, settings and sharding of a run over epochs, for the terminal."""
    plan, validation = run.plan, readers.validation
    table_rows = sum(spec.num_embeddings for spec in plan.tables)
    return (
        f"{run.config.model.name} on {plan.schema.name}: {plan.train_rows:,} training samples, "
        f"{f'{validation.num_rows:,} validation samples, ' if validation else ''}"
        f"{len(plan.schema.sparse)} fields, {table_rows:,} table rows\n"
        f"batch {run.config.train.batch_size} ({plan.epoch_steps} steps an epoch), {settings_summary(run)}"
    )


def settings_summary(run: ActiveRun) -> str:
    """Scaling, clip, derived rates and sharding, for the terminal; on CUDA also why steps are not captured."""
    config, derived, why = run.config, run.plan.scaled.hyperparameters, run.state.why_not_captured
    uncaptured = f"\nsteps are not captured as a CUDA graph: {why}" if why and run.process.device.type == "cuda" else ""
    decays = (("weight decay", derived.weight_decay), ("dense weight decay", derived.dense_weight_decay))
    decay = "".join(f", {name} {value:g}" for name, value in decays if value)
    falls = run.plan.schedule.decay
    decay += f", lr decay {falls}" if falls != "none" else ""
    return (
        f"scaling {config.optimizer.scaling}, clip {config.clip.rule}: embedding lr {derived.embedding_lr:g}, dense lr"
        f" {derived.dense_lr:g}, l2 {derived.l2:g}{decay}{uncaptured}"
        + (f"\n{sharding_line(run.sharding)}" if run.process.world_size > 1 else "")
    )


def epochs_report(run: ActiveRun, epochs: Epochs, speed: Speed, quality: dict[str, Any]) -> dict[str, Any]:
    """The report of a run over epochs, whose quality is given."""
    best_possible = run.plan.schema.best
    return {
        **quality,
        "auc_remark": auc_remark(quality, epochs.ends[: quality["epoch"]]),
        "calibration_remark": calibration_remark(quality) if run.config.train.loss == "bce" else None,
        "samples_per_second": speed.samples / speed.seconds if speed.seconds else nan,
        "train_seconds": speed.seconds,
        "best_possible": dict(best_possible) if best_possible else None,
        "world_size": run.process.world_size,
        "epochs": list(map(without_times, epochs.ends)),
        "training": epochs.training_report(),
        **shared_report(run),
    }


def without_times(values: Mapping[str, Any]) -> dict[str, Any]:
    """Measures without those of each tenth by time, which only the report has: they are many."""
    return {
        key: without_times(value) if key == "last_epoch" else value
        for key, value in values.items()
        if key != "over_time"
    }


def remarks(report: Mapping[str, Any]) -> list[str]:
    """The remarks of a report that ask for a change. Without effect, the clip is worth one where epochs overfit."""
    shown = [report["auc_remark"], report["clip_remark"] if report["auc_remark"] else None]
    return [each for each in (*shown, report["calibration_remark"]) if each]


def shared_report(run: ActiveRun) -> dict[str, Any]:
    """Entries that every report has."""
    statistics = run.state.clip_watch.total() if run.state.clip_watch else None
    return {
        "steps": run.steps,
        "clip_statistics": statistics,
        "clip_remark": clip_remark(statistics),
        "cuda_graph": run.state.captured,
        "seed": run.config.train.seed,
        **run.plan.describe(),
        **run.state.environment,
    }
