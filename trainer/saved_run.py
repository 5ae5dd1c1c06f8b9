"""A saved run put to use, without its training data: evaluation and prediction."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torchrec.distributed import TrainPipelineSparseDist

from cowrec.data_pipeline import Reader, Schema

from .assembly import build_sharded, dense_parameters
from .checkpoint import load_model
from .config import RunConfig, load_config
from .evaluation import Pipeline, evaluate, predictions
from .loop import derived_hyperparameters
from .processes import Process, process_group
from .run_dir import CHECKPOINTS, CONFIG
from .schedule import DenseAdam


def evaluate_run(run_dir: Path, data_dir: Path, split: str = "test") -> dict[str, Any]:
    """AUC, logloss and rows of a split under a run's newest checkpoint.

    Raises:
        ValueError: a folder that is no run, data with other ids than the run's, or a split without labels.
    """
    with _saved_run(run_dir, data_dir, split) as (pipeline, reader, process):
        del process
        return dataclasses.asdict(evaluate(pipeline, reader))


def predict_run(run_dir: Path, data_dir: Path, output: Path, split: str = "test") -> int:
    """Writes click probabilities, column ``prediction`` float32, in the rows' order; returns the number of rows.

    Raises:
        ValueError: as :func:`evaluate_run`, or more than one process.
    """
    schema = pa.schema([("prediction", pa.float32())])
    with _saved_run(run_dir, data_dir, split) as (pipeline, reader, process):
        if process.world_size > 1:
            raise ValueError("predict runs in one process; start it without torchrun")
        partial = output.with_name(f"{output.name}.partial")
        try:
            with pq.ParquetWriter(partial, schema) as writer:
                for logits, _ in predictions(pipeline, reader):
                    writer.write(pa.record_batch([logits.sigmoid().float().cpu().numpy()], schema=schema))
            partial.rename(output)
        finally:
            partial.unlink(missing_ok=True)
        return reader.num_rows


@contextmanager
def _saved_run(run_dir: Path, data_dir: Path, split: str) -> Iterator[tuple[Pipeline, Reader, Process]]:
    if not (run_dir / CONFIG).is_file():
        raise ValueError(f"{run_dir} is not a run: it has no {CONFIG}; pass the --run-dir of a cowrec train")
    config, schema = load_config(run_dir / CONFIG), Schema.load(run_dir)
    _check_same_ids(schema, Schema.load(data_dir), run_dir, data_dir)
    with process_group(config.train.device) as process:
        reader = Reader(
            data_dir,
            split,
            batch_size=config.train.eval_batch_size,
            rank=process.rank,
            world_size=process.world_size,
            device=process.device,
        )
        yield _loaded_pipeline(config, schema, process, run_dir), reader, process


def _loaded_pipeline(config: RunConfig, schema: Schema, process: Process, run_dir: Path) -> Pipeline:
    hyperparameters = derived_hyperparameters(config)
    model = build_sharded(config, schema, process, hyperparameters)
    load_model(run_dir / CHECKPOINTS, model)
    optimizer = DenseAdam(dense_parameters(model), config.optimizer, hyperparameters.dense_lr, 0)
    return TrainPipelineSparseDist(model, optimizer, process.device)


def _check_same_ids(of_run: Schema, of_data: Schema, run_dir: Path, data_dir: Path) -> None:
    """Refuses data whose ids or dense values were made by another preparation than the run's."""
    if (of_run.dense, of_run.sparse) != (of_data.dense, of_data.sparse):
        raise ValueError(
            f"{data_dir} was not prepared like the data of {run_dir}: its fields, vocabularies or scales differ;"
            f" prepare it with --like {run_dir}"
        )
