"""Quality of a model: measures of a split, the importance of fields, and predictions over all processes."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cowrec.data_pipeline import Batch, Reader

from ..measures.quality import Quality, Samples, measure, measure_tasks
from ..measures.segments import THIRDS, divided_by_time, tenths_by_time
from ..runtime.processes import from_first, gathered
from ..sharded_model.step import even_slice
from .state import TrainState


class Stopped(Exception):
    """The run was asked to stop while its model was measured."""


Stop = Callable[[], bool]
"""Tells whether to stop; all processes call it before each batch."""


def evaluate(state: TrainState, reader: Reader, thirds: np.ndarray | None = None, stop: Stop | None = None) -> Quality:
    """Measures a reader's labelled samples; those of a test split with times also by tenths of the time.

    All processes call together and get the same numbers.

    Args:
        thirds: on the first process, the thirds of a complete split to measure by themselves; see
            :func:`id_count_thirds`.
    """
    samples = predicted_samples(state, reader, stop)

    def measured() -> Quality:
        quality, main = measure_tasks(samples, state.plan.schema.labels), samples.of_task(0)
        data_dir = Path(state.plan.config.data.dir)
        if reader.split == "test" and (tenths := tenths_by_time(data_dir, "test")):
            tenth, starts = torch.from_numpy(tenths[0]), tenths[1].tolist()
            over_time = {start: measure(main.where(tenth == n)).without_bins() for n, start in enumerate(starts)}
            newest = over_time[starts[-1]] if divided_by_time(data_dir) else None
            quality = dataclasses.replace(quality, newest=newest, over_time=over_time)
        if thirds is None:
            return quality
        numbers = torch.from_numpy(thirds)
        by_third = {name: measure(main.where(numbers == third)).without_bins() for third, name in enumerate(THIRDS)}
        return dataclasses.replace(quality, by_id_counts=by_third)

    return from_first(state.plan.process, measured)


def field_importance(state: TrainState, reader: Reader, samples: Samples) -> dict[str, dict[str, float]]:
    """Measures how much worse the predictions are if the values of a field are permuted among the evaluated samples.

    Source: Breiman 2001 (Random Forests), section 10, here on samples that were not trained on. The permutation is
    fixed. A field that became both a number and a bucket is permuted as one, and so is a history with the sequences
    along it. The split is resident, in one process.

    Args:
        reader: reader of a complete split.
        samples: predictions of its samples, in the stored order.

    Returns:
        For each field, the most important one first, ``auc_drop`` and ``logloss_rise`` of the first label.
    """
    reader.make_resident()
    known = np.flatnonzero(~samples.of_task(0).label.isnan().numpy())
    order = np.arange(reader.num_rows)
    order[known] = known[np.random.default_rng(0).permutation(len(known))]
    schema, fields = reader.schema, dict[str, list[str]]()
    source_of = {field.name: field.source or field.name for field in schema.dense}
    source_of |= {field.name: field.source or field.name for field in schema.sparse}
    mains = {field.name: field.along for field in schema.sparse if field.along}
    for name in source_of:
        fields.setdefault(source_of[mains.get(name, name)], []).append(name)
    before, index, found = measure(samples.of_task(0)), torch.from_numpy(order).to(reader.device), {}
    for source, names in fields.items():
        after = measure(predicted_samples(state, reader.with_values_of(index, names)).of_task(0))
        found[source] = {"auc_drop": before.auc - after.auc, "logloss_rise": after.logloss - before.logloss}
    return dict(sorted(found.items(), key=lambda named: -named[1]["logloss_rise"]))


def predicted_samples(state: TrainState, reader: Reader, stop: Stop | None = None) -> Samples:
    """Predicts all samples of a reader, in its order, on the CPU of the first process; others get their own samples.

    All processes call together. The first one holds 8 bytes of each sample, 12 with weights.
    """
    process = state.plan.process
    # Copied, since a column of a batch may be a part of a larger block.
    collected = [samples.map(torch.clone) for samples in predictions(state, reader, stop)]
    logits, label, weight, true_logit = zip(*collected, strict=True)
    own = Samples(torch.cat(logits), torch.cat(label), _joined(weight), _joined(true_logit))
    if process.world_size == 1:
        return own.map(Tensor.cpu)
    slices = [reader.positions(step) for step in range(len(reader))]
    positions = torch.cat([torch.arange(part.start, part.stop, device=process.device) for part in slices])
    order = gathered(positions, process).cpu().argsort()
    return own.map(lambda column: gathered(column, process).cpu()[order])


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    return None if parts[0] is None else torch.cat([part for part in parts if part is not None])


def predictions(state: TrainState, reader: Reader, stop: Stop | None = None) -> Iterator[Samples]:
    """Yields the predictions of each batch of this process, in the reader's order; the model is in evaluation mode.

    If the training split kept a share of the negatives, predictions of other splits are corrected for it.
    """
    shift = 0.0 if reader.split == "train" else state.logit_shift
    was_training = state.model.training
    state.model.eval()
    others: deque[tuple[Tensor | None, Tensor | None]] = deque()  # of the batches that the pipeline has taken

    def batches() -> Iterator[Batch]:
        for batch in reader.epoch(0):
            others.append((batch.weight, batch.true_logit))
            yield state.ids.lookup(even_slice(batch, state.plan.process.world_size))

    taken = batches()
    state.pipeline.reset()
    try:
        with torch.no_grad():
            for _ in range(len(reader)):
                if stop and stop():
                    raise Stopped
                _, logits, label = state.pipeline.progress(taken)
                yield Samples(logits + shift if shift else logits, label, *others.popleft())
    finally:
        state.model.train(was_training)
