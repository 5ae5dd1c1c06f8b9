"""Exact AUC and logloss of predictions in memory."""

import numpy as np


def exact_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve: probability that a positive scores above a negative, ties counting one half.

    Args:
        scores: float [R], any increasing function of the probability.
        labels: [R], 0 or 1.

    Returns:
        Value in [0, 1] from the rank sum (Mann-Whitney), without thresholds; NaN if one of the classes is absent.
    """
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    positive = labels[order].astype(bool)
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    stops = np.r_[starts[1:], len(ordered)]
    mean_rank = np.repeat((starts + stops + 1) / 2, stops - starts)
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    return float((mean_rank[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def exact_logloss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean of -log(probability of the label), in nats; logits float [R], labels [R]."""
    return float(np.mean(np.logaddexp(0.0, logits) - labels * logits))
