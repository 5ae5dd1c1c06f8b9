"""Times training steps of `EmbeddingAdam` in the steady state, for one part of the GPU check.

Each figure becomes a line of the results as soon as it is known, so that a process that hangs or is killed loses none.
"""

from cowrec.trainer.runtime.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import argparse
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.trainer.bench.criteo import Bench, Case, SteadyRun, cases, measure_criteo, run_ids, steady_run, stored
from cowrec.trainer.bench.parts import graph_captured

from . import cpu_build  # noqa: F401  (it registers an operator)
from .machine import ROOT, about, append
from .replay import turns_of_programs
from .smoke import interpret

REPLAYS = 5
"""Replays of the graph that the table of its kernels is of."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file that lines of results are added to")
    parser.add_argument("--part", required=True, help="name of the part, for the lines")
    parser.add_argument("--batch-sizes", default="131072,1024", help="samples of a step, with commas")
    parser.add_argument("--precision", default="tf32", help="train.precision")
    parser.add_argument("--clip", default="on", choices=("on", "off"), help="with CowClip or without")
    parser.add_argument("--uncaptured", action="store_true", help="without a CUDA graph")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a replay instead of timing steps")
    parser.add_argument("--mlperf", action="store_true", help="DLRM-DCNv2 under FBGEMM's fused optimizer, attached")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds to time each combination")
    parser.add_argument("--rehearse", action="store_true", help="on CPU, with tiny tables, under TRITON_INTERPRET=1")
    arguments = parser.parse_args()
    if arguments.rehearse:
        interpret()
    device = "cpu" if arguments.rehearse else "cuda"
    provenance = about("rehearsal" if arguments.rehearse else torch.cuda.get_device_name())
    passed = True
    for identity, figures in combinations(arguments, device):
        line = {"part": arguments.part, **identity}
        try:
            for known in figures:
                known.pop("step_seconds", None)
                print(f"{line}: {known}", flush=True)
                append(arguments.output, line | known | provenance)
        except Exception as error:  # the other combinations are worth their time all the same
            traceback.print_exc()
            append(arguments.output, line | {"error": f"{type(error).__name__}: {error}"} | provenance)
            passed = False
    return 0 if passed else 1


def combinations(
    arguments: argparse.Namespace, device: str
) -> Iterator[tuple[dict[str, Any], Iterator[dict[str, Any]]]]:
    """Yields what identifies each combination, and its figures as they become known."""
    if arguments.mlperf:
        # Its network, TorchRec's own class, imports packages that the other parts do without.
        from cowrec.trainer.bench.mlperf import BATCH_SIZE_OF_GPU, TABLE_ROWS, measure_mlperf, mlperf_config

        rows = [min(each, 10 if device == "cpu" else 1_000_000) for each in TABLE_ROWS]
        size = 8 if device == "cpu" else BATCH_SIZE_OF_GPU
        for clip in ("on", "off"):
            config = mlperf_config(size, arguments.precision, clip, device)
            identity = {"mode": config.optimizer.embedding, "batch_size": size, "clip": clip}
            yield identity | {"precision": arguments.precision}, measure_mlperf(config, rows, arguments.seconds)
        return
    sizes = tuple(map(int, arguments.batch_sizes.split(",")))
    settings = Bench(
        ("replay",),
        sizes,
        max_rows=4 if device == "cpu" else None,
        epoch_share=1e-6 if device == "cpu" else 0.9,
        seconds=arguments.seconds,
        clips=(arguments.clip,),
        precisions=(arguments.precision,),
        device=device,
    )
    ids = CriteoIds(max_rows=settings.max_rows)
    for case in cases(settings, ids, last_samples(ids, settings)):
        train = replace(case.config.train, cuda_graph=not arguments.uncaptured)
        case = replace(case, config=replace(case.config, train=train))
        identity = {"mode": "replay", "batch_size": case.batch_size, "clip": arguments.clip}
        lines = kernels(case) if arguments.kernels else measure_criteo(case)
        yield identity | {"precision": arguments.precision}, lines


def last_samples(ids: CriteoIds, settings: Bench) -> Path:
    """File of the last samples of all rows, which the parts share; drawing them takes seconds."""
    file = ROOT / "build" / f"gpu_check_last_samples_{settings.max_rows}_{settings.samples}.npy"
    if not file.exists():
        partial = file.with_name(f"{os.getpid()}_{file.name}")
        partial.parent.mkdir(exist_ok=True)
        np.save(partial, run_ids(ids, settings.samples))
        partial.replace(file)
    return file


def kernels(case: Case) -> Iterator[dict[str, Any]]:
    """Yields the kernels of a step, those that take longest first: a table of one replay of the graph.

    Each has its name, how often a step runs it, and the microseconds of all its runs in a step. On CPU they are the
    operators of a step. The turns of replay are those of the batch after these steps.
    """
    with steady_run(case) as run:
        for index in range(case.warmup_steps):
            run.step(index)
        on_cuda = run.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        with profile(activities=activities, acc_events=True) as profiled:
            for index in range(REPLAYS):
                run.step(case.warmup_steps + index)
            if on_cuda:
                torch.cuda.synchronize()
        rows = []
        for each in profiled.key_averages():
            if (each.device_type != DeviceType.CPU) == on_cuda and not each.is_user_annotation:
                us = each.self_device_time_total if on_cuda else each.self_cpu_time_total
                rows.append({"kernel": each.key[:120], "count": each.count / REPLAYS, "us": us / REPLAYS})
        rows.sort(key=lambda row: -row["us"])
        if not rows:
            raise RuntimeError("the profile has no kernels; the driver may keep users from its counters")
        yield {
            "captured": graph_captured(run.pipeline, run.device),
            "kernels_of_a_step": rows,
            "kernels_us": sum(row["us"] for row in rows),
            "replay": replay_turns(run),
        }


def replay_turns(run: SteadyRun) -> dict[str, int]:
    """Brings the rows of the next batch up to date; returns the turns of replay's programs, and the longest one's."""
    last, reached, state = list[Tensor](), list[Tensor](), stored(run.adam)
    for field, ids in next(run.batches).sparse.to_dict().items():
        rows, steps = ids.values().long().unique(), state[f"{field}.last_step"].view(-1)
        last.append(steps[rows])
        run.adam.catch_up(field, rows)
        reached.append(steps[rows])
    turns = turns_of_programs(torch.cat(last), torch.cat(reached), run.adam.steps)
    return {"turns": int(turns.sum()), "longest": int(turns.max())}


if __name__ == "__main__":
    sys.exit(main())
