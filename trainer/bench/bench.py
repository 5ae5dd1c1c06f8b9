"""`cowrec bench`: training throughput and memory in the steady state, on ids with Criteo's frequencies.

Before the measurements, one pass over the stream of ids records the last sample of every row, which all combinations
use.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from cowrec.data_pipeline.files import naming_full_disk
from cowrec.trainer.runs.run_dir import to_json
from cowrec.trainer.runtime.environment import launched_rank, launched_world_size
from cowrec.trainer.runtime.errors import Interrupted
from cowrec.trainer.runtime.subprocess_call import Subprocess

from .measurement import INTERRUPTED, case_runner, measured_line
from .settings import Bench, Preset
from .table import short


def bench(settings: Bench, output: Path) -> list[dict[str, Any]]:
    """Measures every combination; writes a JSON object per line as soon as it is measured.

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
        * minutes_of_10_epochs of Criteo at this speed; roofline: the least flops and bytes per sample, the rates of
          both that this machine reached, and the resulting step in ms. Each kernel counts once a sample, which is too
          little for xdeepfm (an eighth of the flops) and autoint (a fiftieth), whose kernels serve columns or fields;
        * peak_memory_bytes of the process (on CUDA: what torch allocated on the device), and rss_before_tables_bytes;
        * steps_before: steps before the measurement.

        All have config, versions, device, threads, git_commit.

    Raises:
        Interrupted: by Ctrl-C; the file has the combinations measured before.
    """
    with case_runner(settings) as runner:
        return _written((runner.line(case) for case in runner.cases), output)


def bench_preset(preset: Preset, settings: Bench, output: Path) -> list[dict[str, Any]]:
    """Measures another shape for each batch size, precision and clip of the settings, as :func:`bench`.

    Batch sizes are those of all processes together; under torchrun all measure together, and the first has the lines.

    Returns:
        The lines, without what is about Criteo's epochs; MLPerf's with world_size and samples_per_second_of_gpu (of a
        process).

    Raises:
        ValueError: a batch size is not a multiple of the number of processes.
        Interrupted: by Ctrl-C; the file has the combinations measured before.
    """
    launched = launched_world_size()
    for size in settings.batch_sizes:
        if size % launched:
            raise ValueError(f"--batch-sizes {size} is not a multiple of the {launched} processes")
    return _written(_preset_lines(preset, settings, launched), output)


def _preset_lines(preset: Preset, settings: Bench, launched: int) -> Iterator[dict[str, Any]]:
    rows = [min(each, settings.max_rows or each) for each in preset.table_rows]
    with Subprocess() as process:
        for size, precision, clip in product(settings.batch_sizes, settings.precisions, settings.clips):
            config = preset.config(size, precision, clip, settings.device)
            about = {"mode": config.optimizer.embedding, "model": preset.name, "max_rows": settings.max_rows}
            arguments = (config, rows, settings.seconds)
            here = partial(preset.measure, *arguments)
            take = here if launched > 1 else partial(process.each, preset.measure, *arguments)
            line = measured_line(about, config, take, sum(rows) * preset.row_bytes)
            if settings.device == "cpu":
                process.close()
            if launched_rank() == 0:
                yield line


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
                if line.get("error") == INTERRUPTED:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise Interrupted(f"stopped; {output} holds the {len(found)} combinations measured before") from None
    return found
