"""Evaluation of a model over a complete split, and its predictions, over all processes."""

import dataclasses
from collections import deque
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from cowrec.data_pipeline import Batch, Reader
from cowrec.data_pipeline.reading.random_sample import RandomSample
from cowrec.trainer.measures.id_count_groups import GROUPS, IdCountGroups
from cowrec.trainer.measures.quality import Quality, measure
from cowrec.trainer.measures.samples import CollectedSamples, Samples

from .dataloading import even_slices
from .state import TrainState


def evaluate(state: TrainState, reader: Reader | RandomSample, groups: IdCountGroups | None = None) -> Quality:
    """Measures a reader's labelled samples; all processes call together and get the same numbers.

    Args:
        state: of training.
        reader: not shuffled.
        groups: of the split's samples, to be measured by themselves too; the reader then reads the complete split.
    """
    collected = predicted_samples(state, reader)
    quality = state.tasks.measure(collected.own, together=True)
    if not groups:
        return quality
    samples, of_samples = state.tasks.main_of(collected.own), groups.of_samples[collected.positions]
    of_groups = [measure(samples.where(of_samples == number), together=True) for number in range(len(GROUPS))]
    by_id_counts = dict(
        zip(GROUPS, (dataclasses.replace(each, calibration_bins=None) for each in of_groups), strict=True)
    )
    return dataclasses.replace(quality, by_id_counts=by_id_counts)


def predicted_samples(state: TrainState, reader: Reader | RandomSample) -> CollectedSamples:
    """Predictions of this process's samples of a reader, in its order; all processes call together."""
    positions = [reader.positions(step) for step in range(len(reader))]
    collected = CollectedSamples(sum(each.stop - each.start for each in positions))
    for each, predicted in zip(positions, predictions(state, reader), strict=True):
        collected.add(each, predicted)
    return collected


def predictions(state: TrainState, reader: Reader | RandomSample) -> Iterator[Samples]:
    """Yields the predictions of each batch of this process, in the reader's order.

    The model is in evaluation mode meanwhile. If the training split kept a share of the negatives, predictions of other
    splits are corrected for it.
    """
    shift = 0.0 if reader.split == "train" else state.logit_shift
    was_training = state.model.training
    state.model.eval()
    others: deque[tuple[Tensor | None, Tensor | None]] = deque()  # of the batches that the pipeline has taken

    def batches() -> Iterator[Batch]:
        for batch in even_slices(reader.epoch(0), dist.get_world_size()):
            others.append((batch.weight, batch.true_logit))
            yield state.ids.lookup(batch)

    taken = batches()
    state.pipeline.reset()
    try:
        with torch.no_grad():
            for _ in range(len(reader)):
                _, logits, label = state.pipeline.progress(taken)
                yield Samples(logits + shift if shift else logits, label, *others.popleft())
    finally:
        state.model.train(was_training)
