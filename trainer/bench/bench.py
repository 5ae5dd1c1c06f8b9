"""`cowrec bench`: training throughput and memory in the steady state, on ids with Criteo's frequencies.

Before the measurements, one pass over the stream of ids records the last sample of every row, which all combinations
use.
"""

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.errors import UserError
from cowrec.files import naming_full_disk

from ..config.run import RunConfig
from ..runs.provenance import environment
from ..runs.run_dir import to_json
from ..runtime.environment import launched_rank, launched_world_size
from ..runtime.errors import Interrupted, ProcessFailed
from ..runtime.subprocess_call import Subprocess
from .measurement import cases, measure, run_ids
from .mlperf import NAME, ROW_BYTES, TABLE_ROWS, measure_mlperf, mlperf_config
from .settings import Bench
from .table import short

_INTERRUPTED = "interrupted"
"""``error`` of a combination that Ctrl-C has ended."""


class Combination(NamedTuple):
    """One combination to measure.

    Attributes:
        about: mode, model and max_rows.
        measure: function of a module that yields values of the line as they become known.
        arguments: of that function.
        table_bytes: of tables and moments, for the message of a failure.
    """

    about: dict[str, Any]
    config: RunConfig
    measure: Callable[..., Iterator[dict[str, Any]]]
    arguments: tuple[Any, ...]
    table_bytes: int


def bench(settings: Bench, output: Path, *, mlperf: bool = False) -> list[dict[str, Any]]:
    """Measures every combination; writes a JSON object per line as soon as it is measured.

    Of MLPerf's shape, these are the batch sizes, precisions and clips of the settings. Its batch sizes are those of all
    processes together; under torchrun all measure together, and the first has the lines.

    Returns:
        The lines. Each combination has

        * mode, clip, precision, batch_size, model, max_rows;
        * error, the text of what ended it, if it failed; the others are measured all the same. All else, as far as it
          was known by then:
        * table_rows, table_bytes, moments_bytes;
        * samples_per_second and step_ms (medians over the steps), samples_per_second_quartiles, steps (how many);
        * host_ms: processor time of the process per step, of all its threads together; on CUDA what the host needs to
          start the device's work. kernels: launched per step, and captured: whether the steps replayed a CUDA graph
          (both None on CPU);
        * step_parts_ms: the parts of a step (see step_parts.py) by their shares in some profiled steps;
        * roofline: the least flops and bytes per sample, the rates of both that this machine reached, and the resulting
          step in ms. Each kernel counts once a sample, which is too little for xdeepfm (an eighth of the flops) and
          autoint (a fiftieth), whose kernels serve columns or fields;
        * peak_memory_bytes of the process (on CUDA: what torch allocated on the device), and rss_before_tables_bytes;
        * of Criteo's shape minutes_of_10_epochs at this speed, and steps_before: steps before the measurement;
        * of MLPerf's shape world_size and samples_per_second_of_gpu (of a process).

        All have config, versions, device, threads, git_commit.

    Raises:
        ValueError: a batch size of MLPerf's shape is not a multiple of the number of processes.
        Interrupted: by Ctrl-C; the file has the combinations measured before.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = _of_mlperf(settings) if mlperf else _of_criteo(settings, Path(folder) / "last_samples.npy")
        return _written(measured_lines(found, keeps_process=settings.device == "cuda"), output)


def _of_criteo(settings: Bench, last_samples: Path) -> Iterator[Combination]:
    """The combinations of Criteo's shape, after the ids before them have been drawn into a file."""
    ids = CriteoIds(max_rows=settings.max_rows)
    np.save(last_samples, run_ids(ids, settings.samples))
    for case in cases(settings, ids, last_samples):
        about = {"mode": case.config.optimizer.absent_rows, "model": settings.model, "max_rows": settings.max_rows}
        yield Combination(about, case.config, measure, (case,), 144 * int(ids.table_rows.sum()))


def _of_mlperf(settings: Bench) -> list[Combination]:
    rows, found = [min(each, settings.max_rows or each) for each in TABLE_ROWS], []
    for size, precision, clip in product(settings.batch_sizes, settings.precisions, settings.clips):
        if size % launched_world_size():
            raise UserError(f"--batch-sizes {size} is not a multiple of the {launched_world_size()} processes")
        config = mlperf_config(size, precision, clip, settings.device)
        about = {"mode": config.optimizer.embedding, "model": NAME, "max_rows": settings.max_rows}
        arguments = (config, rows, settings.seconds)
        found.append(Combination(about, config, measure_mlperf, arguments, sum(rows) * ROW_BYTES))
    return found


def measured_lines(combinations: Iterable[Combination], *, keeps_process: bool) -> Iterator[dict[str, Any]]:
    """Measures one combination after the other; yields its line, on the first process.

    On CPU the peak of its memory is that of a process, so that each has its own. On CUDA torch counts it, and all share
    a process, which imports libraries and compiles kernels once; after a failure a new one is started. Processes of
    torchrun measure themselves.
    """
    with Subprocess() as process:
        for each in combinations:
            call = each.measure if launched_world_size() > 1 else partial(process.each, each.measure)
            line = _line(each, partial(call, *each.arguments))
            if not keeps_process:
                process.close()
            if launched_rank() == 0:
                yield line


def _line(combination: Combination, take: Callable[[], Iterator[dict[str, Any]]]) -> dict[str, Any]:
    """The line of a combination: what identifies it, what was measured, and how; ``error`` if that is not all."""
    config = combination.config
    of_config = {"precision": config.train.precision, "batch_size": config.train.batch_size}
    about = {**combination.about, "clip": "off" if config.clip.rule == "none" else "on", **of_config}
    how = {
        "config": {key: dataclasses.asdict(getattr(config, key)) for key in ("model", "optimizer", "clip")},
        **environment(torch.device(config.train.device)),
    }
    values: dict[str, Any] = {}
    try:
        for known in take():
            values |= known
    except ProcessFailed as error:
        needs = f"its tables and their moments need {combination.table_bytes / 1e9:.1f} GB of memory"
        values["error"] = f"{error} ({needs})"
    except KeyboardInterrupt:
        if not values:
            raise
        values["error"] = _INTERRUPTED
    values.pop("step_seconds", None)
    return {**about, **values, **how}


def _written(lines: Iterable[dict[str, Any]], output: Path) -> list[dict[str, Any]]:
    """Writes and shows each line as soon as it is there; returns them all."""
    found: list[dict[str, Any]] = []
    mine = output if launched_rank() == 0 else Path(os.devnull)
    with naming_full_disk(mine), mine.open("w", encoding="utf-8", buffering=1) as file:
        try:
            for line in lines:
                found.append(line)
                file.write(to_json(line) + "\n")
                print(short(line), file=sys.stderr, flush=True)
                if line.get("error") == _INTERRUPTED:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise Interrupted(f"stopped; {output} holds the {len(found)} combinations measured before") from None
    return found
