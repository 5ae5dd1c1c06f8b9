"""Exact AUC and logloss of a model over a whole split, and its predictions, over all processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC
from torchrec.distributed import TrainPipelineSparseDist

from cowrec.data_pipeline import Batch, Reader

Pipeline: TypeAlias = TrainPipelineSparseDist[Batch, tuple[Tensor, Tensor, Tensor]]
"""TorchRec's pipeline over a TrainTask: ``progress`` returns (loss, logits [B], label [B])."""


@dataclass(frozen=True)
class Quality:
    """How well a model predicts a split.

    Attributes:
        auc: area under the ROC curve, exact (no binning); NaN where the split has one class only.
        logloss: mean binary cross-entropy, in nats.
        rows: samples.
    """

    auc: float
    logloss: float
    rows: int


def evaluate(pipeline: Pipeline, reader: Reader) -> Quality:
    """AUC and logloss over a whole split; all processes call together and get the same numbers.

    Raises:
        ValueError: the split has no rows or no labels.
    """
    split = reader.schema.split(reader.split)
    if not split.labelled:
        raise ValueError(f"the {reader.split} split has no labels: it can be predicted, not evaluated")
    if not split.rows:
        raise ValueError(f"the {reader.split} split has no rows; prepare it with a larger test fraction")
    auc = BinaryAUROC(thresholds=None, validate_args=False).to(reader.device)
    logloss = MeanMetric().set_dtype(torch.float64).to(reader.device)
    for logits, label in predictions(pipeline, reader):
        if label.numel():
            auc.update(logits.double().sigmoid(), label.long())
            losses = F.binary_cross_entropy_with_logits(logits.double(), label.double(), reduction="none")
            logloss.update(losses)
    one_class = split.positives in (0, split.rows)
    return Quality(float("nan") if one_class else auc.compute().item(), logloss.compute().item(), split.rows)


def predictions(pipeline: Pipeline, reader: Reader) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [B], label [B]) of each batch of this process, in the reader's order, on its device."""
    model = pipeline._model
    was_training = model.training
    model.eval()
    batches = reader.epoch(0)
    try:
        with torch.no_grad():
            while True:
                try:
                    _, logits, label = pipeline.progress(batches)
                except StopIteration:
                    return
                yield logits, label
    finally:
        model.train(was_training)
