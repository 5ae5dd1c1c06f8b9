"""Readers of a training run, checked before training starts, and padding of their batches to even slices."""

import dataclasses
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch.nn.functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.data_pipeline import Batch, Reader, Schema, available_bytes
from cowrec.data_pipeline.dataset.schema import TIME
from cowrec.data_pipeline.dataset.shards import shard_path
from cowrec.errors import UserError
from cowrec.sparse_opt.id_tables.config import TIME_LIMIT

from ..config.id_table import seconds
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
    """Opens the readers of a run. All stream.

    Raises:
        ValueError: the folder is not a data set, a split cannot be trained on or evaluated, or id tables do not take
            the times of its samples.
    """
    config, schema, process = plan.config, plan.schema, plan.process
    data_dir = Path(config.data.dir)
    has_split = "validation" in schema.splits
    for split in ("train", "test", *(["validation"] if has_split else [])):
        require_labels(schema, split, data_dir)
    _require_times(plan, data_dir)
    if has_split and config.train.validation_fraction:
        raise UserError(
            f"train.validation_fraction = {config.train.validation_fraction} takes samples from the training split, but"
            f" {data_dir} has a validation split, which is used; set train.validation_fraction = 0"
        )
    if config.train.patience and not (has_split or config.train.validation_fraction):
        raise UserError(
            f"train.patience = {config.train.patience} needs validation samples; prepare the data with a validation"
            " split, or set train.validation_fraction, for example to 0.1"
        )
    reader = partial(Reader, data_dir, rank=process.rank, world_size=process.world_size, device=process.device)
    rows = schema.split("train").rows
    validation_rows = rows - plan.train_rows
    if config.train.validation_fraction and not 0 < validation_rows < rows:
        raise UserError(
            f"train.validation_fraction = {config.train.validation_fraction} of {rows:,} training samples is"
            f" {validation_rows:,}; choose one that leaves samples on both sides"
        )
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


def _require_times(plan: RunPlan, data_dir: Path) -> None:
    """Raises ValueError if training would end at a time that id tables do not take, by the statistics of the shards.

    So would one in the future, after which nothing that was seen before would be known.

    Shards that cannot be read, or are still in an object store, are reported when they are trained on.
    """
    tables = [spec.ids for spec in plan.tables if spec.ids.kind == "collisionless"]
    if not plan.schema.timed or not tables:
        return
    ahead = seconds(plan.config.online.ahead, "online.ahead")
    newest = time.time() + ahead if ahead and any(each.expire_after or each.window for each in tables) else inf
    for number in range(len(plan.schema.split("train").shards)):
        path, bounds = shard_path(data_dir, "train", number), list[int]()
        with suppress(OSError, pa.ArrowException):
            metadata = pq.read_metadata(path)
            for group in map(metadata.row_group, range(metadata.num_row_groups)):
                for column in map(group.column, range(group.num_columns)):
                    if column.path_in_schema == TIME and column.statistics and column.statistics.has_min_max:
                        bounds += [column.statistics.min, column.statistics.max]
        if bounds and not 0 <= min(bounds) <= max(bounds) < TIME_LIMIT:
            raise UserError(
                f"{path} has sample times from {min(bounds)} to {max(bounds)}, and id tables take Unix seconds in"
                " [0, 2^32), the years 1970 to 2106; prepare the data again without such samples"
            )
        if bounds and max(bounds) > newest:
            raise UserError(
                f"{path} has a sample time of {datetime.fromtimestamp(max(bounds), UTC):%Y-%m-%d %H:%M}, more than"
                f" online.ahead = {plan.config.online.ahead!r} ahead of this machine's clock: all that was seen before"
                " would be long past; prepare the data again without such samples, or raise online.ahead"
            )


def require_labels(schema: Schema, name: str, data_dir: Path) -> None:
    """Raises ValueError if a split has no samples or no labels."""
    split = schema.split(name)
    if not split.rows:
        raise UserError(f"the {name} split of {data_dir} has no samples; prepare it with another split")
    if not split.labelled:
        raise UserError(f"the {name} split of {data_dir} has no labels: it can be predicted, not evaluated")


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
