"""Evaluation: exact AUC and logloss of a model over a complete split, and its predictions, over all processes."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from cowrec.data_pipeline import Reader

from .dataloading import even_slices
from .state import TrainState


@dataclass(frozen=True)
class Quality:
    """Quality of a model's predictions of a split.

    Attributes:
        auc: area under the ROC curve, exact (no binning); NaN where the split has one class only.
        logloss: mean binary cross-entropy, in nats.
        rows: samples.
    """

    auc: float
    logloss: float
    rows: int


def evaluate(state: TrainState, reader: Reader) -> Quality:
    """Measures AUC and logloss over a reader's samples; all processes call together and get the same numbers."""
    auc = BinaryAUROC(thresholds=None, validate_args=False).to(reader.device)
    logloss, clicks = (MeanMetric().set_dtype(torch.float64).to(reader.device) for _ in range(2))
    for logits, label in predictions(state, reader):
        # Called even if this process has no samples: a metric that was never updated skips the final gathering, and the
        # other processes would wait for it.
        clicks.update(label)
        auc.update(logits.double().sigmoid(), label.long())
        logloss.update(F.binary_cross_entropy_with_logits(logits.double(), label.double(), reduction="none"))
    one_class = clicks.compute().item() in (0, 1)
    return Quality(nan if one_class else auc.compute().item(), logloss.compute().item(), reader.num_rows)


def predictions(state: TrainState, reader: Reader) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (logits [B], label [B]) of each batch of this process, in the reader's order, on its device.

    The model is in evaluation mode meanwhile.
    """
    was_training = state.model.training
    state.model.eval()
    batches = map(state.ids.lookup, even_slices(reader.epoch(0), dist.get_world_size()))
    state.pipeline.reset()
    try:
        with torch.no_grad():
            for _ in range(len(reader)):
                _, logits, label = state.pipeline.progress(batches)
                yield logits, label
    finally:
        state.model.train(was_training)
