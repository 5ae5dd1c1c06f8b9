"""Measurement of cases, each as a line of values for the output of `cowrec bench`."""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.models import physical_dim
from cowrec.trainer.runs.provenance import environment
from cowrec.trainer.runtime.errors import ProcessFailed
from cowrec.trainer.runtime.subprocess_call import Subprocess, run_in_subprocess

from .absence import Absence, last_steps, measure_absence
from .roofline import bytes_per_sample, floor_seconds
from .settings import EPOCH_SAMPLES, Bench, cases
from .steady_state import Case, Measurement, measure


@contextmanager
def case_runner(settings: Bench) -> Iterator["CaseRunner"]:
    """Draws the ids before the measurement; at the end closes the process and removes the file of the cases."""
    ids = CriteoIds(max_rows=settings.max_rows)
    with tempfile.TemporaryDirectory() as folder, Subprocess() as process:
        last_samples = run_ids(ids, settings.samples)
        file = Path(folder) / "last_samples.npy"
        np.save(file, last_samples)
        yield CaseRunner(settings, list(cases(settings, ids, file)), last_samples, process)


class CaseRunner:
    """Measures cases one after the other, each with the peak of its memory.

    On CPU that is the peak of a process, so that each case has its own. On CUDA torch counts it, and all cases share a
    process, which imports libraries and compiles kernels once; after a failure a new one is started.

    Attributes:
        cases: the combinations of the settings, in order.
    """

    def __init__(self, settings: Bench, cases: list[Case], last_samples: np.ndarray, process: Subprocess) -> None:
        self.cases = cases
        self._settings, self._last_samples = settings, last_samples
        self._call = process.call if settings.device == "cuda" else run_in_subprocess
        self._peaks_without_tables: dict[int, int] = {}

    def line(self, case: Case, timeout: float | None = None) -> dict[str, Any]:
        """Measures a case. A failed one has the keys that identify it, its configuration, and ``error``.

        Args:
            case: one of ``cases``.
            timeout: seconds after which a measurement is given up; by default never.
        """
        about = {
            "mode": case.config.optimizer.absent_rows,
            "clip": "off" if case.config.clip.rule == "none" else "on",
            "precision": case.config.train.precision,
            "batch_size": case.batch_size,
            "spacing": case.spacing,
            "model": case.config.model.name,
            "max_rows": self._settings.max_rows,
        }
        how = {
            "config": {key: dataclasses.asdict(getattr(case.config, key)) for key in ("model", "optimizer", "clip")},
            **environment(torch.device(case.config.train.device)),
        }
        started = time.monotonic()
        try:
            measured = self._call(measure, case, timeout=timeout)
            left = None if timeout is None else max(timeout - (time.monotonic() - started), 0.0)
            without_tables = self._peak_without_tables(case, left)
        except ProcessFailed as error:
            rows = int(case.ids.table_rows.sum()) * case.spacing
            needs = f"its {rows:,} table rows and their moments need {rows * 144 / 1e9:.1f} GB of memory"
            return {**about, "error": f"{error} ({needs})", **how}
        absence = self._absence(case, len(measured.step_seconds))
        return {**about, **_values(case, measured, absence), "peak_without_tables_bytes": without_tables, **how}

    def _peak_without_tables(self, case: Case, timeout: float | None) -> int:
        """Peak memory at this batch size with tables of almost no size."""
        size = case.batch_size
        if size not in self._peaks_without_tables:
            optimizer = dataclasses.replace(case.config.optimizer, absent_rows="lazy")
            config = dataclasses.replace(case.config, optimizer=optimizer)
            small = dataclasses.replace(case, config=config, ids=CriteoIds(max_rows=2), seconds=0.0)
            self._peaks_without_tables[size] = self._call(measure, small, timeout=timeout).peak_memory
        return self._peaks_without_tables[size]

    def _absence(self, case: Case, steps: int) -> Absence:
        first = case.steps_before * case.batch_size
        rows = case.ids.rows(first, (case.warmup_steps + steps) * case.batch_size)
        last = last_steps(self._last_samples, case.batch_size, case.steps_before)
        tables = np.split(last, np.cumsum(case.ids.table_rows)[:-1])
        return measure_absence(rows, tables, case.batch_size, case.steps_before, case.warmup_steps)


def run_ids(ids: CriteoIds, samples: int) -> np.ndarray:
    """The result of :meth:`CriteoIds.last_samples` for the first samples of the stream; shows a progress bar."""
    total = samples * len(ids.table_rows)
    hidden = not sys.stderr.isatty()
    with tqdm(total=total, unit=" ids", desc="ids before", unit_scale=True, leave=False, disable=hidden) as bar:
        return ids.last_samples(samples, bar.update)


def speed(batch_size: int, step_seconds: list[float]) -> dict[str, Any]:
    """Samples per second and milliseconds per step: medians and quartiles over the steps."""
    low, median, high = np.quantile(step_seconds, (0.25, 0.5, 0.75)).tolist()
    return {
        "samples_per_second": batch_size / median,
        "samples_per_second_quartiles": [batch_size / high, batch_size / low],
        "step_ms": 1e3 * median,
        "steps": len(step_seconds),
    }


def _values(case: Case, measured: Measurement, absence: Absence) -> dict[str, Any]:
    rates, fields = measured.rates, len(case.ids.table_rows)
    distinct_rows = sum(absence.seen.values()) + absence.never_seen
    traffic = bytes_per_sample(fields, physical_dim(case.config.model.embedding_dim), distinct_rows)
    floor = case.batch_size * floor_seconds(rates, measured.flops_per_sample, traffic)
    speeds = speed(case.batch_size, measured.step_seconds)
    return {
        **speeds,
        "host_ms": 1e3 * measured.host_seconds,
        "captured": measured.captured,
        "kernels": measured.profile.kernels,
        "step_parts_ms": {part: speeds["step_ms"] * share for part, share in measured.profile.shares.items()},
        "minutes_of_10_epochs": 10 * EPOCH_SAMPLES / speeds["samples_per_second"] / 60,
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
        "steps_before": case.steps_before,
        "gaps": {str(least): rows for least, rows in absence.seen.items()},
        "never_seen": absence.never_seen,
        "missed_row_steps": absence.missed_row_steps,
        "replayed_row_steps": measured.replayed_row_steps,
    }
