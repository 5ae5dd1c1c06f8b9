"""Memory and time of measuring predictions, by number of samples and of processes; the AUC against scikit-learn's.

    python -m scripts.scaling.auc_memory --output results/HARDWARE/auc_memory.jsonl

Logits are normal numbers, in float32 and rounded to bfloat16, where most are equal to others. `samples_mb` is what a
process holds of its samples, `peak_mb` the peak of its resident memory while it measures, without what Python and the
libraries took before there were samples. `expected_auc` is scikit-learn's, in a process of its own.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from sklearn.metrics import roc_auc_score

from cowrec.trainer.measures.quality import measure
from cowrec.trainer.measures.samples import Samples
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runs.provenance import environment

from .meter import metered, resident_mb

CHUNK = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="10,30,90", help="millions of samples")
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--logits", default="float32", help="float32, bfloat16 or both")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write")
    given = parser.parse_args()
    rows, processes = ([int(n) for n in each.split(",")] for each in (given.rows, given.processes))
    lines = []
    with given.output.open("w", encoding="utf-8", buffering=1) as file:
        for line in measured(rows, given.logits.split(","), processes):
            file.write(json.dumps(line) + "\n")
            lines.append(line)
    print(aligned([list(lines[0])[:10], *([str(each) for each in list(line.values())[:10]] for line in lines)]))


def measured(millions: list[int], kinds: list[str], processes: list[int]) -> Iterator[dict[str, Any]]:
    """Yields a line for each number of samples, kind of logits and number of processes."""
    torch.set_num_threads(1)
    machine = environment(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as name:
        for rows in millions:
            for dtype in kinds:
                expected = Path(name) / "expected.json"
                torch.multiprocessing.spawn(_expected, (rows, dtype, str(expected)), 1)
                auc = json.loads(expected.read_text())
                for size in processes:
                    (Path(name) / "store").unlink(missing_ok=True)
                    torch.multiprocessing.spawn(_measure, (size, rows, dtype, name), size)
                    ranks = [json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(size)]
                    assert len({each["auc"] for each in ranks}) == 1
                    assert abs(ranks[0]["auc"] - auc) < 1e-11, (ranks[0]["auc"], auc)
                    most = {key: round(max(each[key] for each in ranks), 1) for key in ranks[0] if key != "auc"}
                    head = {"rows": rows * CHUNK, "logits": dtype, "processes": size}
                    yield {**head, **most, "auc": ranks[0]["auc"], "expected_auc": auc, **machine}


def samples_of(rank: int, processes: int, rows: int, dtype: str) -> Samples:
    """A process's share of the samples, which are the same for any number of processes; ``rows`` in millions."""
    chunks = range(rank * rows // processes, (rank + 1) * rows // processes)
    logits, label = (torch.empty(len(chunks) * CHUNK) for _ in range(2))
    for place, chunk in enumerate(chunks):
        draw = np.random.default_rng([0, chunk])
        own = draw.normal(-3, 1.2, CHUNK).astype(np.float32)
        clicked = draw.random(CHUNK, np.float32) < 1 / (1 + np.exp(-own))
        end = slice(place * CHUNK, (place + 1) * CHUNK)
        logits[end] = torch.from_numpy(own).to(getattr(torch, dtype))
        label[end] = torch.from_numpy(clicked)
    return Samples(logits, label)


def _expected(_: int, rows: int, dtype: str, output: str) -> None:
    samples = samples_of(0, 1, rows, dtype)
    Path(output).write_text(json.dumps(roc_auc_score(samples.label.numpy(), samples.logits.numpy())))


def _measure(rank: int, size: int, rows: int, dtype: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    measure(samples_of(rank, size, size, dtype), together=True)  # what the first use of the libraries takes
    libraries = resident_mb()
    samples = samples_of(rank, size, rows, dtype)
    held = sum(each.nbytes for each in samples if each is not None) / 1e6
    with metered() as used:
        quality = measure(samples, together=True)
    own = {"seconds": used["seconds"], "cpu_seconds": used["cpu_seconds"], "samples_mb": held}
    own |= {"peak_mb": used["peak_mb"] - libraries, "libraries_mb": libraries, "auc": quality.auc}
    Path(f"{folder}/{rank}.json").write_text(json.dumps(own))
    dist.barrier()


if __name__ == "__main__":
    main()
