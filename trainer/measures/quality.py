"""Quality of predictions: of labels, and expected under known true probabilities.

R samples.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cowrec.data_pipeline.synthetic.metrics import expected_auc

from .auc import ascending, auc
from .calibration import CalibrationBins, calibration_bins
from .samples import Samples


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


def measure(samples: Samples) -> Quality:
    """Measures predictions of one task; samples whose label is unknown are left out."""
    samples = samples.where(~samples.label.isnan())
    samples = samples.where(ascending(samples.logits))
    logits, label, weight = samples.logits.double(), samples.label.double(), samples.weights()
    total = weight.sum().item()
    if not total:
        return Quality(nan, nan, len(label))
    losses, prediction = cross_entropies(logits, label), logits.sigmoid()
    bins = calibration_bins(prediction, label, weight)
    logloss, ctr, mean = ((weight * each).sum().item() / total for each in (losses, label, prediction))
    quality = Quality(
        auc(samples.logits, label, weight),
        logloss,
        len(label),
        logloss / entropy(ctr) if 0 < ctr < 1 else nan,
        mean / ctr if ctr else nan,
        bins.error,
        ctr,
        bins,
    )
    if samples.true_logit is None:
        return quality
    truth = samples.true_logit.double()
    p = truth.sigmoid()
    expected, least = (cross_entropies(each, p).mean().item() for each in (logits, truth))
    return dataclasses.replace(
        quality,
        expected_auc=expected_auc(logits.cpu().numpy(), truth.cpu().numpy()),
        expected_logloss=expected,
        excess_logloss=expected - least,
    )


def cross_entropies(logits: Tensor, p: Tensor) -> Tensor:
    """Cross-entropy of the predictions of logits and of probabilities p, in nats; both float64 [R]."""
    return F.binary_cross_entropy_with_logits(logits, p, reduction="none")


def entropy(p: float) -> float:
    """Entropy of a click of probability p in (0, 1), in nats."""
    return float(torch.special.entr(torch.tensor([p, 1 - p], dtype=torch.float64)).sum())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    return list(value) if isinstance(value, tuple) else value
