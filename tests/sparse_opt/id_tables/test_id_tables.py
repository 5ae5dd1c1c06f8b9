"""Id tables against plain dictionaries, and edge cases."""

import os
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from cowrec.sparse_opt import Admission, IdTableConfig, IdTables, NewRows, hashed_ids, rows_for
from cowrec.sparse_opt.id_tables import layout
from id_table_model import IdTablesModel, hash_of

FEATURES = ["a", "plain", "b", "c"]
Bags = list[list[tuple[int, int]]]


def flat(bags: Bags) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, splits and times of each feature's (id, time)."""
    ids = np.array([id for bag in bags for id, _ in bag], np.int64)
    times = np.array([time for bag in bags for _, time in bag], np.int64)
    return ids, np.cumsum([0, *map(len, bags)]), times


def one(*ids: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of one feature."""
    return np.array(ids, np.int64), np.array([0, len(ids)])


def table(capacity: int, **options: object) -> IdTables:
    """One table of one feature."""
    return IdTables({"t": IdTableConfig(capacity, ("a",), **options)}, ["a"])  # type: ignore[arg-type]


def as_tuples(new_rows: NewRows) -> list[tuple]:
    return list(zip(new_rows.table, new_rows.row, new_rows.id, new_rows.feature, strict=True))


CONFIGS = st.builds(
    IdTableConfig,
    capacity=st.sampled_from([1, 2, 7, 16, 40, 130]),
    features=st.just(("a", "b")),
    when_full=st.sampled_from(["oldest", "least_frequent", "refuse"]),
    expire_after=st.sampled_from([0, 0, 1, 6, 30]),
    admission=st.sampled_from(
        [Admission(), Admission("count", 3, counters=1 << 14), Admission("count", 2, window=9, counters=1 << 16)]
    ),
)


def random_bags(rng: np.random.Generator, now: int, pool: np.ndarray) -> Bags:
    """Draws up to 12 ids a feature, with repeated ids and empty features; samples up to 40 seconds late."""
    late = rng.choice([0, 1, 5, 40], 200, p=[0.6, 0.2, 0.15, 0.05])
    drawn = (pool[rng.zipf(1.3, rng.integers(0, 13)) % len(pool)].tolist() for _ in FEATURES)
    return [[(id, max(0, now - int(late[rng.integers(200)]))) for id in ids] for ids in drawn]


@settings(max_examples=60, deadline=None)
@given(config=CONFIGS, timed=st.booleans(), max_segments=st.sampled_from([1, 3]), seed=st.integers(0, 2**32))
def test_batches_match_plain_dictionaries(config: IdTableConfig, timed: bool, max_segments: int, seed: int) -> None:
    """Rows, new rows, freed rows, ids of rows, entries and counters after each of 40 batches, exactly."""
    rng = np.random.default_rng(seed)
    configs = {"shared": config, "single": IdTableConfig(12, ("c",))}
    pool = np.concatenate([rng.integers(-(2**63), 2**63, 60), [0, 1, 2, -1, -(2**63), 2**63 - 1]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "MIN_SEGMENT_CAPACITY", 5)  # so that small tables have several segments
        tables = IdTables(configs, FEATURES, max_segments=max_segments)
    model = IdTablesModel(configs, FEATURES, max_segments=max_segments, min_segment_capacity=5, timed=timed)
    now = int(rng.integers(0, 100))
    for _ in range(40):
        bags = random_bags(rng, now, pool)
        ids, splits, times = flat(bags)
        rows, new_rows = tables.assign(ids, splits, times if timed else None)
        owners = [model.owners(t) for t in range(len(configs))]
        expected_rows, expected_new_rows = model.assign(bags)
        assert rows.tolist() == expected_rows
        assert as_tuples(new_rows) == expected_new_rows
        for t, name in enumerate(configs):
            found_ids, features, resident = tables.ids_of(name, np.arange(tables.num_embeddings[name]))
            of_rows = {row: (found_ids[row], features[row]) for row in resident.nonzero()[0].tolist()}
            assert of_rows == model.owners(t)
            assert set(tables.freed()[name].tolist()) == owners[t].keys() - of_rows.keys()
            entries = tables.entries(name)
            columns = (entries.id, entries.feature, entries.row, entries.last_seen, entries.count)
            assert set(zip(*(column.tolist() for column in columns), strict=True)) == model.entries(t)
            counters, expected = tables.counters()[name], model.counters(t)
            assert {key: counters[key] for key in expected} == expected
        others = [[int(id) for id in rng.choice(pool, 9)] for _ in FEATURES]
        ids = np.array(others, np.int64).reshape(-1)
        assert tables.rows_of(ids, np.arange(5) * 9).tolist() == model.rows_of(others)
        now += int(rng.choice([0, 1, 3, 25], p=[0.3, 0.4, 0.25, 0.05]))


@pytest.mark.parametrize("before", [False, True])
def test_batches_in_random_order_of_time(before: bool) -> None:
    """They are processed as without expiry and window; lookups go by the newest sample, and so do later batches.

    Also after batches in order, which have left a later clock and a later pane.
    """
    rng, day, count = np.random.default_rng(0), 86400, partial(Admission, "count", 3, counters=1 << 20)
    ids, times = rng.zipf(1.5, 4000) % 300 + 2, rng.permutation(np.arange(4000) * 60 * day // 4000)
    timed = table(400, when_full="refuse", expire_after=10 * day, admission=count(window=day))
    plain = table(400, when_full="refuse", admission=count())
    last = dict.fromkeys(range(2, 302), -1)
    for own in (timed, plain) if before else ():
        own.assign(*one(7, 7, 7, 8, 8), np.full(5, 90 * day))
        last[7] = 90 * day
    for part in np.array_split(np.arange(4000), 40):
        rows, expected = (table.assign(*one(*ids[part]), times[part], in_order=False)[0] for table in (timed, plain))
        assert rows.tolist() == expected.tolist()
        for id, seen in zip(ids[part][rows > 0].tolist(), times[part][rows > 0].tolist(), strict=True):
            last[id] = max(last[id], seen)
    assert [timed.counters()["t"][name] for name in ("late", "expired")] == [0, 0]
    newest = max(last.values())
    alive = np.array([0 <= last[id] >= newest - 10 * day for id in range(2, 302)])
    known = plain.rows_of(*one(*range(2, 302)))
    assert 0 < alive.sum() < (known > 0).sum()
    assert timed.rows_of(*one(*range(2, 302))).tolist() == np.where(alive, known, 0).tolist()
    later = [timed.assign(*one(400), np.array([newest + after * day]))[0][0] for after in (1, 3, 5, 5, 5)]
    assert [row > 0 for row in later] == [False] * 4 + [True], "at the third within a day"


def test_two_ids_never_share_a_row() -> None:
    """100,000 ids while the slots grow; every row is within the table."""
    tables = table(120_000, when_full="refuse")
    ids = np.random.default_rng(0).permutation(np.arange(2, 100_002)) * np.int64(-7046029254386353131)
    given_rows = [tables.assign(*one(*part))[0] for part in np.array_split(ids, 10)]
    rows = np.concatenate(given_rows)
    assert len(set(rows.tolist())) == len(ids)
    assert rows.min() >= 2
    assert rows.max() < tables.num_embeddings["t"]
    assert (tables.rows_of(*one(*ids)) == rows).all()
    assert (tables.rows_of(*one(*(ids + 1))) == 0).all()


def test_counts_saturate() -> None:
    tables = table(10)
    ids = np.full(70_000, 9)
    for _ in range(2):
        tables.assign(ids, np.array([0, len(ids)]))
        assert tables.entries("t").count.tolist() == [65_535]


def test_ids_that_collide_in_one_slot() -> None:
    """The home slot of every id is 0; removing some moves others back, and the remaining ones are still found."""
    colliding = [id for id in range(2, 40_000) if (hash_of(id, 0) & 0xFFFFFFFF) * 126 >> 32 == 0][:90]
    assert len(colliding) == 90
    tables = table(100, expire_after=10)
    rows, _ = tables.assign(*one(*colliding), np.arange(90) % 7)
    assert len(set(rows.tolist())) == 90
    for now in range(10, 60):
        tables.assign(*one(1), np.array([now]))
        valid_ids = [now <= 10 + number % 7 for number in range(90)]
        expected = [row if valid else 0 for row, valid in zip(rows.tolist(), valid_ids, strict=True)]
        assert tables.rows_of(*one(*colliding)).tolist() == expected
    assert tables.counters()["t"]["resident"] == 0


def test_ids_with_equal_tags_and_home_slots() -> None:
    """Two ids, and one id of two features, with the same bits of the hash in the slot and the same home slot of 16."""

    def seen(id: int, feature: int) -> tuple[int, int]:
        hashed = hash_of(id, feature)
        return (hashed >> 32) % (1 << 11), (hashed & 0xFFFFFFFF) * 16 >> 32  # 2^20 rows leave 11 bits

    by_feature = next(id for id in range(2, 10**6) if seen(id, 0) == seen(id, 1))
    by_id = next(id for id in range(2, 10**6) if id != by_feature and seen(id, 0) == seen(by_feature, 0))
    tables = IdTables({"t": IdTableConfig(1 << 20, ("a", "b"))}, ["a", "b"], max_segments=1)
    first, _ = tables.assign(np.array([by_feature]), np.array([0, 1, 1]))
    rows, new_rows = tables.assign(np.array([by_feature, by_id, by_feature]), np.array([0, 2, 3]))
    assert rows[0] == first[0]
    assert len(set(rows.tolist())) == 3
    assert as_tuples(new_rows) == [(0, rows[1], by_id, 0), (0, rows[2], by_feature, 1)]


def test_results_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(1)
    configs = {"t": IdTableConfig(40_000, ("a",)), "u": IdTableConfig(20_000, ("b",), "least_frequent")}
    results = []
    batches = [rng.zipf(1.1, 50_000) for _ in range(6)]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            tables = IdTables(configs, ["a", "b"])
            results.append([tables.assign(ids, np.array([0, 20_000, 50_000])) for ids in batches])
    finally:
        torch.set_num_threads(before)
    for (rows, new_rows), (other_rows, other_new_rows) in zip(*results, strict=True):
        assert (rows == other_rows).all()
        assert as_tuples(new_rows) == as_tuples(other_new_rows)


@pytest.mark.parametrize(
    ("ids", "splits", "times", "message"),
    [
        (np.array([1, 2], np.int32), np.array([0, 2]), None, "ids must be contiguous int64"),
        (np.array([1, 2]), np.array([0, 1, 2]), None, r"splits must be int64 \[2\]"),
        (np.array([1, 2]), np.array([0, 1]), None, "splits must rise from 0 to the number of ids, 2"),
        (np.array([1, 2]), np.array([0, 2]), np.array([1, -1]), "seconds in"),
    ],
)
def test_a_wrong_batch_is_rejected(ids: np.ndarray, splits: np.ndarray, times: np.ndarray | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table(10).assign(ids, splits, times)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IdTableConfig(0, ("a",)), "capacity"),
        (lambda: IdTableConfig(5, ("a", "a")), "must differ"),
        (lambda: IdTableConfig(5, ("a",), expire_after=-1), "expire_after"),
        (lambda: IdTables({n: IdTableConfig(5, ("a",)) for n in "tu"}, ["a"]), "list it in one"),
        (lambda: IdTables({}, ["a"], max_segments=0), "at least as many segments as ranks"),
    ],
)
def test_a_wrong_configuration_is_rejected(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def translated(tables: IdTables, method: str, sample: tuple[torch.Tensor]) -> object:
    return getattr(tables, method)(*one(int(sample[0])))


@pytest.mark.thorough
@pytest.mark.parametrize(("start", "method"), [("fork", "assign"), ("fork", "rows_of"), ("spawn", "assign")])
def test_copies_in_workers_of_a_loader_are_refused(start: str, method: str) -> None:
    """Each would give rows of its own, and the tables in this process none."""
    tables, ids = table(10), TensorDataset(torch.tensor([10, 11]))
    loader = DataLoader(
        ids,
        batch_size=None,
        num_workers=1,
        multiprocessing_context=start,
        collate_fn=partial(translated, tables, method),
    )
    with pytest.raises(ValueError, match=rf"of those of process {os.getpid()}, .* in a thread of the process"):
        next(iter(loader))


@pytest.mark.parametrize("capacity", [1, 100, 4096, 8192, 100_001, 1 << 20])
def test_rows_for_a_capacity(capacity: int) -> None:
    tables = IdTables({"t": IdTableConfig(capacity, ("a",))}, ["a"])
    assert rows_for(capacity) == tables.num_embeddings["t"] >= capacity + 2


def test_the_hash_is_splitmix() -> None:
    """The hash is part of trained models: it must never change."""
    ids = np.array([0, 2, -1, 1 << 62, -(1 << 63)], np.int64)
    for feature in (0, 1, 7):
        assert hashed_ids(ids, feature).tolist() == [hash_of(int(id_), feature) for id_ in ids]
