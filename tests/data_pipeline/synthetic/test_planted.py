"""Synthetic data: deterministic, of Criteo's shape, with the best possible AUC; exact and expected measures."""

from itertools import product

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from cowrec.data_pipeline import Reader, Schema, SynthesizeConfig, synthesize
from cowrec.data_pipeline.synthetic.criteo_frequencies import CRITEO_SIZES
from cowrec.data_pipeline.synthetic.planted import PlantedModel, Scales, auc, exact_logloss
from raw_cases import content

SMALL = {"rows": 5000, "test_rows": 2000, "vocabulary_scale": 1e-4}


def table(folder, split="train"):
    return pq.read_table(folder / split)


def model(seed=0, **changes):
    scales = {"skew": 1.1, "id_scale": 0.3, "pair_scale": 0.2, "rank": 2, "dense_scale": 0.5}
    scales |= {name: changes.pop(name) for name in scales.keys() & changes}
    return PlantedModel(seed, changes.pop("sizes", np.array([5, 100, 10**7])), 3, Scales(**scales), **changes)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, -3.5, 7.0]), min_size=2, max_size=30), st.data())
def test_auc_and_logloss_equal_scikit_learn(scores, data):
    labels = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(scores), max_size=len(scores))))
    scores = np.array(scores)
    if len(set(labels.tolist())) == 2:
        assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    else:
        assert np.isnan(auc(scores, labels))
    expected = log_loss(labels, 1 / (1 + np.exp(-scores)), labels=[0, 1])
    assert exact_logloss(scores, labels) == pytest.approx(expected, abs=1e-12)


def test_rows_depend_on_the_seed_and_not_on_their_number_or_on_shards(tmp_path):
    changes = {"more": {}, "again": {}, "fewer": {"rows": 3000, "shard_rows": 1000}, "other": {"seed": 1}}
    for name, change in changes.items():
        synthesize(tmp_path / name, SynthesizeConfig(**{**SMALL, **change}))
    assert content(tmp_path / "more") == content(tmp_path / "again")
    assert table(tmp_path / "more").slice(0, 3000).equals(table(tmp_path / "fewer"))
    assert table(tmp_path / "more", "test").equals(table(tmp_path / "fewer", "test"))
    assert not table(tmp_path / "more").equals(table(tmp_path / "other"))


def test_the_shape_equals_criteo(tmp_path):
    schema = synthesize(tmp_path / "data", SynthesizeConfig(rows=1000, test_rows=1000, vocabulary_scale=1.0))
    assert [field.num_embeddings - 2 for field in schema.sparse] == list(CRITEO_SIZES)
    assert sum(CRITEO_SIZES) == 33_762_577
    assert len(schema.dense) == 13
    batch = next(Reader(tmp_path / "data", "train", batch_size=1000).epoch(0))
    assert batch.dense.shape == (1000, 13)
    assert (batch.dense >= 0).all()
    assert (batch.dense < 1).all()
    assert batch.sparse.values().numel() == 26_000
    assert set(batch.label.tolist()) == {0.0, 1.0}


def test_click_rate_and_best_auc_are_as_configured(tmp_path):
    """Default settings give a Bayes AUC of 0.78 to 0.80; the standard error on 20,000 rows is 0.004."""
    schema = synthesize(tmp_path / "data", SynthesizeConfig(rows=20_000, test_rows=20_000))
    split = schema.splits["train"]
    assert split.positives[0] / split.rows == pytest.approx(0.25, abs=0.015)
    assert 0.77 < schema.best["auc"] < 0.81
    assert Schema.load(tmp_path / "data").best == schema.best


def test_ids_follow_the_power_law():
    ids = model(skew=1.0).draw(0, 0, 400_000).ids
    for field, size in enumerate((5, 100)):
        share = np.bincount(ids[field], minlength=size)[:size] / 400_000
        rank = np.arange(1, size + 1)
        np.testing.assert_allclose(share, np.log1p(1 / rank) / np.log(size + 1), atol=0.004)
    assert ids.min() == 0
    assert ids[2].max() < 10**7


def test_the_effect_of_an_id_is_the_same_in_all_rows():
    """Solves for one effect per id by least squares: without interactions and numbers, the logit is their sum."""
    draw = model(pair_scale=0.0, dense_scale=0.0, sizes=np.array([5, 40])).draw(0, 0, 1000)
    design = (draw.ids[:, :, None] == np.arange(40)).transpose(1, 0, 2).reshape(1000, 80).astype(float)
    effects, *_ = np.linalg.lstsq(design, draw.logits)
    np.testing.assert_allclose(design @ effects, draw.logits, atol=1e-8)
    assert draw.logits.std() > 0.2


LOGITS = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.7, 3.0]), min_size=2, max_size=5)


@settings(max_examples=20, deadline=None)
@given(LOGITS, st.data())
def test_expectations_over_all_labels(true_logits, data):
    """The expected pairs, concordant and all, add up the probabilities of all 2^R assignments of labels."""
    scores = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(true_logits), max_size=len(true_logits))))
    p = 1 / (1 + np.exp(-np.array(true_logits)))
    concordant = pairs = logloss = 0.0
    for labels in map(np.array, product((0, 1), repeat=len(p))):
        chance = np.where(labels, p, 1 - p).prod()
        logloss += chance * log_loss(labels, 1 / (1 + np.exp(-scores)), labels=[0, 1])
        found = labels.sum() * (1 - labels).sum()
        pairs += chance * found
        concordant += chance * found * (roc_auc_score(labels, scores) if found else 0)
    assert auc(scores, p) == pytest.approx(concordant / pairs, abs=1e-12)
    assert exact_logloss(scores, p) == pytest.approx(logloss, abs=1e-12)
