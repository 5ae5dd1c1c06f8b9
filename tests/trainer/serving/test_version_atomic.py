"""Every prediction uses the rows, the network and the number of one version, while versions are applied."""

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline.dataset.sample_block import Bags, SampleBlock
from cowrec.trainer.publishing.blob import Change, TableChange
from cowrec.trainer.serving.served_model import ServedModel
from cowrec.trainer.serving.served_rows import RowChange, ServedRows
from served_oracle import Oracle, collisionless_schema, delta, full, random_samples

VERSIONS, IDS = 12, 500


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_every_prediction_is_of_one_version(tmp_path: Path, precision: str) -> None:
    """Bit-identical to the prediction of a model to which the versions are applied while nobody else uses it.

    Numbered, collisionless and shared tables of two widths and a list field; all rows and weights change at random, ids
    come, go and return, and the tables grow.
    """
    oracle = Oracle(5)
    oracle.train(IDS, True)
    oracle.export(tmp_path / "export", precision)
    alone, served = (ServedModel.load(tmp_path / "export") for _ in range(2))
    samples = [random_samples(oracle.rng, IDS, 100) for _ in range(4)]
    blobs = []
    expected = [[alone.predict(each) for each in samples]]
    for version in range(1, VERSIONS + 1):
        oracle.cities = [oracle.row("cities") for _ in oracle.cities]
        change = oracle.train(IDS + 50 * version, version % 2 == 0)
        cities = TableChange(np.arange(4), np.array(oracle.cities, np.float32))
        change = Change(change.step, change.sample_time, {**change.tables, "cities": cities}, change.dense)
        whole = version % 8 == 1
        blobs.append(full(oracle.everything(), version) if whole else delta(change, version))
        alone.apply(blobs[-1])
        expected.append([alone.predict(each) for each in samples])
    seen, wrong, finished = set[int](), list[str](), threading.Event()

    def ask(number: int) -> None:
        last = False
        while not last:
            last = finished.is_set()
            got, version = served.predict_with_version(samples[number])
            seen.add(version)
            if not np.array_equal(got, expected[version][number]):
                wrong.append(f"{(got != expected[version][number]).mean():.0%} differ from version {version}")

    readers = [threading.Thread(target=ask, args=(number,)) for number in range(len(samples))]
    for reader in readers:
        reader.start()
    for blob in blobs:
        served.apply(blob)
    finished.set()
    for reader in readers:
        reader.join()
    assert not wrong, wrong[:5]
    assert len(seen) > 2
    assert VERSIONS in seen


identifiers = st.integers(2, 9).map(lambda number: number << 40)
versions = st.lists(
    st.tuples(
        st.booleans(),  # whether it is a full version
        st.dictionaries(st.tuples(st.integers(0, 2), identifiers | st.integers(0, 1)), st.integers(-100, 100)),
        st.sets(st.tuples(st.integers(0, 2), identifiers)),
        st.dictionaries(st.integers(0, 3), st.integers(-100, 100)),
    ),
    max_size=12,
)
WIDTHS = np.array([4, 4, 8, 4])


def as_changes(rows: dict[tuple[int, int], int], removed: set[tuple[int, int]]) -> list[RowChange]:
    """Changes of one table for each field; every column of a row has its value."""
    changes = []
    for field in range(4):
        ids = np.array([each for of, each in rows if of == field], np.int64)
        values = np.array([value for (of, _), value in rows.items() if of == field], np.float32)
        gone = np.array([each for of, each in removed if of == field], np.int64)
        numbers = [np.full(len(each), field) for each in (ids, gone)]
        changes.append(RowChange(ids, numbers[0], np.repeat(values[:, None], WIDTHS[field], 1), gone, numbers[1]))
    return changes


@settings(max_examples=80, deadline=None)
@given(versions)
def test_tables_equal_dictionaries(versions: list) -> None:
    """Before, with, and after merging an overlay; earlier tables keep their values until the overlay is merged.

    Fields 0 and 1 share a collisionless table, whose reserved rows belong to both; field 2 has one of another width,
    and field 3 has numbered rows.
    """
    sizes, schema = np.array([-1, -1, -1, 4]), collisionless_schema()
    served = ServedRows(schema, sizes, np.array([0, 0, 1, 2]), WIDTHS, "float32")
    asked = [0, 1, *(number << 40 for number in range(2, 10)), -3]
    offsets = torch.arange(len(asked) + 1)
    single = torch.tensor([[each, each, number % 6 - 1] for number, each in enumerate(asked)])
    samples = SampleBlock(
        torch.zeros(len(asked), 1), torch.zeros(len(asked)), single, {"basket": Bags(torch.tensor(asked), offsets)}
    )
    rows = {(field, each): 0 for field in (0, 2) for each in (0, 1)} | {(3, each): 0 for each in range(4)}

    def check(tables: tuple, rows: dict[tuple[int, int], int]) -> None:
        got, unknown = served.gather(samples, tables)
        missing = 0
        for b in range(len(asked)):
            for field in range(4):
                each = int(single[b, 2]) if field == 3 else asked[b]
                key = (0 if field == 1 and each in (0, 1) else field, each)
                default = (0 if field == 1 else field, 0)
                assert (got[b, field, : WIDTHS[field]] == rows.get(key, rows[default])).all(), (field, each)
                missing += key not in rows or key == default
        assert unknown == missing

    for whole, written, removed, cities in versions:
        changed = {(0 if each in (0, 1) and field == 1 else field, each): v for (field, each), v in written.items()}
        changed |= {(3, each): value for each, value in cities.items()}
        removed = removed - changed.keys()
        before, tables = dict(rows), served.tables
        if whole:
            rows = {key: value for key, value in rows.items() if key[0] == 3 or key[1] in (0, 1)} | changed
            served.replace(as_changes(changed, set()))
        else:
            rows = {key: value for key, value in (rows | changed).items() if key not in removed}
            served.overlay(as_changes(changed, removed))
            check(tables, before)
            check(served.tables, rows)
            served.merge(as_changes(changed, removed))
        check(served.tables, rows)
        assert served.resident == sum(field != 3 and each > 1 for field, each in rows)


def test_slots_are_cleared_of_removed_ids() -> None:
    """Ten thousand ids come and go, ten at a time, in the memory of a hundred."""
    schema = dataclasses.replace(collisionless_schema(), sparse=collisionless_schema().sparse[:1])
    served = ServedRows(schema, np.array([-1]), np.array([0]), np.array([4]), "int8")
    none = np.empty(0, np.int64)
    for first in range(2, 10_000, 10):
        ids, zeros = np.arange(first, first + 10) << 20, np.zeros(10, np.int64)
        for change in (RowChange(ids, zeros, np.ones((10, 4), np.float32), none, none),
                       RowChange(none, none, np.empty((0, 4), np.float32), ids, zeros)):  # fmt: skip
            served.overlay([change])
            served.merge([change])
    assert served.resident == 0
    assert served.removed == 10_000
    base = served.tables[0].base
    assert (len(base.slots), len(base.rows)) <= (256, 100)
