"""Ids with Criteo's frequencies: against real samples and in closed form, and the stream against a plain loop."""

import lzma
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pytest

from cowrec.data_pipeline.synthetic.criteo_frequencies import CRITEO_SIZES
from cowrec.data_pipeline.synthetic.criteo_ids import CRITEO_FREQUENCIES, CriteoIds
from criteo_stream import last_by_loop

SAMPLE = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "criteo_80k_hash20.tsv.xz"
SAMPLE_ROWS, CRITEO_ROWS = 80_000, 45_840_617


def counts_of(column) -> np.ndarray:
    return np.sort(pc.value_counts(column).field("counts").to_numpy())[::-1]


def test_ids_repeat_as_in_real_samples():
    """Distinct ids, ids seen once, and lookups of ids seen up to 4 times agree.

    The tolerance is 2 % plus three deviations of two Poisson counts. The sample's ids are 20-bit hashes, of which 1.7 %
    collide in the largest fields. C1 has only 249 ids seen once, which the smooth classes match to 10 %.
    """
    if not SAMPLE.is_file():
        pytest.skip(f"needs {SAMPLE}")
    types = {f"f{column}": pa.string() for column in range(14, 40)}
    table = pa.csv.read_csv(
        pa.BufferReader(lzma.decompress(SAMPLE.read_bytes())),
        pa.csv.ReadOptions(autogenerate_column_names=True),
        pa.csv.ParseOptions(delimiter="\t"),
        pa.csv.ConvertOptions(column_types=types, include_columns=list(types)),
    )
    drawn = CriteoIds().rows(0, SAMPLE_ROWS)
    for field, columns in enumerate(zip(map(pa.array, drawn), table.columns, strict=True), 1):
        ours, theirs = map(counts_of, columns)
        for name, measure in (
            ("distinct", len),
            ("once", lambda counts: (counts == 1).sum()),
            ("up to four times", lambda counts: counts[counts <= 4].sum()),
        ):
            allowed = (0.1 if field == 1 else 0.02) * measure(theirs) + 3 * np.sqrt(2 * measure(theirs)) + 3
            assert abs(measure(ours) - measure(theirs)) <= allowed, (field, name)


def test_as_many_samples_as_criteo_has_see_as_many_ids():
    """Expected distinct ids of 45.8 million draws, in closed form; the classes of small fields are single ids."""
    for classes, size in zip(CRITEO_FREQUENCIES, CRITEO_SIZES, strict=True):
        ids, shares = np.array(classes).T
        expected = (ids * -np.expm1(CRITEO_ROWS * np.log1p(-shares / shares.sum() / ids))).sum()
        assert expected == pytest.approx(size, rel=0.005, abs=4)


def folded_into(first: float, end: float, rows: float, ids: np.ndarray) -> np.ndarray:
    """Number of ids below each of ``ids`` that fold into rows [first, end) of a table of ``rows`` rows."""
    return ids // rows * (end - first) + np.clip(ids % rows - first, 0, end - first)


def test_the_classes_are_drawn_by_their_shares():
    """Rows and distinct rows of each class, folded ids included, agree within 5 deviations of a binomial."""
    samples = 1 << 18
    for classes, size, rows in zip(CRITEO_FREQUENCIES, CRITEO_SIZES, CriteoIds().rows(0, samples), strict=True):
        ids, shares = np.array(classes).T
        rates, ends = shares / shares.sum() / ids, np.cumsum(ids)
        for first, end in zip(ends - ids, np.minimum(ends, size), strict=True):
            if first < size:
                here = folded_into(first, end, size, ends) - folded_into(first, end, size, ends - ids)
                drawn = rows[(rows >= first) & (rows < end)]
                expected = samples * (here * rates).sum()
                assert abs(len(drawn) - expected) <= 5 * np.sqrt(expected) + 1
                distinct = (end - first) * -np.expm1(-expected / (end - first))
                assert abs(len(np.unique(drawn)) - distinct) <= 5 * np.sqrt(distinct) + 1


def test_any_part_of_the_stream_can_be_drawn_by_itself():
    whole = CriteoIds(seed=3).rows(0, 1000)
    np.testing.assert_array_equal(CriteoIds(seed=3).rows(300, 500), whole[:, 300:800])
    assert (CriteoIds(seed=4).rows(0, 1000) != whole).any()
    assert (whole[0] != whole[7]).any()


def test_ids_fold_into_smaller_tables():
    capped, whole = CriteoIds(max_rows=50), CriteoIds()
    np.testing.assert_array_equal(capped.table_rows, np.minimum(CRITEO_SIZES, 50))
    rows, unfolded = capped.rows(0, 2000), whole.rows(0, 2000)
    assert (rows < capped.table_rows[:, None]).all()
    for field, classes in enumerate(CRITEO_FREQUENCIES):
        if sum(ids for ids, _ in classes) <= CRITEO_SIZES[field]:
            np.testing.assert_array_equal(rows[field], unfolded[field] % capped.table_rows[field])


def test_last_samples_are_those_of_a_loop_over_the_stream(monkeypatch):
    monkeypatch.setattr("cowrec.data_pipeline.synthetic.criteo_ids._CHUNK", 700)
    ids, done = CriteoIds(max_rows=300), []
    found = ids.last_samples(2000, done.append)
    np.testing.assert_array_equal(found, np.concatenate(last_by_loop(ids, 2000)))
    assert sum(done) == 26 * 2000
    assert (found == 0).any()
