"""Id tables by row: the id of each row, the rows that a batch freed, and the number of rows."""

import numpy as np
import pytest

from cowrec.sparse_opt import IdTableConfig, IdTables, hashed_ids, rows_for
from id_table_model import hash_of


@pytest.mark.parametrize("when_full", ["oldest", "least_frequent"])
@pytest.mark.parametrize("capacity", [300, 9000])
def test_ids_of_rows_and_freed_rows(capacity: int, when_full: str) -> None:
    """Compared with the entries before and after each batch; at 9000 the table has two segments."""
    config = IdTableConfig(capacity, ("a", "b"), when_full=when_full, expire_after=3000)
    tables = IdTables({"t": config}, ["a", "b"])
    rows = np.arange(tables.num_embeddings["t"])
    rng = np.random.default_rng(capacity)
    owners: dict[int, tuple[int, int]] = {}
    freed_in_all = 0
    for batch in range(60):
        ids = rng.integers(-3 * capacity, 3 * capacity, 400)
        times = np.full(400, 1000 + 100 * batch)
        new_rows = tables.assign(ids, np.array([0, 250, 400]), times)[1]
        # By the records, not the clock: ids that are expired and not yet freed have their rows.
        found_ids, features, resident = tables.ids_of("t", rows)
        now = {row: (found_ids[row], features[row]) for row in rows[resident].tolist()}
        entries = tables.entries("t")
        for row, id_, feature in zip(entries.row.tolist(), entries.id, entries.feature, strict=True):
            assert now[row] == (id_, feature)
        freed = set(tables.freed()["t"].tolist())
        assert freed == {row for row in owners if row not in now}
        changed = {row for row in now if owners.get(row) != now[row]}
        assert changed <= set(new_rows.row.tolist())
        owners, freed_in_all = now, freed_in_all + len(freed)
    assert freed_in_all > capacity
    assert not resident[:2].any()


@pytest.mark.parametrize("capacity", [1, 100, 4096, 8192, 100_001, 1 << 20])
def test_rows_for_a_capacity(capacity: int) -> None:
    tables = IdTables({"t": IdTableConfig(capacity, ("a",))}, ["a"])
    assert rows_for(capacity) == tables.num_embeddings["t"] >= capacity + 2


def test_the_hash_is_splitmix() -> None:
    """The hash is part of trained models: it must never change."""
    ids = np.array([0, 2, -1, 1 << 62, -(1 << 63)], np.int64)
    for feature in (0, 1, 7):
        assert hashed_ids(ids, feature).tolist() == [hash_of(int(each), feature) for each in ids]
