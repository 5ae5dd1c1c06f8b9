"""Quality of predictions: AUC and logloss, of labels and expected under known true probabilities, over all processes.

B samples of this process.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric, Metric, SumMetric
from torchmetrics.classification import BinaryAUROC
from torchmetrics.utilities.data import dim_zero_cat

from cowrec.data_pipeline.synthetic.metrics import expected_auc


@dataclass(frozen=True)
class Quality:
    """Quality of a model's predictions of a split, or of a group of its samples.

    The expected values are those over all labels that the true probabilities p could have given: without the noise of
    the labels drawn. They are None where p is not known.

    Attributes:
        auc: area under the ROC curve, exact (no binning); NaN where the samples have one class only.
        logloss: mean binary cross-entropy, in nats; NaN without samples.
        rows: samples.
        expected_auc: see :func:`expected_auc`.
        expected_logloss: mean of -(p log q + (1 - p) log(1 - q)) for predictions q.
        excess_logloss: expected_logloss less its least possible value, that of q = p: the mean Kullback-Leibler
            divergence of q from p.
        by_id_counts: the same of each group of samples; see :class:`IdCountGroups`.
    """

    auc: float
    logloss: float
    rows: int
    expected_auc: float | None = None
    expected_logloss: float | None = None
    excess_logloss: float | None = None
    by_id_counts: Mapping[str, "Quality"] | None = None

    def __str__(self) -> str:
        excess = "" if self.excess_logloss is None else f"  excess logloss {self.excess_logloss:.4f}"
        return f"AUC {self.auc:.4f}  logloss {self.logloss:.4f}{excess}"

    def values(self) -> dict[str, Any]:
        """The values that are known, by name."""
        return _without_none(dataclasses.asdict(self))


class QualityMeter:
    """Collects the predictions of all processes and measures them.

    Args:
        device: of the predictions.
        has_truth: whether true logits are known.
    """

    def __init__(self, device: torch.device, has_truth: bool) -> None:
        self._auc = BinaryAUROC(thresholds=None, validate_args=False).to(device)
        self._logloss, self._expected, self._least = (
            MeanMetric().set_dtype(torch.float64).to(device) for _ in range(3)
        )
        self._rows, self._positives = (SumMetric().set_dtype(torch.float64).to(device) for _ in range(2))
        self._has_truth = has_truth
        self._pairs = _Pairs().to(device)

    def add(self, logits: Tensor, label: Tensor, true_logit: Tensor | None) -> None:
        """Adds predictions: logits [B], labels [B], and true logits [B] where they are known.

        Call it for every batch, even without samples: a metric that was never updated skips the final gathering, and
        the other processes would wait for it.
        """
        logits, label = logits.double(), label.double()
        self._auc.update(logits.sigmoid(), label.long())
        self._logloss.update(_cross_entropies(logits, label))
        self._rows.update(torch.ones_like(label))
        self._positives.update(label)
        if true_logit is not None:
            true_logit = true_logit.double()
            p = true_logit.sigmoid()
            self._expected.update(_cross_entropies(logits, p))
            self._least.update(_cross_entropies(true_logit, p))
            self._pairs.update(logits, true_logit)

    def quality(self) -> Quality:
        """Measures what was added; all processes call together and get the same numbers."""
        rows, positives = int(self._rows.compute()), int(self._positives.compute())
        auc = nan if positives in (0, rows) else self._auc.compute().item()
        quality = Quality(auc, self._logloss.compute().item() if rows else nan, rows)
        if not (self._has_truth and rows):
            return quality
        expected = self._expected.compute().item()
        return dataclasses.replace(
            quality,
            expected_auc=expected_auc(*self._pairs.compute().cpu().numpy().T),
            expected_logloss=expected,
            excess_logloss=expected - self._least.compute().item(),
        )


class _Pairs(Metric):
    """Logits and true logits of all processes: float64 [R, 2]. CatMetric would leave out NaN."""

    full_state_update = False
    pairs: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("pairs", default=[], dist_reduce_fx="cat")

    def update(self, logits: Tensor, true_logit: Tensor) -> None:
        self.pairs.append(torch.stack([logits, true_logit], 1))

    def compute(self) -> Tensor:
        return dim_zero_cat(self.pairs)


def _cross_entropies(logits: Tensor, p: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, p, reduction="none")


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return value
