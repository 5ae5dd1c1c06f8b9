"""Quality of predictions: of labels, and expected under known true probabilities.

R samples.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import frexp, fsum, nan
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .calibration import BinnedSamples, CalibrationBins
from .exact_sums import ExactSums
from .samples import Samples
from .score_blocks import PART, Masses, score_blocks, total_masses


@dataclass(frozen=True)
class Quality:
    """Quality of a model's predictions of a split, or of a group of its samples.

    Where samples have weights, all means and pairs are weighted. The expected values are those over all labels that the
    true probabilities p could have given: without the noise of the labels drawn, and without weights. They are None
    where p is not known.

    Attributes:
        auc: area under the ROC curve, exact (no binning); NaN where the samples have one class only.
        logloss: mean binary cross-entropy, in nats; NaN without samples.
        rows: samples whose label is known.
        normalized_entropy: logloss over that of predicting `ctr` for every sample; 1 is a model that knows nothing
            else. NaN where the samples have one class only. He et al. 2014 (Practical Lessons from Predicting Clicks on
            Ads at Facebook), equation 1, with the click rate of the measured samples.
        calibration: mean prediction over mean label, of the same paper; 1 is best. NaN without a click.
        calibration_error: see :class:`CalibrationBins`; NaN without samples.
        ctr: mean label.
        calibration_bins: of the complete split.
        expected_auc: see :func:`expected_auc`.
        expected_logloss: mean of -(p log q + (1 - p) log(1 - q)) for predictions q.
        excess_logloss: expected_logloss less its least possible value, that of q = p: the mean Kullback-Leibler
            divergence of q from p.
        by_id_counts: the same of each group of samples; see :class:`IdCountGroups`.
        by_task: of several tasks, the quality of each; the other values are those of the main one.
    """

    auc: float
    logloss: float
    rows: int
    normalized_entropy: float = nan
    calibration: float = nan
    calibration_error: float = nan
    ctr: float = nan
    calibration_bins: CalibrationBins | None = None
    expected_auc: float | None = None
    expected_logloss: float | None = None
    excess_logloss: float | None = None
    by_id_counts: Mapping[str, "Quality"] | None = None
    by_task: Mapping[str, "Quality"] | None = None

    def __str__(self) -> str:
        if self.by_task:
            return "; ".join(f"{task}: {quality}" for task, quality in self.by_task.items())
        excess = "" if self.excess_logloss is None else f"  excess logloss {self.excess_logloss:.4f}"
        return f"AUC {self.auc:.4f}  logloss {self.logloss:.4f}  calibration {self.calibration:.3f}{excess}"

    def values(self) -> dict[str, Any]:
        """The values that are known, by name, as they are stored: plain numbers, lists and dictionaries.

        Those of each of several tasks are ``auc_<task>`` and so on.
        """
        values = _plain(dataclasses.asdict(dataclasses.replace(self, by_task=None)))
        for task, quality in (self.by_task or {}).items():
            values |= {f"{name}_{task}": value for name, value in quality.values().items()}
        return values


def measure(samples: Samples, together: bool = False) -> Quality:
    """Measures predictions of one task, as float32; samples whose label is unknown are left out.

    The result depends neither on the order of the samples nor on how processes share them: AUC and means are computed
    from the number (the weight, rounded to 2 ** -35 of the largest or less) of clicks and of other samples at each
    score, and summed without rounding.

    Args:
        samples: of this process.
        together: measures the samples of all processes, which call together.
    """
    device = samples.label.device
    labelled = _Labelled(samples, together)
    clicks, others = total_masses(len(samples.label), labelled, device, together).tolist()
    total = clicks + others
    if not total:
        return Quality(nan, nan, labelled.rows)
    bins = BinnedSamples(total, labelled.unit, device)
    pairs, losses = _pairs_and_losses(samples.logits, labelled, together, bins)
    found = bins.bins()
    logloss, ctr = losses / total, clicks / total
    mean = fsum(p * w for p, w in zip(found.prediction, found.weight, strict=True)) / fsum(found.weight)
    quality = Quality(
        pairs / (clicks * others) if clicks and others else nan,
        logloss,
        labelled.rows,
        logloss / entropy(ctr) if clicks and others else nan,
        mean / ctr if clicks else nan,
        found.error,
        ctr,
        found,
    )
    return quality if samples.true_logit is None else _with_expected(quality, samples, labelled, together)


class _Labelled:
    """Weights of labelled samples as integers: the masses of clicks and of other samples.

    Attributes:
        rows: samples whose label is known.
        unit: of the integers, a power of two; so small that their sum over all samples is below 2 ** 62.
    """

    def __init__(self, samples: Samples, together: bool) -> None:
        self._samples = samples
        self.unit = 1.0
        rows = (~samples.label.isnan()).sum()
        if together:
            dist.all_reduce(rows)
        self.rows = int(rows)
        if samples.weight is not None:
            known = samples.weight.where(~samples.label.isnan(), 0.0)
            largest = known.max() if len(known) else known.new_zeros(())
            if together:
                dist.all_reduce(largest, dist.ReduceOp.MAX)
            self.unit = 2.0 ** (frexp(float(largest))[1] + self.rows.bit_length() - 62)

    def __call__(self, indices: Tensor) -> Tensor:
        label = self._samples.label[indices]
        weight = (~label.isnan()).long()
        if self._samples.weight is not None:
            weight *= (self._samples.weight[indices].double() / self.unit).round().long()
        clicked = label == 1
        return torch.stack([weight * clicked, weight * ~clicked], 1)


def _with_expected(quality: Quality, samples: Samples, labelled: _Labelled, together: bool) -> Quality:
    """Adds the expected values, under the true probabilities p; see :func:`expected_auc` for the formula of the AUC."""
    truth, label, device = samples.true_logit, samples.label, samples.label.device
    assert truth is not None
    unknown = (truth.isnan() & ~label.isnan()).sum()
    if together:
        dist.all_reduce(unknown)
    if int(unknown):
        return dataclasses.replace(quality, expected_auc=nan, expected_logloss=nan, excess_logloss=nan)
    one = 1 << (62 - labelled.rows.bit_length())  # probabilities are integers too, so that any order has the same sum

    def masses(indices: Tensor) -> Tensor:
        p = _losses_and_probability(truth[indices])[2]
        positive = (p * one).round().long()
        known = (~label[indices].isnan()).long()
        return torch.stack([positive, one - positive, (p * (1 - p) * one).round().long()], 1) * known[:, None]

    positive, negative, own = total_masses(len(label), masses, device, together).tolist()
    pairs, losses = _pairs_and_losses(samples.logits, lambda indices: masses(indices)[:, :2], together)
    least = ExactSums(1, device)
    for part, known in zip(truth.split(PART), label.isnan().logical_not().split(PART), strict=True):
        of_click, of_other, p = _losses_and_probability(part[known])
        least.add(p * of_click + (1 - p) * of_other)
    if together:
        least.add_other_processes()
    expected = losses / (labelled.rows * one)
    return dataclasses.replace(
        quality,
        expected_auc=(pairs - own * one / 2) / (positive * negative - own * one) if labelled.rows > 1 else nan,
        expected_logloss=expected,
        excess_logloss=expected - least.floats()[0] / labelled.rows,
    )


def _pairs_and_losses(
    logits: Tensor, masses: Masses, together: bool, bins: BinnedSamples | None = None
) -> tuple[float, float]:
    """Pairs in the right order, of equal logits half of them, and losses: by the masses of clicks and of others."""
    pairs, losses = ExactSums(1, logits.device), ExactSums(1, logits.device)
    for blocks in score_blocks(logits.float(), masses, together):
        clicks, others = blocks.masses.double().unbind(1)
        of_click, of_other, p = _losses_and_probability(blocks.scores)
        pairs.add(clicks * (blocks.below[:, 1].double() + others / 2))
        losses.add(clicks * of_click + others * of_other)
        if bins:
            bins.add(p, blocks.masses[:, 0], blocks.masses.sum(1), blocks.below.sum(1))
    if together:
        pairs.add_other_processes()
        losses.add_other_processes()
        if bins:
            bins.add_other_processes()
    return pairs.floats()[0], losses.floats()[0]


def _losses_and_probability(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of a click, loss of another sample, and the probability of a click, of each logit: float64.

    On the CPU by numpy: torch's results depend on the place of a number in a vector register.
    """
    library: Any = torch if logits.is_cuda else np
    x: Any = logits.double() if logits.is_cuda else logits.double().numpy()
    size = library.abs(x)
    small = library.exp(-size)
    least = library.log1p(small)
    with np.errstate(invalid="ignore"):  # an infinite logit has a NaN for the class that it excludes
        columns = (
            (size - x) / 2 + least,
            (size + x) / 2 + least,
            library.where(x >= 0, 1 / (1 + small), small / (1 + small)),
        )
    of_click, of_other, p = columns if logits.is_cuda else map(torch.from_numpy, columns)
    return of_click, of_other, p


def entropy(p: float) -> float:
    """Entropy of a click of probability p in (0, 1), in nats."""
    return float(torch.special.entr(torch.tensor([p, 1 - p], dtype=torch.float64)).sum())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    return list(value) if isinstance(value, tuple) else value
