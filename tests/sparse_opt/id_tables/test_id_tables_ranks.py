"""Id tables on several ranks, and checkpoints loaded on another number of ranks: bit-identical to one process."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup

from cowrec.sparse_opt import Admission, IdTableConfig, IdTables, NewRows
from cowrec.sparse_opt.id_tables import layout
from process_groups import in_processes, process_group

FEATURES = ["a", "b", "plain", "c"]
CONFIGS = {
    "shared": IdTableConfig(240, ("b", "a"), expire_after=40),
    "counted": IdTableConfig(90, ("c",), "least_frequent", Admission("count", 3, window=60, counters=1 << 12)),
}
PROBABILISTIC = {
    "shared": CONFIGS["shared"],
    "counted": IdTableConfig(90, ("c",), "refuse", Admission("probabilistic", 4)),
}
BATCHES, SAVED_AFTER, SHARDS = 30, 17, 7
Slice = tuple[np.ndarray, np.ndarray, np.ndarray]


def make(configs: dict[str, IdTableConfig], group: ProcessGroup | None = None) -> IdTables:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "MIN_SEGMENT_CAPACITY", 16)  # so that small tables have several segments
        return IdTables(configs, FEATURES, seed=5, max_segments=SHARDS, group=group)


def slices(number: int, ranks: int) -> list[Slice]:
    """ids, splits and times of each rank's part of a batch: samples of up to three ids a feature.

    Parts are uneven; in every third batch the last rank has no sample, and in every tenth no rank has any.
    """
    rng = np.random.default_rng(number)
    samples = 0 if number % 10 == 9 else 50
    counts = rng.integers(0, 4, (len(FEATURES), samples))
    ids = [[rng.zipf(1.2, n) * (-1) ** number for n in feature_counts] for feature_counts in counts]
    times = 5 * number + rng.integers(-60, 5, samples) + 100
    bounds = np.sort(rng.integers(0, samples + 1, ranks - 1))
    if number % 3 == 0 and ranks > 1:
        bounds[-1] = samples
    parts = []
    for low, high in zip([0, *bounds], [*bounds, samples], strict=True):
        rank_ids = [np.concatenate([np.empty(0, np.int64), *feature_ids[low:high]]) for feature_ids in ids]
        part_times = [np.repeat(times[low:high], feature_counts[low:high]) for feature_counts in counts]
        splits = np.cumsum([0, *map(len, rank_ids)])
        parts.append((np.concatenate(rank_ids), splits, np.concatenate(part_times)))
    return parts


def columns(new_rows: NewRows) -> list[list[int]]:
    return [new_rows.table.tolist(), new_rows.row.tolist(), new_rows.id.tolist(), new_rows.feature.tolist()]


def run(tables: IdTables, numbers: range, rank: int = 0, ranks: int = 1) -> list[Any]:
    """Rows, new rows, rows of the batch before, and counters, for each batch."""
    results = []
    for number in numbers:
        rows, new_rows = tables.assign(*slices(number, ranks)[rank])
        before = tables.rows_of(*slices(max(number - 1, 0), ranks)[rank][:2])
        results.append((rows, columns(new_rows), before, tables.counters()))
    return results


def save(tables: IdTables, path: Path) -> None:
    dcp.save(tables.state_dict(), checkpoint_id=path, no_dist=not dist.is_initialized())


def loaded(path: Path, group: ProcessGroup | None) -> IdTables:
    tables = make(CONFIGS, group)
    state = tables.state_dict()
    dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    tables.load_state_dict(state)
    return tables


def worker(rank: int, ranks: int, folder: str) -> None:
    with process_group(rank, ranks, folder):
        group = dist.group.WORLD
        tables = make(CONFIGS, group)
        first = run(tables, range(SAVED_AFTER), rank, ranks)
        save(tables, Path(folder) / "of_ranks")
        remaining = run(tables, range(SAVED_AFTER, BATCHES), rank, ranks)
        other = loaded(Path(folder) / "of_one", group)
        results = {
            "run": first + remaining,
            "probabilistic": run(make(PROBABILISTIC, group), range(BATCHES), rank, ranks),
            "from one": run(other, range(SAVED_AFTER, BATCHES), rank, ranks),
            "entries": {name: vars(tables.entries(name)) for name in CONFIGS},
        }
        with pytest.raises(ValueError, match=f"IdTables of {ranks} processes need a group"):
            make(CONFIGS)
        # A wrong batch of one rank is rejected on all of them, and changes nothing.
        ids, splits, times = slices(1, ranks)[rank]
        with pytest.raises(ValueError, match="seconds in" if rank == 0 else "rank 0 got a batch"):
            tables.assign(ids, splits, times - (1 << 40) * (rank == 0))
        with pytest.raises(ValueError, match="in every batch or in none" if rank == 0 else "rank 0 got a batch"):
            tables.assign(ids, splits, None if rank == 0 else times)
        with pytest.raises(ValueError, match="times on some ranks only"):
            make(CONFIGS, group).assign(ids, splits, None if rank == 0 else times)
        results["after"] = run(tables, range(BATCHES, BATCHES + 2), rank, ranks)
        (Path(folder) / f"rank{rank}").write_bytes(pickle.dumps(results))
        dist.barrier()


def in_batch_order(parts: list[np.ndarray], number: int) -> np.ndarray:
    """Rows of the ranks' slices, in the order of the batch in one process."""
    splits = [part[1] for part in slices(number, len(parts))]
    return np.concatenate(
        [rows[at[f] : at[f + 1]] for f in range(len(FEATURES)) for rows, at in zip(parts, splits, strict=True)]
    )


def check_same(of_ranks: list[list[Any]], of_one: list[Any], numbers: range) -> None:
    for number, one, *parts in zip(numbers, of_one, *of_ranks, strict=True):
        rows, new_rows, before, counters = one
        assert (in_batch_order([part[0] for part in parts], number) == rows).all()
        assert (in_batch_order([part[2] for part in parts], max(number - 1, 0)) == before).all()
        for part in parts:
            assert part[1] == new_rows, "in the same order"
            assert part[3] == counters


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_results_do_not_depend_on_ranks(tmp_path: Path) -> None:
    ranks = 3
    one = make(CONFIGS)
    expected = run(one, range(SAVED_AFTER))
    save(one, tmp_path / "of_one")
    expected += run(one, range(SAVED_AFTER, BATCHES))
    in_processes(worker, (ranks, str(tmp_path)), ranks)
    results = [pickle.loads((tmp_path / f"rank{rank}").read_bytes()) for rank in range(ranks)]
    check_same([result["run"] for result in results], expected, range(BATCHES))
    check_same([result["from one"] for result in results], expected[SAVED_AFTER:], range(SAVED_AFTER, BATCHES))
    check_same(
        [result["probabilistic"] for result in results], run(make(PROBABILISTIC), range(BATCHES)), range(BATCHES)
    )
    for name in CONFIGS:
        entries = vars(one.entries(name))
        for column, values in entries.items():
            assert (np.concatenate([result["entries"][name][column] for result in results]) == values).all()
    assert run(one, range(BATCHES, BATCHES + 2))[-1][3] == results[0]["after"][-1][3]
    from_ranks = run(loaded(tmp_path / "of_ranks", None), range(SAVED_AFTER, BATCHES))
    check_same([from_ranks], expected[SAVED_AFTER:], range(SAVED_AFTER, BATCHES))
    assert all(expected[-1][3]["shared"][name] for name in ("expired", "late", "evicted"))


def test_a_loaded_copy_of_the_state_continues_like_the_original() -> None:
    """The copied state is loaded over other ids and does not share the original's memory."""
    tables, other = make(CONFIGS), make(CONFIGS)
    run(tables, range(SAVED_AFTER))
    state = {name: value.clone() for name, value in tables.state_dict().items()}
    expected = run(tables, range(SAVED_AFTER, BATCHES))
    run(other, range(5))
    other.load_state_dict(state)
    check_same([run(other, range(SAVED_AFTER, BATCHES))], expected, range(SAVED_AFTER, BATCHES))


def test_another_configuration_does_not_load() -> None:
    state = make(CONFIGS).state_dict()
    configs = CONFIGS | {"shared": IdTableConfig(241, ("b", "a"))}
    other = IdTables(configs, FEATURES, max_segments=SHARDS)
    with pytest.raises(ValueError, match="differ from these"):
        other.load_state_dict(state)
