"""Measures of arbitrary predictions, weights and groups, against scikit-learn and plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss, roc_auc_score

from cowrec.trainer.measures.quality import Samples, group_aucs, measure

# Few different logits, so that many are equal; weights may be 0.
SAMPLES = st.lists(
    st.tuples(st.integers(-4, 4), st.booleans(), st.sampled_from([0.0, 0.25, 1.0, 7.0]), st.integers(0, 3)),
    min_size=1,
    max_size=60,
)


def columns(drawn: list[tuple]) -> tuple[torch.Tensor, ...]:
    logits, label, weight, groups = (np.array(each) for each in zip(*drawn, strict=True))
    floats = (torch.from_numpy(each.astype(np.float32)) for each in (logits / 2, label, weight))
    return (*floats, torch.from_numpy(groups))


@settings(max_examples=150, deadline=None)
@given(drawn=SAMPLES)
def test_any_weighted_samples_are_measured_as_by_scikit_learn(drawn: list[tuple]) -> None:
    logits, label, weight, groups = columns(drawn)
    quality = measure(Samples(logits, label, weight))
    assert quality.rows == len(drawn)
    of_groups = group_aucs(*Samples(logits, label, weight).arrays(), groups.numpy(), 5)
    kept = weight > 0
    for expected, chosen in zip(
        [quality.auc, *of_groups.tolist()], [groups >= 0, *(groups == g for g in range(5))], strict=True
    ):
        x, y, w = (each[chosen & kept].double().numpy() for each in (logits, label, weight))
        if len(set(y)) == 2:
            assert expected == pytest.approx(roc_auc_score(y, x, sample_weight=w), abs=1e-12)
        else:
            assert math.isnan(expected)
    if not kept.any():
        assert math.isnan(quality.logloss)
        return
    y, w = (each[kept].double().numpy() for each in (label, weight))
    p = 1 / (1 + np.exp(-logits[kept].double().numpy()))
    ctr = np.average(y, weights=w)
    assert quality.ctr == pytest.approx(ctr)
    assert quality.logloss == pytest.approx(log_loss(y, p, sample_weight=w, labels=[0, 1]))
    if 0 < ctr < 1:
        alone = log_loss(y, np.full(len(y), ctr), sample_weight=w)
        assert quality.normalized_entropy == pytest.approx(quality.logloss / alone)
        assert quality.calibration == pytest.approx(np.average(p, weights=w) / ctr)
    else:
        assert math.isnan(quality.normalized_entropy)
    check_bins(p, y, w, quality.calibration_bins, quality.calibration_error)


def check_bins(p: np.ndarray, y: np.ndarray, w: np.ndarray, bins, error: float) -> None:
    """Bins hold all samples between their ends, and no prediction is in two."""
    assert list(bins.lower) == sorted(bins.lower)
    assert all(upper < lower for upper, lower in zip(bins.upper, bins.lower[1:], strict=False))
    assert sum(bins.weight) == pytest.approx(w.sum())
    differences = 0.0
    for lower, upper, prediction, rate, weight in zip(*vars(bins).values(), strict=True):
        inside = (lower - 1e-12 <= p) & (p <= upper + 1e-12)  # the sigmoid here rounds in another way
        assert weight == pytest.approx(w[inside].sum())
        assert prediction == pytest.approx(np.average(p[inside], weights=w[inside]))
        assert rate == pytest.approx(np.average(y[inside], weights=w[inside]))
        differences += weight * abs(prediction - rate)
    assert error == pytest.approx(differences / w.sum())


def test_bins_of_different_predictions_are_scikit_learns_quantiles() -> None:
    rng = np.random.default_rng(0)
    p, y = rng.permutation(np.arange(1, 401)) / 401, (rng.random(400) < 0.3).astype(float)
    bins = measure(Samples(torch.from_numpy(p).logit().float(), torch.from_numpy(y))).calibration_bins
    rates, predictions = calibration_curve(y, p, n_bins=20, strategy="quantile")
    assert bins.prediction == pytest.approx(predictions)
    assert bins.ctr == pytest.approx(rates)
    assert bins.weight == (20.0,) * 20


def test_samples_without_a_label_are_left_out() -> None:
    logits, label = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.0, 1.0, math.nan])
    assert measure(Samples(logits, label)) == measure(Samples(logits[:2], label[:2]))
    nothing = measure(Samples(logits[2:], label[2:]))
    assert nothing.rows == 0
    assert math.isnan(nothing.logloss)


def test_zeros_of_both_signs_and_neighbouring_numbers_are_ordered_exactly() -> None:
    rng = np.random.default_rng(0)
    near = 2 + rng.integers(0, 300, 3000) * 2.0**-22
    for logits in (near, rng.integers(-4, 5, 3000) / 2 * rng.choice([1, -1], 3000)):
        label = rng.random(3000) < 1 / (1 + np.exp(2 - logits))
        quality = measure(Samples(*(torch.from_numpy(each.astype(np.float32)) for each in (logits, label))))
        assert quality.auc == pytest.approx(roc_auc_score(label, logits), abs=1e-12)


def test_numbers_that_are_not_finite_are_no_quality() -> None:
    label = torch.tensor([0.0, 1.0, 1.0])
    for wrong in (math.nan, math.inf):
        assert not math.isfinite(measure(Samples(torch.tensor([0.0, wrong, 1.0]), label)).logloss)
    logits = torch.tensor([-1.0, 1.0, 0.5])
    quality = measure(Samples(logits, label, true_logit=torch.tensor([1.0, math.nan, 0.0])))
    assert quality.auc == 1
    assert quality.expected_auc is not None
    assert quality.expected_logloss is not None
    assert math.isnan(quality.expected_auc + quality.expected_logloss)
