"""Speed and memory of raw ids to rows: IdTables beside a dict, numpy and TorchRec's managed collision.

    python scripts/bench_ids.py --output ids.jsonl
    python scripts/bench_ids.py --output ids.jsonl --only cowrec,dict --resident 1000K

Each is filled with random int64 ids in a process of its own, which then takes batches of ids that it knows, drawn
evenly or by Zipf's law, and of which a share is new. A batch with new ids is taken as in training: whoever is new gets
a row; without, it is looked up. Each measurement is the median of `--rounds` batches, or of fewer where they take long.
Memory is the growth of the process while it is filled, per id. Where other work shares the cores, ids per second of the
processor tell more than ids per second: they count the time of both threads.
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
from cowrec.trainer.cli.flag_values import chosen, listed, number
from cowrec.trainer.reports.text_table import aligned
from cowrec.trainer.runs.run_dir import environment
from cowrec.trainer.runtime.errors import ProcessFailed
from cowrec.trainer.runtime.subprocess_call import run_in_subprocess

NEW_SHARES = (0.0, 0.01, 0.1)
_ROOM = 1.3
"""Rows that there are for each resident id, where rows are bounded."""
_FILLED_AT_ONCE = 100_000
_SECONDS = 10.0
"""After which no further round of a measurement begins."""
_MCH_INTERVAL = 10
"""Batches after which TorchRec's module takes up new ids; a measurement is of that many."""


class Subject(Protocol):
    """Who is measured."""

    batches: int
    """That make one measurement."""

    def fill(self, ids: np.ndarray) -> None: ...

    def look_up(self, ids: np.ndarray) -> Any: ...

    def take(self, ids: np.ndarray) -> Any: ...


class Cowrec:
    """IdTables with room for more ids than there are, or with none: then every new id takes the place of an old one."""

    batches = 1

    def __init__(self, resident: int, room: float) -> None:
        self.tables = IdTables({"t": IdTableConfig(int(resident * room), ("t",))}, ["t"])

    def fill(self, ids: np.ndarray) -> None:
        for low in range(0, len(ids), _FILLED_AT_ONCE):
            self.take(ids[low : low + _FILLED_AT_ONCE])

    def look_up(self, ids: np.ndarray) -> np.ndarray:
        return self.tables.rows_of(ids, np.array([0, len(ids)]))

    def take(self, ids: np.ndarray) -> np.ndarray:
        return self.tables.assign(ids, np.array([0, len(ids)]))[0]


class Dictionary:
    """A Python dict and a loop."""

    batches = 1

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def fill(self, ids: np.ndarray) -> None:
        for low in range(0, len(ids), _FILLED_AT_ONCE):
            self.take(ids[low : low + _FILLED_AT_ONCE])

    def look_up(self, ids: np.ndarray) -> np.ndarray:
        get = self.rows.get
        return np.array([get(id, 0) for id in ids.tolist()])

    def take(self, ids: np.ndarray) -> np.ndarray:
        rows = self.rows
        return np.array([rows.setdefault(id, len(rows)) for id in ids.tolist()])


class Sorted:
    """numpy.searchsorted in the sorted ids, beside them their rows; new ids are merged in batch by batch."""

    batches = 1

    def fill(self, ids: np.ndarray) -> None:
        self.ids = np.sort(ids)
        self.rows = np.arange(len(ids), dtype=np.int32)

    def look_up(self, ids: np.ndarray) -> np.ndarray:
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[at] == ids, self.rows[at], 0)

    def take(self, ids: np.ndarray) -> np.ndarray:
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        new = np.unique(ids[self.ids[at] != ids])
        into = np.searchsorted(self.ids, new)
        rows = np.arange(len(self.rows), len(self.rows) + len(new), dtype=np.int32)
        self.ids, self.rows = np.insert(self.ids, into, new), np.insert(self.rows, into, rows)
        return self.look_up(ids)


class Mch:
    """TorchRec's MCHManagedCollisionModule on CPU, evicting the least frequent; filled by writing its buffers."""

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

    def look_up(self, ids: np.ndarray) -> torch.Tensor:
        self.module.eval()
        return self._forward(ids)

    def take(self, ids: np.ndarray) -> torch.Tensor:
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
    parser.add_argument("--only", default=",".join(SUBJECTS), help="some of those who are measured [%(default)s]")
    parser.add_argument("--resident", default="1000K,10000K,30000K", help="ids, K is 1000 [%(default)s]")
    parser.add_argument("--batch", default="213K", help="ids of a batch, K is 1000 [%(default)s]")
    parser.add_argument("--rounds", type=int, default=7, help="batches of each kind, at most [%(default)s]")
    arguments = parser.parse_args()
    try:
        names = chosen("only", arguments.only, SUBJECTS)
        sizes = [number(each, 1000, "--resident takes numbers, with K for 1000") for each in listed(arguments.resident)]
        batch = number(arguments.batch, 1000, "--batch takes a number, with K for 1000")
    except ValueError as error:
        sys.exit(str(error))
    surroundings = {**environment(torch.device("cpu")), "cores": available_cores()}
    cells = [["resident", "who", "ids", "new", "M ids/s", "M per CPU second", "bytes/id"]]
    with arguments.output.open("w", encoding="utf-8", buffering=1) as file:
        for resident in sizes:
            for name in names:
                for line in _lines(name, resident, batch, arguments.rounds):
                    file.write(json.dumps({**line, **surroundings}) + "\n")
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
    """One line for each way of drawing ids and each share of new ones."""
    random = np.random.default_rng(0)
    ids = random.integers(-(2**63), 2**63, resident)
    warm = SUBJECTS[name](1000)
    warm.fill(ids[:1000])
    for _ in range(warm.batches):
        warm.take(ids[:1000])
    warm.look_up(ids[:1000])
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
    """Batches without end, and whether they are looked up."""
    while True:
        # By Zipf's law with an exponent near one, as the ids of clicks; the ids' own order is random.
        places = random.integers(0, len(ids), batch) if drawn == "evenly" else random.zipf(1.05, batch) % len(ids)
        result = ids[places]
        new = random.random(batch) < new_share
        result[new] = random.integers(-(2**63), 2**63, int(new.sum()))
        yield result, new_share == 0


def _speed(subject: Subject, batches: Iterator[tuple[np.ndarray, bool]], rounds: int) -> dict[str, Any]:
    """Median ids per second and quartiles, and the median per second of the processor."""
    speeds: list[float] = []
    of_processor: list[float] = []
    begun = time.perf_counter()
    while len(speeds) < rounds and (not speeds or time.perf_counter() - begun < _SECONDS):
        drawn = [next(batches) for _ in range(subject.batches)]
        count = sum(len(ids) for ids, _ in drawn)
        start, start_of_processor = time.perf_counter(), time.process_time()
        for ids, looked_up in drawn:
            if looked_up:
                subject.look_up(ids)
            else:
                subject.take(ids)
        speeds.append(count / (time.perf_counter() - start))
        of_processor.append(count / (time.process_time() - start_of_processor))
    low, median, high = np.quantile(speeds, (0.25, 0.5, 0.75)).tolist()
    return {
        "rounds": len(speeds),
        "ids_per_second": median,
        "ids_per_second_quartiles": [low, high],
        "ids_per_cpu_second": float(np.median(of_processor)),
    }


def _memory() -> int:
    """Bytes of this process that lie in memory, without what its heap keeps for later."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096


if __name__ == "__main__":
    main()
