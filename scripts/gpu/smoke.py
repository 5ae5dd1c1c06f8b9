"""Checks in half a minute of a GPU's time that the kernels and the captured graph compute what they should.

* bits: four steps on small tables leave the bits that the CPU's kernels left (cpu_bits.json; `--record` on a CPU
  writes it anew).
* kernels: they leave what torch_rows.py leaves, too.
* relu: layers whose products have a ReLU in their epilogue have the values and gradients of float64; on CUDA they
  keep NaN.
* step: a step of the full batch on tables of Criteo's size leaves what torch_rows.py leaves.
* graph: training with captured steps leaves the bits that training without a graph leaves, under a falling rate.
* checkpoint: a run that resumes from its checkpoint goes on with the bits of one that was not interrupted.
"""

from cowrec.trainer.runtime.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.models.linear_relu import linear_relu
from cowrec.sparse_opt.kernels import triton_replay, triton_rows
from cowrec.sparse_opt.lookups import row_backends, wrapped_lookup
from cowrec.trainer.bench.criteo import Case, criteo_config, steady_run
from cowrec.trainer.bench.parts import graph_captured

from . import cpu_build  # noqa: F401  (it registers an operator)
from .machine import about, append
from .rows import Problem, criteo_problem, small_problem, steps, trained_values

BITS = Path(__file__).with_name("cpu_bits.json")
CHECKS = "kernels,relu,step,graph"
TOLERANCE = 1e-5
"""Largest difference from torch, as a share of the largest value: norms are summed in another order."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file that lines of results are added to")
    parser.add_argument("--part", default="smoke", help="name of the part, for the lines")
    parser.add_argument("--checks", default=CHECKS, help=f"checks to do (default: {CHECKS})")
    parser.add_argument("--device", default="cuda", help="cpu only for a rehearsal under TRITON_INTERPRET=1")
    parser.add_argument("--batch-size", type=int, default=128 * 1024, help="samples of the large step")
    parser.add_argument("--rows", type=int, help="most rows of a table in the large step (default: Criteo's)")
    parser.add_argument("--record", action="store_true", help="write cpu_bits.json with the CPU's kernels")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cpu" and not arguments.record:
        interpret()
    if arguments.record:
        BITS.write_text(json.dumps(digests(small_problem(torch.device("cpu")), "numba"), indent=1) + "\n")
        return 0
    provenance = about(torch.cuda.get_device_name() if device.type == "cuda" else "rehearsal")
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "bits": lambda: bits(device),
        "kernels": lambda: kernels(device),
        "relu": lambda: relu(device),
        "step": lambda: compared(criteo_problem(device, arguments.batch_size, 64, arguments.rows)),
        "graph": lambda: graph(device),
        "checkpoint": lambda: checkpoint(device),
    }
    passed = True
    for name in arguments.checks.split(","):
        started = time.monotonic()
        try:
            found = checks[name]()
        except Exception as error:  # the other checks are worth their time all the same
            traceback.print_exc()
            found = {"equal": False, "error": f"{type(error).__name__}: {error}"}
        line = {"part": arguments.part, "check": name, **found, "seconds": time.monotonic() - started}
        passed &= line["equal"]
        print(f"{name}: {line}", flush=True)
        if arguments.output:
            append(arguments.output, line | provenance)
    return 0 if passed else 1


def interpret() -> None:
    """Puts Triton's kernels, which TRITON_INTERPRET=1 interprets, in the place of the CPU's; one program takes many
    rows, since the interpreter takes as long for a small program as for a large one.
    """
    triton_replay.ELEMENTS = triton_rows.ELEMENTS = 512
    triton_rows.BLOCK, triton_rows.IDS = 4, 2
    wrapped_lookup.NumbaRows = row_backends.TritonRows  # type: ignore[assignment,attr-defined]


def digests(problem: Problem, backend: str) -> list[str]:
    """Hashes of the state after each step."""
    return [problem.digest() for _ in steps(problem, backend)]


def checkpoint(device: torch.device) -> dict[str, Any]:
    """Compares a resumed run with one that was not interrupted; needs numba and pyarrow, unlike the other checks."""
    from .resume import resume

    return resume(device)


def bits(device: torch.device) -> dict[str, Any]:
    """Compares small steps with the CPU's bits."""
    expected, found = json.loads(BITS.read_text()), digests(small_problem(device), "triton")
    same = [one == other for one, other in zip(expected, found, strict=True)]
    return {"equal": all(same), "steps_with_the_bits_of_the_cpu": same}


def kernels(device: torch.device) -> dict[str, Any]:
    """Compares small steps with the CPU's bits and with torch."""
    against_cpu, against_torch = bits(device), compared(small_problem(device))
    return {**against_torch, **against_cpu, "equal": against_torch["equal"] and against_cpu["equal"]}


def relu(device: torch.device) -> dict[str, Any]:
    """Compares two layers, of an odd and an even width, with float64, and on CUDA looks for NaN behind their ReLU.

    Their numbers are such that all sums are exact, and none is zero before the ReLU.
    """
    unequal, keeps_nan = 0, True
    for width in (13, 16):
        generator = torch.Generator().manual_seed(0)
        shapes = ((3000, width), (40, width), (40,), (7, 40), (7,))
        drawn = [torch.randint(-3, 4, shape, generator=generator).to(device) for shape in shapes]
        results = []
        for dtype, layers in ((torch.float32, linear_relu), (torch.float64, _plain_layers)):
            leaves = [each.to(dtype) for each in drawn]
            leaves[2] += 0.5
            leaves[4] += 0.25
            y = layers(*(each.requires_grad_() for each in leaves))
            y.sum().backward()
            results.append([y.detach(), *(each.grad for each in leaves)])
        unequal += sum(int((one != two).sum()) for one, two in zip(*results, strict=True))
        broken = [each.float() for each in drawn]
        broken[0][0] = torch.nan
        keeps_nan &= device.type == "cpu" or bool(linear_relu(*broken)[0].isnan().all())
    return {"equal": unequal == 0 and keeps_nan, "unequal": unequal, "keeps_nan": keeps_nan}


def _plain_layers(x: Tensor, *parameters: Tensor) -> Tensor:
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        x = F.linear(x, weight, bias).relu()
    return x


def compared(problem: Problem) -> dict[str, Any]:
    """Takes a problem's steps with Triton and with torch; returns how much they differ.

    Returns:
        equal; by tensor, the largest difference as a share of the largest value, and how many elements differ at all.
    """
    other = problem.copy()
    for each, kind in ((problem, "triton"), (other, "torch")):
        list(steps(each, kind))
    pairs = {
        **{name: (getattr(problem.state, name), getattr(other.state, name)) for name in problem.state._fields},
        "last_step": (problem.last_step, other.last_step),
    }
    differences, unequal = {}, {}
    for name, (one, two) in pairs.items():
        differences[name] = float((one - two).abs().max() / two.abs().max())
        unequal[name] = int((one != two).sum())
    equal = unequal["last_step"] == 0 and max(differences.values()) <= TOLERANCE
    rows = int((problem.last_step == problem.step).sum())
    return {"equal": equal, "difference": differences, "unequal": unequal, "rows_of_the_last_step": rows}


def graph(device: torch.device) -> dict[str, Any]:
    """Trains on a small table twice, with a captured graph and without."""
    ids, size = CriteoIds(max_rows=1000 if device.type == "cuda" else 4), 1024 if device.type == "cuda" else 4
    config = criteo_config("deepfm", size, "replay", "on", "float32", device.type)
    trained, captured = [], []
    with tempfile.TemporaryDirectory() as folder:
        last = Path(folder) / "last_samples.npy"
        np.save(last, ids.last_samples(40 * size))
        for on in (True, False):
            train = replace(config.train, cuda_graph=on)
            with steady_run(Case(replace(config, train=train), ids, 40 * size, last, 8, 0.0)) as run:
                for index in range(12 if device.type == "cuda" else 2):
                    run.adam.lr *= 0.9
                    run.step(index)
                trained.append(trained_values(run.model, run.adam))
                captured.append(graph_captured(run.pipeline, run.device))
    unequal = sum(int((one != two).sum()) for one, two in zip(*trained, strict=True))
    equal = unequal == 0 and captured in ([True, False], [None, None])
    return {"equal": equal, "unequal": unequal, "captured": captured}


if __name__ == "__main__":
    sys.exit(main())
