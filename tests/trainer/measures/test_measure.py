"""Measures of arbitrary predictions, weights and groups, against scikit-learn and plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss, roc_auc_score

from cowrec.trainer.measures.auc import ascending, aucs
from cowrec.trainer.measures.quality import measure
from cowrec.trainer.measures.samples import Samples

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
    order = ascending(logits)
    of_groups = aucs(logits[order], label[order].double(), weight[order].double(), groups[order], 5)
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
