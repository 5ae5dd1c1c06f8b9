"""Training straight from raw files or a table in memory, and the trained run as a model of tables."""

import dataclasses
import filecmp
import json
import logging
import os
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cowrec.data_pipeline import InferredSchema, PrepareConfig, Schema, infer_schema, prepare
from cowrec.data_pipeline.dataset.schema import SCHEMA_FILE
from cowrec.data_pipeline.preparation.config import OnBadRow, prepared_with
from cowrec.data_pipeline.raw.inputs import find_inputs
from cowrec.data_pipeline.raw.parsing import SKIP_ADVICE
from cowrec.data_pipeline.raw.schema_file import load_schema_file
from cowrec.data_pipeline.remote import Place, is_remote, local_path, require_local
from cowrec.errors import UserError

from ..config.run import RunConfig, with_overrides
from ..runs.local_copy import local_copy
from ..runs.run_dir import FITTED, REPORT, require_unused
from ..runtime.environment import launched_world_size
from ..sharded_model.check_run import check_settings
from .saved_run import encoded, evaluate_run, predict_run, run_of
from .trainer import train

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FittedModel:
    """A trained run, as :func:`fit` and :func:`load` return it.

    Attributes:
        run_dir: folder of the run.
        data_dir: the prepared data set, with the test split that was kept from training.
        report: result of :func:`train`; empty before the run has ended.
    """

    run_dir: Path
    data_dir: Place
    report: dict[str, Any]

    @property
    def schema(self) -> Schema:
        """The fields and ids of the run."""
        return Schema.load(self.run_dir)

    def predict(self, table: Any, *, on_bad_row: OnBadRow | None = None) -> NDArray[np.float32]:
        """Predicts the click probabilities of a table's R rows in order, float32 [R], or [R, T] of T > 1 labels.

        Args:
            table: as for :func:`fit`, with the columns of the fields, in any order; labels may be absent.
            on_bad_row: "skip" gives rows that cannot be read NaN, "error" refuses them; by default the run's
                ``prepare.on_bad_row``.

        Raises UserError if the table has other columns, or a row that cannot be read.
        """
        arrow, labels = _as_arrow(table), self.schema.labels
        if not arrow.num_rows:
            return np.empty((0, len(labels)) if len(labels) > 1 else 0, np.float32)
        with self._encoded(arrow, on_bad_row) as data:
            output = data.with_name("predictions.parquet")
            predict_run(self.run_dir, data, output, every_row=True)
            written = pq.read_table(output)
        names = ["prediction"] if len(labels) == 1 else [f"prediction_{label}" for label in labels]
        found: NDArray[np.float32] = np.stack([written[name].to_numpy() for name in names], axis=1)
        return found[:, 0] if len(labels) == 1 else found

    def evaluate(self, table: Any = None, *, on_bad_row: OnBadRow | None = None, **options: Any) -> dict[str, Any]:
        """Measures a table with labels, by default the test split, as ``cowrec.trainer.evaluate`` does.

        ``on_bad_row`` is that of :meth:`predict`, where skipped rows are not measured; ``options`` are those of
        ``evaluate``.
        """
        if table is None:
            return evaluate_run(self.run_dir, self.data_dir, **options)
        with self._encoded(_as_arrow(table), on_bad_row, labelled=True) as data:
            return evaluate_run(self.run_dir, data, **options)

    @contextmanager
    def _encoded(self, table: pa.Table, on_bad_row: OnBadRow | None, *, labelled: bool = False) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="cowrec-") as folder:
            raw = _written(table, Path(folder, "table.parquet"))
            config = PrepareConfig(on_bad_row=on_bad_row, max_bad_rows=table.num_rows)
            with ExitStack() as stack:
                try:
                    data = stack.enter_context(encoded(self.run_dir, [raw], config, labelled=labelled))
                except ValueError as error:
                    text = str(error).replace(SKIP_ADVICE, '. To leave out such rows, pass on_bad_row="skip"')
                    raise UserError(text.replace(str(raw), "the table")) from error
                yield data


def load(run_dir: Place) -> FittedModel:
    """Returns a run of ``fit``, ``train`` or the commands of these names, for the tables of its columns.

    In any process the model predicts the same bits. ``run_dir`` is a path or the URI of a folder in an object store.
    Raises UserError if it is not a run.
    """
    folder = local_copy(run_dir, "run")
    config, _ = run_of(folder)
    report = folder / REPORT
    own = folder / FITTED  # of `fit`, wherever the run's folder is now
    return FittedModel(
        folder,
        own if (own / SCHEMA_FILE).is_file() else config.data.dir,
        json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {},
    )


def fit(
    table: Any,
    *,
    run_dir: Place,
    label: Hashable = "",
    positive: Sequence[Any] = (),
    config: RunConfig | None = None,
    overrides: Sequence[str] = (),
    schema_file: Place | None = None,
    data_dir: Place | None = None,
) -> FittedModel:
    """Trains on a table in memory, as ``cowrec fit`` does on its Parquet file.

    Args:
        table: a pandas or Polars DataFrame, a pyarrow Table, or another object with Arrow's interface for tables. The
            columns of pandas are those that ``to_parquet`` writes: names become text, and an index that is not a range
            is a column.
        run_dir: a new or empty local folder. ``data.parquet`` there is the table, ``data.toml`` its schema file, and
            ``data`` the prepared data.
        label: column of the label, of two values or of numbers; by default the one that looks like it.
        positive: values of the label that are positive, where it is not known which ones are.
        config: configuration of the run, ``[prepare]`` included; by default the defaults.
        overrides: values of the configuration as text, such as ``["train.batch_size=4K"]``.
        schema_file: a corrected ``data.toml``, which is then used, in place of ``label``.
        data_dir: in place of ``run_dir / "data"``, a new or empty folder for the prepared data; or the data that an
            earlier call prepared from the same table, which are then used.

    Raises:
        UserError: the command would refuse the table or a setting, a column cannot be in Parquet, there are several
            processes, or ``data_dir`` was prepared from another table or otherwise.
    """
    config, folder = _checked(run_dir, config, overrides, label, schema_file)
    arrow = _as_arrow(table)
    folder.mkdir(parents=True, exist_ok=True)
    raw = _written(arrow, folder / f"{FITTED}.parquet")
    return fit_files([raw], folder, str(label), config, schema_file, data_dir, positive=[*map(str, positive)])


def fit_files(
    inputs: Sequence[Place],
    run_dir: Place,
    label: str = "",
    config: RunConfig | None = None,
    schema_file: Place | None = None,
    data_dir: Place | None = None,
    *,
    positive: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> FittedModel:
    """Trains on raw files, as :func:`fit` on its table; the first file is described.

    ``inputs`` and ``progress`` are those of ``cowrec.data_pipeline.prepare``, the others those of :func:`fit`.
    """
    config, folder = _checked(run_dir, config, (), label, schema_file)
    if schema_file is not None and positive:
        raise UserError(f"positive = {[*positive]} and schema_file exclude each other: the file names these values")
    if schema_file is None:
        found = infer_schema(find_inputs([os.fspath(file) for file in inputs])[0], label=label, positive=positive)
        schema_file = folder / f"{FITTED}.toml"
        folder.mkdir(parents=True, exist_ok=True)
        schema_file.write_text(found.text, encoding="utf-8")
        _warn_of_guesses(found, schema_file, label_given=label != "")
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / FITTED if data_dir is None else data_dir
    if data_dir is not None and not is_remote(data_dir) and (local_path(data_dir) / SCHEMA_FILE).is_file():
        _require_same(data_dir, Path(inputs[0]), schema_file, config.prepare)
    else:
        # What an earlier call prepared in the run's folder has not been trained on: that folder is unused.
        settings, again = config.prepare, data_dir is None
        prepare("tabular", inputs, data, settings, schema_file=schema_file, overwrite=again, progress=progress)
    return FittedModel(folder, data, train(config, data, folder))


def _checked(
    run_dir: Place, config: RunConfig | None, overrides: Sequence[str], label: Hashable, schema_file: Place | None
) -> tuple[RunConfig, Path]:
    """Returns the configuration and the folder of a run, before anything is written."""
    if launched_world_size() > 1:
        raise UserError("fit runs in one process; for several, prepare the files, then train under torchrun")
    if schema_file is not None and label != "":
        raise UserError(f"label = {label!r} and schema_file exclude each other: the file names the label")
    config = with_overrides(RunConfig() if config is None else config, overrides)
    check_settings(config)
    folder = require_local(run_dir, "run_dir", "fit prepares its data there")
    require_unused(folder)
    return config, folder


def _require_same(data_dir: Place, raw: Path, schema_file: Place, config: PrepareConfig) -> None:
    """Raises UserError if a data set was prepared from another table, with another schema file, or otherwise."""
    made = Schema.load(data_dir)
    layout = json.loads(json.dumps(dataclasses.asdict(load_schema_file(schema_file))))
    settings = prepared_with({"layout": layout, "prepare": dataclasses.asdict(config)})
    different = None
    before = made.sources[0] if [file.bytes for file in made.sources] == [raw.stat().st_size] else None
    if not before or (Path(before.path).is_file() and not filecmp.cmp(before.path, raw, shallow=False)):
        different = "another table"
    elif made.settings.get("layout") != layout:
        different = f"columns that another schema file than {schema_file} describes"
    elif changed := [key for key, value in prepared_with(made.settings).items() if settings.get(key) != value]:
        different = f"another prepare.{changed[0]}"
    if different:
        raise UserError(f"{data_dir} has prepared data of {different}; pass another data_dir, or leave it out")


def _warn_of_guesses(found: InferredSchema, schema_file: Path, *, label_given: bool) -> None:
    """Warns of what is unsure about the columns of a table."""
    if found.label.doubts and not label_given:
        doubts = "; ".join(found.label.doubts)
        logger.warning("the label is a guess: %s, but %s; name the right one as `label`", found.label.text, doubts)
    if found.rule and found.rule.doubts:
        logger.warning("which values of the label are positive is a guess: %s; see %s", found.rule.text, schema_file)
    guesses = [field for field in found.fields if field.doubts]
    if guesses:
        kinds = [f"{field.keys['name']!r} is {field.keys['kind']} ({'; '.join(field.doubts)})" for field in guesses[:5]]
        shown = "; ".join(kinds) + "; ..." * (len(guesses) > 5)
        logger.warning("some kinds of fields are guesses: %s; see %s", shown, schema_file)
    if found.left_out:
        shown = "; ".join(f"{field.keys['column']!r}: {field.comment}" for field in found.left_out)
        logger.warning("not used as fields: %s; see %s", shown, schema_file)


def _as_arrow(table: Any) -> pa.Table:
    try:
        return pa.table(table)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UserError(
            f"table must be a pandas DataFrame or a pyarrow Table, got {type(table)}, which Arrow cannot read: {error};"
            " give each column a name of its own, and dense values of one type, for example by astype('string')"
        ) from error


def _written(table: pa.Table, file: Path) -> Path:
    try:
        pq.write_table(table, file)
    except pa.ArrowException as error:
        remedy = "convert the column, or leave it out"
        raise UserError(f"the table cannot be written as Parquet: {error}; {remedy}") from error
    return file
