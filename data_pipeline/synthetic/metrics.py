"""Exact AUC and logloss of predictions in memory, of labels and under the true probabilities."""

import numpy as np

from .planted import probability


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


def expected_auc(scores: np.ndarray, true_logits: np.ndarray) -> float:
    """Expected AUC under the true probabilities: no noise of labels.

    The expected number of concordant pairs over the expected number of pairs, of different samples:

        sum_{i != j} p_i (1 - p_j) ([s_i > s_j] + [s_i = s_j] / 2) / sum_{i != j} p_i (1 - p_j)

    Sample i is a positive with weight p_i and a negative with weight 1 - p_i. Source: the bipartite ranking risk in
    terms of the class-probability function (Menon and Williamson, JMLR 17, 2016).

    Args:
        scores: float [R], any increasing function of the predicted probability.
        true_logits: float [R], logits of the true probabilities p.

    Returns:
        Value in [0, 1]; NaN for fewer than two samples.
    """
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    p = probability(true_logits[order].astype(np.float64))
    if len(p) < 2:
        return float("nan")
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    # Sums over the samples of one score, and over the pairs of a sample with itself.
    positive, negative, own = (np.add.reduceat(each, starts) for each in (p, 1 - p, p * (1 - p)))
    below = np.cumsum(negative) - negative
    concordant = (positive * below + (positive * negative - own) / 2).sum()
    return float(concordant / (positive.sum() * negative.sum() - own.sum()))


def exact_logloss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Mean of -log(probability of the label), in nats; logits float [R], labels [R].

    With the true probabilities in place of labels it is the expected logloss.
    """
    return float(np.mean(np.logaddexp(0.0, logits) - labels * logits))


def best_quality(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Quality of the true probabilities: auc and logloss of labels [R], and their expectations; logits float [R]."""
    return {
        "auc": exact_auc(logits, labels),
        "logloss": exact_logloss(logits, labels),
        "expected_auc": expected_auc(logits, logits),
        "expected_logloss": exact_logloss(logits, probability(logits)),
    }
