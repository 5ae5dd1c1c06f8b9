"""Global batches from the training samples of a data set, and each rank's slice."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch, Reader, Schema
from cowrec.sparse_opt import id_bucket_rows
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.sharded_model.run_plan import RunPlan
from cowrec.trainer.sharded_model.tables import TableSpec, table_specs
from cowrec.trainer.training.dataloading import even_slice, training_readers


@dataclass(frozen=True)
class GlobalBatch:
    """A global batch of G samples, taken from as many samples of the data set as there are, which may be fewer.

    Attributes:
        samples: of the data set.
        size: G.
    """

    samples: Batch
    size: int

    def slice_of(self, rank: int, world_size: int) -> Batch:
        """The samples that a rank has of it, as in training; samples repeat where the data set has fewer than G."""
        first, end = rank * self.size // world_size, (rank + 1) * self.size // world_size
        return even_slice(
            _taken(self.samples, torch.arange(first, end) % len(self.samples.label), self.size), world_size
        )


def global_batch(config: RunConfig, data_dir: Path, step: int = 0) -> GlobalBatch:
    """Reads global batch ``step`` of the first epoch, in the order of training on CPU; if the samples are fewer, all.

    Raises:
        ValueError: the folder is not a data set that can be trained on, or the epoch has no such step.
    """
    reader, batches = _opened(config, data_dir, step)
    return _with_rows(next(batches), reader, config)


def first_batches(config: RunConfig, data_dir: Path, most: int = 8) -> list[GlobalBatch]:
    """Reads the first complete global batches of the first epoch, or the first one, as :func:`global_batch` does."""
    reader, batches = _opened(config, data_dir)
    found = [_with_rows(each, reader, config) for each in islice(batches, most)]
    return [each for each in found if len(each.samples.label) == len(found[0].samples.label)]


def _opened(config: RunConfig, data_dir: Path, step: int = 0) -> tuple[Reader, Iterator[Batch]]:
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, dir=str(data_dir)))
    plan = RunPlan.of(config, Schema.load(data_dir).of_batches(), Process(0, 1, 1, False, torch.device("cpu")))
    reader = training_readers(plan).train
    return reader, iter(reader.epoch(0, step))


def _with_rows(batch: Batch, reader: Reader, config: RunConfig) -> GlobalBatch:
    rows = _rows_of_ids(batch.sparse, table_specs(reader.schema, config))
    return GlobalBatch(dataclasses.replace(batch, sparse=rows), config.train.batch_size)


def _rows_of_ids(sparse: KeyedJaggedTensor, specs: list[TableSpec]) -> KeyedJaggedTensor:
    """Gives raw ids the rows of their hashes, of collisionless tables too: there ids come to be as evenly spread."""
    hashed = {
        field.name: (spec.ids.capacity, index)
        for spec in specs
        for index, field in enumerate(spec.fields)
        if spec.ids.kind != "rows"
    }
    if not hashed:
        return sparse
    values = [
        torch.from_numpy(id_bucket_rows(ids.numpy().astype(np.int64), *hashed[key])) if key in hashed else ids
        for key, ids in zip(sparse.keys(), sparse.values().split(sparse.length_per_key()), strict=True)
    ]
    rows = torch.cat(values).to(torch.int32)
    translated = KeyedJaggedTensor(sparse.keys(), rows, sparse.weights_or_none(), sparse.lengths())
    translated.offsets()
    return translated


def _taken(batch: Batch, index: torch.Tensor, global_size: int) -> Batch:
    """Samples ``index`` of a batch."""
    sparse = batch.sparse
    features, samples = len(sparse.keys()), len(batch.label)
    lengths = sparse.lengths().view(features, samples)[:, index].flatten()
    starts = sparse.offsets()[:-1].view(features, samples)[:, index].flatten()
    before = lengths.cumsum(0) - lengths
    place = torch.repeat_interleave(starts.long() - before, lengths.long()) + torch.arange(int(lengths.sum()))
    weights = sparse.weights_or_none()
    taken = KeyedJaggedTensor(
        sparse.keys(),
        sparse.values()[place],
        None if weights is None else weights[place],
        lengths,
        length_per_key=lengths.view(features, -1).sum(1).tolist(),
    )
    weight = None if batch.weight is None else batch.weight[index]
    return Batch(batch.dense[index], taken, batch.label[index], global_size, weight=weight)
