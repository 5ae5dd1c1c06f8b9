"""Drifting samples: reproducible in any chunks; lifetimes of ids, drift of effects and best possible quality."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from cowrec.data_pipeline import Reader, Schema
from cowrec.data_pipeline.encoding.vocabulary import raw_ids
from cowrec.data_pipeline.synthetic.drifting import (
    DAY,
    LIFETIMES,
    DriftConfig,
    DriftingModel,
    drift_config,
    drifting_tables,
    id_text,
    synthesize_drifting,
)

SMALL = {"rows": 20_000, "days": 40.0, "core_ids": (3, 50, 0), "new_ids_per_day": (0, 20, 40)}


def probability(logits):
    return 1 / (1 + np.exp(-logits))


def test_times_are_evenly_spaced_during_and_after_the_configured_days():
    config = DriftConfig(**SMALL, start=1_000_000)
    times = DriftingModel.of(config).draw(0, 40_000).times
    assert times[0] == 1_000_000
    assert (np.diff(times) >= 0).all()
    np.testing.assert_array_equal(times, [1_000_000 + row * 40 * DAY // 20_000 for row in range(40_000)])


def test_short_lived_ids_disappear_for_good():
    """Id number k appears k / new_ids days after 1970; one second of slack, since times are rounded to seconds."""
    config = DriftConfig(**{**SMALL, "rows": 100_000})
    draw = DriftingModel.of(config).draw(0, 100_000)
    for field, new_ids in enumerate(config.new_ids_per_day):
        ids = draw.ids[field]
        assert ((ids >= 0) & (ids < config.core_ids[field]) | (new_ids > 0) & (ids < 0)).all()
        if new_ids:
            appeared = (-1 - ids[ids < 0]) / new_ids
            age = draw.times[ids < 0] / DAY - appeared
            # The id appeared somewhere within 1 / new_ids days of its number.
            assert age.min() > -1 / DAY
            assert age.max() <= LIFETIMES * config.lifetime_days + 1 / new_ids
            # Mean of an exponential truncated at L lifetimes; standard error at most 2 / sqrt(25,000) days.
            mean = config.lifetime_days * (1 - LIFETIMES / math.expm1(LIFETIMES))
            assert age.mean() == pytest.approx(mean - 0.5 / new_ids, abs=0.06)
    first, last = draw.ids[2][:10_000], draw.ids[2][-10_000:]
    assert not set(first.tolist()) & set(last.tolist())
    assert set(draw.ids[0][:10_000].tolist()) == set(draw.ids[0][-10_000:].tolist())


def test_labels_are_drawn_with_the_known_probabilities():
    """Checks each tenth: 20,000 rows with a standard error below 0.0036. The mean over the days is the ctr."""
    config = DriftConfig(**{**SMALL, "rows": 200_000}, ctr=0.1)
    draw = DriftingModel.of(config).draw(0, 200_000)
    expected = probability(draw.logits)
    for tenth in np.array_split(np.argsort(expected), 10):
        assert draw.labels[tenth].mean() == pytest.approx(expected[tenth].mean(), abs=0.015)
    assert expected.mean() == pytest.approx(0.1, abs=0.002)


def test_effects_drift_at_the_configured_rate():
    """Effects of 2,000 ids after d days correlate by exp(-d^2 / (2 drift_days^2)); standard error at most 0.025.

    With one field and neither interactions nor numbers, the logit is the id's effect at that time.
    """
    config = DriftConfig(
        rows=400_000, days=30.0, core_ids=(2000,), new_ids_per_day=(0,), num_dense=0, skew=0.0, drift_days=10.0,
        interaction_effect=0.0, id_effect=1.0,
    )  # fmt: skip
    draw = DriftingModel.of(config).draw(0, 400_000)

    def effects(day):
        rows = slice(int(day * 400_000 / 30), int(day * 400_000 / 30) + 13_000)
        values = np.full(2000, np.nan)
        values[draw.ids[0, rows]] = draw.logits[rows]
        return values

    start = effects(0)
    for day in (0, 5, 10, 20, 29):
        later = effects(day)
        both = ~np.isnan(start) & ~np.isnan(later)
        assert both.sum() > 1900
        expected = math.exp(-(day**2) / 200)
        assert np.corrcoef(start[both], later[both])[0, 1] == pytest.approx(expected, abs=0.1)
        assert later[both].std() == pytest.approx(1.0, abs=0.1)


def test_raw_samples_in_any_chunks_equal_the_draw_with_ids_as_text():
    config = DriftConfig(**SMALL)
    draw = DriftingModel.of(config).draw(100, 250)
    tables = list(drifting_tables(config, 100, 250, chunk_rows=100))
    assert [table.num_rows for table in tables] == [100, 100, 50]
    assert id_text(np.zeros(0, np.int64)).to_pylist() == []
    rows = [row for table in tables for row in table.to_pylist()]
    for index, row in enumerate(rows):
        expected = {"sample_id": 100 + index, "time": draw.times[index], "label": draw.labels[index]}
        expected |= {f"I{n + 1}": draw.dense[n, index] for n in range(4)}
        for field, ids in enumerate(draw.ids):
            ident = int(ids[index])
            expected[f"C{field + 1}"] = f"core_{ident}" if ident >= 0 else f"born_{-1 - ident}"
        assert row == expected
    assert (DriftingModel.of(DriftConfig(**SMALL, seed=1)).draw(100, 250).ids != draw.ids).any()


def test_a_data_set_holds_the_samples_with_raw_ids_and_times(tmp_path):
    config = DriftConfig(**{**SMALL, "rows": 3000})
    schema = synthesize_drifting(tmp_path / "data", config, test_rows=1500)
    assert schema == Schema.load(tmp_path / "data")
    assert drift_config(tmp_path / "data") == config
    for split, first, rows in (("train", 0, 3000), ("test", 3000, 1500)):
        draw = DriftingModel.of(config).draw(first, rows)
        batch = next(Reader(tmp_path / "data", split, batch_size=rows).epoch(0))
        np.testing.assert_array_equal(batch.time, draw.times)
        np.testing.assert_array_equal(batch.label, draw.labels)
        np.testing.assert_array_equal(batch.dense, draw.dense.T)
        expected = np.concatenate([raw_ids(id_text(ids)) for ids in draw.ids])
        np.testing.assert_array_equal(batch.sparse.values(), expected)
    assert schema.best["auc"] == pytest.approx(roc_auc_score(draw.labels, draw.logits), abs=1e-12)
