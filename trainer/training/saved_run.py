"""Use of a saved run without its training data: evaluation and prediction."""

import filecmp
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cowrec.data_pipeline import Reader, Schema
from cowrec.data_pipeline.files import replacing
from cowrec.trainer.config.run import RunConfig, load_config
from cowrec.trainer.runs.checkpoint_folder import Progress
from cowrec.trainer.runs.run_dir import CHECKPOINTS, CONFIG, VOCABULARY
from cowrec.trainer.runtime.environment import launched_world_size
from cowrec.trainer.runtime.processes import Process, process_group

from .batch_ramp import BatchRamp
from .dataloading import require_labels
from .evaluation import evaluate, predictions
from .schedule import Schedule
from .state import TrainState


def evaluate_run(run_dir: Path, data_dir: Path, split: str = "test") -> dict[str, Any]:
    """Measures a split with a run's newest checkpoint; returns the values of :class:`Quality`.

    With `train.patience` it is the checkpoint of the best epoch; so it is in the other functions here.

    Raises:
        ValueError: the folder is not a run, the data have other ids than the run's, or the split has no labels.
    """
    with _saved_run(run_dir, data_dir, split) as (state, reader):
        require_labels(reader.schema, split, data_dir)
        return evaluate(state, reader).values()


def predict_run(run_dir: Path, data_dir: Path, output: Path, split: str = "test") -> int:
    """Writes click probabilities, column ``prediction`` float32, in the order of the samples; returns their number.

    Raises:
        ValueError: see :func:`evaluate_run`; or there is more than one process.
    """
    if launched_world_size() > 1:
        raise ValueError("predict runs in one process; start it without torchrun")
    schema = pa.schema([("prediction", pa.float32())])
    with _saved_run(run_dir, data_dir, split) as (state, reader):
        with replacing(output) as file, pq.ParquetWriter(file, schema) as writer:
            for each in predictions(state, reader):
                writer.write(pa.record_batch([each.logits.sigmoid().float().cpu().numpy()], schema=schema))
        return reader.num_rows


def trained_state(run_dir: Path, process: Process) -> tuple[TrainState, Progress]:
    """Loads a run's model, sharded over the process group, with the weights of its newest intact checkpoint.

    Returns:
        The state, for evaluation and export, and the progress of the checkpoint.

    Raises:
        ValueError: the folder is not a run, or has no usable checkpoint.
    """
    config, schema = run_of(run_dir)
    state = TrainState(config, schema, process, Schedule(ramp=BatchRamp.of(config)))
    return state, state.load_weights(run_dir / CHECKPOINTS, partial(print, file=sys.stderr))


def run_of(run_dir: Path) -> tuple[RunConfig, Schema]:
    """Loads a run's configuration and data schema. Raises ValueError if the folder is not a run."""
    if not (run_dir / CONFIG).is_file():
        raise ValueError(f"{run_dir} is not a run: it has no {CONFIG}; pass the --run-dir of a cowrec train")
    return load_config(run_dir / CONFIG), Schema.load(run_dir)


@contextmanager
def _saved_run(run_dir: Path, data_dir: Path, split: str) -> Iterator[tuple[TrainState, Reader]]:
    """Loads a run's model with its newest weights and opens a split of data that has the run's ids."""
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
            true_logits=True,
        )
        state, _ = trained_state(run_dir, process)
        yield state, reader


def _require_same_ids(run_dir: Path, run: Schema, data_dir: Path, data: Schema) -> None:
    """Raises ValueError if the data were prepared with other ids or dense scales than the run's."""
    different = None
    if (run.dense, run.sparse) != (data.dense, data.sparse):
        different = "its fields, their sizes or scales differ"
    elif _planted(run) != _planted(data):
        different = "it is synthetic, of another seed or shape"
    else:
        for field in run.sparse:
            file = Path(VOCABULARY) / f"{field.name}.parquet"
            if field.encoding == "vocabulary" and not _same_vocabulary(run_dir / file, data_dir / file):
                different = f"the ids of field {field.name!r} differ"
                break
    if different:
        raise ValueError(
            f"{data_dir} was not prepared like the data of {run_dir}: {different}; prepare it with --like {run_dir}"
        )


def _planted(schema: Schema) -> dict[str, Any] | None:
    """Settings that determine the meaning of synthetic ids: all but the sizes of the splits."""
    if schema.name != "synthetic":
        return None
    return {key: value for key, value in schema.settings.items() if key not in ("rows", "test_rows", "shard_rows")}


def _same_vocabulary(one: Path, other: Path) -> bool:
    """True for the same ids in the same order; versions of the Parquet library write them differently."""
    for path in (one, other):
        if not path.is_file():
            raise ValueError(f"vocabulary file {path} is missing; prepare the data set, or train the run, again")
    return filecmp.cmp(one, other, shallow=False) or pq.read_table(one, columns=["value"]).equals(
        pq.read_table(other, columns=["value"])
    )
