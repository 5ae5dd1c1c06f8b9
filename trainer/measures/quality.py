"""Quality of predictions, by labels and by known true probabilities, in float64. R samples, T tasks, U scores."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from cowrec.errors import UserError

BINS = 20


class Samples(NamedTuple):
    """Predictions of samples and their labels, on one device.

    Attributes:
        logits: float [R], or [R, T] of T > 1 tasks.
        label: float32, of the same shape; from 0 to 1, NaN where unknown.
        weight: sample weights, float32 [R]; None where all are equal.
        true_logit: logit of the true click probability, float32 [R]; None where it is unknown.
    """

    logits: Tensor
    label: Tensor
    weight: Tensor | None = None
    true_logit: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Samples":
        return Samples(*(None if column is None else change(column) for column in self))  # type: ignore[arg-type]

    def where(self, chosen: Tensor) -> "Samples":
        """Chooses samples by a mask, bool [R], or by indices."""
        return self.map(lambda column: column[chosen])

    def of_task(self, task: int) -> "Samples":
        """Returns the samples with the logits and labels of one task, [R]."""
        return self if self.logits.ndim == 1 else self._replace(logits=self.logits[:, task], label=self.label[:, task])

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns logits as float32, labels and weights (1 where there are none) as float64, [R] each, of one task."""
        label = self.label.cpu().numpy().astype(np.float64)
        weight = np.ones_like(label) if self.weight is None else self.weight.cpu().numpy().astype(np.float64)
        return self.logits.float().cpu().numpy(), label, weight


@dataclass(frozen=True)
class CalibrationBins:
    """Samples in at most ``BINS`` bins of ascending predictions and nearly equal weight; equal predictions share one.

    Attributes:
        lower, upper: lowest and highest prediction of each bin.
        prediction: mean prediction of each bin.
        ctr: mean label.
        weight: sum of the samples' weights; their number where they have none.
    """

    lower: tuple[float, ...]
    upper: tuple[float, ...]
    prediction: tuple[float, ...]
    ctr: tuple[float, ...]
    weight: tuple[float, ...]

    @property
    def error(self) -> float:
        """Expected calibration error: the weighted mean of ``|prediction - ctr|`` over the bins.

        Source: Guo et al. 2017 (arXiv 1706.04599), equation 3, with bins of equal weight instead of equal width.
        """
        rows = zip(self.prediction, self.ctr, self.weight, strict=True)
        return sum(abs(p - y) * w for p, y, w in rows) / sum(self.weight)


@dataclass(frozen=True)
class Quality:
    """Quality of a model's predictions of a split, or of a group of its samples.

    Where samples have weights, all means and pairs are weighted. A sample whose label is a rate y between 0 and 1
    counts as a click of y times its weight and another sample of 1 - y times its weight. The expected values, without
    weights, are means over all labels that the true probabilities p could have given. They are None without p.

    Attributes:
        auc: area under the ROC curve, exact (no binning); NaN where the samples have one class only.
        logloss: mean binary cross-entropy, in nats; NaN without samples.
        rows: samples whose label is known and whose weight is above 0.
        normalized_entropy: logloss over that of predicting `ctr` for every sample; NaN where the samples have one class
            only. He et al. 2014 (Practical Lessons from Predicting Clicks on Ads at Facebook), equation 1.
        calibration: mean prediction over mean label, of the same paper; 1 is best. NaN without a click.
        calibration_error: see :class:`CalibrationBins`; NaN without samples.
        ctr: mean label.
        effective_clicks, effective_others: Kish's effective numbers of samples of each class: (sum of weights)^2 / (sum
            of their squares), the number of samples where they have no weights; of rates at most that number.
        calibration_bins: bins of the complete split.
        expected_auc: probability that a click's logit exceeds another's, over labels drawn with p; see :func:`measure`.
        expected_logloss: mean of -(p log q + (1 - p) log(1 - q)) for predictions q.
        excess_logloss: expected_logloss less that of q = p: the mean Kullback-Leibler divergence of q from p.
        by_id_counts: quality of each third of the samples; see :func:`id_count_thirds`.
        newest: quality of the newest tenth of a test split by time.
        over_time: quality of each tenth of a test split by its first time, Unix seconds; see :func:`tenths_by_time`.
        by_task: quality of each of several tasks; the other values are those of the main one.
    """

    auc: float
    logloss: float
    rows: int
    normalized_entropy: float = nan
    calibration: float = nan
    calibration_error: float = nan
    ctr: float = nan
    effective_clicks: float = 0.0
    effective_others: float = 0.0
    calibration_bins: CalibrationBins | None = None
    expected_auc: float | None = None
    expected_logloss: float | None = None
    excess_logloss: float | None = None
    by_id_counts: Mapping[str, "Quality"] | None = None
    newest: "Quality | None" = None
    over_time: "Mapping[int, Quality] | None" = None
    by_task: Mapping[str, "Quality"] | None = None

    def __str__(self) -> str:
        if self.by_task:
            return "; ".join(f"{task}: {quality}" for task, quality in self.by_task.items())
        excess = "" if self.excess_logloss is None else f"  excess logloss {self.excess_logloss:.4f}"
        return f"AUC {self.auc:.4f}  logloss {self.logloss:.4f}  calibration {self.calibration:.3f}{excess}"

    def values(self) -> dict[str, Any]:
        """Returns the known values by name, as plain numbers, lists and dictionaries; of a task ``auc_<task>`` etc."""
        values: dict[str, Any] = _plain(dataclasses.asdict(dataclasses.replace(self, by_task=None)))
        for task, quality in (self.by_task or {}).items():
            values |= {f"{name}_{task}": value for name, value in quality.values().items()}
        return values

    def without_bins(self) -> "Quality":
        return dataclasses.replace(self, calibration_bins=None)


WORSE, PERFECT = 0.003, 0.99
"""Loss of AUC since an earlier epoch, and AUC, above which a run gets a remark."""
GAP = 0.01
"""Difference of logloss between validation and training samples from which the model has learnt the latter by heart."""


def auc_remark(values: Mapping[str, Any], epochs: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns a sentence for a run whose AUC fell in later epochs, or is too good to be true; None for others.

    ``values`` are measures of the test split, and ``epochs`` those after each epoch up to that of ``values``.
    """
    if values["auc"] > PERFECT:
        return (
            f"AUC is {values['auc']:.4f}: perhaps a field says what the label is, and is not known before the label;"
            " cowrec evaluate --importance tells which fields the model uses"
        )
    key = "validation_auc" if "validation_auc" in values else "auc"
    best = max(epochs, key=lambda epoch: -1.0 if math.isnan(epoch[key]) else float(epoch[key]))
    if not best[key] - values[key] > WORSE:
        return None
    hold_out = "train.validation_fraction = 0.1, " if key == "auc" else ""
    return (
        f"AUC was {best[key]:.4f} after epoch {best['epoch']}, and is {values[key]:.4f} now: later epochs probably"
        f" learn the training samples by heart; set train.epochs = {best['epoch']}, or stop early: {hold_out}"
        'train.patience = 1, checkpoint.keep_best = "auc"'
    )


def curve_remark(
    epochs: Sequence[Mapping[str, Any]], losses: Sequence[float], *, few_steps: int, most_epochs: int
) -> str | None:
    """Returns a sentence that says what would improve a run, by its curves; None without validation samples.

    Args:
        epochs: measures after each epoch.
        losses: mean training loss of each epoch.
        few_steps: number of steps below which a run shows how short it is.
    """
    measured = [epoch for epoch in epochs if math.isfinite(epoch.get("validation_logloss") or math.nan)]
    if not measured:
        return None
    best = min(measured, key=lambda epoch: float(epoch["validation_logloss"]))
    found = f"the validation logloss was best after epoch {best['epoch']} of {len(epochs)}"
    if best is epochs[-1] and len(epochs) == most_epochs:
        return f"{found}, the last one: more epochs may improve the model (train.epochs)"
    if best["step"] < few_steps:
        return f"{found}, in {best['step']} steps: a smaller train.batch_size may improve the model"
    gap = float(best["validation_logloss"]) - losses[best["epoch"] - 1]
    if gap > GAP:
        return (
            f"{found}, {gap:.3f} above the loss of the training samples: more samples may improve the model, and more"
            " epochs do not"
        )
    return f"{found}: more epochs do not improve the model"


def calibration_remark(values: Mapping[str, Any]) -> str | None:
    """Returns a sentence for a run whose predictions of the newest test samples are off by more than a tenth, and by
    more than chance explains; None for others, and for splits that are not by time. ``values`` are of a test split."""
    newest = values.get("newest")
    if not newest or not newest["ctr"] > 0:
        return None
    off, clicks, others = newest["calibration"] - 1, newest["effective_clicks"], newest["effective_others"]
    if abs(off) <= max(0.1, 3 / math.sqrt(clicks)):  # three standard deviations of a number of clicks
        return None
    found = (
        f"the newest tenth of the test samples has {abs(off):.0%} too {'many' if off > 0 else 'few'} predicted clicks"
    )
    lost = values["auc"] - newest["auc"]
    if lost > max(0.01, math.sqrt((1 / clicks + 1 / max(others, 1)) / 3)):  # two, at an AUC of 0.5
        drift = f"AUC is {lost:.3f} lower there: what is clicked has changed, or many ids are new"
    elif (values["calibration"] - 1) * off > off * off / 2:  # off in the same direction
        drift = (
            f"Calibration of the whole split is {values['calibration']:.3f}: the click rate differs from that of the"
            " training samples; if it did not change (evaluate --split train), the model is overfitted"
        )
    else:
        drift = f"AUC is not clearly lower there: perhaps the click rate has changed lately, to {newest['ctr']:.4f}"
    return f"{found}. {drift}. Train on newer samples, or as they arrive (cowrec online)"


def require_distinct_measures(labels: Sequence[str]) -> None:
    """Raises UserError if two measures of several labels would have one name, such as `auc_<label>`."""
    own = [field.name for field in dataclasses.fields(Quality)]
    of_labels = [f"{measure}_{label}" for label in labels for measure in own] if len(labels) > 1 else []
    for name, count in Counter([*own, "auc_remark", "calibration_remark", *of_labels]).items():
        if count > 1:
            taken = [label for label in labels if name.endswith(f"_{label}")]
            raise UserError(
                f"the measure {name!r} of label {min(taken, key=len)!r} would have the name of another one; give the"
                " label another name in the schema file, with the raw name as `column`, and prepare the data again"
            )


def measure_tasks(samples: Samples, labels: Sequence[str]) -> Quality:
    """Measures the main task, that of the first label, and where there are several, each task."""
    qualities = {label: measure(samples.of_task(task)) for task, label in enumerate(labels)}
    if len(labels) == 1:
        return qualities[labels[0]]
    by_task = {label: quality.without_bins() for label, quality in qualities.items()}
    return dataclasses.replace(qualities[labels[0]], by_task=by_task)


def measure(samples: Samples) -> Quality:
    """Measures predictions of one task, as float32; samples whose label is unknown are left out.

    The expected AUC is P / S. S is the sum of p * (1 - p') over all pairs of different samples, and P the same sum over
    the pairs that the logits order rightly; pairs of equal logits count half in P.
    """
    samples = samples.where(~samples.label.isnan())
    unknown_truth = samples.true_logit is not None and bool(samples.true_logit.isnan().any())
    logits, label, weight = samples.arrays()
    weighed = weight > 0
    rows = int(weighed.sum())
    if not rows:
        return Quality(nan, nan, rows)
    order = np.flatnonzero(weighed)[logits[weighed].argsort()]
    scores, label, weight = logits[order], label[order], weight[order]
    clicks, others = _by_score(scores, weight * label), _by_score(scores, weight * (1 - label))
    of_blocks = clicks + others
    total, clicked = of_blocks.sum(), clicks.sum()
    ctr, both = float(clicked / total), 0 < clicked < total
    logloss = float((weight * _cross_entropy(scores, label)).sum() / total)
    prediction = _probability(scores[_block_starts(scores)])
    bins = _calibration_bins(prediction, clicks, of_blocks)
    quality = Quality(
        float(_ordered_pairs(clicks, others).sum() / (clicked * others.sum())) if both else nan,
        logloss,
        rows,
        logloss / entropy(ctr) if both else nan,
        float((prediction * of_blocks).sum() / total) / ctr if clicked else nan,
        bins.error,
        ctr,
        _effective_size((weight * label)[label > 0]),
        _effective_size((weight * (1 - label))[label < 1]),
        bins,
    )
    if samples.true_logit is None:
        return quality
    if unknown_truth:
        return dataclasses.replace(quality, expected_auc=nan, expected_logloss=nan, excess_logloss=nan)
    order = logits.argsort()
    scores, truth = logits[order], samples.true_logit.cpu().numpy()[order]
    p = _probability(truth)
    positive, negative, own = _by_score(scores, p), _by_score(scores, 1 - p), (p * (1 - p)).sum()
    pairs, expected = _ordered_pairs(positive, negative).sum(), _cross_entropy(scores, p).mean()
    return dataclasses.replace(
        quality,
        expected_auc=float((pairs - own / 2) / (positive.sum() * negative.sum() - own)) if len(p) > 1 else nan,
        expected_logloss=float(expected),
        excess_logloss=float(expected - _cross_entropy(truth, p).mean()),
    )


def group_aucs(logits: np.ndarray, label: np.ndarray, weight: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
    """Computes the AUC of each group: the weighted share of its pairs of a click and a non-click in the right order.

    A pair weighs the product of its two weights; one of equal logits counts half.

    Args:
        logits, label, weight: float32, float64 and float64 [R]; labels from 0 to 1, weights of at least 0.
        groups: group of each sample, int64 [R], in [0, count).

    Returns float64 [count], NaN for a group without a pair.
    """
    if not len(logits):
        return np.full(count, nan)
    order = np.lexsort((logits, groups))
    scores, groups = logits[order], groups[order]
    clicks, others = (_by_score(scores, (weight * chosen)[order], groups) for chosen in (label, 1 - label))
    of_block = groups[_block_starts(scores, groups)]
    # Each group's weights have the sum 1, so that sums over all groups are as exact for one of small weights.
    totals = np.bincount(of_block, clicks + others, count)
    totals[totals == 0] = 1
    clicks, others = clicks / totals[of_block], others / totals[of_block]
    group_clicks, group_others = np.bincount(of_block, clicks, count), np.bincount(of_block, others, count)
    # A difference of the same sums, which is exactly 0 in a group without others.
    before_group = np.append(0.0, others.cumsum())[np.searchsorted(of_block, of_block)]
    pairs = np.bincount(of_block, clicks * (others.cumsum() - others / 2 - before_group), count)
    with np.errstate(invalid="ignore"):
        return pairs / (group_clicks * group_others)


def group_ranks(logits: np.ndarray, label: np.ndarray, groups: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes NDCG and the reciprocal rank of each group, with its samples in descending order of their logits.

    DCG is the sum of label / log2(1 + rank), ranks counted from 1 (Järvelin and Kekäläinen 2002), and NDCG its share of
    the largest possible one. Samples of equal logits share the mean of their discounts, as in scikit-learn's
    ``ndcg_score``. The reciprocal rank is that of the first sample with a click, which stands behind other samples of
    its logit. Arguments are those of :func:`group_aucs`. Returns two float64 [count]; NaN for a group without a click.
    """
    ndcg, reciprocal = np.full(count, nan), np.full(count, nan)
    if not len(logits):
        return ndcg, reciprocal
    order = np.lexsort((-logits, groups))
    scores, label, groups = logits[order], label[order], groups[order]
    first = np.searchsorted(groups, groups)  # of the sample's group
    rank = np.arange(len(groups)) - first + 1
    discounts = 1 / np.log2(1.0 + rank)
    starts = _block_starts(scores, groups)
    sizes = np.diff(np.append(starts, len(scores)))
    of_block, clicks = groups[starts], np.add.reduceat((label > 0).astype(np.int64), starts)
    gains = np.bincount(of_block, np.add.reduceat(discounts, starts) * np.add.reduceat(label, starts) / sizes, count)
    best = np.bincount(groups, label[np.lexsort((-label, groups))] * discounts, count)  # groups are sorted
    known = best > 0
    ndcg[known] = gains[known] / best[known]
    of_click = np.flatnonzero(clicks > 0)
    with_clicks, chosen = np.unique(of_block[of_click], return_index=True)
    first_block = of_click[chosen]
    reciprocal[with_clicks] = 1 / (rank[starts[first_block]] + sizes[first_block] - clicks[first_block])
    return ndcg, reciprocal


def entropy(p: float) -> float:
    """Computes the entropy of a click of probability p in (0, 1), in nats."""
    return float(-p * np.log(p) - (1 - p) * np.log1p(-p))


def _effective_size(weight: np.ndarray) -> float:
    """Computes Kish's effective sample size of weights above 0, float64 [R]; 0 without samples."""
    return float(weight.sum() ** 2 / np.square(weight).sum()) if len(weight) else 0.0


def _block_starts(scores: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
    """Finds the first sample of each block of equal sorted scores, and groups: int64 [U]."""
    changes = scores[1:] != scores[:-1]
    if groups is not None:
        changes |= groups[1:] != groups[:-1]
    return np.concatenate([[0], np.flatnonzero(changes) + 1])


def _by_score(scores: np.ndarray, values: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
    """Sums values, float64 [R], of equal scores and groups: [U]."""
    summed: np.ndarray = np.add.reduceat(values, _block_starts(scores, groups))
    return summed


def _ordered_pairs(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Sums each block's pairs of positive with lower blocks' negative weights, and half of those within it: [U]."""
    pairs: np.ndarray = positive * (negative.cumsum() - negative / 2)
    return pairs


def _cross_entropy(logits: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Computes -(p log q + (1 - p) log(1 - q)), float64, from logits of q; NaN or infinite if the logit is."""
    x = logits.astype(np.float64)
    size = np.abs(x)
    with np.errstate(invalid="ignore"):
        losses: np.ndarray = (size - (2 * p - 1) * x) / 2 + np.log1p(np.exp(-size))
    return losses


def _probability(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _calibration_bins(prediction: np.ndarray, clicks: np.ndarray, weight: np.ndarray) -> CalibrationBins:
    """Bins blocks of ascending predictions; all are float64 [U]."""
    middle = weight.cumsum() - weight / 2
    numbers = np.minimum(middle * (BINS / weight.sum()), BINS - 1).astype(np.int64)
    starts = np.concatenate([[0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1])
    ends = np.append(starts[1:], len(numbers)) - 1
    weights, clicked, predicted = (np.add.reduceat(values, starts) for values in (weight, clicks, prediction * weight))
    columns = (prediction[starts], prediction[ends], predicted / weights, clicked / weights, weights)
    return CalibrationBins(*(tuple(column.tolist()) for column in columns))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items() if entry is not None}
    return list(value) if isinstance(value, tuple) else value
