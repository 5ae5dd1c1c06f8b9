"""Exact AUC and logloss of a model over a whole split, and its predictions, over all processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from cowrec.data_pipeline import Reader

from .dataloading import even_slices
from .pipeline import Pipeline


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


def evaluate(model: nn.Module, pipeline: Pipeline, reader: Reader) -> Quality:
    """AUC and logloss over a split that has rows and labels; all processes call together and get the same numbers."""
    split = reader.schema.split(reader.split)
    auc = BinaryAUROC(thresholds=None, validate_args=False).to(reader.device)
    logloss = MeanMetric().set_dtype(torch.float64).to(reader.device)
    for logits, label in predictions(model, pipeline, reader):
        # Also where this process has no rows: a metric that was never updated does not take part in the gathering, and
        # the other processes would wait for it.
        auc.update(logits.double().sigmoid(), label.long())
        logloss.update(F.binary_cross_entropy_with_logits(logits.double(), label.double(), reduction="none"))
    one_class = split.positives in (0, split.rows)
    return Quality(nan if one_class else auc.compute().item(), logloss.compute().item(), split.rows)


def predictions(model: nn.Module, pipeline: Pipeline, reader: Reader) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [B], label [B]) of each batch of this process, in the reader's order, on its device.

    Args:
        model: what the pipeline drives; it is put in evaluation mode meanwhile.
        pipeline: of the model.
        reader: of the split.
    """
    was_training = model.training
    model.eval()
    batches = even_slices(reader.epoch(0), dist.get_world_size())
    pipeline.reset()
    try:
        with torch.no_grad():
            for _ in range(len(reader)):
                _, logits, label = pipeline.progress(batches)
                yield logits, label
    finally:
        model.train(was_training)
