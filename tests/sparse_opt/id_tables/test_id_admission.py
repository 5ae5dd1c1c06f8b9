"""Admission of ids: the sketch against exact counts and its bound, and the odds of the random draw."""

import math

import numpy as np
import pytest

from cowrec.sparse_opt import Admission, IdTableConfig, IdTables
from cowrec.sparse_opt.id_tables.kernels.memory import (
    DEPTH,
    RECORD,
    SEGMENT_LOCATION,
    SEGMENT_STATE,
    TABLE_SETTINGS,
    Segment,
)
from cowrec.sparse_opt.id_tables.kernels.sketch import count_id
from id_table_model import hash_of
from refusal import refused


def tables_with(admission: Admission, capacity: int = 4000) -> IdTables:
    return IdTables({"t": IdTableConfig(capacity, ("a",), "refuse", admission)}, ["a"], seed=3)


def assign(tables: IdTables, ids: np.ndarray, time: int | None = None) -> np.ndarray:
    rows, _ = tables.assign(ids, np.array([0, len(ids)]), None if time is None else np.full(len(ids), time))
    return rows


@pytest.mark.parametrize("panes", [1, 4])
def test_estimates_are_never_too_low_and_rarely_exceed_the_bound(panes: int) -> None:
    """Compares with exact counts: 2,000 ids in 128 counters a row, or 28 with panes, over ten panes.

    The test requires some estimates to be too high: otherwise it would show nothing.
    """
    config, rng = Admission("count", 9, window=4 * (panes > 1), counters=512), np.random.default_rng(panes)
    state, location, table = (np.zeros(1, dtype)[0] for dtype in (SEGMENT_STATE, SEGMENT_LOCATION, TABLE_SETTINGS))
    lines = config.lines(1)
    table["panes"], table["lines"] = panes, lines
    cells, exact, beyond = np.zeros(512, np.uint16), np.zeros((10, 2002), np.int64), []
    segment = Segment(state, location, table, np.zeros(0, RECORD), np.zeros(0, np.uint32), cells)
    for pane in range(10):
        for id in (rng.zipf(1.1, 800) % 2000 + 2).tolist():
            exact[pane, id] += 1
            counted = exact[max(0, pane - 3) if panes > 1 else 0 : pane + 1]
            excess = count_id(segment, np.uint64(hash_of(id, 0)), 1, pane if panes > 1 else 0)
            excess -= counted[:, id].sum()
            assert excess >= 0
            beyond.append((excess, excess > config.excess_bound(counted.sum(), lines)))
    off, too_far = np.mean(np.array(beyond) > 0, axis=0)
    assert off > 0.5
    assert too_far <= math.exp(-DEPTH)


@pytest.mark.parametrize("window", [80, pytest.param(0, marks=pytest.mark.thorough)])
def test_admission_by_a_small_sketch(window: int) -> None:
    """5,000 ids in few counters: ids with enough occurrences are admitted, and very few ids with too few.

    Enough: in the last three quarters of the window. Too few: less than the threshold by more than ``filter_excess`` in
    the window; the bound allows exp(-4) of the decisions on average, this test twice that.
    """
    threshold, counters = 100, 40_960 if window else 8192
    tables = tables_with(Admission("count", threshold, window=window, counters=counters), capacity=3000)
    rng, is_in = np.random.default_rng(0), np.zeros(5002, bool)
    counted = np.zeros((200, 5002), np.int64)  # occurrences of each id in each batch while it was absent
    wrong = decisions = 0
    for batch in range(200):
        now, ids = 2 * batch, rng.zipf(1.2, 600) % 5000 + 2
        counted[batch] = np.bincount(ids, minlength=5002) * ~is_in
        given_row = np.bincount(ids, weights=assign(tables, ids, now) != 0, minlength=5002) > 0
        times = 2 * np.arange(200)
        surely = counted[(times > now - window * 3 // 4) | (window == 0)].sum(0)
        at_most = counted[(times > now - window) | (window == 0)].sum(0)
        excess = tables.counters()["t"]["filter_excess"]
        absent = counted[batch] > 0
        assert (given_row | (surely < threshold))[absent].all()
        decisions += int(absent.sum())
        wrong += int((given_row & (at_most + excess < threshold))[absent].sum())
        is_in |= given_row
    assert 0 < excess < threshold
    assert decisions > 5000
    assert wrong <= 2 * math.exp(-4) * decisions


def test_counts_of_another_window_are_not_loaded() -> None:
    """Their panes would never expire, or admit ids that were not counted."""
    (saved, other) = (tables_with(Admission("count", 2, window=window, counters=8192)) for window in (4000, 8000))
    refused(
        "differ from these in names, capacities, features, counters, windows", other.load_state_dict, saved.state_dict()
    )


def test_saturated_counters_admit() -> None:
    """Every id is admitted at the largest threshold with all counters saturated, and ``filter_excess`` shows it."""
    tables = tables_with(Admission("count", 65_535, counters=128))
    ids = np.repeat(np.arange(2, 40), 65_534)
    for _ in range(2):
        rows = assign(tables, ids)
    assert (rows != 0).all()
    assert tables.counters()["t"]["filter_excess"] > 65_535


def test_probabilistic_admission_has_the_odds_of_monolith() -> None:
    """Holds after one and ``threshold`` occurrences, one a batch or all at once, within four standard errors."""
    n, threshold = 20_000, 10
    ids = np.arange(2, n + 2)
    apart = tables_with(Admission("probabilistic", threshold), capacity=40_000)
    shares = [(assign(apart, ids) != 0).mean() for _ in range(threshold)]
    at_once = (assign(tables_with(Admission("probabilistic", threshold), 40_000), np.tile(ids, threshold)) != 0).mean()
    for share, expected in [(shares[0], 1 - 0.05**0.1), (shares[-1], 0.95), (at_once, 0.95)]:
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / n)


def test_probabilistic_admission_depends_on_the_seed_alone() -> None:
    config = {"t": IdTableConfig(4000, ("a",), admission=Admission("probabilistic", 3))}
    ids, splits = np.arange(2, 1002), np.array([0, 1000])
    first, same, other = (IdTables(config, ["a"], seed=seed).assign(ids, splits)[0] for seed in (1, 1, 2))
    assert (first == same).all()
    assert (first != other).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 0}, r"threshold must be in \[1, 65535\]"),
        ({"kind": "count", "threshold": 2}, "counters must be at least 128, got 0"),
        ({"kind": "none", "window": 5}, 'belong to kind "count"'),
    ],
)
def test_a_wrong_admission_is_rejected(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Admission(**arguments)
