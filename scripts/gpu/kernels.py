"""Times the CUDA kernels of `EmbeddingAdam` alone, on ids with Criteo's frequencies; needs no CUDA build of FBGEMM.

A step finds the distinct rows of a batch's ids, replays the steps that they missed, and updates them: sums of
gradients, L2, clip and Adam. Rows have the last steps that most of an epoch leaves; gradients are noise. Writes a JSON
object per line. B samples, F fields, D columns.

python -m scripts.gpu.kernels --output kernels.jsonl
"""

from cowrec.trainer.runtime.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import argparse
import json
import time
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.models import physical_dim
from cowrec.sparse_opt import AdamConfig
from cowrec.sparse_opt.algorithm.adam import adam_constants
from cowrec.sparse_opt.kernels.layout import AdamState, DecayThresholds, DeviceSteps, LookupLayout, TableClips
from cowrec.sparse_opt.kernels.torch_rows import LookupIds
from cowrec.sparse_opt.kernels.triton_replay import replay_rows_on_device
from cowrec.sparse_opt.kernels.triton_rows import DeviceRows, find_rows_on_device
from cowrec.sparse_opt.optim.replay import StepHistory
from cowrec.sparse_opt.tbe.lookup import BagsOfLookup
from cowrec.trainer.bench.measurement import last_steps
from cowrec.trainer.bench.settings import EPOCH_SAMPLES, criteo_config
from cowrec.trainer.runs.provenance import environment
from cowrec.trainer.sharded_model.run_plan import Scaled

KERNELS = ("find", "replay", "update")
_WARMUP_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("kernels.jsonl"))
    parser.add_argument("--batch-sizes", default="131072,1024", help="samples of a step, with commas")
    parser.add_argument("--rows", type=int, help="most rows of a table (default: Criteo's)")
    parser.add_argument("--epoch-share", type=float, default=0.9, help="share of an epoch before the measurement")
    parser.add_argument("--steps", type=int, default=30, help="steps to time, after some that are not")
    parser.add_argument("--device", default="cuda", help="cpu only under TRITON_INTERPRET=1")
    arguments = parser.parse_args()
    ids, device = CriteoIds(max_rows=arguments.rows), torch.device(arguments.device)
    with arguments.output.open("w", encoding="utf-8", buffering=1) as file:
        for size in map(int, arguments.batch_sizes.split(",")):
            steps = max(round(arguments.epoch_share * EPOCH_SAMPLES / size), 1)
            last = last_steps(ids.last_samples(steps * size), size, steps)
            for clip in ("on", "off"):
                kernels = RowKernels(ids, last, steps, size, clip, device)
                line = {"batch_size": size, "clip": clip, **kernels.measure(arguments.steps)}
                print(f"batch {size}, clip {clip}: {line['ms']}", flush=True)
                file.write(json.dumps(line | environment(device)) + "\n")


class RowKernels:
    """The kernels on tables of Criteo's shape, in the state after ``steps_before`` steps.

    Args:
        ids: stream of ids.
        last: last step of each row, int32 [rows of all tables].
        steps_before: steps of the stream before.
        size: B.
        clip: "on" or "off".
        device: of the tables.
    """

    def __init__(self, ids: CriteoIds, last: np.ndarray, steps_before: int, size: int, clip: str, device: torch.device):
        self._ids, self._next, self._size, self._device = ids, steps_before * size, size, device
        run = criteo_config("deepfm", size, "replay", clip)
        values, columns = Scaled.of(run).hyperparameters, run.model.embedding_dim
        config = AdamConfig(lr=values.embedding_lr, l2=values.l2, eps=1e-7, adam_epsilon="keras", absent_rows="replay")
        self._layout, self._constants = layout_of(ids, physical_dim(columns), device), adam_constants(config)
        limit, tables = Scaled.of(run).clip.limit(columns), torch.ones(self._layout.tables, device=device)
        counts = torch.full_like(tables, limit.per_occurrence, dtype=torch.bool)
        self._clips = TableClips((columns * tables).long(), limit.r * tables, limit.floor * tables, counts)
        weights = 1e-2 * torch.randn(self._layout.size, device=device)
        self._state = AdamState(weights, torch.full_like(weights, 1e-6), torch.full_like(weights, 1e-10))
        history = StepHistory(config, device)
        history.replace(np.full(steps_before, config.lr))
        history.prepare(steps_before + 1, config.lr)
        taken = torch.tensor([steps_before], dtype=torch.int32, device=device)
        log_beta2 = torch.tensor([log(config.betas[1])], dtype=torch.float64, device=device)
        last_step = torch.from_numpy(last.copy()).to(device)
        self._steps = DeviceSteps(taken, last_step, *history.schedule, tables, log_beta2)
        self._thresholds = DecayThresholds(config.lr, 1e-11, 1e-20)
        offsets = torch.arange(self._layout.tables * size + 1, device=device)
        finder = BagsOfLookup(range(self._layout.tables), self._layout.dim.tolist(), device)
        self._bags = finder.of({"indices": offsets[:-1], "offsets": offsets})
        self._gradient = 1e-4 * torch.randn(size, self._layout.tables * self._layout.max_dim, device=device)

    def measure(self, steps: int) -> dict[str, Any]:
        """Takes steps. Returns the medians of the kernels' times in ms, and of the distinct rows of a batch."""
        rows, times = [], []
        for _ in range(min(_WARMUP_STEPS, steps) + steps):
            indices = torch.from_numpy(self._ids.rows(self._next, self._size)).flatten().to(self._device)
            self._next += self._size
            marks, found = self.step(indices)
            times.append([milliseconds(*pair) for pair in pairwise(marks)])
            rows.append(int((found.begin < len(found.row)).sum()))
        medians = np.median(times[-steps:], axis=0).tolist()
        return {
            "ms": dict(zip(KERNELS, medians, strict=True)),
            "distinct_rows": float(np.median(rows[-steps:])),
            "steps": steps,
        }

    def step(self, indices: Tensor) -> tuple[list[Any], LookupIds]:
        """Takes a step on a batch's ids, feature-major. Returns the times before, between and after the kernels."""
        layout, state, steps, constants = self._layout, self._state, self._steps, self._constants
        marks = [mark(self._device)]
        outside = torch.zeros_like(layout.rows)
        found = find_rows_on_device(layout, self._bags._replace(indices=indices), outside)
        marks.append(mark(self._device))
        replay_rows_on_device(found.row, found.begin, layout, None, state, steps, constants, self._thresholds)
        marks.append(mark(self._device))
        steps.taken.add_(1)
        DeviceRows(layout, found, None, self._gradient).update(self._clips, state, steps, constants, replays=True)
        marks.append(mark(self._device))
        return marks, found


def layout_of(ids: CriteoIds, dim: int, device: torch.device) -> LookupLayout:
    """Geometry of a lookup of one table for each field, all ``dim`` wide."""
    rows = torch.from_numpy(ids.table_rows.astype(np.int64))
    tables, total = len(rows), int(rows.sum())
    first_row = rows.cumsum(0) - rows
    return LookupLayout(
        rows=rows.to(device),
        dim=torch.full_like(rows, dim).to(device),
        start=(first_row * dim).to(device),
        first_row=first_row.to(device),
        max_dim=dim,
        size=total * dim,
        tables=tables,
        num_rows=total,
    )


def mark(device: torch.device) -> Any:
    """The present time: seconds on CPU, an event on CUDA."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end))


if __name__ == "__main__":
    main()
