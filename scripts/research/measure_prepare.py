"""Measurement of `prepare` on raw files in Criteo's layout, and of the reader on the result; JSON lines.

    python scripts/make_raw_criteo.py --rows 45840617 --output train.txt
    python scripts/research/measure_prepare.py train.txt --folder /scratch --output prepare.jsonl

Each measurement runs in its own process and includes its peak memory. `prepare` writes to a temporary folder in
`--folder`. The reader yields shuffled training batches for `--seconds` or one epoch; loading a resident data set is not
timed.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cowrec.data_pipeline import Reader, prepare
from cowrec.data_pipeline.parallel import available_cores
from cowrec.trainer.runtime.environment import environment
from cowrec.trainer.runtime.subprocess_call import Subprocess

BATCH_SIZE = 8192
PASSES = ("survey", "fit", "write")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, nargs="+", help="raw files to measure")
    parser.add_argument("--folder", type=Path, required=True, help="folder for temporary data sets")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each reader measurement")
    arguments = parser.parse_args()
    machine = {**environment(torch.device("cpu")), "cores": available_cores()}
    with arguments.output.open("w", encoding="utf-8", buffering=1) as file:
        for raw in arguments.raw:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                for line in measured(raw, Path(folder) / "data", arguments.seconds):
                    print(line, flush=True)
                    file.write(json.dumps({**line, **machine}) + "\n")


def measured(raw: Path, data: Path, seconds: float) -> Iterator[dict[str, Any]]:
    """Yields the lines of one raw file: prepare, then the reader, streaming and resident."""
    with Subprocess() as process:  # a new one for each measurement, which starts with no memory used
        yield {"what": "prepare", "raw": raw.name, **process.call(time_prepare, raw, data)}
        for resident in (False, True):
            process.close()
            yield {"what": "read", "raw": raw.name, **process.call(time_reader, data, resident, seconds)}


def time_prepare(raw: Path, data: Path) -> dict[str, Any]:
    """Measures rows, ids, seconds in total and per pass, CPU seconds, rows per second, bytes and peak memory."""
    size, start = raw.stat().st_size, time.perf_counter()
    done = 0
    ends: list[float] = []

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if done >= size * (len(ends) + 1):
            ends.append(time.perf_counter() - start)

    schema = prepare("criteo", [raw], data, progress=progress)
    seconds = time.perf_counter() - start
    starts = [0.0, *ends[:-1]]
    return {
        "rows": schema.sources[0].rows,
        "seconds": seconds,
        "cpu_seconds": time.process_time(),
        "rows_per_second": schema.sources[0].rows / seconds,
        "pass_seconds": {name: end - begin for name, begin, end in zip(PASSES, starts, ends, strict=True)},
        "ids": sum(field.num_embeddings for field in schema.sparse),
        "raw_bytes": size,
        "prepared_bytes": sum(path.stat().st_size for path in data.rglob("*") if path.is_file()),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def time_reader(data: Path, resident: bool, seconds: float) -> dict[str, Any]:
    """Measures samples per second of shuffled training batches, and peak memory."""
    reader = Reader(data, "train", batch_size=BATCH_SIZE, shuffle=True, resident=resident)
    samples, start = 0, time.perf_counter()
    for batch in reader.epoch(0):
        samples += batch.label.numel()
        if time.perf_counter() - start > seconds:
            break
    return {
        "resident": resident,
        "batch_size": BATCH_SIZE,
        "rows": reader.num_rows,
        "samples_per_second": samples / (time.perf_counter() - start),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def peak_memory_bytes() -> int:
    """Returns the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
