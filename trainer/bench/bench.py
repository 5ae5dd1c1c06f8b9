"""`cowrec bench`: training throughput and memory in the steady state, on ids with Criteo's frequencies.

Each combination is measured in its own process, so that its peak memory is known. Before that, one pass over the stream
of ids records the last sample of every row, which all combinations use.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from tqdm import tqdm

from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.models import ModelConfig, physical_dim, require_model
from cowrec.sparse_opt import PRESETS, AdamConfig, ReferenceCowClip
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.config.sections import ClipConfig, OptimizerConfig, TrainConfig
from cowrec.trainer.runs.provenance import environment
from cowrec.trainer.runs.run_dir import to_json
from cowrec.trainer.runtime.errors import Interrupted, ProcessFailed
from cowrec.trainer.runtime.subprocess_call import run_in_subprocess

from .absence import Absence, last_steps, measure_absence
from .plot import plot, short
from .roofline import bytes_per_sample, floor_seconds
from .steady_state import WARMUP_STEPS, Case, Measurement, measure

EPOCH_SAMPLES = 41_256_555
"""Samples of Criteo's training split as published: nine tenths of 45,840,617."""
_BASE_BATCH_SIZE = 1024
_LAST_SAMPLES = "last_samples.npy"
_MOST_STEPS, _LEAST_STEPS, _MOST_SAMPLES = 256, 8, 1 << 20
"""Limits on the steps of a combination, so that their batches fit into memory."""


@dataclass(frozen=True)
class Bench:
    """Settings of a benchmark; each combination of modes, clips, precisions, batch sizes and spacings is one line.

    Attributes:
        modes: values of optimizer.absent_rows.
        clips: "on" and "off".
        precisions: values of train.precision.
        batch_sizes: samples per step.
        model: name of the network.
        max_rows: most rows of a table; None for Criteo's full vocabulary.
        spacings: distances of two ids' rows; tables are that many times larger.
        epoch_share: share of an epoch after which the measurement starts.
        seconds: time to measure each combination; at least 5 steps.
        device: "cpu" or "cuda".

    Raises:
        ValueError: a value that is unknown, out of range or repeated.
    """

    modes: Sequence[str] = ("replay", "lazy", "dense")
    batch_sizes: Sequence[int] = (1024, 8192, 65536)
    model: str = "deepfm"
    max_rows: int | None = None
    spacings: Sequence[int] = (1,)
    epoch_share: float = 0.9
    seconds: float = 20.0
    clips: Sequence[str] = ("on",)
    precisions: Sequence[str] = ("float32",)
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_model(self.model)
        adam, train = get_type_hints(AdamConfig), get_type_hints(TrainConfig)
        for flag, names, known in (
            ("absent-rows", self.modes, get_args(adam["absent_rows"])),
            ("clip", self.clips, ("on", "off")),
            ("precision", self.precisions, get_args(train["precision"])),
            ("device", [self.device], ("cpu", "cuda")),
        ):
            for name in names:
                if name not in known:
                    raise ValueError(f"--{flag} {name!r} is not known; known: {', '.join(known)}")
        listed: tuple[tuple[str, Sequence[Any]], ...] = (
            ("absent-rows", self.modes),
            ("clip", self.clips),
            ("precision", self.precisions),
            ("batch-sizes", self.batch_sizes),
            ("spacing", self.spacings),
        )
        for flag, values in listed:
            if not values or len(set(values)) < len(values):
                raise ValueError(f"--{flag} needs one value or several different ones, got {values}")
        for flag, value, fits, what in (
            ("batch-sizes", min(self.batch_sizes), min(self.batch_sizes) >= 1, "at least 1"),
            ("spacing", min(self.spacings), min(self.spacings) >= 1, "at least 1"),
            ("rows", self.max_rows, self.max_rows is None or self.max_rows >= 2, "full or at least 2"),
            ("epoch-share", self.epoch_share, 0 < self.epoch_share <= 40, "above 0 and at most 40"),
            ("seconds", self.seconds, 0 <= self.seconds < inf, "at least 0"),
        ):
            if not fits:
                raise ValueError(f"--{flag} must be {what}, got {value}")
        if self.device == "cpu" and "tf32" in self.precisions:
            raise ValueError("--precision tf32 exists on CUDA only; add --device cuda, or measure float32 or bfloat16")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda, but torch sees no GPU; measure with --device cpu or check the driver")

    @property
    def samples(self) -> int:
        """Samples of the stream before the measurement starts: complete steps of the largest batch."""
        largest = max(self.batch_sizes)
        return max(round(self.epoch_share * EPOCH_SAMPLES / largest), 1) * largest


def bench(settings: Bench, output: Path) -> list[dict[str, Any]]:
    """Measures every combination; writes a JSON object per line as soon as it is measured, then a plot beside them.

    Returns:
        The lines. Each combination has

        * mode, clip, precision, batch_size, spacing, model, max_rows; table_rows, table_bytes, moments_bytes;
        * samples_per_second and step_ms (medians over the steps), samples_per_second_quartiles, steps (how many);
        * step_parts_ms: the parts of a step (see step_parts.py) by their shares in some profiled steps;
        * minutes_of_10_epochs of Criteo at this speed; roofline: the least flops and bytes per sample, the rates of
          both that this machine reached, and the resulting step in ms;
        * peak_memory_bytes of the process (on CUDA: what torch allocated on the device), rss_before_tables_bytes, and
          peak_without_tables_bytes, the peak of the same measurement on tables of two rows;
        * steps_before: steps before the measurement; gaps: absence of the rows, as rows per sample whose previous
          lookup was 2^k to 2^(k+1) - 1 steps earlier; never_seen rows per sample; missed_row_steps per sample, from the
          first step on for rows never seen; replayed_row_steps: those of them that were computed, until the row had
          decayed (None for modes other than replay);
        * config, versions, device, threads, git_commit.

    Raises:
        ValueError: a combination could not be measured, for example for lack of memory.
        Interrupted: by Ctrl-C; the file has the combinations measured before.
    """
    ids = CriteoIds(max_rows=settings.max_rows)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, output.open("w", encoding="utf-8", buffering=1) as file:
        last_samples = run_ids(ids, settings.samples)
        np.save(Path(folder) / _LAST_SAMPLES, last_samples)
        try:
            for case in cases(settings, ids, Path(folder) / _LAST_SAMPLES):
                measured = _measured(case)
                absence = _absence(case, last_samples, len(measured.step_seconds))
                lines.append(_line(settings, case, measured, _peak_without_tables(case, lines), absence))
                file.write(to_json(lines[-1]) + "\n")
                print(short(lines[-1]), file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped; {output} holds the {len(lines)} combinations measured before") from None
    plot(lines, output.with_suffix(".png"))
    return lines


def criteo_config(
    model: str, batch_size: int, mode: str, clip: str = "on", precision: str = "float32", device: str = "cpu"
) -> RunConfig:
    """The published settings for Criteo, as in scripts/configs/criteo.toml, at a batch size."""
    preset = PRESETS["criteo"](_BASE_BATCH_SIZE)
    return RunConfig(
        model=ModelConfig(name=model),
        train=TrainConfig(
            batch_size=batch_size,
            epochs=preset.epochs,
            device=device,  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
        ),
        optimizer=OptimizerConfig(
            base_batch_size=_BASE_BATCH_SIZE,
            scaling="cowclip",
            **dataclasses.asdict(preset.hyperparameters),
            warmup_epochs=preset.warmup_epochs,
            eps=1e-7,
            adam_epsilon="keras",
            embedding_init_std=preset.embedding_init_std,
            absent_rows=mode,  # type: ignore[arg-type]
        ),
        clip=ClipConfig(ReferenceCowClip.name, **dataclasses.asdict(preset.clip))
        if clip == "on"
        else ClipConfig("none"),
    )


def run_ids(ids: CriteoIds, samples: int) -> np.ndarray:
    """The result of :meth:`CriteoIds.last_samples` for the first samples of the stream; shows a progress bar."""
    total = samples * len(ids.table_rows)
    hidden = not sys.stderr.isatty()
    with tqdm(total=total, unit=" ids", desc="ids before", unit_scale=True, leave=False, disable=hidden) as bar:
        return ids.last_samples(samples, bar.update)


def cases(settings: Bench, ids: CriteoIds, last_samples: Path) -> Iterator[Case]:
    """The combinations, batch size by batch size, so that results to compare are measured close together."""
    variants = (settings.spacings, settings.precisions, settings.modes, settings.clips)
    for batch_size, spacing, precision, mode, clip in product(settings.batch_sizes, *variants):
        steps = min(max(_MOST_SAMPLES // batch_size, _LEAST_STEPS), _MOST_STEPS)
        yield Case(
            criteo_config(settings.model, batch_size, mode, clip, precision, settings.device),
            ids,
            spacing,
            EPOCH_SAMPLES,
            settings.samples,
            last_samples,
            steps,
            settings.seconds,
        )


def _measured(case: Case) -> Measurement:
    try:
        return run_in_subprocess(measure, case)
    except ProcessFailed as error:
        rows = int(case.ids.table_rows.sum()) * case.spacing
        raise ValueError(
            f"{case.config.optimizer.absent_rows} at batch size {case.batch_size}: {error}. Its {rows:,} table rows and"
            f" their moments need {rows * 144 / 1e9:.1f} GB of memory; lower --rows or --spacing if that is too much"
        ) from None


def _peak_without_tables(case: Case, lines: list[dict[str, Any]]) -> int:
    """Peak memory at this batch size with tables of almost no size; taken from an earlier line if there is one."""
    for line in lines:
        if line["batch_size"] == case.batch_size:
            return int(line["peak_without_tables_bytes"])
    config = dataclasses.replace(case.config, optimizer=dataclasses.replace(case.config.optimizer, absent_rows="lazy"))
    return _measured(dataclasses.replace(case, config=config, ids=CriteoIds(max_rows=2), seconds=0.0)).peak_memory


def _absence(case: Case, last_samples: np.ndarray, steps: int) -> Absence:
    first = case.steps_before * case.batch_size
    rows = case.ids.rows(first, (WARMUP_STEPS + steps) * case.batch_size)
    last = last_steps(last_samples, case.batch_size, case.steps_before)
    tables = np.split(last, np.cumsum(case.ids.table_rows)[:-1])
    return measure_absence(rows, tables, case.batch_size, case.steps_before, WARMUP_STEPS)


def _line(settings: Bench, case: Case, measured: Measurement, without_tables: int, absence: Absence) -> dict[str, Any]:
    low, median, high = np.quantile(measured.step_seconds, (0.25, 0.5, 0.75)).tolist()
    rates, fields = measured.rates, len(case.ids.table_rows)
    distinct_rows = sum(absence.seen.values()) + absence.never_seen
    traffic = bytes_per_sample(fields, physical_dim(case.config.model.embedding_dim), distinct_rows)
    floor = case.batch_size * floor_seconds(rates, measured.flops_per_sample, traffic)
    return {
        "mode": case.config.optimizer.absent_rows,
        "clip": "off" if case.config.clip.rule == "none" else "on",
        "precision": case.config.train.precision,
        "batch_size": case.batch_size,
        "spacing": case.spacing,
        "model": settings.model,
        "max_rows": settings.max_rows,
        "samples_per_second": case.batch_size / median,
        "samples_per_second_quartiles": [case.batch_size / high, case.batch_size / low],
        "step_ms": 1e3 * median,
        "steps": len(measured.step_seconds),
        "step_parts_ms": {part: 1e3 * median * share for part, share in measured.parts.items()},
        "minutes_of_10_epochs": 10 * EPOCH_SAMPLES / case.batch_size * median / 60,
        "roofline": {
            "flops_per_sample": measured.flops_per_sample,
            "bytes_per_sample": traffic,
            **dataclasses.asdict(rates),
            "step_ms": 1e3 * floor,
        },
        "table_rows": measured.table_rows,
        "table_bytes": measured.table_bytes,
        "moments_bytes": measured.moments_bytes,
        "rss_before_tables_bytes": measured.rss_before_tables,
        "peak_memory_bytes": measured.peak_memory,
        "peak_without_tables_bytes": without_tables,
        "steps_before": case.steps_before,
        "gaps": {str(least): rows for least, rows in absence.seen.items()},
        "never_seen": absence.never_seen,
        "missed_row_steps": absence.missed_row_steps,
        "replayed_row_steps": measured.replayed_row_steps,
        "config": {key: dataclasses.asdict(getattr(case.config, key)) for key in ("model", "optimizer", "clip")},
        **environment(torch.device(case.config.train.device)),
    }
