"""Expected AUC and logloss under known probabilities, against scikit-learn's and against all possible labels."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from cowrec.data_pipeline.synthetic.planted import best_quality, exact_logloss, expected_auc

LOGITS = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.7, 3.0]), min_size=2, max_size=6)


@settings(max_examples=40, deadline=None)
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
    assert expected_auc(scores, np.array(true_logits)) == pytest.approx(concordant / pairs, abs=1e-12)
    assert exact_logloss(scores, p) == pytest.approx(logloss, abs=1e-12)


def test_expected_auc_equals_scikit_learns_of_weighted_samples():
    """Every sample once as a positive of weight p and once as a negative of weight 1 - p, less its pair with itself."""
    rng = np.random.default_rng(0)
    true_logits, scores = rng.normal(size=(2, 500))
    p = 1 / (1 + np.exp(-true_logits))
    labels, weights = np.repeat([1, 0], 500), np.concatenate([p, 1 - p])
    pairs, own = p.sum() * (1 - p).sum(), (p * (1 - p)).sum()
    with_own = roc_auc_score(labels, np.tile(scores, 2), sample_weight=weights)
    expected = (with_own * pairs - own / 2) / (pairs - own)
    assert expected_auc(scores, true_logits) == pytest.approx(expected, abs=1e-12)


def test_no_scores_are_better_than_the_true_probabilities():
    true_logits = np.random.default_rng(1).normal(size=1000)
    best = best_quality(true_logits, np.arange(1000) % 2)
    other = true_logits + np.random.default_rng(2).normal(size=1000)
    assert best["expected_auc"] > expected_auc(other, true_logits) > 0.5
    assert best["expected_logloss"] < exact_logloss(other, 1 / (1 + np.exp(-true_logits)))
    assert np.isnan(expected_auc(np.zeros(1), np.zeros(1)))
