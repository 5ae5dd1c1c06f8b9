"""Times the replay kernel alone, on one table of Criteo's width: what a turn of its loop costs, and what may slow it.

* one row: a turn, by itself.
* a column of padding: takes no step, so it costs nothing.
* a slow root: a column whose second moments are so small that roots are slow, as those of padding once were.
* two rows that share a warp, of which one decays before the absence of the other begins: no turns in between.
* many rows: steps of short absences, of which the GPU takes many at once.
"""

from cowrec.trainer.runtime.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cowrec.sparse_opt.algorithm.adam import adam_constants
from cowrec.sparse_opt.kernels import triton_replay
from cowrec.sparse_opt.kernels.layout import REST_INTERVAL, AdamState, DeviceSteps, LookupLayout
from cowrec.sparse_opt.optim.replay import StepHistory, rest_thresholds

from .machine import about, append
from .rows import CONFIG, LIMIT, falling_rate
from .smoke import interpret

DIM = 12
RUNS = 4
_NONE = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file that lines of results are added to")
    parser.add_argument("--part", default="replay", help="name of the part, for the lines")
    parser.add_argument("--rehearse", action="store_true", help="on CPU, with few steps, under TRITON_INTERPRET=1")
    arguments = parser.parse_args()
    if arguments.rehearse:
        interpret()
    device = torch.device("cpu" if arguments.rehearse else "cuda")
    provenance = about("rehearsal" if arguments.rehearse else torch.cuda.get_device_name())
    step, many = (64, 4) if arguments.rehearse else (8192, 200_000)
    short = np.random.default_rng(0).integers(step - step // 32, step, many)
    absences: dict[str, tuple[Any, Callable[[AdamState], None]]] = {
        "one row": ([0], lambda state: None),
        "a column of padding": ([0], lambda state: _fill(state, (0.0, 0.0, 0.0), columns=DIM - 1)),
        "a slow root": ([0], lambda state: _fill(state, (0.0, 0.0, 1e-35), columns=DIM - 1)),
        "two rows": ([0, step - step // 16], lambda state: _fill(state, (1e-13, 0.0, 1e-20), rows=0)),
        "many rows": (short, lambda state: None),
    }
    for case, (last, change) in absences.items():
        found = timed(torch.tensor(last, dtype=torch.int32, device=device), step, change)
        print(f"{case}: {found}", flush=True)
        append(arguments.output, {"part": arguments.part, "case": case, **found} | provenance)
    return 0


def _fill(state: AdamState, values: tuple[float, ...], rows: Any = slice(None), columns: Any = slice(None)) -> None:
    for each, value in zip(state, values, strict=True):
        each.view(-1, DIM)[rows, columns] = value


def timed(last: Tensor, step: int, change: Callable[[AdamState], None]) -> dict[str, Any]:
    """Replays rows with these last steps, int32 [n], up to a step; ``change`` changes their state before.

    Returns:
        us of the fastest of four runs (None on CPU), the programs' turns and the longest one's, and how many rows
        came to rest.
    """
    count, device = len(last), last.device
    one = torch.ones(1, dtype=torch.int64, device=device)
    layout = LookupLayout(count * one, DIM * one, 0 * one, 0 * one, DIM, count * DIM, 1, count)
    generator = torch.Generator(device).manual_seed(0)
    weights = torch.randn(count * DIM, generator=generator, device=device).mul_(1e-2)
    start = AdamState(weights, weights * 1e-2, torch.full_like(weights, 5e-8))
    change(start)
    history = StepHistory(CONFIG, device)
    history.replace(falling_rate(np.arange(1, step + 1)))
    taken, rows = step * one.int(), torch.arange(count, dtype=torch.int32, device=device)
    begin, fastest = triton_replay.distinct_begins(rows), None
    for _ in range(RUNS if device.type == "cuda" else 1):
        state, reached = AdamState(*(each.clone() for each in start)), last.clone()
        steps = DeviceSteps(taken, reached, *history.step_scalars, one.float(), 0.0 * one.double(), layout.dim)
        arguments = (state, steps, adam_constants(CONFIG), rest_thresholds(CONFIG, 1.0, [LIMIT]))
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
        triton_replay.replay_rows_on_device(rows, begin, layout, None, *arguments)
        if device.type == "cuda":
            ended.record()
            torch.cuda.synchronize()
            fastest = min(fastest or np.inf, 1000 * began.elapsed_time(ended))
    turns = turns_of_programs(last, reached, step)
    counts = {"turns": int(turns.sum()), "longest": int(turns.max()), "decayed": int((reached < 0).sum())}
    return {"us": fastest, "ns_of_longest_turn": fastest and 1000 * fastest / counts["longest"], **counts}


def turns_of_programs(last: Tensor, reached: Tensor, step: int, rows: int = 32 // 16) -> Tensor:
    """Counts the turns of the loop of each program of replay, int64 [programs] (see triton_replay.py).

    Args:
        last, reached: last steps of the rows before and after replay, as in :class:`DeviceSteps`, in the order of the
            programs.
        step: step to which they were brought.
        rows: rows of a program; two of 9 to 16 columns.
    """
    ends = torch.where(reached < 0, -1 - reached, step).long()
    last = torch.where((last < 0) | (last >= step), _NONE, last).long()
    missing = -len(last) % rows
    padding = torch.full((missing,), _NONE, device=last.device)
    last, ends = (torch.cat([each, padding]).view(-1, rows) for each in (last, ends))
    behind, first = last < _NONE, last.min(1, keepdim=True).values
    shift = (last - first) // REST_INTERVAL * REST_INTERVAL
    return torch.where(behind, ends - shift - first, 0).max(1).values


if __name__ == "__main__":
    sys.exit(main())
