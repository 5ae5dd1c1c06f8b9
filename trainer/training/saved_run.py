"""A saved run put to use, without its training data: evaluation and prediction."""

import dataclasses
import filecmp
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn
from torch.optim import SGD
from torchrec.distributed import DistributedModelParallel

from cowrec.data_pipeline import Reader, Schema
from cowrec.data_pipeline.files import replacing
from cowrec.sparse_opt import EmbeddingAdam
from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.runs.checkpoint import load_model
from cowrec.trainer.runs.checkpoint_folder import Progress
from cowrec.trainer.runs.run_dir import CHECKPOINTS, CONFIG, VOCABULARY
from cowrec.trainer.runtime.environment import launched_world_size
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.sharded_model.build import build_sharded, dense_parameters, embedding_optimizer

from .dataloading import require_labelled_rows
from .evaluation import evaluate, predictions
from .pipeline import Pipeline, pipeline_of


def evaluate_run(run_dir: Path, data_dir: Path, split: str = "test") -> dict[str, Any]:
    """AUC, logloss and rows of a split under a run's newest checkpoint.

    Raises:
        ValueError: a folder that is no run, data with other ids than the run's, or a split without labels.
    """
    with _saved_run(run_dir, data_dir, split) as (model, pipeline, reader):
        require_labelled_rows(reader.schema, split, data_dir)
        return dataclasses.asdict(evaluate(model, pipeline, reader))


def predict_run(run_dir: Path, data_dir: Path, output: Path, split: str = "test") -> int:
    """Writes click probabilities, column ``prediction`` float32, in the rows' order; returns the number of rows.

    Raises:
        ValueError: as :func:`evaluate_run`, or more than one process.
    """
    if launched_world_size() > 1:
        raise ValueError("predict runs in one process; start it without torchrun")
    schema = pa.schema([("prediction", pa.float32())])
    with _saved_run(run_dir, data_dir, split) as (model, pipeline, reader):
        with replacing(output) as file, pq.ParquetWriter(file, schema) as writer:
            for logits, _ in predictions(model, pipeline, reader):
                writer.write(pa.record_batch([logits.sigmoid().float().cpu().numpy()], schema=schema))
        return reader.num_rows


def trained_model(run_dir: Path, process: Process) -> tuple[DistributedModelParallel, Progress]:
    """A run's model with the weights of its newest intact checkpoint, and how far that had come.

    The model is sharded over the process group.

    Raises:
        ValueError: a folder that is no run, or has no checkpoint that can be used.
    """
    config, schema = run_of(run_dir)
    model = build_sharded(config, schema, process)
    optimizer = embedding_optimizer(config, schema, model)
    replays = isinstance(optimizer, EmbeddingAdam) and optimizer.config.absent_rows == "replay"
    replayed = cast(EmbeddingAdam, optimizer) if replays else None
    progress = load_model(run_dir / CHECKPOINTS, model, replayed, process, partial(print, file=sys.stderr))
    return model, progress


def run_of(run_dir: Path) -> tuple[RunConfig, Schema]:
    """A run's configuration and the description of its data. Raises ValueError for a folder that is no run."""
    if not (run_dir / CONFIG).is_file():
        raise ValueError(f"{run_dir} is not a run: it has no {CONFIG}; pass the --run-dir of a cowrec train")
    return load_config(run_dir / CONFIG), Schema.load(run_dir)


@contextmanager
def _saved_run(run_dir: Path, data_dir: Path, split: str) -> Iterator[tuple[nn.Module, Pipeline, Reader]]:
    """A run's model with its newest weights, and a reader of a split of data that has its ids."""
    config, schema = run_of(run_dir)
    _require_same_ids(run_dir, schema, data_dir, Schema.load(data_dir))
    with process_group(config.train.device) as process:
        reader = Reader(
            data_dir,
            split,
            batch_size=config.train.eval_batch_size,
            rank=process.rank,
            world_size=process.world_size,
            device=process.device,
        )
        model, _ = trained_model(run_dir, process)
        never_steps = SGD(dense_parameters(model).values())
        yield model, pipeline_of(model, never_steps, process), reader


def _require_same_ids(run_dir: Path, of_run: Schema, data_dir: Path, of_data: Schema) -> None:
    """Raises ValueError where data have ids or dense values that another preparation made than the run's."""
    different = None
    if (of_run.dense, of_run.sparse) != (of_data.dense, of_data.sparse):
        different = "its fields, their sizes or scales differ"
    elif _planted(of_run) != _planted(of_data):
        different = "it is synthetic, of another seed or shape"
    else:
        for field in of_run.sparse:
            file = Path(VOCABULARY) / f"{field.name}.parquet"
            if field.encoding == "vocabulary" and not _same_vocabulary(run_dir / file, data_dir / file):
                different = f"the ids of field {field.name!r} differ"
                break
    if different:
        raise ValueError(
            f"{data_dir} was not prepared like the data of {run_dir}: {different}; prepare it with --like {run_dir}"
        )


def _planted(schema: Schema) -> dict[str, Any] | None:
    """What decides the meaning of synthetic ids: all settings but the sizes of the splits."""
    if schema.name != "synthetic":
        return None
    return {key: value for key, value in schema.settings.items() if key not in ("rows", "test_rows", "shard_rows")}


def _same_vocabulary(one: Path, other: Path) -> bool:
    """The same ids in the same order, whichever version of the Parquet library wrote the files."""
    for path in (one, other):
        if not path.is_file():
            raise ValueError(f"vocabulary file {path} is missing; prepare the data set, or train the run, again")
    return filecmp.cmp(one, other, shallow=False) or pq.read_table(one, columns=["value"]).equals(
        pq.read_table(other, columns=["value"])
    )
