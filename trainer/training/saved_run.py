"""Use of a saved run without its training data: evaluation and prediction."""

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow.csv import CSVWriter

from cowrec.data_pipeline import PrepareConfig, Reader, Schema, prepare
from cowrec.data_pipeline.dataset.schema import KEPT_PREFIX, SAMPLE_NUMBER
from cowrec.data_pipeline.dataset.shards import arrow_schema, shard_columns
from cowrec.data_pipeline.raw.parsing import counts_text
from cowrec.data_pipeline.remote import Place
from cowrec.errors import UserError
from cowrec.files import replacing, require_target

from ..config.run import RunConfig, load_config, with_values
from ..measures.quality import measure_tasks
from ..measures.segments import Segments
from ..runs.checkpoint import Progress
from ..runs.local_copy import local_copy, local_data
from ..runs.run_dir import CHECKPOINTS, CONFIG, load_code, require_same_ids, warn_if_changed
from ..runtime.environment import launched_rank, launched_world_size
from ..runtime.processes import Process, from_first, on_first, process_group
from ..sharded_model.check_run import require_labels
from ..sharded_model.run_plan import RunPlan
from .evaluation import field_importance, predicted_samples, predictions
from .state import TrainState

logger = logging.getLogger(__name__)


def evaluate_run(
    run_dir: Place,
    data_dir: Place,
    split: str = "test",
    *,
    by: Sequence[str] = (),
    top: int = 20,
    importance: bool = False,
    checkpoint: str = "",
) -> dict[str, Any]:
    """Measures a split with a checkpoint of a run; returns the values of :class:`Quality`, and the step.

    Args:
        run_dir: a path or the URI of a folder in an object store.
        by: sparse fields and kept columns to measure groups of samples by, or one; entry ``by`` of the result has the
            values of :meth:`Segments.measure` for each.
        top: number of groups to list.
        importance: also predict with the values of each field permuted, in one process, with all samples in memory;
            entry ``importance`` of the result has the values of :func:`field_importance`.
        checkpoint: "latest", "best" or a step; by default "best" where the run keeps it.

    Raises:
        UserError: the folder is not a run, the data have other ids than the run's, the split has no labels, or its
            samples cannot be grouped so.
    """
    if importance and launched_world_size() > 1:
        raise UserError("the importance of fields is measured in one process; start it without torchrun")
    if top < 0:
        raise UserError(f"the number of groups to list must be at least 0, got {top}")
    by = [by] if isinstance(by, str) else by
    run_dir, data_dir = local_copy(run_dir, "run"), local_data(data_dir)
    with _saved_run(run_dir, data_dir, split, checkpoint) as (state, reader, progress):
        require_labels(reader.schema, split, data_dir)
        process, segments = state.plan.process, dict[str, Segments]()
        on_first(process, lambda: segments.update({column: Segments.of(data_dir, split, column) for column in by}))
        samples = predicted_samples(state, reader)
        quality = from_first(process, lambda: measure_tasks(samples, reader.schema.labels))
        main = samples.of_task(0)
        by_column = from_first(process, lambda: {name: groups.measure(main, top) for name, groups in segments.items()})
        if launched_rank() == 0:
            logger.info("%s samples of %s: %s", f"{quality.rows:,}", split, quality)
        result = quality.values() | {"step": progress.step} | ({"by": by_column} if by else {})
        return result | ({"importance": field_importance(state, reader, samples)} if importance else {})


def predict_run(
    run_dir: Place,
    data_dir: Place,
    output: Place,
    split: str = "test",
    *,
    every_row: bool = False,
    checkpoint: str = "",
) -> int:
    """Writes the click probability of each sample to a Parquet or, by its name, CSV file, in the order of the samples.

    Its columns are ``sample_number`` int64, the sample's number over all raw files, where the data set has it; the
    labels, where they are known; the kept columns under their raw names, as text; and ``prediction`` float32, or
    ``prediction_<label>`` of each of several labels.

    Args:
        every_row: also write the bad rows of the raw files, in which all but the number is null; the data set was
            prepared ``like`` the run.

    Returns:
        The number of rows written.

    Raises:
        UserError: see :func:`evaluate_run`; or there is more than one process, or the file cannot be written.
    """
    if launched_world_size() > 1:
        raise UserError("predict runs in one process; start it without torchrun")
    suffix = require_writable(output)
    data_dir = local_data(data_dir)
    with _saved_run(local_copy(run_dir, "run"), data_dir, split, checkpoint) as (state, reader, _):
        beside = _Beside(data_dir, split)
        labels = reader.schema.labels
        names = ["prediction"] if len(labels) == 1 else [f"prediction_{label}" for label in labels]
        schema = pa.schema([*beside.schema, *((name, pa.float32()) for name in names)])
        open_writer = CSVWriter if suffix == ".csv" else pq.ParquetWriter
        end = 0
        with replacing(Path(output)) as file, open_writer(file, schema) as writer:
            for samples in predictions(state, reader):
                values = samples.logits.sigmoid().float().cpu().reshape(len(samples.logits), -1).numpy()
                columns = [*beside.take(len(values)), *(pa.array(column) for column in values.T)]
                table, start = pa.table(columns, schema=schema), end
                end = table[SAMPLE_NUMBER][-1].as_py() + 1 if every_row else end + table.num_rows
                writer.write_table(_with_bad_rows(table, start, end) if every_row else table)
            if every_row and (rows := sum(source.rows for source in reader.schema.sources)) > end:
                writer.write_table(_with_bad_rows(schema.empty_table(), end, end := rows))
        return end


def _with_bad_rows(table: pa.Table, start: int, end: int) -> pa.Table:
    """Adds the bad rows, which a table of the samples numbered from ``start`` to ``end`` lacks."""
    index = np.full(end - start, -1)
    index[table[SAMPLE_NUMBER].to_numpy() - start] = np.arange(table.num_rows)
    rows = table.take(pa.array(index, mask=index < 0))
    return rows.set_column(0, SAMPLE_NUMBER, pa.array(np.arange(start, end)))


@contextmanager
def encoded(
    run_dir: Place,
    inputs: Sequence[Place],
    config: PrepareConfig | None = None,
    *,
    keep: Sequence[str] = (),
    beside: Place | None = None,
    labelled: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Path]:
    """Encodes raw samples with the ids and scales of a run, as ``cowrec prepare --like`` does.

    Yields the folder of a temporary data set, whose test split has all samples that can be read. Memory does not grow
    with the samples.

    Args:
        inputs, config, keep, progress: arguments of ``cowrec.data_pipeline.prepare``.
        beside: file in whose folder the data set is; by default it is in the folder of temporary files.
        labelled: whether labels are required.

    Raises:
        UserError: the folder is not a run of raw samples; or a file, or a row that may not be skipped, cannot be read.
    """
    if launched_world_size() > 1:
        raise UserError("raw samples are encoded in one process; start it without torchrun, or prepare them first")
    run_dir = local_copy(run_dir, "run")
    layout: Any = run_of(run_dir)[1].name
    if layout == "synthetic":
        raise UserError(f"{run_dir} was trained on synthetic samples, which have no raw files; pass a data set")
    parent = None if beside is None else Path(beside).absolute().parent
    with tempfile.TemporaryDirectory(prefix=".cowrec-", dir=parent) as folder:
        data = Path(folder, "data")
        schema = prepare(layout, inputs, data, config, like=run_dir, keep=keep, progress=progress)
        if bad := sum(schema.bad_rows.values()):
            text = "%s rows cannot be read, and are neither predicted nor measured: %s"
            logger.warning(text, f"{bad:,}", counts_text(schema.bad_rows))
        if labelled and not schema.split("test").labelled:
            raise UserError(f"{', '.join(map(str, inputs))} has no labels: it can be predicted, not evaluated")
        yield data


def require_writable(output: Place) -> str:
    """Raises UserError if no file of predictions can be written there; returns the ending of the file's name."""
    require_target(Path(output))
    if (suffix := Path(output).suffix.lower()) in _OTHER_FORMATS:
        raise UserError(f"{output}: predictions are written as Parquet or CSV, not {suffix}; name it .parquet or .csv")
    return suffix


_OTHER_FORMATS = (".tsv", ".txt", ".json", ".jsonl", ".gz", ".zst", ".feather", ".arrow")


class _Beside:
    """Columns of a split that stand beside predictions, read shard by shard; ``schema`` has their names and types."""

    def __init__(self, data_dir: Path, split: str) -> None:
        schema = Schema.load(data_dir)
        labels = schema.label_columns if schema.split(split).labelled else ()
        own = [SAMPLE_NUMBER] * schema.numbered + list(labels)
        names = own + [KEPT_PREFIX + name for name in schema.kept]
        types = arrow_schema(schema)
        # A kept column whose name is taken keeps its prefix.
        taken = {*own, *(name for name in schema.kept if name.startswith("prediction"))}
        shown = list(own)
        for name in schema.kept:
            while name in taken:
                name = KEPT_PREFIX + name
            taken.add(name)
            shown.append(name)
        self.schema = pa.schema([(new, types.field(name).type) for new, name in zip(shown, names, strict=True)])
        self._names, self._rest = names, pa.schema([types.field(name) for name in names]).empty_table()
        self._shards = shard_columns(data_dir, schema, split, names)

    def take(self, count: int) -> list[pa.ChunkedArray]:
        while self._names and self._rest.num_rows < count:
            self._rest = pa.concat_tables([self._rest, next(self._shards).select(self._names)])
        taken, self._rest = self._rest.slice(0, count), self._rest.slice(count)
        return list(taken.columns)


def trained_state(
    run_dir: Path, run: tuple[RunConfig, Schema], process: Process, checkpoint: str = ""
) -> tuple[TrainState, Progress]:
    """Loads the model of a run from :func:`run_of`, sharded over the process group, with weights of a checkpoint.

    The run may have had another number of processes. Raises UserError as :meth:`TrainState.load_weights` does.
    """
    config, schema = run
    if process.world_size > 1:
        config = with_values(config, sharding={"plan": "auto", "tables": {}})
    state = TrainState(RunPlan.of(config, schema, process))
    return state, state.load_weights(run_dir / CHECKPOINTS, checkpoint)


def run_of(run_dir: Path) -> tuple[RunConfig, Schema]:
    """Loads a run's configuration, as it works on this machine, and its data schema.

    Raises UserError if the folder is not a run, or its own network or loss cannot be imported.
    """
    if not (run_dir / CONFIG).is_file():
        raise UserError(f"{run_dir} is not a run: it has no {CONFIG}; pass the --run-dir of a cowrec train")
    code = load_code(run_dir)
    config = load_config(run_dir / CONFIG)
    warn_if_changed(code, run_dir)
    return config if torch.cuda.is_available() else _without_cuda(config), Schema.load(run_dir)


def _without_cuda(config: RunConfig) -> RunConfig:
    """Adapts a configuration to a machine without a GPU, for uses of the weights alone, which are always float32."""
    train, optimizer = config.train, config.optimizer
    precision = "float32" if train.precision == "tf32" else train.precision
    embedding = "adagrad" if optimizer.embedding == "fbgemm_adam" else optimizer.embedding
    on_cpu, in_memory = {"device": "cpu", "precision": precision}, {"memory": "device"}
    return with_values(config, train=on_cpu, optimizer={"embedding": embedding}, sharding=in_memory)


@contextmanager
def _saved_run(
    run_dir: Path, data_dir: Path, split: str, checkpoint: str
) -> Iterator[tuple[TrainState, Reader, Progress]]:
    """Loads a run's model with the weights of a checkpoint and opens a split of data that has the run's ids."""
    config, schema = run_of(run_dir)
    require_same_ids(run_dir, schema, data_dir, Schema.load(data_dir))
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
        state, progress = trained_state(run_dir, (config, schema), process, checkpoint)
        yield state, reader, progress
