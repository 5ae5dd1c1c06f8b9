"""Raw files straight to the measures and predictions of a run: `--input` of `cowrec predict` and `cowrec evaluate`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from commands.command_line import Cowrec
from trained_runs import data_folder, run
from trainer_cases import TEST_ROWS, TRAIN_ROWS, raw_rows

folder = data_folder()
ROWS = 60


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    run(folder, folder / "run", "train.epochs=1")
    return folder / "run"


def predicted(cowrec: Cowrec, trained: Path, *options: object, output: str = "p.parquet") -> Any:
    code, printed, said = cowrec("predict", trained, *options, "--output", output)
    assert code == 0, said
    table = pq.read_table(output)
    assert printed == f"{output}: {table.num_rows} rows\n"
    return table


def test_predictions_are_those_of_the_prepared_files(
    cowrec: Cowrec, trained: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Text with labels and without, Parquet, and several files in one call; files are predicted in their order."""
    monkeypatch.chdir(tmp_path)
    Path("new.csv").write_text(raw_rows(ROWS, seed=1, labelled=False))
    Path("known.csv").write_text(raw_rows(ROWS, seed=1))
    Path("parts").mkdir()
    whole = pa_csv.read_csv("new.csv", convert_options=pa_csv.ConvertOptions(strings_can_be_null=False))
    pq.write_table(whole.slice(0, 25), "parts/a.parquet")
    pq.write_table(whole.slice(25), "parts/b.parquet")
    assert cowrec("prepare", "tabular", "--like", trained, "--input", "new.csv", "--output", "new")[0] == 0
    expected = predicted(cowrec, trained, "--data", "new")
    for inputs in (["new.csv"], ["parts"], ["parts/a.parquet", "parts/b.parquet"]):
        assert predicted(cowrec, trained, "--input", *inputs).equals(expected)
    known = predicted(cowrec, trained, "--input", "known.csv", "--keep", "price,city")
    assert known.column_names == ["sample_number", "label", "price", "city", "prediction"]
    assert known["prediction"].equals(expected["prediction"])
    assert known["city"].to_pylist() == whole["city"].to_pylist()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["known.csv", "new", "new.csv", "p.parquet", "parts"]


def test_a_row_that_cannot_be_read_has_no_prediction_and_moves_no_other(
    cowrec: Cowrec, trained: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    header, *lines = raw_rows(ROWS, seed=1, labelled=False).splitlines()
    Path("good.csv").write_text("\n".join([header, *lines]))
    good = predicted(cowrec, trained, "--input", "good.csv")["prediction"].to_numpy()
    bad = [0, 7, 8, ROWS - 1]
    for number in bad:
        lines[number] = "much" + lines[number].removeprefix(lines[number].partition(",")[0])
    Path("bad.csv").write_text("\n".join([header, *lines]))
    code, printed, said = cowrec("predict", trained, "--input", "bad.csv", "--output", "q.parquet")
    assert (code, printed) == (2, "")
    assert "bad.csv, line 2, column price: " in said
    assert "--set prepare.on_bad_row=skip" in said
    skip = ["--input", "bad.csv", "--keep", "city", "--set", "prepare.on_bad_row=skip", "--output"]
    code, printed, said = cowrec("predict", trained, *skip, "q.parquet")
    assert printed == f"q.parquet: {ROWS} rows\n"
    assert "4 rows cannot be read, and are neither predicted nor measured: 4: column price: must be" in said
    found = pq.read_table("q.parquet")
    assert found["sample_number"].to_pylist() == list(range(ROWS))
    expected = [None if number in bad else value for number, value in enumerate(good.tolist())]
    assert found["prediction"].to_pylist() == expected
    assert found["city"][7].as_py() is None
    assert cowrec("predict", trained, *skip, "q.csv")[0] == 0
    assert Path("q.csv").read_text().splitlines()[1] == "0,,"
    Path("bad.csv").write_text("\n".join([header, *(lines[number] for number in bad)]))
    assert cowrec("predict", trained, *skip, "q.parquet")[0] == 0
    assert pq.read_table("q.parquet")["prediction"].to_pylist() == [None] * 4
    refusal = cowrec("predict", trained, *skip, "q.parquet", "--set", "prepare.max_bad_rows=3")
    assert "more than prepare.max_bad_rows = 3 bad rows" in refusal[2]


def test_measures_are_those_of_the_prepared_files(
    cowrec: Cowrec, folder: Path, trained: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("new.csv").write_text(raw_rows(ROWS, seed=1))
    prepared = ["--like", trained, "--input", "new.csv", "--keep", "price", "--output", "new"]
    assert cowrec("prepare", "tabular", *prepared)[0] == 0
    by = ["--by", "price", "--by", "city"]
    expected = json.loads(cowrec("evaluate", trained, "--data", "new", *by)[1])
    assert json.loads(cowrec("evaluate", trained, "--input", "new.csv", *by)[1]) == expected
    Path("new.csv").write_text(raw_rows(ROWS, seed=1, labelled=False))
    code, _, said = cowrec("evaluate", trained, "--input", "new.csv")
    assert (code, said.count("new.csv has no labels: it can be predicted, not evaluated")) == (2, 1)


def test_a_raw_file_in_place_of_a_data_set_is_told_what_to_do(
    cowrec: Cowrec, folder: Path, trained: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    raw = folder / "raw.csv"
    _, _, said = cowrec("predict", trained, "--data", raw, "--output", "p.parquet")
    assert said.endswith(f"cowrec predict and evaluate take them with --input {raw}\n")
    found = predicted(cowrec, trained, "--input", raw)
    assert found.num_rows == TRAIN_ROWS + TEST_ROWS
    assert np.isfinite(found["prediction"].to_numpy()).all()
    for options, message in (
        ([], "pass a prepared data set with --data, or raw samples with --input"),
        (["--data", folder / "data", "--input", raw], "pass a prepared data set with --data, or raw samples"),
        (["--data", folder / "data", "--keep", "city"], "--keep is for --input; a data set has what it was prepared"),
    ):
        code, _, said = cowrec("predict", trained, *options, "--output", "p.parquet")
        assert code == 2
        assert message in said
