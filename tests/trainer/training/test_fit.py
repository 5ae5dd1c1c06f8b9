"""`fit` on a table in memory: what the commands do with its Parquet file, and their messages."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands.command_line import Cowrec
from cowrec.data_pipeline import PrepareConfig, infer_schema
from cowrec.trainer import FittedModel, RunConfig, fit, load, load_config
from refusal import refused
from run_comparison import assert_same
from trainer_cases import CONFIG

PAGE = Path(__file__).resolve().parents[3] / "docs" / "train.md"
ROWS = 300


def clicks(rows: int = ROWS, seed: int = 0) -> pa.Table:
    draw = np.random.default_rng(seed)
    user = draw.integers(0, 8, rows)
    columns = {
        "clicked": draw.random(rows) < (user + 1) / 10,
        "user": [f"u{user_id}" for user_id in user],
        "price": pa.array(draw.lognormal(2, 1, rows).round(2), mask=draw.random(rows) < 0.1),
        "tags": [[f"t{integer}" for integer in draw.integers(0, 5, draw.integers(0, 4))] for _ in range(rows)],
        "3": draw.integers(0, 30, rows),
        "row": [f"row{number}" for number in range(rows)],
    }
    return pa.table(columns)


def fitted(run_dir: Path, table: Any, **settings: Any) -> FittedModel:
    (run_dir.parent / "run.toml").write_text(CONFIG)
    config = load_config(run_dir.parent / "run.toml", settings.pop("overrides", ["train.epochs=1"]))
    return fit(table, run_dir=run_dir, config=config, **({"label": "clicked"} | settings))


def test_the_pages_example_has_the_bits_of_the_commands(cowrec: Cowrec, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(clicks(), "clicks.parquet")
    pq.write_table(clicks(40, seed=1), "new.parquet")
    Path("run.toml").write_text(CONFIG)
    section = PAGE.read_text(encoding="utf-8").partition("\n## From Python\n")[2]
    example, *_ = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 10
    names: dict[str, Any] = {}
    exec(example, names)
    for command in (
        "schema infer clicks.parquet --label clicked --output by_hand.toml",
        "prepare tabular --schema by_hand.toml --input clicks.parquet --output by_hand",
        "train run.toml --data by_hand --run-dir runs/by_hand --set train.batch_size=64",
        "prepare tabular --like runs/by_hand --input new.parquet --output new",
        "predict runs/by_hand --data new --output by_hand.parquet",
    ):
        code, *said = cowrec(*command.split())
        assert code == 0, said
    assert_same(Path("runs/clicks"), Path("runs/by_hand"))
    expected = pq.read_table("by_hand.parquet")["prediction"].to_numpy()
    found = names["model"].predict(names["new"].drop_columns("clicked"))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


def test_tables_that_do_not_work_get_the_messages_of_the_commands(tmp_path: Path, caplog: Any) -> None:
    table, run_dir, columns = clicks(), tmp_path / "run", tmp_path / "columns.toml"
    pq.write_table(table, tmp_path / "raw.parquet")
    columns.write_text(infer_schema(tmp_path / "raw.parquet", label="clicked").text)
    described = {"schema_file": columns, "label": ""}  # the first rows of the wrong table would be described otherwise
    for wrong, message, settings in (
        (tmp_path, "table must be a pandas DataFrame or a pyarrow Table, got .*Path", {}),
        (table, "no column 'bought' for the label among clicked, user", {"label": "bought"}),
        (table, "label = 'clicked' and schema_file exclude each other", {"schema_file": columns}),
        (table.slice(0, 0), "has no samples", {}),
        (with_value(table, "price", 250, float("inf")), r"data\.parquet, row 251, column price: must be", described),
        (with_value(table, "clicked", 7, None), r"row 8, column clicked: the label is missing", described),
        (table.append_column("user", table["user"]), "several columns", {"label": "user"}),
        (table.append_column("odd", pa.nulls(ROWS, pa.month_day_nano_interval())), "written as Parquet.*leave it", {}),
    ):
        refused(message, fitted, run_dir, wrong, **settings)
    model = fitted(run_dir, table)  # what the refused calls left is replaced
    refused("has a complete run", fitted, run_dir, table)
    refused("no column 'tags'", model.predict, table.drop_columns("tags"))
    refused("labels", model.evaluate, table.drop_columns("clicked"))


def with_value(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    values = table[name].to_pylist()
    return table.set_column(table.column_names.index(name), name, [[*values[:row], value, *values[row + 1 :]]])


def test_skipped_rows_have_no_prediction(tmp_path: Path) -> None:
    overrides = ["train.epochs=1", 'prepare.on_bad_row="skip"']
    model = fitted(tmp_path / "run", clicks(), overrides=overrides, data_dir=tmp_path / "elsewhere")
    assert model.data_dir == tmp_path / "elsewhere"
    wrong = with_value(clicks(20, seed=2), "price", 3, float("inf"))
    assert np.flatnonzero(np.isnan(model.predict(wrong))).tolist() == [3]
    message = r'the table, row 4, column price: must be .*\. To leave out such rows, pass on_bad_row="skip"$'
    refused(message, model.predict, wrong, on_bad_row="error")
    careful = fitted(tmp_path / "careful", clicks(), overrides=overrides[:1])
    refused(message, careful.predict, wrong)
    refused(message, careful.evaluate, wrong)
    np.testing.assert_array_equal(careful.predict(wrong, on_bad_row="skip"), model.predict(wrong))
    assert careful.evaluate(wrong, on_bad_row="skip")["rows"] == 19
    assert careful.predict(wrong.slice(0, 0)).shape == (0,)


def test_new_tables_need_no_times(tmp_path: Path) -> None:
    """Times divide the samples of training; neither predictions nor measures need them."""
    timed = clicks().append_column("when", [list(range(ROWS))])
    fields = '[[fields]]\nname = "user"\nkind = "categorical"\n[[fields]]\nname = "price"\nkind = "numeric"\n'
    (tmp_path / "columns.toml").write_text(f'label = "clicked"\ntime = "when"\n{fields}')
    overrides = ["train.epochs=1", 'prepare.split="time"']
    model = fitted(tmp_path / "run", timed, label="", schema_file=tmp_path / "columns.toml", overrides=overrides)
    new = clicks(20, seed=2)
    with_times = new.append_column("when", [list(range(20))])
    np.testing.assert_array_equal(model.predict(new), model.predict(with_times))
    assert model.evaluate(new) == model.evaluate(with_times)


def test_a_data_frame_is_its_parquet_file(tmp_path: Path) -> None:
    """Integer names, and an index of two levels."""
    pytest.importorskip("pandas")
    frame = clicks().to_pandas().rename(columns={"3": 3})
    config = RunConfig(prepare=PrepareConfig(seed=1))
    for name, case in (("plain", frame), ("both", frame.set_index(["user", "row"]))):
        one = fit(case, label="clicked", config=config, run_dir=tmp_path / name)
        case.rename(columns=str).to_parquet(tmp_path / "file.parquet")
        other = fit(pq.read_table(tmp_path / "file.parquet"), label="clicked", config=config, run_dir=tmp_path / "file")
        assert_same(one.run_dir, other.run_dir)
        other.run_dir.rename(tmp_path / f"{name}_file")


class Streamed:
    """A table as Polars gives it: by Arrow's interface alone, its texts as views."""

    def __init__(self, table: pa.Table) -> None:
        views = {
            name: table[name].cast(pa.string_view()) for name in table.column_names if table[name].type == "string"
        }
        self._table = pa.table({name: views.get(name, table[name]) for name in table.column_names})

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def test_a_loaded_run_is_the_fitted_model(tmp_path: Path) -> None:
    """It predicts the same bits, also where the folder has moved."""
    model, new = fitted(tmp_path / "run", clicks()), clicks(40, seed=1)
    expected, measured = model.predict(new), model.evaluate()
    again = load(tmp_path / "run")
    assert again.report["auc"] == model.report["auc"]
    assert (again.schema, again.data_dir) == (model.schema, model.data_dir)
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = load(tmp_path / "moved")
    np.testing.assert_array_equal(moved.predict(new), expected)
    np.testing.assert_array_equal(moved.predict(Streamed(new)), expected)
    assert moved.evaluate() == measured
    assert moved.evaluate(new)["rows"] == 40
    refused("is not a run: it has no config.toml", load, tmp_path / "run")


def test_the_defaults_and_overrides_need_no_file(tmp_path: Path) -> None:
    assert load_config(None, ["train.batch_size=4K"]).train.batch_size == 4096
    assert load_config() == RunConfig()
    refused(
        "--set train.batch_size=-2: train.batch_size must be at least 0", load_config, None, ["train.batch_size=-2"]
    )
    config = load_config(None, ["train.epochs=1", "train.device=cpu"])
    model = fit(clicks(), label="clicked", run_dir=tmp_path / "run", config=config, overrides=["train.batch_size=100"])
    used = load_config(tmp_path / "run" / "config.toml").train
    assert (used.batch_size, used.epochs, model.report["epoch"]) == (100, 1, 1)
    wrong = ["train.epoch=1"]
    refused("did you mean train.epochs", fit, clicks(), label="clicked", run_dir=tmp_path / "wrong", overrides=wrong)


def test_prepared_data_of_the_same_table_are_used_again(tmp_path: Path) -> None:
    first = fitted(tmp_path / "first", clicks())
    before = (tmp_path / "first" / "data" / "schema.json").stat()
    second = fitted(tmp_path / "second", clicks(), data_dir=first.data_dir)
    assert (tmp_path / "first" / "data" / "schema.json").stat() == before
    assert second.data_dir == first.data_dir
    assert_same(tmp_path / "first", tmp_path / "second")
    described = (tmp_path / "first" / "data.toml").read_text().replace('name = "user"', 'name = "person"', 1)
    (tmp_path / "other.toml").write_text(described)
    swapped = clicks().take(np.arange(ROWS)[::-1].copy())
    for table, why, settings in (
        (clicks(ROWS - 1), "of another table", {}),
        (swapped, "of another table", {}),
        (clicks(), "columns that another schema file than", {"schema_file": tmp_path / "other.toml", "label": ""}),
        (clicks(), "of another prepare.min_count", {"overrides": ["train.epochs=1", "prepare.min_count=2"]}),
    ):
        refused(f"has prepared data .*{why}", fitted, tmp_path / "third", table, data_dir=first.data_dir, **settings)


def test_one_command_trains_on_raw_files(cowrec: Cowrec, tmp_path: Path, monkeypatch: Any) -> None:
    """`cowrec fit` has the bits of the three commands, and what it says of a stopped run is a command."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG)
    table = clicks().drop_columns(["tags", "row"])
    pq.write_table(table, "clicks.parquet")
    settings = ["--config", "run.toml", "--set", "train.epochs=1", "--set", "prepare.min_count=2"]
    code, printed, said = cowrec("fit", "clicks.parquet", "--label", "clicked", "--run-dir", "runs/one", *settings)
    assert code == 0, said
    sizes, quality = printed.splitlines()
    assert re.match(r"runs/one/data: \d+ train samples, \d+ test samples; label positive in ", sizes), sizes
    assert re.fullmatch(r"AUC 0\.\d{4}  logloss .* run runs/one", quality)
    fitted(tmp_path / "runs" / "two", table, overrides=["train.epochs=1", "prepare.min_count=2"])
    assert_same(Path("runs/one"), Path("runs/two"))
    Path("corrected.toml").write_text(Path("runs/one/data.toml").read_text().replace('"user"', '"user", min_count = 1'))
    code, _, said = cowrec("fit", "clicks.parquet", "--schema", "corrected.toml", "--run-dir", "runs/three", *settings)
    assert code == 0, said
    assert len(load("runs/three").schema.sparse) == len(load("runs/one").schema.sparse)
    Path("runs/three/report.json").unlink()
    said = cowrec("fit", "clicks.parquet", "--run-dir", "runs/three")[2]
    assert "has a run that was stopped" in said
    (resume,) = re.findall(r"cowrec (train .* --resume)", said)
    assert cowrec(*resume.split())[0] == 0
    assert Path("runs/three/report.json").is_file()
