"""Readers of a training run, and padding of their batches to even slices."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.nn.functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch, Reader, available_bytes

from ..sharded_model.run_plan import RunPlan


class Readers(NamedTuple):
    """Readers of a training run.

    Attributes:
        train: the training samples, shuffled.
        validation: the split "validation", or the last samples of the training split, which are not trained on then;
            None without either.
        test: the test split.
    """

    train: Reader
    validation: Reader | None
    test: Reader

    @property
    def measured(self) -> Reader:
        """The samples that are measured after each epoch."""
        return self.test if self.validation is None else self.validation


def training_readers(plan: RunPlan) -> Readers:
    """Opens the readers of a run. All stream. Raises UserError if the folder is not a data set."""
    config, schema, process = plan.config, plan.schema, plan.process
    data_dir = Path(config.data.dir)
    has_split = "validation" in schema.splits
    reader = partial(Reader, data_dir, rank=process.rank, world_size=process.world_size, device=process.device)
    rows = schema.split("train").rows
    validation_rows = rows - plan.train_rows
    train = reader(
        "train",
        rows=range(plan.train_rows),
        batch_size=config.train.batch_size,
        passes=config.train.accumulation,
        shuffle=True,
        seed=config.train.seed,
        window_rows=config.data.window_rows,
    )
    evaluation = partial(reader, batch_size=config.train.eval_batch_size, true_logits=True)
    validation = None
    if has_split:
        validation = evaluation("validation")
    elif validation_rows:
        validation = evaluation("train", rows=range(plan.train_rows, rows))
    return Readers(train, validation, evaluation("test"))


def even_slice(batch: Batch, world_size: int) -> Batch:
    """Pads a slice of a global batch that is one sample short, so that all ranks have equally many samples.

    The added sample has no ids and no label. TorchRec's reduce-scatter of row-wise tables needs equal slices on gloo,
    and this way no rank is without samples.
    """
    if len(batch.dense) * world_size >= batch.global_batch_size:
        return batch
    dense, sparse = F.pad(batch.dense, (0, 0, 0, 1)), batch.sparse
    lengths = F.pad(sparse.lengths().view(len(sparse.keys()), -1), (0, 1)).flatten()
    padded = KeyedJaggedTensor(
        sparse.keys(),
        sparse.values(),
        sparse.weights_or_none(),
        lengths,
        length_per_key=sparse.length_per_key(),  # a sample without ids adds none
    )
    return dataclasses.replace(batch, dense=dense, sparse=padded)


def keep_resident(readers: Readers, plan: RunPlan) -> None:
    """Keeps what every epoch reads on the device: the training samples, then those that are measured after each epoch.

    Call it once the model is built: samples are kept if they take at most half of the memory that tables, moments and
    network have left; the other half is for the steps. `data.resident` = "yes" keeps the training samples in any case.

    Raises:
        ValueError: `data.resident` is "yes" and the training samples do not fit; or a shard is missing or damaged.
    """
    config, process = plan.config, plan.process
    if config.data.resident == "no":
        return
    copies = process.local_world_size if process.device.type == "cpu" else 1
    for reader in (readers.train, readers.measured):
        free = available_bytes(process.device)
        fits = free is not None and copies * reader.resident_bytes <= free // 2
        if fits or (reader is readers.train and config.data.resident == "yes"):
            reader.make_resident()
