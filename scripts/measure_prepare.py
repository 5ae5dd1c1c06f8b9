"""Times `prepare` on raw files like Criteo's and the reader on what comes out; one JSON object a line.

    python scripts/measure_prepare.py --rows 45840617 --folder /scratch --output prepare.jsonl
    python scripts/measure_prepare.py --rows 1000000,10000000 --max-ids 20000 --folder /scratch --output fixed.jsonl

The second has a vocabulary that does not grow with the rows, to see that memory does not either. The folder needs room
for the raw file, 243 bytes a row, and a fifth of that; both are removed again.

Each measurement has a process of its own, whose peak memory is given. The reader serves shuffled batches as training
takes them, for as long as `--seconds` says or one epoch; the clock starts with the first batch.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from cowrec.data_pipeline import Reader, Schema, prepare
from cowrec.trainer.own_process import run_apart
from cowrec.trainer.run_dir import environment

BATCH_SIZE = 8192
PASSES = ("survey", "fit", "write")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", required=True, help="of the raw files, joined by commas")
    parser.add_argument("--max-ids", type=int, help="ids of a field at most")
    parser.add_argument("--folder", type=Path, required=True, help="where the files are made")
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--seconds", type=float, default=20.0, help="that the reader is measured for")
    arguments = parser.parse_args()
    surroundings = environment(torch.device("cpu"))
    with arguments.output.open("w", encoding="utf-8", buffering=1) as file:
        for rows in arguments.rows.split(","):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                for line in measured(int(rows), arguments.max_ids, Path(folder), arguments.seconds):
                    print(line, flush=True)
                    file.write(json.dumps({**line, **surroundings}) + "\n")


def measured(rows: int, max_ids: int | None, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """The lines of one raw file: prepare, then the reader, streaming and resident."""
    raw, data = folder / "train.txt", folder / "data"
    maker = [sys.executable, str(Path(__file__).with_name("make_raw_criteo.py")), "--rows", str(rows)]
    maker += ["--output", str(raw), *(["--max-ids", str(max_ids)] if max_ids else [])]
    subprocess.run(maker, check=True)
    lines = [{"what": "prepare", "rows": rows, "max_ids": max_ids, **run_apart(time_prepare, raw, data)}]
    for resident in (False, True):
        lines.append(
            {"what": "read", "rows": rows, "max_ids": max_ids, **run_apart(time_reader, data, resident, seconds)}
        )
    return lines


def time_prepare(raw: Path, data: Path) -> dict[str, Any]:
    """Seconds of each pass and of all, rows per second over all, ids found, bytes read and written, peak memory."""
    size, start = raw.stat().st_size, time.perf_counter()
    done, ends = 0, []

    def progress(count: int) -> None:
        nonlocal done
        done += count
        if done >= size * (len(ends) + 1):
            ends.append(time.perf_counter() - start)

    schema = prepare("criteo", [raw], data, progress=progress)
    seconds = time.perf_counter() - start
    starts = [0.0, *ends[:-1]]
    return {
        "seconds": seconds,
        "rows_per_second": schema.sources[0].rows / seconds,
        "pass_seconds": {name: end - begin for name, begin, end in zip(PASSES, starts, ends, strict=True)},
        "ids": sum(field.num_embeddings for field in schema.sparse),
        "raw_bytes": size,
        "prepared_bytes": sum(path.stat().st_size for path in data.rglob("*") if path.is_file()),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def time_reader(data: Path, resident: bool, seconds: float) -> dict[str, Any]:
    """Samples per second of shuffled training batches, and peak memory."""
    reader = Reader(data, "train", batch_size=BATCH_SIZE, shuffle=True, resident=resident)
    batches = reader.epoch(0)
    next(batches)
    samples, start = 0, time.perf_counter()
    for batch in batches:
        samples += batch.label.numel()
        if time.perf_counter() - start > seconds:
            break
    return {
        "resident": resident,
        "batch_size": BATCH_SIZE,
        "train_rows": Schema.load(data).split("train").rows,
        "samples_per_second": samples / (time.perf_counter() - start),
        "peak_memory_bytes": peak_memory_bytes(),
    }


def peak_memory_bytes() -> int:
    """Of this process, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
