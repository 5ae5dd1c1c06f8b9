"""`cowrec bench`: training throughput and memory in the steady state, on ids with Criteo's frequencies; its tables."""

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from ..reports.plotting import size_name
from ..reports.text_table import aligned
from ..runs.run_dir import to_json
from ..runtime.environment import environment, launched_rank, launched_world_size
from ..runtime.errors import Interrupted, ProcessFailed
from ..runtime.subprocess_call import Subprocess
from .criteo import Bench, cases, measure_criteo, run_ids
from .mlperf import BATCH_SIZE_OF_GPU, NAME, PUBLISHED, ROW_BYTES, TABLE_ROWS, measure_mlperf, mlperf_config

Lines = Sequence[dict[str, Any]]

PAPER_MINUTES = {1024: 768, 8192: 102, 131072: 9}
"""Ten epochs of Criteo, DeepFM with CowClip on one V100. Source: CowClip (arXiv 2204.06240), Table 5."""
_INTERRUPTED = "interrupted"


class Combination(NamedTuple):
    """One combination to measure.

    Attributes:
        about: mode, model and max_rows.
        measure: module-level function that yields values of the line as they become known.
        table_bytes: bytes of tables and moments, for the message of a failure.
    """

    about: dict[str, Any]
    config: RunConfig
    measure: Callable[..., Iterator[dict[str, Any]]]
    arguments: tuple[Any, ...]
    table_bytes: int


def bench(settings: Bench, output: Path, *, mlperf: bool = False) -> list[dict[str, Any]]:
    """Measures every combination; writes a JSON object per line as soon as it is measured.

    In MLPerf's shape the batch sizes are those of all processes together; under torchrun all processes measure
    together, and the first one has the lines. In Criteo's shape one pass over the stream of ids first records the last
    sample of every row, which all combinations use.

    Returns:
        The lines. Each has mode, clip, precision, batch_size, model, max_rows, config, versions, device, threads,
        git_commit. A combination that failed has error, its text; the others are measured all the same. Other values
        that were known by then:
        * table_rows, table_bytes, moments_bytes;
        * samples_per_second and step_ms (medians over the steps), samples_per_second_quartiles, steps (how many);
        * host_ms: processor time of all threads of the process per step. kernels: launched per step, and captured:
          whether the steps replayed a CUDA graph (both None on CPU);
        * step_parts_ms: time of each of :data:`PARTS`, by their shares in some profiled steps;
        * roofline: the least flops and bytes per sample, the rates of both that this machine reached, and the resulting
          step in ms. Each kernel counts once a sample, which is too little for xdeepfm (an eighth of the flops) and
          autoint (a fiftieth), whose kernels serve columns or fields;
        * peak_memory_bytes of the process (on CUDA: what torch allocated on the device), and rss_before_tables_bytes;
        * of Criteo's shape minutes_of_10_epochs at this speed, and steps_before: steps before the measurement;
        * of MLPerf's shape world_size and samples_per_second_of_gpu (of a process).

    Raises:
        UserError: a batch size of MLPerf's shape is not a multiple of the number of processes.
        Interrupted: Ctrl-C ended a combination; the file has the combinations measured before.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = _of_mlperf(settings) if mlperf else _of_criteo(settings, Path(folder) / "last_samples.npy")
        return _written(measured_lines(found, keeps_process=settings.device == "cuda"), output)


def _of_criteo(settings: Bench, last_samples: Path) -> Iterator[Combination]:
    ids = CriteoIds(max_rows=settings.max_rows)
    np.save(last_samples, run_ids(ids, settings.samples))
    for case in cases(settings, ids, last_samples):
        about = {"mode": case.config.optimizer.absent_rows, "model": settings.model, "max_rows": settings.max_rows}
        yield Combination(about, case.config, measure_criteo, (case,), 144 * int(ids.table_rows.sum()))


def _of_mlperf(settings: Bench) -> list[Combination]:
    rows, found = [min(rows, settings.max_rows or rows) for rows in TABLE_ROWS], []
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

    With ``keeps_process``, on CUDA where torch counts the peak memory, the combinations share a process, which compiles
    kernels once. On CPU each has a process, whose peak memory is counted. Processes of torchrun measure themselves.
    """
    with Subprocess() as process:
        for combination in combinations:
            call = combination.measure if launched_world_size() > 1 else partial(process.each, combination.measure)
            line = _line(combination, partial(call, *combination.arguments))
            if not keeps_process:
                process.close()
            if launched_rank() == 0:
                yield line


def _line(combination: Combination, take: Callable[[], Iterator[dict[str, Any]]]) -> dict[str, Any]:
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


def table(lines: Lines) -> str:
    """Formats combinations that did not fail: speed and memory, time of a step's parts, time of 10 epochs.

    Memory is in GB: the peak, and the size of tables and moments. In MLPerf's shape the published speed is in place of
    the time of 10 epochs.
    """
    head = ["mode", "batch", "samples/s", "quartiles", "step ms", "peak GB", "tables GB"]
    parts = [part.replace("_", " ") for part in lines[0]["step_parts_ms"]]
    of_parts = [["step ms by part", "batch", *parts, "roofline"]]
    for line in lines:
        times = [*line["step_parts_ms"].values(), line["roofline"]["step_ms"]]
        of_parts.append(
            [_name(line), size_name(line["batch_size"]), *("-" if time is None else f"{time:.2f}" for time in times)]
        )
    last = _published if lines[0]["model"] == NAME else _minutes_table
    return "\n\n".join([aligned([head, *map(_cells, lines)]), aligned(of_parts), last(lines)])


def short(line: dict[str, Any]) -> str:
    """Formats a combination in one line."""
    if "error" in line:
        return f"{_name(line)}, batch {size_name(line['batch_size'])}: failed: {line['error']}"
    name, batch, speed, _, step, peak, *_ = _cells(line)
    return f"{name}, batch {batch}: {speed} samples/s, {step} ms a step, {peak} GB"


def _minutes_table(lines: Lines) -> str:
    sizes = sorted({line["batch_size"] for line in lines})
    minutes: dict[str, dict[int, float]] = {}
    floors: dict[str, dict[int, float]] = {}
    for line in lines:
        size, of_10_epochs = line["batch_size"], line["minutes_of_10_epochs"]
        minutes.setdefault(_name(line), {})[size] = of_10_epochs
        floor = of_10_epochs * line["roofline"]["step_ms"] / line["step_ms"]
        floors.setdefault(f"roofline {line['precision']}", {})[size] = floor
    rows = [["minutes of 10 epochs", *map(size_name, sizes)]]
    for name, by_size in {**minutes, **floors}.items():
        rows.append([name, *(f"{by_size[size]:,.1f}" if size in by_size else "-" for size in sizes)])
    if lines[0]["model"] == "deepfm":
        rows.append(["CowClip paper, one V100", *(str(PAPER_MINUTES.get(size, "-")) for size in sizes)])
    return aligned(rows)


def _published(lines: Lines) -> str:
    speeds = ", ".join(f"{line['samples_per_second_of_gpu']:,.0f}" for line in lines)
    own = f"samples/s of each of {lines[0]['world_size']} processes: {speeds}"
    return f"{own}\nMLPerf, 8 x H200, batch {8 * BATCH_SIZE_OF_GPU:,}: {PUBLISHED / 8:,.0f} samples/s each"


def _cells(line: dict[str, Any]) -> list[str]:
    return [
        _name(line),
        size_name(line["batch_size"]),
        f"{line['samples_per_second']:,.0f}",
        " - ".join(f"{speed:,.0f}" for speed in line["samples_per_second_quartiles"]),
        f"{line['step_ms']:.1f}",
        f"{line['peak_memory_bytes'] / 1e9:.2f}",
        f"{(line['table_bytes'] + line['moments_bytes']) / 1e9:.2f}",
    ]


def _name(line: dict[str, Any]) -> str:
    """Names the mode, and the values that are not the default."""
    unclipped = ["no clip"] if line["clip"] == "off" else []
    precision = [line["precision"]] if line["precision"] != "float32" else []
    return ", ".join([line["mode"], *unclipped, *precision])
