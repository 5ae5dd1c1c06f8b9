"""Evaluation of a model over a complete split, and its predictions, over all processes."""

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cowrec.data_pipeline import Batch, Reader
from cowrec.data_pipeline.reading.random_sample import RandomSample
from cowrec.trainer.measures.id_count_groups import GROUPS, IdCountGroups
from cowrec.trainer.measures.quality import Quality, QualityMeter

from .dataloading import even_slices
from .state import TrainState


class Predicted(NamedTuple):
    """Predictions of a batch of this process, on its device.

    Attributes:
        logits: float32 [B].
        label: float32 [B].
        true_logit: float32 [B], where the reader has them.
    """

    logits: Tensor
    label: Tensor
    true_logit: Tensor | None

    def where(self, chosen: Tensor) -> "Predicted":
        """Those of the chosen samples, bool [B]."""
        true_logit = None if self.true_logit is None else self.true_logit[chosen]
        return Predicted(self.logits[chosen], self.label[chosen], true_logit)


def evaluate(state: TrainState, reader: Reader | RandomSample, groups: IdCountGroups | None = None) -> Quality:
    """Measures a reader's labelled samples; all processes call together and get the same numbers.

    Args:
        state: of training.
        reader: not shuffled.
        groups: of the split's samples, to be measured by themselves too; the reader then reads the complete split.
    """
    meter, *meters = (QualityMeter(reader.device, reader.schema.true_logits) for _ in range(1 + len(GROUPS)))
    for step, predicted in enumerate(predictions(state, reader)):
        meter.add(*predicted)
        if groups:
            of_samples = groups.of_samples[reader.positions(step)]
            for group, own in enumerate(meters):
                own.add(*predicted.where(of_samples == group))
    quality = meter.quality()
    if not groups:
        return quality
    by_id_counts = {name: own.quality() for name, own in zip(GROUPS, meters, strict=True)}
    return dataclasses.replace(quality, by_id_counts=by_id_counts)


def predictions(state: TrainState, reader: Reader | RandomSample) -> Iterator[Predicted]:
    """Yields the predictions of each batch of this process, in the reader's order.

    The model is in evaluation mode meanwhile.
    """
    was_training = state.model.training
    state.model.eval()
    true_logits: deque[Tensor | None] = deque()  # of the batches that the pipeline has taken

    def batches() -> Iterator[Batch]:
        for batch in even_slices(reader.epoch(0), dist.get_world_size()):
            true_logits.append(batch.true_logit)
            yield state.ids.lookup(batch)

    taken = batches()
    state.pipeline.reset()
    try:
        with torch.no_grad():
            for _ in range(len(reader)):
                _, logits, label = state.pipeline.progress(taken)
                yield Predicted(logits, label, true_logits.popleft())
    finally:
        state.model.train(was_training)
