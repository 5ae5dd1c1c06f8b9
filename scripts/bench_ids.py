"""Benchmark of translating raw ids to rows: IdTables against a dict, numpy and TorchRec's managed collision.

    python scripts/bench_ids.py --output ids.jsonl
    python scripts/bench_ids.py --output ids.jsonl --only cowrec,dict --resident 1000000

Each implementation is filled with random int64 ids in its own process. It then receives batches of known ids, drawn
uniformly or by Zipf's law, with a share of new ids. A batch with new ids is assigned as in training, so each new id
gets a row; one without is looked up. Each measurement is the median of `--rounds` batches, or fewer if they are slow.
Memory is the growth of the process during filling, per id. On a shared machine, ids per CPU second are more reliable
than ids per second; they include the time of all threads.
"""

import argparse
import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from cowrec.data_pipeline.parallel import available_cores
from cowrec.sparse_opt import IdTableConfig, IdTables
from cowrec.trainer.cli.flag_values import parse_count, parse_counts, parse_names
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runs.provenance import environment
from cowrec.trainer.runtime.errors import ProcessFailed
from cowrec.trainer.runtime.subprocess_call import run_in_subprocess

NEW_SHARES = (0.0, 0.01, 0.1)
_ROOM = 1.3
"""Rows per resident id, for implementations with bounded rows."""
_FILL_BATCH = 100_000
_SECONDS = 10.0
"""Time after which a measurement starts no further round."""
_MCH_INTERVAL = 10
"""Batches after which TorchRec's module admits new ids; one measurement covers this many."""


class Subject(Protocol):
    """Interface of a measured implementation."""

    batches: int
    """Number of batches per measurement."""

    def fill(self, ids: np.ndarray) -> None: ...

    def lookup(self, ids: np.ndarray) -> Any: ...

    def assign(self, ids: np.ndarray) -> Any: ...


class Cowrec:
    """IdTables with free rows, or full: then every new id evicts an old one."""

    batches = 1

    def __init__(self, resident: int, room: float) -> None:
        self.tables = IdTables({"t": IdTableConfig(int(resident * room), ("t",))}, ["t"])

    def fill(self, ids: np.ndarray) -> None:
        for low in range(0, len(ids), _FILL_BATCH):
            self.assign(ids[low : low + _FILL_BATCH])

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        return self.tables.rows_of(ids, np.array([0, len(ids)]))

    def assign(self, ids: np.ndarray) -> np.ndarray:
        return self.tables.assign(ids, np.array([0, len(ids)]))[0]


class Dictionary:
    """Python dict with a loop."""

    batches = 1

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def fill(self, ids: np.ndarray) -> None:
        for low in range(0, len(ids), _FILL_BATCH):
            self.assign(ids[low : low + _FILL_BATCH])

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        get = self.rows.get
        return np.array([get(id, 0) for id in ids.tolist()])

    def assign(self, ids: np.ndarray) -> np.ndarray:
        rows = self.rows
        return np.array([rows.setdefault(id, len(rows)) for id in ids.tolist()])


class Sorted:
    """numpy.searchsorted over sorted ids with a parallel array of rows; new ids are merged per batch."""

    batches = 1

    def fill(self, ids: np.ndarray) -> None:
        self.ids = np.sort(ids)
        self.rows = np.arange(len(ids), dtype=np.int32)

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.rows[at], 0)

    def assign(self, ids: np.ndarray) -> np.ndarray:
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        new = np.unique(ids[self.ids[at] != ids])
        into = np.searchsorted(self.ids, new)
        rows = np.arange(len(self.rows), len(self.rows) + len(new), dtype=np.int32)
        self.ids, self.rows = np.insert(self.ids, into, new), np.insert(self.rows, into, rows)
        return self.lookup(ids)


class Mch:
    """TorchRec's MCHManagedCollisionModule on CPU, with least-frequent eviction; filled by writing its buffers."""

    batches = _MCH_INTERVAL

    def __init__(self, resident: int) -> None:
        policy = LFU_EvictionPolicy()
        size = int(resident * _ROOM)
        self.module = MCHManagedCollisionModule(size, torch.device("cpu"), policy, eviction_interval=_MCH_INTERVAL)

    def fill(self, ids: np.ndarray) -> None:
        buffers = dict(self.module.named_buffers())
        buffers["_mch_sorted_raw_ids"][: len(ids)] = torch.from_numpy(np.sort(ids))
        buffers["_mch_counts"][: len(ids)] = 1

    def _forward(self, ids: np.ndarray) -> torch.Tensor:
        feature = JaggedTensor(torch.from_numpy(ids), lengths=torch.ones(len(ids), dtype=torch.int64))
        return self.module({"t": feature})["t"].values()

    def lookup(self, ids: np.ndarray) -> torch.Tensor:
        self.module.eval()
        return self._forward(ids)

    def assign(self, ids: np.ndarray) -> torch.Tensor:
        self.module.train()
        return self._forward(ids)


SUBJECTS: dict[str, Callable[[int], Subject]] = {
    "cowrec": lambda resident: Cowrec(resident, _ROOM),
    "cowrec-full": lambda resident: Cowrec(resident, 1.0),
    "dict": lambda resident: Dictionary(),
    "searchsorted": lambda resident: Sorted(),
    "torchrec-mch": Mch,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--only", default=",".join(SUBJECTS), help="implementations to measure [%(default)s]")
    parser.add_argument("--resident", default="1000000,10000000,30000000", help="resident ids [%(default)s]")
    parser.add_argument("--batch", default="213000", help="ids per batch [%(default)s]")
    parser.add_argument("--rounds", type=int, default=7, help="maximum batches of each kind [%(default)s]")
    arguments = parser.parse_args()
    try:
        names = parse_names("only", arguments.only, SUBJECTS)
        sizes = parse_counts(arguments.resident, "--resident")
        batch = parse_count(arguments.batch, "--batch")
    except ValueError as error:
        sys.exit(str(error))
    machine = {**environment(torch.device("cpu")), "cores": available_cores()}
    cells = [["resident", "subject", "ids", "new", "M ids/s", "M per CPU second", "bytes/id"]]
    with arguments.output.open("w", encoding="utf-8", buffering=1) as file:
        for resident in sizes:
            for name in names:
                for line in _lines(name, resident, batch, arguments.rounds):
                    file.write(json.dumps({**line, **machine}) + "\n")
                    cells.append(_cells(line))
                    print("  ".join(cells[-1]), flush=True)
    print(aligned(cells))


def _lines(name: str, resident: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    about = {"subject": name, "resident": resident, "batch": batch}
    try:
        return [{**about, "error": None, **line} for line in run_in_subprocess(measure, name, resident, batch, rounds)]
    except ProcessFailed as error:
        return [{**about, "error": str(error)}]


def _cells(line: dict[str, Any]) -> list[str]:
    about = [f"{line['resident']:,}", line["subject"]]
    if line["error"]:
        return [*about, line["error"], "", "", "", ""]
    speeds = [f"{line[key] / 1e6:.2f}" for key in ("ids_per_second", "ids_per_cpu_second")]
    return [*about, line["drawn"], f"{line['new_share']:.0%}", *speeds, f"{line['bytes_per_id']:.1f}"]


def measure(name: str, resident: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Returns one line per share of new ids and distribution of ids."""
    random = np.random.default_rng(0)
    ids = random.integers(-(2**63), 2**63, resident)
    warm = SUBJECTS[name](1000)
    warm.fill(ids[:1000])
    for _ in range(warm.batches):
        warm.assign(ids[:1000])
    warm.lookup(ids[:1000])
    before, start = _memory(), time.perf_counter()
    subject = SUBJECTS[name](resident)
    subject.fill(ids)
    filled = {"fill_seconds": time.perf_counter() - start, "bytes_per_id": (_memory() - before) / resident}
    return [
        {
            "drawn": drawn,
            "new_share": share,
            **_speed(subject, _batches(random, ids, drawn, share, batch), rounds),
            **filled,
        }
        for share in NEW_SHARES
        for drawn in ("evenly", "zipf")
    ]


def _batches(
    random: np.random.Generator, ids: np.ndarray, drawn: str, new_share: float, batch: int
) -> Iterator[tuple[np.ndarray, bool]]:
    """Yields endless batches and whether to look them up rather than assign rows."""
    while True:
        # Zipf's law with an exponent near one, as for ids in clicks; the ids themselves are in random order.
        indices = random.integers(0, len(ids), batch) if drawn == "evenly" else random.zipf(1.05, batch) % len(ids)
        result = ids[indices]
        new = random.random(batch) < new_share
        result[new] = random.integers(-(2**63), 2**63, int(new.sum()))
        yield result, new_share == 0


def _speed(subject: Subject, batches: Iterator[tuple[np.ndarray, bool]], rounds: int) -> dict[str, Any]:
    """Returns median and quartiles of ids per second, and the median per CPU second."""
    speeds: list[float] = []
    cpu_speeds: list[float] = []
    begun = time.perf_counter()
    while len(speeds) < rounds and (not speeds or time.perf_counter() - begun < _SECONDS):
        drawn = [next(batches) for _ in range(subject.batches)]
        count = sum(len(ids) for ids, _ in drawn)
        start, cpu_start = time.perf_counter(), time.process_time()
        for ids, known in drawn:
            if known:
                subject.lookup(ids)
            else:
                subject.assign(ids)
        speeds.append(count / (time.perf_counter() - start))
        cpu_speeds.append(count / (time.process_time() - cpu_start))
    low, median, high = np.quantile(speeds, (0.25, 0.5, 0.75)).tolist()
    return {
        "rounds": len(speeds),
        "ids_per_second": median,
        "ids_per_second_quartiles": [low, high],
        "ids_per_cpu_second": float(np.median(cpu_speeds)),
    }


def _memory() -> int:
    """Returns resident bytes of this process after its heap has returned free memory."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()
