"""`cowrec bench`: training throughput and memory in the steady state, on ids with Criteo's frequencies.

Before the measurements, one pass over the stream of ids records the last sample of every row, which all combinations
use.
"""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cowrec.trainer.runs.run_dir import to_json
from cowrec.trainer.runtime.environment import launched_rank
from cowrec.trainer.runtime.errors import Interrupted

from .case_runner import case_runner
from .mlperf import mlperf_lines, mlperf_short
from .plot import measured, plot, short
from .settings import Bench


def bench(settings: Bench, output: Path) -> list[dict[str, Any]]:
    """Measures every combination; writes a JSON object per line as soon as it is measured, then a plot beside them.

    Returns:
        The lines. Each combination has

        * mode, clip, precision, batch_size, spacing, model, max_rows;
        * error, the text of what ended it, if it failed; the others are measured all the same. Otherwise:
        * table_rows, table_bytes, moments_bytes;
        * samples_per_second and step_ms (medians over the steps), samples_per_second_quartiles, steps (how many);
        * host_ms: processor time of the process per step, of all its threads together; on CUDA what the host needs to
          start the device's work. kernels: launched per step, and captured: whether the steps replayed a CUDA graph
          (both None on CPU);
        * step_parts_ms: the parts of a step (see step_parts.py) by their shares in some profiled steps;
        * minutes_of_10_epochs of Criteo at this speed; roofline: the least flops and bytes per sample, the rates of
          both that this machine reached, and the resulting step in ms;
        * peak_memory_bytes of the process (on CUDA: what torch allocated on the device), rss_before_tables_bytes, and
          peak_without_tables_bytes, the peak of the same measurement on tables of two rows;
        * steps_before: steps before the measurement; gaps: absence of the rows, as rows per sample whose previous
          lookup was 2^k to 2^(k+1) - 1 steps earlier; never_seen rows per sample; missed_row_steps per sample, from the
          first step on for rows never seen; replayed_row_steps: those of them that were computed, until the row had
          decayed (None for modes other than replay).

        All have config, versions, device, threads, git_commit.

    Raises:
        Interrupted: by Ctrl-C; the file has the combinations measured before.
    """
    with case_runner(settings) as runner:
        lines = written((runner.line(case) for case in runner.cases), output, short)
    if measured(lines):
        plot(lines, output.with_suffix(".png"))
    return lines


def bench_mlperf(settings: Bench, output: Path) -> list[dict[str, Any]]:
    """Measures MLPerf's DLRM-DCNv2; see :func:`mlperf_lines`. Writes a JSON object per line as soon as it is measured.

    Raises:
        ValueError: from :func:`mlperf_lines`.
        Interrupted: by Ctrl-C; the file has the combinations measured before.
    """
    return written(mlperf_lines(settings), output, mlperf_short)


def written(
    lines: Iterable[dict[str, Any]], output: Path, describe: Callable[[dict[str, Any]], str]
) -> list[dict[str, Any]]:
    """Writes and shows each line as soon as it is there; returns them all.

    Raises:
        Interrupted: by Ctrl-C; the file has the lines until then.
    """
    found: list[dict[str, Any]] = []
    mine = output if launched_rank() == 0 else Path(os.devnull)
    with mine.open("w", encoding="utf-8", buffering=1) as file:
        try:
            for line in lines:
                found.append(line)
                file.write(to_json(line) + "\n")
                print(describe(line), file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            raise Interrupted(f"stopped; {output} holds the {len(found)} combinations measured before") from None
    return found
