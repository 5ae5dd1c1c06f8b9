"""Training straight from a table in memory: it is written as Parquet, described, prepared, and trained on."""

import logging
import tempfile
from collections.abc import Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from cowrec.data_pipeline import InferredSchema, PrepareConfig, Schema, infer_schema, prepare
from cowrec.data_pipeline.preparation.config import OnBadRow
from cowrec.data_pipeline.raw.bad_rows import SKIP_ADVICE
from cowrec.data_pipeline.remote import Place, require_local
from cowrec.errors import UserError

from ..config.run import RunConfig, checked_config
from ..runs.run_dir import FITTED, require_unused
from ..runtime.environment import launched_world_size
from ..sharded_model.check_run import check_settings
from .saved_run import encoded, evaluate_run, predict_run
from .trainer import train

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FittedModel:
    """A run that :func:`fit` has trained.

    Attributes:
        run_dir: its folder.
        data_dir: the prepared data set, with the test split that was kept from training.
        report: what :func:`train` returns.
    """

    run_dir: Path
    data_dir: Place
    report: dict[str, Any]

    def predict(self, table: Any, *, on_bad_row: OnBadRow | None = None) -> NDArray[np.float32]:
        """Click probabilities of a table's R rows in order, float32 [R], or [R, T] of T > 1 labels.

        Args:
            table: as of :func:`fit`, with the columns of the fields, in any order; labels may be absent.
            on_bad_row: "skip" gives rows that cannot be read NaN, "error" refuses them; by default what the run's
                ``prepare.on_bad_row`` says.

        Raises:
            ValueError: the table has other columns, or a row that cannot be read.
        """
        arrow, labels = _as_arrow(table), Schema.load(self.run_dir).labels
        if not arrow.num_rows:
            return np.empty((0, len(labels)) if len(labels) > 1 else 0, np.float32)
        with self._encoded(arrow, on_bad_row) as data:
            output = data.with_name("predictions.parquet")
            predict_run(self.run_dir, data, output, every_row=True)
            written = pq.read_table(output)
        names = ["prediction"] if len(labels) == 1 else [f"prediction_{label}" for label in labels]
        found: NDArray[np.float32] = np.stack([written[each].to_numpy() for each in names], axis=1)
        return found[:, 0] if len(labels) == 1 else found

    def evaluate(self, table: Any = None, *, on_bad_row: OnBadRow | None = None, **options: Any) -> dict[str, Any]:
        """Measures of a table with labels, by default of the test split, as ``cowrec.trainer.evaluate`` returns them.

        Args:
            table, on_bad_row: as of :meth:`predict`, but with labels; rows that are skipped are not measured.
            options: of that function.
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


def fit(
    table: Any,
    *,
    run_dir: Place,
    label: Hashable = "",
    config: RunConfig | None = None,
    schema_file: Place | None = None,
    data_dir: Place | None = None,
) -> FittedModel:
    """Trains on a table in memory, as ``cowrec schema infer``, ``prepare`` and ``train`` do on its Parquet file.

    Args:
        table: a pandas DataFrame, a pyarrow Table, or what else has Arrow's interface for tables. A DataFrame gives
            the columns that its ``to_parquet`` writes: names become text, and an index that is not a range is one.
        run_dir: a new or empty local folder. ``data.parquet`` there is the table, ``data.toml`` its schema file, and
            ``data`` the prepared data.
        label: column of the label, of two values or of numbers; by default the one that looks like it.
        config: of the run, ``[prepare]`` included; by default the defaults.
        schema_file: a corrected ``data.toml``, which is then used, in place of ``label``.
        data_dir: a new or empty folder for the prepared data, in place of ``run_dir / "data"``.

    Raises:
        ValueError: what those commands refuse; no table, a column that Parquet cannot hold, or several processes.
    """
    if launched_world_size() > 1:
        raise UserError("fit runs in one process; for several, prepare the table's file, then train under torchrun")
    if schema_file is not None and label != "":
        raise UserError(f"label = {label!r} and schema_file exclude each other: the file names the label")
    config = checked_config(RunConfig() if config is None else config)
    check_settings(config)
    folder = require_local(run_dir, "run_dir", "fit prepares its data there")
    require_unused(folder)
    arrow = _as_arrow(table)
    folder.mkdir(parents=True, exist_ok=True)
    raw = _written(arrow, folder / f"{FITTED}.parquet")
    if schema_file is None:
        schema_file = raw.with_suffix(".toml")
        found = infer_schema(raw, label=str(label))
        schema_file.write_text(found.text, encoding="utf-8")
        _warn_of_guesses(found, schema_file, label_given=label != "")
    data = folder / FITTED if data_dir is None else data_dir
    # What an earlier call prepared there has not been trained on: the run's folder is unused.
    prepare("tabular", [raw], data, config.prepare, schema_file=schema_file, overwrite=data_dir is None)
    return FittedModel(folder, data, train(config, data, folder))


def _warn_of_guesses(found: InferredSchema, schema_file: Path, *, label_given: bool) -> None:
    """Warns of what is unsure about the columns of a table."""
    if found.label.doubts and not label_given:
        doubts = "; ".join(found.label.doubts)
        logger.warning("the label is a guess: %s, but %s; name the right one as `label`", found.label.text, doubts)
    if found.rule and found.rule.doubts:
        logger.warning("which values of the label are positive is a guess: %s; see %s", found.rule.text, schema_file)
    guesses = [each for each in found.fields if each.doubts]
    if guesses:
        kinds = [f"{each.keys['name']!r} is {each.keys['kind']} ({'; '.join(each.doubts)})" for each in guesses[:5]]
        shown = "; ".join(kinds) + "; ..." * (len(guesses) > 5)
        logger.warning("some kinds of fields are guesses: %s; see %s", shown, schema_file)
    if found.left_out:
        shown = "; ".join(f"{each.keys['column']!r}: {each.comment}" for each in found.left_out)
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
